"""Compiles constraints for an engine: once each, with a deadline and a bounded cache of grammars and failures.

Almost all compile in a few milliseconds in a thread, which checks the time. But a thread holds the GIL and cannot
bound C code or memory, so whatever is large or slower than a moment is first tried in a process (`process.py`). A
trial of more than a second restarts in a second process, where slow constraints delay only each other.

For masks on a device, the whole automaton is finished (`finishers.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from time import monotonic, thread_time

from sgl.errors import EngineDead, GrammarError
from sgl.grammar.automaton.finished import MAX_OPENED, FinishedAutomaton
from sgl.grammar.compiler import Constraint, Grammar, build, can_be_stopped
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.runtime.constraints.cursor import FinishedGrammar
from sgl.runtime.constraints.finishers import Answer, Finishers
from sgl.runtime.constraints.process import GrammarProcess, with_first_mask
from sgl.time_limit import OutOfTime, resting, time_limit

logger = logging.getLogger(__name__)

_LARGE = 64 << 10  # characters: tried in a process at once
_SHORT_TRIAL = 1.0  # seconds; slower trials queue behind each other
_LOOKS = 16  # new constraints between checks of the cache's size
MAX_BYTES = 256 << 20
"""Bound of all cached grammars' known bytes."""


class GrammarFuture(Future[Grammar | FinishedGrammar]):
    """A grammar that is being compiled."""

    failed_at: float | None = None
    """Monotonic seconds at which compiling failed for the constraint's sake."""

    @property
    def grammar(self) -> Grammar | FinishedGrammar | None:
        """The grammar, unless compiling failed or goes on."""
        has_failed = not self.done() or self.cancelled() or self.exception() is not None
        return None if has_failed else self.result()


