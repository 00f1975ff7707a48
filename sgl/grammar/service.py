"""Compiles constraints for an engine: one flight for each, a deadline, and a bounded memory of grammars and failures.

Almost every constraint is compiled in a few milliseconds, in a thread of the service, and what takes long checks the
time as it goes. That is not enough for hostile ones: work in a thread holds up the scheduler's, and no check stands
inside C code or bounds memory. So what is not done within a moment is first tried in a process of its own, which is
killed at the deadline; only what came through there is compiled here.
"""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from time import monotonic

import numpy as np

from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar.compiler import Constraint, Grammar, build
from sgl.grammar.time_limit import OutOfTime, time_limit
from sgl.grammar.vocabulary import Vocabulary

_WORKER_BYTES = 8 << 30


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
    ) -> None:
        """Seconds: `deadline` for one constraint, `moment` that it may take in a thread before it is tried in the
        process, `failures_kept` for which a failure is remembered."""
        self.vocabulary = vocabulary
        self.deadline = deadline
        self.moment = moment
        self.max_grammars = max_grammars
        self.failures_kept = failures_kept
        self._flights: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()
        self._failed_at: dict[Constraint, float] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, "grammar")
        self._trial = _Trial(vocabulary)

    def submit(self, constraint: Constraint) -> Future[Grammar]:
        """The grammar, its first mask worked out; the same future for the same constraint.

        Ends in GrammarTooLarge past the deadline, which counts from when a thread of the service takes it up.
        """
        with self._lock:
            flight = self._flights.get(constraint)
            failed_at = self._failed_at.get(constraint)
            if failed_at is not None and monotonic() - failed_at > self.failures_kept:
                flight = None
            if flight is None:
                self._failed_at.pop(constraint, None)
                flight = self._flights[constraint] = self._threads.submit(self._compile, constraint)
            self._flights.move_to_end(constraint)
            while len(self._flights) > self.max_grammars:
                oldest, _ = self._flights.popitem(last=False)
                self._failed_at.pop(oldest, None)
            return flight

    def close(self) -> None:
        """End the threads and the process; flights under way fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trial.kill()

    def _compile(self, constraint: Constraint) -> Grammar:
        try:
            return self._compile_in_time(constraint)
        except GrammarError:
            with self._lock:
                self._failed_at[constraint] = monotonic()
            raise

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


def _with_first_mask(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
    grammar = build(constraint, vocabulary)
    mask = np.zeros(vocabulary.words, np.int32)
    grammar.matcher().fill_mask(mask)
    if not mask.any():
        raise GrammarError(f"no token of the model's vocabulary can begin what {constraint.kind} allows")
    return grammar


class _Trial:
    """One process in which constraints are tried, one at a time; started when it is first needed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_closed = False

    def run(self, constraint: Constraint, until: float, deadline: float) -> None:
        """Return if the constraint was compiled in time; raise the GrammarError that it ended in if not."""
        if not self._lock.acquire(timeout=max(until - monotonic(), 0.0)):
            raise OutOfTime(deadline)
        try:
            connection = self._started()
            connection.send((constraint, max(until - monotonic(), 0.0)))
            if not connection.poll(max(until - monotonic(), 0.0)):
                self.kill(for_good=False)
                raise OutOfTime(deadline)
            error = connection.recv()
        except (EOFError, OSError) as died:
            self.kill(for_good=False)
            raise GrammarTooLarge("compiling the grammar took too much memory", states=0, limit=0) from died
        finally:
            self._lock.release()
        if isinstance(error, OutOfTime):
            raise OutOfTime(deadline)
        if error is not None:
            raise error

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
            code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
            self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
            theirs.close()
            self._connection = Connection(ours.detach())
            self._connection.send(self.vocabulary)
        return self._connection


def serve(descriptor: int) -> None:
    """The process, which ends with its parent: answers each constraint that comes through the socket with None or the
    GrammarError that it ends in."""
    resource.setrlimit(resource.RLIMIT_AS, (_WORKER_BYTES, _WORKER_BYTES))
    connection = Connection(descriptor)
    vocabulary: Vocabulary = connection.recv()
    while True:
        try:
            constraint, seconds = connection.recv()
        except EOFError:
            return
        answer: GrammarError | None = None
        try:
            with time_limit(seconds):
                _with_first_mask(constraint, vocabulary)
        except MemoryError:
            answer = GrammarTooLarge("compiling the grammar took too much memory", states=0, limit=0)
        except GrammarError as error:
            answer = error
        connection.send(answer)
