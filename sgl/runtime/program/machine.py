"""Runs one program's streams on the engine loop's thread, submits their requests together, and leases their pages.
A waiting program costs the loop only a timer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sgl.errors import EngineDead, RequestTimeout, SglError
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate
from sgl.lang.ir.interpreter import Quota, SharedQuota, Steps, Turns
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.submission import Output, Submission
from sgl.runtime.loop.timers import Timer
from sgl.runtime.program.order import ProgramOrder
from sgl.runtime.program.sender import current_sender
from sgl.runtime.program.stream import NodeRequests, Stream
from sgl.runtime.program.tokens import Encoder
from sgl.runtime.requests.builder import RequestBuilder
from sgl.runtime.requests.router import OutputRouter
from sgl.runtime.scheduler.leases import Leases
from sgl.runtime.scheduler.tiers import Tiers

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STREAMS_A_TURN = (
    128  # more branches, or requests, than that are left to later turns, with steps for everybody in between
)


@dataclass(frozen=True, slots=True)
class Services:
    """What programs use of an engine."""

    loop: EngineLoop
    router: OutputRouter
    builder: RequestBuilder
    encoder: Encoder
    leases: Leases
    tiers: Tiers | None
    pool: Executor  # for work too long for the loop's thread
    template: ChatTemplate | None  # the model's own
    lease_ttl: float  # upper bound in seconds
    quota: SharedQuota


class Machine(Turns[Stream]):
    """Runs one program."""

    def __init__(self, services: Services, program: ir.Program, sink: ir.Sink) -> None:
        super().__init__(sink)
        self._services = services
        self._program = program
        sender = current_sender.get()
        self._call = sender.batch or object()  # its requests share one place in the waiting queue
        self.tenant = sender.tenant
        self.quota = Quota(services.quota, sender.tenant)
        self._leasing: set[Stream] = set()
        self._submissions: list[Submission] = []  # of this turn
        self._calls: dict[int, NodeRequests] = {}  # by uid
        self.order = ProgramOrder()
        self._num_away = 0  # pieces of work on other threads
        self._idle_since = 0.0
        self._lease_timer: Timer | None = None
        self._deadline: Timer | None = None
        if program.deadline_s is not None:
            due = time.monotonic() + program.deadline_s
            self.post(partial(self._arm_deadline, due, program.deadline_s))

    # ---- any thread

    def post(self, action: Callable[[], None]) -> None:
        """Run an action on the loop's thread, then what it made possible. Raises EngineDead."""
        self._services.loop.post(partial(self._turn, action))

    def cancel(self) -> None:
        """End the program in any state. `Done` acknowledges it: pages are free and no event follows."""
        with suppress(EngineDead):
            self.post(self._end)

    # ---- the loop's thread: what steps of streams use

    def add(self, stream: Stream, steps: Steps[None]) -> None:
        """Execute a stream from now on."""
        super().add(stream, steps)
        if stream.lease is not None:
            self._leasing.add(stream)

    def call(self, call: NodeRequests) -> Steps[None]:
        """Submit the requests and wait for all. Raises the first error."""
        uids = call.unfinished
        self._calls.update(dict.fromkeys(uids, call))
        for request in call.requests:
            request.call = self._call
        self.order.begin(call)
        self._services.router.expect(uids, self)
        self._submissions += call.submissions
        while not call.is_over:
            yield
        self.order.end(call)
        if call.error is not None:
            self._abort(call.unfinished)
            raise call.error

    def elsewhere(self, stream: Stream, work: Callable[[], T], pool: Executor | None = None) -> Steps[T]:
        """Wait for work on another thread, of the engine's pool or another one."""
        try:
            future = (pool or self._services.pool).submit(work)
        except RuntimeError:  # the interpreter ends: pools end before engines do
            raise EngineDead("the engine is shut down") from None
        self._num_away += 1
        future.add_done_callback(lambda _: self._come_back(stream))
        while not future.done():
            yield
        return future.result()

    def lease(self, stream: Stream, key: bytes, namespace: Namespace) -> None:
        """Lease the pages of the stream's tokens, which have this key, instead of its old lease."""
        lease = self._services.leases.take(key, namespace)
        self.release(stream)
        if lease is not None:
            stream.lease, stream.leased = lease, (key, namespace)
            self._leasing.add(stream)

    def release(self, stream: Stream, *, is_over: bool = False) -> None:
        """Release the stream's lease. is_over: nobody will come back for what follows its first gen's prompt."""
        if stream.lease is not None:
            if is_over:
                self._services.leases.finish(stream.lease, stream.num_first)
            else:
                self._services.leases.release(stream.lease)
            stream.lease = None
            self._leasing.remove(stream)

    def bring_back(self, stream: Stream) -> None:
        """Something of the stream has arrived: begin to load what its lease lost."""
        tiers, lease = self._services.tiers, stream.lease
        if tiers is not None and lease is not None and lease.lost and stream.leased is not None:
            tiers.loads.prefetch(*stream.leased)

    # ---- the loop's thread: a turn

    def put(self, outputs: list[Output]) -> None:
        """Take a step's outputs; see router.Sink. The next turn precedes the next step, unless many programs wait."""
        try:
            self._take(outputs)
            if self._ready:
                self.post(_nothing)
        except Exception as error:  # the program's client is told; the loop goes on
            self._fail(error)

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            call = self._calls.get(output.uid)
            if call is not None:
                if call.take(output):
                    self._forget([output.uid])
                if isinstance(call.error, EngineDead):
                    raise call.error
                if call.is_over:
                    self.wake(call.stream)

    def _come_back(self, stream: Stream) -> None:
        def arrive() -> None:
            self._num_away -= 1
            self.wake(stream)

        try:
            self.post(arrive)
        except EngineDead as error:  # the loop is dead, and nobody else can tell the client
            self._fail(error)

    def _turn(self, action: Callable[[], None]) -> None:
        """Run an action and what follows, until every stream waits or other programs are due."""
        if self._is_over:
            return
        try:
            action()
            for _ in range(_STREAMS_A_TURN):
                if self._ready and len(self._submissions) < _STREAMS_A_TURN:
                    self._resume(self._ready.popleft())
            if not self._ready and not self._num_away:
                for request in self.order.became_critical():
                    self._services.loop.scheduler.becomes_critical(request)
            if self._submissions:
                submissions, self._submissions = self._submissions, []
                self._services.loop.submit(submissions)
            if self._ready:
                self.post(_nothing)
            elif self.is_final and not self._undrained:
                self._end()
            else:
                self._note_idle()
        except Exception as error:  # the program's client is told; the loop goes on
            self._fail(error)

    def _drained(self, stream: Stream) -> None:
        self.release(stream, is_over=True)
        super()._drained(stream)

    def _known(self, error: Exception) -> SglError:
        if not isinstance(error, SglError):
            logger.error("a program failed", exc_info=error)
        return super()._known(error)

    # ---- the loop's thread: leases and the end

    def _note_idle(self) -> None:
        """Let leases expire if the program waits for its client."""
        if self._calls or self._num_away or not self._leasing:
            return
        self._idle_since = time.monotonic()
        if self._lease_timer is None:
            self._lease_timer = self._services.loop.timers.call_at(
                self._idle_since + self._ttl, self._expire_leases
            )

    @property
    def _ttl(self) -> float:
        return min(self._program.lease_s, self._services.lease_ttl)

    def _expire_leases(self) -> None:
        self._lease_timer = None
        if self._calls or self._num_away or self._ready:
            return  # the next idle turn sets a timer
        due = self._idle_since + self._ttl
        if time.monotonic() < due:
            self._lease_timer = self._services.loop.timers.call_at(due, self._expire_leases)
            return
        for stream in self._leasing:
            assert stream.lease is not None, "streams that lease have a lease"
            self._services.leases.expire(stream.lease)

    def _arm_deadline(self, due: float, seconds: float) -> None:
        late = RequestTimeout(f"the program did not finish within {seconds:g} s", seconds=seconds)
        self._deadline = self._services.loop.timers.call_at(due, partial(self._fail, late))

    def _fail(self, error: Exception) -> None:
        if not self._is_over:
            with suppress(Exception):  # a client's sink, which `_say_done` meets again, and logs
                self._sink(ir.NodeFailed(None, None, self._known(error)))
            self._end()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self.quota.release()
        uids = list(self._calls)
        self._forget(uids)
        for stream in list(self._leasing):
            self.release(stream, is_over=True)
        for timer in (self._lease_timer, self._deadline):
            if timer is not None:
                self._services.loop.timers.cancel(timer)
        self._undrained.clear()
        self._ready.clear()
        self._submissions.clear()
        try:
            self._services.loop.abort(uids, self._say_done)
        except EngineDead:
            self._say_done()

    def _say_done(self) -> None:
        try:
            self._sink(ir.Done())
        except Exception:  # a client's sink may raise anything; the loop goes on
            logger.exception("the client of program %s failed", self._program.name)

    def _abort(self, uids: list[int]) -> None:
        self._forget(uids)
        if uids:
            with suppress(EngineDead):
                self._services.loop.abort(uids)

    def _forget(self, uids: list[int]) -> None:
        self._services.router.forget(uids)
        for uid in uids:
            self._calls.pop(uid, None)


def _nothing() -> None:
    """A turn without an action of its own."""
