"""Compiles constraints for an engine: one flight for each, a deadline, and a bounded memory of grammars and failures.

Almost every constraint is compiled in a few milliseconds, in a thread of the service, and what takes long checks the
time as it goes. That is not enough for hostile ones: work in a thread holds up the scheduler's, and no check stands
inside C code or bounds memory. So what is not done within a moment, and what is large, is first tried in a process
(`process.py`); only what came through there is compiled here. A trial of more than a second is given up and begun again
in another process, behind others that take as long: a few hostile constraints hold up each other, and nobody else.

For walks that cannot stop to ask for more, all of an automaton is worked out, in processes as well (`finishers.py`).
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

_LARGE = 64 << 10  # characters: a larger constraint is tried in a process at once
_SHORT_TRIAL = 1.0  # seconds, of a first trial; who takes longer waits for others that do
_LOOKS = 16  # new constraints, between two looks at how large all grammars are
MAX_BYTES = 256 << 20
"""Of all grammars that the service keeps, as far as they are known to have."""

Flight = Future[Grammar | FinishedGrammar]


class CompileService:
    """Hands out compiled grammars. Safe from any thread; `close` ends its threads and processes."""

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
        """Seconds: `deadline` for one constraint, `moment` of CPU time that it may take in a thread before it is
        tried in a process, `failures_kept` for which a failure is remembered. With `num_finishers`, so many processes
        finish automata, and grammars that are small enough come as FinishedGrammar; where that takes longer than
        `patience`, only to those who ask later. `prepare` is called with each of these before anybody has it.
        is_launching: see `Finishers`."""
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
        self._num_new = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, "grammar")
        self._builders = ThreadPoolExecutor(1, "grammar-build")
        self._short_trials = ThreadPoolExecutor(1, "grammar-trial")
        self._long_trials = ThreadPoolExecutor(1, "grammar-long-trial")
        self._short_trial, self._trial = GrammarProcess(vocabulary), GrammarProcess(vocabulary)
        fits = vocabulary.is_byte_complete and vocabulary.most_opened <= MAX_OPENED
        self._finishers: Finishers | None = None
        if num_finishers > 0 and fits:
            self._finishers = Finishers(
                num_finishers, deadline=deadline, patience=patience, is_launching=is_launching
            )
            # Its thread keeps it in use; so would this, and with it who waits and who launches, if it were not called
            self._end_finishers = weakref.finalize(self, self._finishers.close)

    def submit(self, constraint: Constraint) -> Flight:
        """The grammar, finished or its first mask worked out; the same future for the same constraint.

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
            if flight is not None and _is_worn(flight):
                flight = None
            if flight is None:
                self._failed_at.pop(constraint, None)
                flight = Future()
                self._take_off(flight, constraint)
                self._flights[constraint] = flight
                self._under_way.add(flight)
                self._make_room()
            self._flights.move_to_end(constraint)
            return flight

    def _make_room(self) -> None:
        """Forget what was asked for least recently, beyond `max_grammars` or MAX_BYTES. Bytes are added up at times: a
        look at each grammar for each new one would take longer than finishing it."""
        self._num_new += 1
        if self._num_new % _LOOKS == 0:
            self._forget_large()
        while len(self._flights) > self.max_grammars:
            oldest, _ = self._flights.popitem(last=False)
            self._failed_at.pop(oldest, None)

    def _forget_large(self) -> None:
        sizes = [_num_bytes(flight) for flight in self._flights.values()]
        left, size = len(sizes), sum(sizes)
        for number, constraint in zip(sizes, list(self._flights), strict=True):
            if size <= MAX_BYTES or left == 1:
                break
            del self._flights[constraint]
            self._failed_at.pop(constraint, None)
            left, size = left - 1, size - number

    def close(self) -> None:
        """End the threads and the processes; flights under way end in EngineDead."""
        with self._lock:
            self._is_closed = True
            under_way, self._under_way = self._under_way, set()
        for flight in under_way:
            _abandoned(flight)
        for threads in (self._threads, self._builders, self._short_trials, self._long_trials):
            threads.shutdown(wait=False, cancel_futures=True)
        for trial in (self._short_trial, self._trial):
            trial.kill()
        if self._finishers is not None:
            self._end_finishers()

    def start(self) -> None:
        """Start the processes that finish automata, which would otherwise start when they are first needed."""
        if self._finishers is not None:
            self._finishers.start()

    def _take_off(self, flight: Flight, constraint: Constraint) -> None:
        if self._finishers is None:
            self._threads.submit(self._compile, flight, constraint)
        else:
            ended = partial(self._finishing_ended, flight, constraint)
            self._finishers.finish(constraint, ended, partial(self._finishing_came_late, constraint))

    def _finishing_ended(self, flight: Flight, constraint: Constraint, answer: Answer) -> None:
        if answer is None:
            try:
                self._threads.submit(self._compile, flight, constraint)
            except RuntimeError:  # closed meanwhile, or the interpreter ends
                _abandoned(flight)
        else:
            self._land(flight, constraint, lambda: self._with(answer, constraint))

    def _finishing_came_late(self, constraint: Constraint, answer: Answer) -> None:
        with self._lock:
            flight = self._flights.get(constraint)
        # What the constraint's own flight ends in is what counts: it may end after this.
        if isinstance(answer, FinishedAutomaton) and flight is not None:
            flight.add_done_callback(partial(self._replace, constraint, answer))

    def _replace(self, constraint: Constraint, finished: FinishedAutomaton, flight: Flight) -> None:
        """Hand out the finished automaton to those who ask from now on."""
        if flight.exception() is not None:
            return
        later: Flight = Future()
        later.set_result(self._with(finished, constraint))
        with self._lock:
            if self._flights.get(constraint) is flight:
                self._flights[constraint] = later

    def _compile(self, flight: Flight, constraint: Constraint) -> None:
        """Compile what takes but a moment; leave the rest to the trials, of which those that take long hold up no
        others."""
        if len(constraint.source) <= _LARGE and can_be_stopped(constraint):
            try:
                grammar = self._compile_in_time(constraint)
            except OutOfTime:
                pass
            except BaseException as error:
                self._fail(flight, constraint, error)
                return
            else:
                self._land(flight, constraint, lambda: grammar)
                return
        if self.deadline > _SHORT_TRIAL:
            self._try(self._short_trials, self._short_trial, _SHORT_TRIAL, flight, constraint)
        else:
            self._try(self._long_trials, self._trial, self.deadline, flight, constraint)

    def _compile_in_time(self, constraint: Constraint) -> Grammar:
        """Raises OutOfTime where that takes more than a moment."""
        self.vocabulary.work_out()  # once, for all constraints
        with time_limit(min(self.moment, self.deadline), thread_time), resting():
            return with_first_mask(constraint, self.vocabulary)

    def _try(
        self,
        threads: ThreadPoolExecutor,
        trial: GrammarProcess,
        seconds: float,
        flight: Flight,
        constraint: Constraint,
    ) -> None:
        def run() -> None:
            try:
                if not flight.done():
                    trial.run(constraint, monotonic() + seconds, seconds)
            except OutOfTime as error:
                if seconds < self.deadline:
                    self._try(self._long_trials, self._trial, self.deadline, flight, constraint)
                else:
                    self._fail(flight, constraint, error)
            except BaseException as error:
                self._fail(flight, constraint, error)
            else:
                with contextlib.suppress(RuntimeError):
                    self._builders.submit(self._land, flight, constraint, partial(self._build, constraint))

        try:
            threads.submit(run)
        except RuntimeError:  # closed meanwhile, or the interpreter ends
            _abandoned(flight)

    def _build(self, constraint: Constraint) -> Grammar:
        """A grammar that came through its trial."""
        with time_limit(self.deadline, thread_time), resting():
            return with_first_mask(constraint, self.vocabulary)

    def _fail(self, flight: Flight, constraint: Constraint, error: BaseException) -> None:
        def fail() -> Grammar:
            raise error

        self._land(flight, constraint, fail)

    def _land(
        self, flight: Flight, constraint: Constraint, grammar: Callable[[], Grammar | FinishedGrammar]
    ) -> None:
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

    def _with(self, finished: FinishedAutomaton | BaseException, constraint: Constraint) -> FinishedGrammar:
        if isinstance(finished, BaseException):
            raise finished
        grammar = FinishedGrammar(finished, self.vocabulary, lambda: build(constraint, self.vocabulary))
        try:
            self._prepare(grammar)
        except Exception:  # it was only to save time later
            logger.exception("a grammar could not be prepared")
        return grammar


def _found(flight: Flight) -> Grammar | FinishedGrammar | None:
    """What a flight ended in, if it did and not in an error."""
    has_failed = not flight.done() or flight.cancelled() or flight.exception() is not None
    return None if has_failed else flight.result()


def _num_bytes(flight: Flight) -> int:
    found = _found(flight)
    return 0 if found is None else found.num_bytes


def _is_worn(flight: Flight) -> bool:
    """Whether its grammar is made anew for who asks next: texts of others would soon have used up its states."""
    found = _found(flight)
    return isinstance(found, Grammar) and found.is_worn


def _abandoned(flight: Flight) -> Flight:
    with contextlib.suppress(InvalidStateError):  # it has just ended
        flight.set_exception(EngineDead("the engine is shut down"))
    return flight