class CompileService:
    """Hands out compiled grammars. Safe from any thread; `close` ends threads and processes."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        deadline: float = 10.0,
        moment: float = 0.05,
        max_grammars: int = 512,
        failures_kept: float = 60.0,
        num_threads: int = 2,
        num_finishers: int = 0,
        patience: float = 0.1,
        prepare: Callable[[FinishedGrammar], None] = lambda _: None,
        is_launching: Callable[[], bool] = lambda: False,
    ) -> None:
        """Seconds: `deadline` for one constraint; `moment` of CPU time in a thread before it is tried in a process;
        `failures_kept` in the cache. With `num_finishers` processes, small grammars come as FinishedGrammar, after
        `prepare` was called with it; if that takes longer than `patience`, only later requests get it.
        is_launching: see `Finishers`."""
        self.vocabulary = vocabulary
        self.deadline = deadline
        self.moment = moment
        self.max_grammars = max_grammars
        self.failures_kept = failures_kept
        self._prepare = prepare
        self._futures: OrderedDict[Constraint, GrammarFuture] = OrderedDict()
        self._unfinished: set[GrammarFuture] = set()
        self._is_closed = False
        self._num_new = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, "grammar")
        self._builders = ThreadPoolExecutor(1, "grammar-build")
        self._short_trials = ThreadPoolExecutor(1, "grammar-trial")
        self._long_trials = ThreadPoolExecutor(1, "grammar-long-trial")
        self._short_trial, self._trial = GrammarProcess(vocabulary), GrammarProcess(vocabulary)
        self._finishers: Finishers | None = None
        if num_finishers > 0 and vocabulary.most_opened > MAX_OPENED:
            logger.warning(
                "token masks are made on the host, not on the device: a token of this vocabulary opens %d brackets",
                vocabulary.most_opened,
            )
        elif num_finishers > 0:
            self._finishers = Finishers(
                num_finishers,
                deadline=deadline,
                patience=patience,
                missing=vocabulary.missing_bytes,
                is_launching=is_launching,
            )
            # The thread keeps it alive, and so does this finalizer until it is called, with the callbacks it holds.
            self._end_finishers = weakref.finalize(self, self._finishers.close)

    def submit(self, constraint: Constraint) -> GrammarFuture:
        """The grammar, finished or with its first mask; the same future for the same constraint. Fails with
        GrammarTooLarge after the deadline, counted from when a thread or process takes it up, and with EngineDead
        once the service is closed."""
        with self._lock:
            if self._is_closed:
                return _abandoned(GrammarFuture())
            future = self._futures.get(constraint)
            if future is None or self._is_outdated(future):
                future = GrammarFuture()
                self._start(future, constraint)
                self._futures[constraint] = future
                self._unfinished.add(future)
                self._make_room()
            self._futures.move_to_end(constraint)
            return future

    def _is_outdated(self, future: GrammarFuture) -> bool:
        """Whether it failed some time ago, or its grammar has used up most of its states."""
        if future.failed_at is not None:
            return monotonic() - future.failed_at > self.failures_kept
        return isinstance(future.grammar, Grammar) and future.grammar.is_worn

    def _make_room(self) -> None:
        """Evict the least recently used beyond `max_grammars` or MAX_BYTES. Sizes are added up rarely: that takes
        longer than finishing a grammar."""
        self._num_new += 1
        if self._num_new % _LOOKS == 0:
            self._forget_large()
        while len(self._futures) > self.max_grammars:
            self._futures.popitem(last=False)

    def _forget_large(self) -> None:
        sizes = [0 if (found := future.grammar) is None else found.num_bytes for future in self._futures.values()]
        left, size = len(sizes), sum(sizes)
        for number, constraint in zip(sizes, list(self._futures), strict=True):
            if size <= MAX_BYTES or left == 1:
                break
            del self._futures[constraint]
            left, size = left - 1, size - number

    def close(self) -> None:
        """End threads and processes; unfinished compilations fail with EngineDead."""
        with self._lock:
            self._is_closed = True
            unfinished, self._unfinished = self._unfinished, set()
        for future in unfinished:
            _abandoned(future)
        for threads in (self._threads, self._builders, self._short_trials, self._long_trials):
            threads.shutdown(wait=False, cancel_futures=True)
        for trial in (self._short_trial, self._trial):
            trial.kill()
        if self._finishers is not None:
            self._end_finishers()

    def start(self) -> None:
        """Start the finishing processes now instead of on first use."""
        if self._finishers is not None:
            self._finishers.start()

    def _start(self, future: GrammarFuture, constraint: Constraint) -> None:
        if self._finishers is None:
            _submit(self._threads, future, self._compile, future, constraint)
        else:
            ended = partial(self._finishing_ended, future, constraint)
            self._finishers.finish(constraint, ended, partial(self._finishing_came_late, constraint))

    def _finishing_ended(self, future: GrammarFuture, constraint: Constraint, answer: Answer) -> None:
        if answer is None:
            _submit(self._threads, future, self._compile, future, constraint)
        else:
            self._resolve(future, lambda: self._with(answer, constraint))

    def _finishing_came_late(self, constraint: Constraint, answer: Answer) -> None:
        with self._lock:
            future = self._futures.get(constraint)
        # the constraint's own future decides, and may end later
        if isinstance(answer, FinishedAutomaton) and future is not None:
            future.add_done_callback(partial(self._replace, constraint, answer))

    def _replace(self, constraint: Constraint, finished: FinishedAutomaton, future: GrammarFuture) -> None:
        if future.exception() is not None:
            return
        later = GrammarFuture()
        later.set_result(self._with(finished, constraint))
        with self._lock:
            if self._futures.get(constraint) is future:
                self._futures[constraint] = later

    def _compile(self, future: GrammarFuture, constraint: Constraint) -> None:
        """Compile what takes but a moment; leave the rest to trials, long ones apart."""
        if len(constraint.source) <= _LARGE and can_be_stopped(constraint):
            try:
                grammar = self._compile_in_time(constraint)
            except OutOfTime:
                pass
            except BaseException as error:  # the future raises it
                self._fail(future, error)
                return
            else:
                self._resolve(future, lambda: grammar)
                return
        if self.deadline > _SHORT_TRIAL:
            self._try(self._short_trials, self._short_trial, _SHORT_TRIAL, future, constraint)
        else:
            self._try(self._long_trials, self._trial, self.deadline, future, constraint)

    def _compile_in_time(self, constraint: Constraint) -> Grammar:
        self.vocabulary.work_out()  # once, for all constraints
        with time_limit(min(self.moment, self.deadline), thread_time), resting():
            return with_first_mask(constraint, self.vocabulary)

    def _try(
        self,
        threads: ThreadPoolExecutor,
        trial: GrammarProcess,
        seconds: float,
        future: GrammarFuture,
        constraint: Constraint,
    ) -> None:
        def run() -> None:
            try:
                if not future.done():
                    trial.run(constraint, seconds)
            except OutOfTime as error:
                if seconds < self.deadline:
                    self._try(self._long_trials, self._trial, self.deadline, future, constraint)
                else:
                    self._fail(future, error)
            except BaseException as error:  # the future raises it
                self._fail(future, error)
            else:
                _submit(self._builders, future, self._resolve, future, partial(self._build, constraint))

        _submit(threads, future, run)

    def _build(self, constraint: Constraint) -> Grammar:
        with time_limit(self.deadline, thread_time), resting():
            return with_first_mask(constraint, self.vocabulary)

    def _fail(self, future: GrammarFuture, error: BaseException) -> None:
        def fail() -> Grammar:
            raise error

        self._resolve(future, fail)

    def _resolve(self, future: GrammarFuture, grammar: Callable[[], Grammar | FinishedGrammar]) -> None:
        with contextlib.suppress(InvalidStateError):  # closed meanwhile
            try:
                found = grammar()
            except BaseException as error:  # the future raises it
                if isinstance(error, GrammarError):
                    future.failed_at = monotonic()
                future.set_exception(error)
            else:
                future.set_result(found)
        with self._lock:
            self._unfinished.discard(future)

    def _with(self, finished: FinishedAutomaton | BaseException, constraint: Constraint) -> FinishedGrammar:
        if isinstance(finished, BaseException):
            raise finished
        grammar = FinishedGrammar(finished, self.vocabulary, lambda: build(constraint, self.vocabulary))
        try:
            self._prepare(grammar)
        except Exception:  # it would only save time later
            logger.exception("a grammar could not be prepared")
        return grammar


def _submit(
    threads: ThreadPoolExecutor, future: GrammarFuture, work: Callable[..., object], *arguments: object
) -> None:
    try:
        threads.submit(work, *arguments)
    except RuntimeError:  # closed meanwhile, or the interpreter ends
        _abandoned(future)


def _abandoned(future: GrammarFuture) -> GrammarFuture:
    with contextlib.suppress(InvalidStateError):  # it has just ended
        future.set_exception(EngineDead("the engine is shut down"))
    return future
