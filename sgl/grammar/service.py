"""Compiles constraints for an engine: one flight for each, a deadline, and a bounded memory of grammars and failures.

Almost every constraint is compiled in a few milliseconds, in a thread of the service, and what takes long checks the
time as it goes. That is not enough for hostile ones: work in a thread holds up the scheduler's, and no check stands
inside C code or bounds memory. So what is not done within a moment is first tried in a process of its own, which is
killed at the deadline; only what came through there is compiled here.

For walks that cannot stop to ask for more, all of an automaton is worked out (`closure.py`). That takes too long for a
thread beside the scheduler's, so it is done in processes, and what comes of it is sent back.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import queue
import resource
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from multiprocessing.connection import Connection
from time import monotonic

import numpy as np

from sgl.errors import EngineDead, GrammarError, GrammarTooLarge
from sgl.grammar.closure import Closed, close
from sgl.grammar.compiler import Constraint, Grammar, build
from sgl.grammar.cursor import MAX_OPENED, ClosedGrammar
from sgl.grammar.time_limit import OutOfTime, time_limit
from sgl.grammar.vocabulary import Vocabulary

_WORKER_BYTES = 8 << 30
MAX_CLOSED_STATES = 5000
"""Larger automata are not closed: that takes longer than anybody waits, and their arrays too much room."""
_CLOSING_SECONDS = 1.0
_ANSWER_BYTES = 1 << 20
_COLLECT_EVERY = 32  # constraints
_BYTES = Vocabulary([bytes([byte]) for byte in range(256)], [])


class CompileService:
    """Hands out compiled grammars. Safe from any thread; `close` ends its threads and process."""

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
    ) -> None:
        """Seconds: `deadline` for one constraint, `moment` that it may take in a thread before it is tried in the
        process, `failures_kept` for which a failure is remembered. With `num_closers`, so many processes close
        automata, and grammars that are small enough come as ClosedGrammar; where that takes longer than `patience`,
        only to those who ask later. `prepare` is called with each of these before anybody has it."""
        self.vocabulary = vocabulary
        self.deadline = deadline
        self.moment = moment
        self.max_grammars = max_grammars
        self.failures_kept = failures_kept
        self.patience = patience
        self._prepare = prepare
        self._flights: OrderedDict[Constraint, Future[Grammar | ClosedGrammar]] = OrderedDict()
        self._under_way: set[Future[Grammar | ClosedGrammar]] = set()
        self._failed_at: dict[Constraint, float] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max(num_threads, num_closers), "grammar")
        self._trial = _Process(vocabulary)
        self._closers: queue.SimpleQueue[_Process] = queue.SimpleQueue()  # those at rest
        self._processes = [self._trial, *(_Process(None) for _ in range(num_closers))]
        for process in self._processes[1:]:
            self._closers.put(process)
        fits = vocabulary.is_byte_complete and vocabulary.most_opened <= MAX_OPENED
        self._closes = num_closers > 0 and fits

    def submit(self, constraint: Constraint) -> Future[Grammar | ClosedGrammar]:
        """The grammar, closed or its first mask worked out; the same future for the same constraint.

        Ends in GrammarTooLarge past the deadline, which counts from when a thread of the service takes it up, and in
        EngineDead once the service is closed.
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
                self._threads.submit(self._fly, flight, constraint)
                self._flights[constraint] = flight
                self._under_way.add(flight)
            self._flights.move_to_end(constraint)
            while len(self._flights) > self.max_grammars:
                oldest, _ = self._flights.popitem(last=False)
                self._failed_at.pop(oldest, None)
            return flight

    def close(self) -> None:
        """End the threads and the process; flights under way end in EngineDead."""
        with self._lock:
            self._is_closed = True
            under_way, self._under_way = self._under_way, set()
        for flight in under_way:
            _abandoned(flight)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()

    def start(self) -> None:
        """Start the processes that close automata, which would otherwise start when they are first needed."""
        for process in self._processes[1:]:
            process.start()

    def _fly(self, flight: Future[Grammar | ClosedGrammar], constraint: Constraint) -> None:
        with contextlib.suppress(InvalidStateError):  # closed meanwhile
            try:
                grammar = self._compile(constraint)
            except BaseException as error:
                flight.set_exception(error)
            else:
                flight.set_result(grammar)
        with self._lock:
            self._under_way.discard(flight)

    def _compile(self, constraint: Constraint) -> Grammar | ClosedGrammar:
        try:
            closed = self._close(constraint) if self._closes else None
            return self._compile_in_time(constraint) if closed is None else self._with(closed, constraint)
        except GrammarError:
            with self._lock:
                self._failed_at[constraint] = monotonic()
            raise

    def _with(self, closed: Closed, constraint: Constraint) -> ClosedGrammar:
        grammar = ClosedGrammar(closed, self.vocabulary, lambda: build(constraint, self.vocabulary))
        self._prepare(grammar)
        return grammar

    def _close(self, constraint: Constraint) -> Closed | None:
        """The closed automaton, if it is small enough and nobody has to wait for it."""
        process = self._closers.get()
        until = monotonic() + self.deadline
        is_late = False
        try:
            process.ask(constraint, until, self.deadline)
            is_late = not process.has_answer(self.patience)
            return None if is_late else process.answer(until, self.deadline)
        finally:
            if is_late:  # a thread of its own: those of the service may all wait for a process
                arguments = process, constraint, until
                threading.Thread(target=self._close_later, args=arguments, name="grammar", daemon=True).start()
            else:
                self._closers.put(process)

    def _close_later(self, process: _Process, constraint: Constraint, until: float) -> None:
        try:
            closed = process.answer(until, self.deadline)
        except GrammarError:  # what the constraint's own flight ends in is what counts
            return
        finally:
            self._closers.put(process)
        with self._lock:
            flight = self._flights.get(constraint)
        if closed is None or flight is None or flight.exception() is not None:  # waits: it may end after this
            return
        with self._lock:
            if self._flights.get(constraint) is flight:
                self._flights[constraint] = Future()
                self._flights[constraint].set_result(self._with(closed, constraint))

    def _compile_in_time(self, constraint: Constraint) -> Grammar:
        until = monotonic() + self.deadline
        try:
            with time_limit(min(self.moment, self.deadline)):
                return _with_first_mask(constraint, self.vocabulary)
        except OutOfTime:
            self._trial.run(constraint, until, self.deadline)
        try:
            with time_limit(max(until - monotonic(), 0.0)):
                return _with_first_mask(constraint, self.vocabulary)
        except OutOfTime:
            raise OutOfTime(self.deadline) from None


