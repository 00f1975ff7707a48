"""Processes that work on constraints: what a thread cannot be stopped in, and what would hold up other threads.

Hostile constraints outlast any check of the time, inside C code or by the memory they take: a process is killed. The
same processes close automata (`closure.py`), several side by side.
"""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import numpy as np

from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar.closure import Closed, close
from sgl.grammar.compiler import Constraint, Grammar, build
from sgl.grammar.time_limit import OutOfTime, time_limit
from sgl.grammar.vocabulary import Vocabulary

_WORKER_BYTES = 8 << 30
MAX_CLOSED_STATES = 5000
"""Larger automata are not closed: that takes longer than anybody waits, and their arrays too much room."""
_CLOSING_SECONDS = 1.0
_ANSWER_BYTES = 1 << 20
_ALIGNMENT = 16  # bytes, of arrays in an answer
_COLLECT_EVERY = 32  # constraints
_BYTES = Vocabulary([bytes([byte]) for byte in range(256)], [])


class GrammarProcess:
    """Works on one constraint at a time; started when it is first needed. It tries them with a vocabulary, or closes
    their automata without one."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self.vocabulary = vocabulary
        self._turn = threading.Lock()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._asked: Connection | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start it now."""
        self._started()

    @property
    def connection(self) -> Connection:
        """Where it was asked last."""
        assert self._asked is not None, "it was asked"
        return self._asked

    def run(self, constraint: Constraint, until: float, deadline: float) -> Closed | None:
        """`ask` and wait for the `answer`; threads take turns. Raises OutOfTime too, and kills it, where that is not
        there by `until`, in monotonic seconds."""
        if not self._turn.acquire(timeout=max(until - monotonic(), 0.0)):
            raise OutOfTime(deadline)
        try:
            if not self.ask(constraint, until).poll(max(until - monotonic(), 0.0)):
                self.kill(for_good=False)
                raise OutOfTime(deadline)
            return self.answer(deadline)
        finally:
            self._turn.release()

    def ask(self, constraint: Constraint, until: float) -> Connection:
        """Begin to work on a constraint: where there will be something to read, `answer` does not wait. Raises
        GrammarTooLarge if it has died."""
        try:
            self._asked = self._started()
            self._asked.send((constraint, max(until - monotonic(), 0.0)))
        except (EOFError, OSError) as died:
            raise self._died() from died
        return self._asked

    def answer(self, deadline: float) -> Closed | None:
        """The closed automaton, None if it was too large or the constraint was only to be tried. Raises the
        GrammarError that it ended in, OutOfTime where the process itself noticed the deadline."""
        try:
            answer: Closed | GrammarError | None = _received(self.connection)
        except (EOFError, OSError) as died:
            raise self._died() from died
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
        with self._starting:
            if self._is_closed:
                raise EOFError
            if self._process is None or self._connection is None or self._process.poll() is not None:
                # Not by multiprocessing, which would run the user's main module again.
                ours, theirs = socket.socketpair()
                # An answer in one piece, so that reading it takes few turns of the interpreter's lock
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ANSWER_BYTES)
                code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve"
                arguments = [sys.executable, "-c", f"{code}; serve({theirs.fileno()})"]
                self._process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
                theirs.close()
                self._connection = Connection(ours.detach())
                self._connection.send(self.vocabulary)
            return self._connection


def serve(descriptor: int) -> None:
    """The process, which ends with its parent: answers each constraint that comes through the socket as
    `GrammarProcess.answer` says."""
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
                    with_first_mask(constraint, vocabulary)
                else:
                    answer = _closed(build(constraint, _BYTES))
        except MemoryError:
            answer = GrammarTooLarge("compiling the grammar took too much memory", states=0, limit=0)
        except GrammarError as error:
            answer = error
        _send(connection, answer)
        if number % _COLLECT_EVERY == 0:
            gc.collect()


def _send(connection: Connection, answer: object) -> None:
    """Arrays go as they are behind the rest, to be read by `_received` into the place where they stay."""
    arrays: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(answer, 5, buffer_callback=arrays.append)
    parts = [array.raw() for array in arrays]
    connection.send((rest, [len(part) for part in parts]))
    data = b"".join(bytes(part) + bytes(-len(part) % _ALIGNMENT) for part in parts)
    while data:
        data = data[os.write(connection.fileno(), data) :]


def _received(connection: Connection) -> Any:
    rest, sizes = connection.recv()
    starts = list(itertools.accumulate((size + -size % _ALIGNMENT for size in sizes), initial=0))
    data = memoryview(bytearray(starts[-1]))
    length = 0
    while length < len(data):
        num_read = os.readv(connection.fileno(), [data[length:]])
        if not num_read:
            raise EOFError
        length += num_read
    return pickle.loads(rest, buffers=[data[at : at + size] for at, size in zip(starts, sizes, strict=False)])


def with_first_mask(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
    """The grammar, the mask at its beginning found. Raises GrammarError if no token can begin."""
    grammar = build(constraint, vocabulary)
    mask = np.zeros(vocabulary.words, np.int32)
    grammar.matcher().fill_mask(mask)
    if not mask.any():
        raise GrammarError(f"no token of the model's vocabulary can begin what {constraint.kind} allows")
    return grammar


def _closed(grammar: Grammar) -> Closed | None:
    if grammar.automaton is None:
        return None
    try:
        with time_limit(_CLOSING_SECONDS):
            return close(grammar.automaton, MAX_CLOSED_STATES)
    except GrammarTooLarge:
        return None
