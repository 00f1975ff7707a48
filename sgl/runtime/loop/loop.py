"""The engine's one thread: takes requests, launches steps, and turns results into outputs.

A step has two orders; `forward` and `sample` only launch where there is a GPU, and masks are of constrained rows:

    synchronous    forward N    masks N                 sample N    handle N
    run-ahead      forward N    handle N - 1, masks N   sample N
                   forward N    sample N                handle N - 1     if no request is constrained
    in D stages    forward N    masks N - D + 1         sample, handle N - D + 1

So with run-ahead (`disable_overlap_schedule=False`), step N computes while the result before it is handled. Steps with
drafts are handled before the next one; where a head drafts for all rows, they run ahead like others (`_go_ahead`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from sgl.errors import EngineDead, InvalidRequest, QueueFull, RequestAborted, RequestTimeout, SglError
from sgl.grammar.matching.jump import ForcedText
from sgl.runtime.batch import PendingStep, Runner
from sgl.runtime.constraints.request_matcher import RequestMatcher
from sgl.runtime.loop.copies import Copies
from sgl.runtime.loop.jumps import Jumps
from sgl.runtime.loop.masks import collect_masks
from sgl.runtime.loop.owner_process import OwnerProcess
from sgl.runtime.loop.submission import Output, Spending, Submission
from sgl.runtime.loop.thread import EngineThread, settle
from sgl.runtime.loop.time_slicer import TimeSlicer
from sgl.runtime.loop.timers import Timers
from sgl.runtime.scheduler.request import FinishReason, Phase, Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Step
from sgl.runtime.speculate.speculator import Speculator

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 0.02  # between looks at deadlines while every request waits for its constraint
_SLICE = 64  # requests of a group handled at once
_SLICE_SECONDS = 0.003  # before each step, for longer groups
_STUCK_SECONDS = 1.0  # after a failure: a step that needs another rank's GPU never ends
_ARRIVALS_SECONDS = 0.01  # before each step, for arrivals; overrun by at most one action


class EngineLoop:
    """Runs a scheduler and a runner in the engine's thread. Every method is safe from any thread."""

    def __init__(
        self,
        thread: EngineThread,
        scheduler: Scheduler,
        runner: Runner,
        deliver: Callable[[list[Output]], None],
        *,
        run_ahead: bool,
        depth: int = 1,
        jump_forward: bool = True,
        pins: bool = False,
        jump_cost: float = 0.0,
        stream_interval: int = 1,
        check_ledger: bool = False,
        speculator: Speculator | None = None,
        spending: Callable[[], Spending] | None = None,
    ) -> None:
        """depth: steps under way at once. jump_cost: by how many steps a row of several tokens prolongs its step. pins:
        forced text is cut into the same tokens, whether they are appended or sampled. spending: of several ranks."""
        self.scheduler = scheduler
        self.timers, self.weight_version = Timers(), "default"
        """Actions between steps, for the loop's own thread."""
        self._runner = runner
        self.copies = Copies(scheduler.memory, runner)
        self._deliver = deliver
        self._run_ahead = run_ahead
        self._stream_interval, self._check_ledger = stream_interval, check_ledger
        self._speculator, self._spending = speculator or Speculator(scheduler), spending
        self.jumps = Jumps(
            scheduler,
            lambda: self._speculator.wants_results,
            run_ahead=run_ahead,
            is_on=jump_forward,
            pins=pins,
            cost=jump_cost,
        )
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[int, Submission] = {}
        self._outputs: list[Output] = []
        self._slicer = TimeSlicer()
        self._num_constrained = self._num_streamed = 0  # of the live submissions
        self._waits = False  # for grammars or loads: nothing can be computed yet
        self._in_flight: tuple[Step, PendingStep] | None = None
        self._depth = depth
        self._launched: deque[tuple[Step, Any]] = deque()  # not sampled
        self._stopping = False
        self._failure: tuple[SglError, float] | None = None  # and when nobody waits any more
        self._death: BaseException | None = None
        self._round_began: float | None = None  # monotonic seconds; None: waiting for work
        self._gate = threading.RLock()  # nothing enters the inbox after the loop's last look
        self._thread = thread
        self.process = OwnerProcess()

    # ---- any thread

    def start(self) -> None:
        """Begin. The thread ends when the loop does."""
        self._thread.start(self._run)
        self._thread.close()

    def submit(self, submissions: list[Submission]) -> None:
        """Queue the requests of one call in one scheduling round. Raises EngineDead."""
        now = time.monotonic()
        call = object() if len(submissions) > 1 else None
        for submission in submissions:
            submission.submitted = now
            submission.request.call = submission.request.call or call
        by_uid = {submission.request.uid: submission for submission in submissions}
        self.post(lambda: self._add(by_uid))

    def abort(self, uids: Collection[int] | None, then: Callable[[], None] | None = None) -> None:
        """Abort requests (None: all), running ones first; unknown and finished ones are ignored. Each sends a last
        output, with its pages free. `then` runs on the loop's thread at the end, and must not raise. EngineDead."""
        chosen = None if uids is None else frozenset(uids)
        self.post(lambda: self._slicer.start(self._end_all(chosen, then)))

    def abort_and_wait(self, uids: Collection[int] | None) -> None:
        """`abort`, and wait until all have ended. Raises EngineDead."""
        ended: Future[None] = Future()
        self.abort(uids, partial(ended.set_result, None))
        self.result_of(ended)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps and return its result. Raises EngineDead."""
        future: Future[T] = Future()
        self.post(lambda: settle(future, function))
        return self.result_of(future)

    def result_of(self, future: Future[T]) -> T:
        """Wait for what the loop's thread sets. Raises EngineDead."""
        while not wait([future], 0.5).done:
            if self.has_ended and not future.done():
                raise EngineDead("the engine stopped") from self._death
        return future.result()

    def stop(self) -> None:
        """End every request and wait for the thread. Idempotent. Does nothing in a forked child."""
        if self.process.was_forked:
            return
        with self._gate:
            self._inbox.put(partial(setattr, self, "_stopping", True))
        self._thread.close()  # if the loop was never started
        self._thread.join(None if self._failure is None else _STUCK_SECONDS)

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return (self._death or self._failure) is None and not self._stopping and self._thread.is_alive

    @property
    def has_ended(self) -> bool:
        """Whether no answer will come any more."""
        return not self._thread.is_alive or (self._failure is not None and time.monotonic() > self._failure[1])

    @property
    def is_quiet(self) -> bool:
        """Whether no step is under way; for its own thread."""
        return self._in_flight is None and not self._launched

    def heartbeat_age(self) -> float:
        """Seconds since the present round began: 0 while idle, infinite when dead."""
        if not self.is_alive:
            return math.inf
        return 0.0 if (began := self._round_began) is None else time.monotonic() - began

    def post(self, action: Callable[[], None]) -> None:
        """Run an action between two steps, in order; it must not raise. Raises EngineDead."""
        self.process.check()
        with self._gate:
            if self._stopping or self._death is not None:
                raise EngineDead(self._note()) from self._death
            self._inbox.put(action)

    def fail(self, error: SglError) -> None:
        """End the loop with an error. It counts as ended, too, if it goes on waiting for something."""
        self._failure = error, time.monotonic() + _STUCK_SECONDS
        self._inbox.put(lambda: None)

    # ---- the loop's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_arrivals()
                if self._failure is not None:
                    raise self._failure[0]
                self._round_began = time.monotonic()
                self._expire()
                self.step()
                self._flush()
        except BaseException as error:  # every caller gets it
            logger.exception("the engine loop stopped")
            self._death = error
        finally:
            self._close()

    def _take_arrivals(self) -> None:
        """Run arrivals for a bounded time; block for one when idle."""
        has_nothing = (self._waits or not self.scheduler.has_work) and self.is_quiet
        idle = has_nothing and not (self._outputs or self._slicer)
        with contextlib.suppress(queue.Empty):
            if idle:
                self._round_began = None
                self._speculator.rest()
                longest = min(self.timers.seconds_left(), _POLL_SECONDS if self._waits else threading.TIMEOUT_MAX)
                self._waits = False
                self._inbox.get(timeout=self.copies.longest_wait(max(0.0, longest)))()
            end = time.monotonic() + _ARRIVALS_SECONDS
            while not self.scheduler.has_work or time.monotonic() < end:
                self._inbox.get_nowait()()
        self._slicer.run_for(_SLICE_SECONDS)

    def step(self) -> None:
        """A round: launch a step, and handle an earlier one's results."""
        if self._speculator.wants_results and (latest := self._in_flight) is not None:
            if self._go_ahead(*latest):
                return
            self._in_flight = None
            self._handle(*latest)
        if self._in_flight is None and not self.scheduler.is_paused:
            self._speculator.draft(self.jumps.hinted)
        self.jumps.hinted.clear()
        scheduler = self.scheduler
        step = self.copies.schedule(
            lambda: scheduler.schedule() if scheduler.has_work and not scheduler.is_paused else None
        )
        if step is not None:
            self._note_first_step(step)
            step.batch.is_streamed = self._num_streamed > 0
            step.batch.is_observed = self._speculator.observes(step)
            self._launched.append((step, self._runner.forward(step.batch)))
            self.scheduler.after_launch(step)
        unhandled, self._in_flight = self._in_flight, None
        if len(self._launched) >= (1 if step is None else self._depth):
            oldest, launched = self._launched.popleft()
            masks = None
            if self._num_constrained:  # masks depend on the previous step's tokens
                if unhandled is not None:
                    self._handle(*unhandled)
                    unhandled = None
                masks = collect_masks(oldest, self.scheduler.counters)
            pending = self._runner.sample(launched, masks)
            if self._run_ahead:
                self._in_flight = oldest, pending
            else:
                unhandled = oldest, pending
        elif step is None and unhandled is None and self.scheduler.has_work:
            self._waits = self.scheduler.waits_for_grammar or self.copies.is_loading or self.scheduler.is_paused
            if not self._waits:
                raise RuntimeError("the scheduler has work and schedules nothing")
        if unhandled is not None:
            self._handle(*unhandled)
        self._check()

    def _go_ahead(self, latest: Step, pending: PendingStep) -> bool:
        """Launch the step behind the latest one before that is handled, if it can be."""
        step = self.copies.schedule(partial(self._speculator.go_ahead, latest))
        if step is None:
            return False
        step.batch.is_streamed = self._num_streamed > 0
        launched = self._runner.forward(step.batch)
        self.scheduler.after_launch(step)
        self._in_flight = step, self._runner.sample(launched)
        self._handle(latest, pending)
        self._speculator.settle(step)
        self._check()
        return True

    def _check(self) -> None:
        if self._check_ledger and (problems := self.scheduler.memory.check()):
            raise RuntimeError("the page ledger does not add up: " + "; ".join(problems))

    def _note_first_step(self, step: Step) -> None:
        if step.batch.setups:
            now = time.monotonic()
            for request in step.requests[step.num_decodes :]:
                request.owner.begin(now, self._spending)

    def _handle(self, step: Step, pending: PendingStep) -> None:
        result = self.copies.result(step, pending)
        self._speculator.computed(step, result)
        for requests in self.scheduler.handle(step, result):
            self._advance(requests)
        self._speculator.measure(step)

    def _advance(self, requests: list[Request]) -> None:
        """Read each request's latest token and what certainly follows. Forced texts are tokenised in one call on all
        cores: one by one they would take longer."""
        jumping: list[tuple[Submission, ForcedText]] = []
        for request in requests:
            submission: Submission = request.owner
            try:
                reason = submission.advance()
                if reason is None and (ahead := self.jumps.forced_text(submission)) is not None:
                    jumping.append((submission, ahead))
                    continue
            except SglError as error:  # this request's alone: a stop regex that runs away
                reason = FinishReason("abort", error=error)
            if reason is not None or submission.stream:
                self._end_or_emit(submission, reason)
        for submission, reason in self.jumps.take(jumping):
            self._end_or_emit(submission, reason)

    def _end_or_emit(self, submission: Submission, reason: FinishReason | None) -> None:
        """End a request if there is a reason; else send its stream what is due."""
        if reason is not None:
            self._end(submission, reason)
            return
        num_new = len(submission.request.output_ids) - submission.emitted
        if submission.stream and num_new >= self._stream_interval:
            self._outputs.append(submission.take(None, self.weight_version))

    def _end(self, submission: Submission, reason: FinishReason) -> None:
        request = submission.request
        del self._live[request.uid]
        if not submission.has_entered:
            request.phase = Phase.DONE
        else:
            reason = self.copies.finish(self.scheduler, request, reason)
            self._speculator.ended(request)
            self._num_constrained -= submission.matcher is not None
            self._num_streamed -= submission.stream
        self._outputs.append(submission.take(reason, self.weight_version))

    def _flush(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._deliver(outputs)

    def _add(self, by_uid: dict[int, Submission]) -> None:
        self._live.update(by_uid)
        self._slicer.start(self._enter(by_uid.values()))

    def _enter(self, submissions: Iterable[Submission]) -> Iterator[None]:
        for number, submission in enumerate(submissions):
            if number and number % _SLICE == 0:
                yield
                if self._stopping:
                    return
            request, matcher = submission.request, submission.matcher
            if request.is_done:  # aborted before it entered
                continue
            request.owner, submission.jumps = submission, self.jumps.apply_to(request)
            request.waits_for_grammar = matcher is not None
            try:
                submission.check()
                self.scheduler.add(request)
            except (QueueFull, InvalidRequest, RequestAborted) as error:
                self._end(submission, FinishReason("abort", error=error))
                continue
            submission.has_entered = True
            self._num_streamed += submission.stream
            if matcher is not None:
                self._num_constrained += 1
                if matcher.compilation.done():
                    self._begin_constrained(submission, matcher)
                else:
                    matcher.compilation.add_done_callback(partial(self._constraint_is_ready, submission, matcher))

    def _constraint_is_ready(self, submission: Submission, matcher: RequestMatcher, _: Future[Any]) -> None:
        with contextlib.suppress(EngineDead):
            self.post(partial(self._begin_constrained, submission, matcher))

    def _begin_constrained(self, submission: Submission, matcher: RequestMatcher) -> None:
        if submission.request.is_done:
            return
        try:
            matcher.start()
        except Exception as error:  # any error is this request's alone
            self._end(submission, FinishReason("abort", error=error))
        else:
            self.scheduler.grammar_is_ready(submission.request)

    def _end_all(self, uids: frozenset[int] | None, then: Callable[[], None] | None) -> Iterator[None]:
        chosen = list(self._live) if uids is None else list(uids)
        if len(chosen) > _SLICE:  # first those that hold pages
            running = (request.uid for request in self.scheduler.memory.running.values())
            chosen[:0] = [uid for uid in running if uids is None or uid in uids]
        for number, uid in enumerate(chosen):
            if number and number % _SLICE == 0:
                yield
                if self._stopping:
                    break
            if (submission := self._live.get(uid)) is not None:
                self._end(submission, FinishReason("abort", error=RequestAborted(f"request {uid} was aborted")))
        if then is not None:
            then()

    def _expire(self) -> None:
        self.timers.run_due()
        for request in self.scheduler.expire():
            submission: Submission = request.owner
            waited = time.monotonic() - submission.submitted
            where = "in the queue" if request.phase is Phase.WAITING else "of running"
            error = RequestTimeout(f"the request timed out after {waited:.3g} s {where}", seconds=waited)
            self._end(submission, FinishReason("abort", error=error))

    def _close(self) -> None:
        """Answer everybody who still waits."""
        with self._gate:
            self._stopping = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()  # late submissions are answered below
        while self._slicer:
            self._slicer.run_for(0.0)  # each sees _stopping
        error = EngineDead(self._note())
        error.__cause__ = self._death
        for submission in list(self._live.values()):
            self._outputs.append(submission.take(FinishReason("abort", error=error), self.weight_version))
        self._live.clear()
        self._flush()

    def _note(self) -> str:
        if (its := self._death) is None:
            return "the engine is shut down"
        return f"the engine stopped on an error: {type(its).__name__}: {its}"
