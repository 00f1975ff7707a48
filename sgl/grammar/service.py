"""Compiles constraints for an engine: one flight for each, a deadline, and a bounded memory of grammars and failures.

Almost every constraint is compiled in a few milliseconds, in a thread of the service, and what takes long checks the
time as it goes. That is not enough for hostile ones: work in a thread holds up the scheduler's, and no check stands
inside C code or bounds memory. So what is not done within a moment is first tried in a process of its own
(`process.py`); only what came through there is compiled here.

For walks that cannot stop to ask for more, all of an automaton is worked out, in processes as well (`closers.py`).
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
from time import monotonic

from sgl.errors import EngineDead, GrammarError
from sgl.grammar.closers import Answer, Closers
from sgl.grammar.closure import Closed
from sgl.grammar.compiler import Constraint, Grammar, build, can_be_stopped
from sgl.grammar.cursor import MAX_OPENED, ClosedGrammar
from sgl.grammar.process import GrammarProcess, with_first_mask
from sgl.grammar.time_limit import OutOfTime, time_limit
from sgl.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

Flight = Future[Grammar | ClosedGrammar]


class CompileService:
    """Hands out compiled grammars. Safe from any thread; `close` ends its threads and processes."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        deadline: float = 10.0,
        moment: float = 0.25,
        max_grammars: int = 512,
        failures_kept: float = 60.0,
        num_threads: int = 2,
        num_closers: int = 0,
        patience: float = 0.1,
        prepare: Callable[[ClosedGrammar], None] = lambda _: None,
        is_launching: Callable[[], bool] = lambda: False,
    ) -> None:
        """Seconds: `deadline` for one constraint, `moment` that it may take in a thread before it is tried in the
        process, `failures_kept` for which a failure is remembered. With `num_closers`, so many processes close
        automata, and grammars that are small enough come as ClosedGrammar; where that takes longer than `patience`,
        only to those who ask later. `prepare` is called with each of these before anybody has it. is_launching: see
        `Closers`."""
        self.vocabulary = vocabulary
        self.deadline = deadline
        self.moment = moment
        self.max_grammars = max_grammars
        self.failures_kept = failures_kept
        self._prepare = prepare
        self._flights: OrderedDict[Constraint, Flight] = OrderedDict()
        self._under_way: set[Flight] = set()
        self._failed_at: dict[Constraint, float] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, "grammar")
        self._trial = GrammarProcess(vocabulary)
        fits = vocabulary.is_byte_complete and vocabulary.most_opened <= MAX_OPENED
        self._closers: Closers | None = None
        if num_closers > 0 and fits:
            self._closers = Closers(num_closers, deadline=deadline, patience=patience, is_launching=is_launching)
            # Its thread keeps it in use; so would this, and with it who waits and who launches, if it were not called
            self._end_closers = weakref.finalize(self, self._closers.close)

    def submit(self, constraint: Constraint) -> Flight:
        """The grammar, closed or its first mask worked out; the same future for the same constraint.

        Ends in GrammarTooLarge past the deadline, which counts from when a thread or a process of the service takes it
        up, and in EngineDead once the service is closed.
        """
        with self._lock:
            if self._is_closed:
                return _abandoned(Future())
            flight = self._flights.get(constraint)
            failed_at = self._failed_at.get(constraint)
            if failed_at is not None and monotonic() - failed_at > self.failures_kept:
                flight = None
            if flight is None:
                self._failed_at.pop(constraint, None)
                flight = Future()
                self._take_off(flight, constraint)
                self._flights[constraint] = flight
                self._under_way.add(flight)
            self._flights.move_to_end(constraint)
            while len(self._flights) > self.max_grammars:
                oldest, _ = self._flights.popitem(last=False)
                self._failed_at.pop(oldest, None)
            return flight

    def close(self) -> None:
        """End the threads and the processes; flights under way end in EngineDead."""
        with self._lock:
            self._is_closed = True
            under_way, self._under_way = self._under_way, set()
        for flight in under_way:
            _abandoned(flight)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trial.kill()
        if self._closers is not None:
            self._end_closers()

    def start(self) -> None:
        """Start the processes that close automata, which would otherwise start when they are first needed."""
        if self._closers is not None:
            self._closers.start()

    def _take_off(self, flight: Flight, constraint: Constraint) -> None:
        if self._closers is None:
            self._threads.submit(self._compile, flight, constraint)
        else:
            ended = partial(self._closing_ended, flight, constraint)
            self._closers.close_automaton(constraint, ended, partial(self._closing_came_late, constraint))

    def _closing_ended(self, flight: Flight, constraint: Constraint, answer: Answer) -> None:
        if answer is None:
            try:
                self._threads.submit(self._compile, flight, constraint)
            except RuntimeError:  # closed meanwhile, or the interpreter ends
                _abandoned(flight)
        else:
            self._land(flight, constraint, lambda: self._with(answer, constraint))

    def _closing_came_late(self, constraint: Constraint, answer: Answer) -> None:
        with self._lock:
            flight = self._flights.get(constraint)
        # What the constraint's own flight ends in is what counts: it may end after this.
        if isinstance(answer, Closed) and flight is not None:
            flight.add_done_callback(partial(self._replace, constraint, answer))

    def _replace(self, constraint: Constraint, closed: Closed, flight: Flight) -> None:
        """Hand out the closed automaton to those who ask from now on."""
        if flight.exception() is not None:
            return
        later: Flight = Future()
        later.set_result(self._with(closed, constraint))
        with self._lock:
            if self._flights.get(constraint) is flight:
                self._flights[constraint] = later

    def _compile(self, flight: Flight, constraint: Constraint) -> None:
        self._land(flight, constraint, lambda: self._compile_in_time(constraint))

    def _land(self, flight: Flight, constraint: Constraint, grammar: Callable[[], Grammar | ClosedGrammar]) -> None:
        with contextlib.suppress(InvalidStateError):  # closed meanwhile
            try:
                found = grammar()
            except BaseException as error:
                if isinstance(error, GrammarError):
                    with self._lock:
                        self._failed_at[constraint] = monotonic()
                flight.set_exception(error)
            else:
                flight.set_result(found)
        with self._lock:
            self._under_way.discard(flight)

    def _with(self, closed: Closed | BaseException, constraint: Constraint) -> ClosedGrammar:
        if isinstance(closed, BaseException):
            raise closed
        grammar = ClosedGrammar(closed, self.vocabulary, lambda: build(constraint, self.vocabulary))
        try:
            self._prepare(grammar)
        except Exception:  # it was only to save time later
            logger.exception("a grammar could not be prepared")
        return grammar

    def _compile_in_time(self, constraint: Constraint) -> Grammar:
        until = monotonic() + self.deadline
        if can_be_stopped(constraint):
            with contextlib.suppress(OutOfTime), time_limit(min(self.moment, self.deadline)):
                return with_first_mask(constraint, self.vocabulary)
        self._trial.run(constraint, until, self.deadline)
        try:
            with time_limit(max(until - monotonic(), 0.0)):
                return with_first_mask(constraint, self.vocabulary)
        except OutOfTime:
            raise OutOfTime(self.deadline) from None


def _abandoned(flight: Flight) -> Flight:
    with contextlib.suppress(InvalidStateError):  # it has just ended
        flight.set_exception(EngineDead("the engine is shut down"))
    return flight