def _abandoned(flight: Future[Grammar | ClosedGrammar]) -> Future[Grammar | ClosedGrammar]:
    with contextlib.suppress(InvalidStateError):  # it has just ended
        flight.set_exception(EngineDead("the engine is shut down"))
    return flight


def _with_first_mask(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
    grammar = build(constraint, vocabulary)
    mask = np.zeros(vocabulary.words, np.int32)
    grammar.matcher().fill_mask(mask)
    if not mask.any():
        raise GrammarError(f"no token of the model's vocabulary can begin what {constraint.kind} allows")
    return grammar


class _Process:
    """A process that works on constraints, one at a time; started when it is first needed. It tries them with a
    vocabulary, or closes their automata without one."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._asked: Connection | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start it now."""
        with self._lock:
            self._started()

    def run(self, constraint: Constraint, until: float, deadline: float) -> Closed | None:
        """`ask` and `answer`."""
        self.ask(constraint, until, deadline)
        return self.answer(until, deadline)

    def ask(self, constraint: Constraint, until: float, deadline: float) -> None:
        """Begin to work on a constraint; `answer` has to follow. Raises OutOfTime where others keep it busy, and
        GrammarTooLarge if it has died."""
        if not self._lock.acquire(timeout=max(until - monotonic(), 0.0)):
            raise OutOfTime(deadline)
        try:
            self._asked = self._started()
            self._asked.send((constraint, max(until - monotonic(), 0.0)))
        except (EOFError, OSError) as died:
            self._lock.release()
            raise self._died() from died

    def has_answer(self, seconds: float) -> bool:
        """Whether `answer` will not wait, after so many seconds at most."""
        assert self._asked is not None, "it was asked"
        return self._asked.poll(seconds)

    def answer(self, until: float, deadline: float) -> Closed | None:
        """The closed automaton, None if it was too large or the constraint was only to be tried. Raises the
        GrammarError that it ended in, also past the deadline."""
        assert self._asked is not None, "it was asked"
        try:
            if not self._asked.poll(max(until - monotonic(), 0.0)):
                self.kill(for_good=False)
                raise OutOfTime(deadline)
            answer: Closed | GrammarError | None = self._asked.recv()
        except (EOFError, OSError) as died:
            raise self._died() from died
        finally:
            self._lock.release()
        if isinstance(answer, OutOfTime):
            raise OutOfTime(deadline)
        if isinstance(answer, GrammarError):
            raise answer
        return answer

    def _died(self) -> GrammarTooLarge:
        self.kill(for_good=False)
        return GrammarTooLarge("compiling the grammar took too much memory", states=0, limit=0)

    def kill(self, *, for_good: bool = True) -> None:
        """End the process, whatever it does."""
        self._is_closed |= for_good
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _started(self) -> Connection:
        if self._is_closed:
            raise EOFError
        if self._process is None or self._connection is None or self._process.poll() is not None:
            # Not by multiprocessing, which would run the user's main module again.
            ours, theirs = socket.socketpair()
            # An answer at a time, so that reading it takes few turns of the interpreter's lock
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ANSWER_BYTES)
            code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
            self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
            theirs.close()
            self._connection = Connection(ours.detach())
            self._connection.send(self.vocabulary)
        return self._connection


def serve(descriptor: int) -> None:
    """The process, which ends with its parent: answers each constraint that comes through the socket as `_Process.run`
    says."""
    resource.setrlimit(resource.RLIMIT_AS, (_WORKER_BYTES, _WORKER_BYTES))
    connection = Connection(descriptor)
    vocabulary: Vocabulary | None = connection.recv()
    gc.freeze()
    gc.disable()  # a fifth of the time otherwise
    for number in itertools.count(1):
        try:
            constraint, seconds = connection.recv()
        except EOFError:
            return
        answer: Closed | GrammarError | None = None
        try:
            with time_limit(seconds):
                if vocabulary is not None:
                    _with_first_mask(constraint, vocabulary)
                else:
                    answer = _closed(build(constraint, _BYTES))
        except MemoryError:
            answer = GrammarTooLarge("compiling the grammar took too much memory", states=0, limit=0)
        except GrammarError as error:
            answer = error
        connection.send(answer)
        if number % _COLLECT_EVERY == 0:
            gc.collect()


def _closed(grammar: Grammar) -> Closed | None:
    if grammar.automaton is None:
        return None
    try:
        with time_limit(_CLOSING_SECONDS):
            return close(grammar.automaton, MAX_CLOSED_STATES)
    except GrammarTooLarge:
        return None
