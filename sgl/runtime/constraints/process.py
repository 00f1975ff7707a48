"""Disposable processes that compile constraints and finish automata (`finished.py`).

A thread cannot be killed, and hostile constraints evade time checks inside C code or take memory.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import selectors
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import clock_gettime, monotonic, thread_time
from typing import Any

import numpy as np

from sgl.child import command
from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar.automaton.finished import FinishedAutomaton, finish
from sgl.grammar.automaton.missing_bytes import does_without
from sgl.grammar.compiler import Constraint, Grammar, build
from sgl.grammar.matching.budget import FAR
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.machine_limits import address_space, limit_address_space
from sgl.runtime.framing import Frames, packed
from sgl.time_limit import OutOfTime, time_limit

_MORE_BYTES = 768 << 20
"""Address space beyond what the process has with its vocabulary. What compiled here is compiled again in the
engine."""
_NICER = 10  # than the engine, for trials
_LOADED = 10.0
"""A constraint's seconds are its process's own. So many times as many may pass: where others keep all cores busy, one
that is nicer than they gets a tenth."""
_LEAST_WAIT = 0.02
MAX_FINISHED_STATES = 5000
"""Larger automata are not finished: they take too long and too much memory."""
_FINISHING_SECONDS = 1.0  # of CPU time
_ANSWER_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_COLLECT_AFTER, _COLLECT_ANYWAY = 32, 128  # constraints between garbage collections: while idle, in any case
_IDLE_SECONDS = 0.02
_START_SECONDS = 120.0  # for a process to become ready; constraints are not charged for it
_BYTES = Vocabulary([bytes([byte]) for byte in range(256)], [])


class Channel:
    """Whole messages over a socket. On a non-blocking one, `flush` and `receive` never wait."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._out = memoryview(b"")
        self._frames = Frames()
        self._received: deque[Callable[[], Any]] = deque()

    def put(self, message: object) -> None:
        """Queue a message."""
        self._out = memoryview(bytes(self._out) + packed(message))

    def flush(self) -> bool:
        """Send; returns whether all is sent."""
        with contextlib.suppress(BlockingIOError):
            while self._out:
                self._out = self._out[self._socket.send(self._out) :]
        return not self._out

    def receive(self) -> Callable[[], Any] | None:
        """A function that unpickles the next message, if complete. Raises EOFError at the end."""
        with contextlib.suppress(BlockingIOError):
            while not self._received:
                if not (data := self._socket.recv(_READ_BYTES)):
                    raise EOFError
                self._received += self._frames.feed(data)
        return self._received.popleft() if self._received else None

    def fileno(self) -> int:
        """The socket's, for selectors."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The event to wait for before the next `flush` or `receive`."""
        return selectors.EVENT_WRITE if self._out else selectors.EVENT_READ


class StaleProcess(Exception):
    """The process died of an earlier constraint: ask again, which starts another."""


class GrammarProcess:
    """A process that works on one constraint at a time: with a vocabulary it tries constraints, without one it
    finishes automata. It exits when memory runs out or half of its allowance is used: only the first constraint of
    a process is blamed for its death."""

    def __init__(
        self, vocabulary: Vocabulary | None, *, more_bytes: int = _MORE_BYTES, missing: bytes = b""
    ) -> None:
        """more_bytes: the memory that constraints may take. missing: the bytes that finished automata must do
        without."""
        self.vocabulary = vocabulary
        self._missing = missing
        self._more_bytes = more_bytes
        self._num_asked = 0  # since the process started
        self._is_ready = False  # the process
        self._seconds = 0.0  # that the constraint has
        self._begun = self._used = 0.0  # from which they count: monotonic, and those that the process had used
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start it now."""
        with contextlib.suppress(EOFError):
            self._started()

    def run(self, constraint: Constraint, seconds: float) -> FinishedAutomaton | None:
        """`ask` and wait for the answer, in one thread at a time. When its time is up, see `due`, kills the process and
        raises OutOfTime."""
        with contextlib.suppress(StaleProcess):
            return self._run(constraint, seconds)
        return self._run(constraint, seconds)

    def _run(self, constraint: Constraint, seconds: float) -> FinishedAutomaton | None:
        channel = self.ask(constraint, seconds)
        with selectors.DefaultSelector() as selector:
            while (answer := self.answer(seconds)) is None:
                selector.register(channel, channel.events)
                left = max(self.due() - monotonic(), 0.0)
                is_ready = selector.select(left)
                selector.unregister(channel)
                if not is_ready and not left:
                    self.kill(for_good=False)
                    raise OutOfTime(seconds)
        return answer()

    def ask(self, constraint: Constraint, seconds: float) -> Channel:
        """Start on a constraint. Call `answer` whenever the channel is ready. Raises GrammarTooLarge if no process
        can be started."""
        try:
            channel = self._started()
            self._num_asked += 1
            self._seconds = seconds
            self._begin()
            channel.put((constraint, seconds))
        except (EOFError, OSError) as died:
            self.kill(for_good=False)
            raise _too_much_memory() from died
        return channel

    def _begin(self) -> None:
        self._begun, self._used = monotonic(), self._cpu_seconds()

    def _cpu_seconds(self) -> float:
        """The process's; where the system does not say, time goes by for all alike."""
        with contextlib.suppress(OSError, AttributeError):  # it has ended, say
            return clock_gettime(~self._process.pid << 3 | 2)  # type: ignore[union-attr]  # as clock_getcpuclockid()
        return monotonic()

    def due(self) -> float:
        """When to see again, in monotonic seconds; a past time once its own is up: so much of its process's, or
        `_LOADED` times as much of all, without that of a start."""
        latest = self._begun + _LOADED * self._seconds
        if not self._is_ready:
            return latest + _START_SECONDS
        left = self._seconds - (self._cpu_seconds() - self._used)
        return min(latest, monotonic() + max(left, _LEAST_WAIT)) if left > 0 else self._begun

    def answer(self, deadline: float) -> Callable[[], FinishedAutomaton | None] | None:
        """None if there is no answer yet; never blocks. Else a function that returns the finished automaton, or
        None if it is too large or was only tried, and raises the compiler's GrammarError or OutOfTime. If the
        process has died, raises GrammarTooLarge for its first constraint, else StaleProcess."""
        channel = self._channel
        try:
            if channel is None:
                raise EOFError
            received = channel.receive() if channel.flush() else None
            if received is not None and not self._is_ready:  # the first message only says so
                self._is_ready = True
                self._begin()
                received = channel.receive()
        except (EOFError, OSError) as died:
            self.kill(for_good=False)
            if self._num_asked > 1:
                raise StaleProcess from died
            raise _too_much_memory() from died
        return None if received is None else partial(_found, received, deadline)

    def kill(self, *, for_good: bool = True) -> None:
        """Kill the process."""
        with self._lock:
            self._is_closed |= for_good
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _started(self) -> Channel:
        with self._lock:
            if self._is_closed:
                raise EOFError
            if self._process is None or self._channel is None or self._process.poll() is not None:
                # multiprocessing would run the user's main module again
                ours, theirs = socket.socketpair()
                ours.setblocking(False)
                # a large buffer: reading in few pieces takes the GIL seldom
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ANSWER_BYTES)
                # a trial may be hostile; finishing has somebody waiting
                nicer = 0 if self.vocabulary is None else _NICER
                numbers = f"{theirs.fileno()}, {nicer}, {self._more_bytes}"
                arguments = command(f"from {__name__} import serve; serve({numbers})")
                self._process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
                theirs.close()
                self._num_asked, self._is_ready = 0, False
                self._channel = Channel(ours)
                self._channel.put((self.vocabulary, self._missing))
                self._channel.flush()
            return self._channel


def _too_much_memory() -> GrammarTooLarge:
    return GrammarTooLarge("compiling the grammar took too much memory", states=0, limit=0)


def _found(received: Callable[[], Any], deadline: float) -> FinishedAutomaton | None:
    answer: FinishedAutomaton | GrammarError | None = received()
    if isinstance(answer, OutOfTime):
        raise OutOfTime(deadline)
    if isinstance(answer, GrammarError):
        raise answer
    return answer


def serve(descriptor: int, nicer: int, more_bytes: int) -> None:
    """The process's main function: reports readiness, then answers constraints as `GrammarProcess.answer`
    describes, until its parent ends."""
    os.nice(nicer)
    serve_channel(Channel(socket.socket(fileno=descriptor)), _Memory(more_bytes))


class _Memory:
    """Bounds a process's memory, so that only a too large constraint fails."""

    def __init__(self, more_bytes: int | None) -> None:
        """more_bytes: allowed growth from now; None: unbounded."""
        self._more_bytes = more_bytes
        self._enough: float = math.inf

    def bound(self) -> None:
        if self._more_bytes is not None and (used := address_space()):
            self._enough = (used + limit_address_space(self._more_bytes)) / 2

    def is_short(self) -> bool:
        """Whether earlier constraints left too little memory for the next."""
        if address_space() <= self._enough:
            return False
        gc.collect()
        return address_space() > self._enough


def serve_channel(channel: Channel, memory: _Memory | None = None) -> None:
    """`serve`, bounded only if there is a `memory`."""
    with contextlib.suppress(EOFError, OSError, MemoryError):
        _answer_all(channel, memory or _Memory(None))


def _answer_all(channel: Channel, memory: _Memory) -> None:
    vocabulary: Vocabulary | None
    vocabulary, missing = _next(channel)
    if vocabulary is not None:
        vocabulary.work_out()
    memory.bound()
    gc.freeze()
    gc.disable()  # collections take a fifth of the time
    channel.put("ready")
    channel.flush()
    waits = select.poll()  # select() takes no file descriptor above 1,023
    waits.register(channel, select.POLLIN)
    num_since = 0  # since the last collection, which would delay an answer
    is_first = True
    while not memory.is_short():
        if num_since >= _COLLECT_AFTER:
            is_idle = not waits.poll(1000 * _IDLE_SECONDS)
            if is_idle or num_since >= _COLLECT_ANYWAY:
                gc.collect()
                num_since = 0
        constraint, seconds = _next(channel)
        num_since += 1
        is_out = False
        answer: FinishedAutomaton | GrammarError | None = None
        try:
            with time_limit(seconds, thread_time):
                if vocabulary is not None:
                    with_first_mask(constraint, vocabulary)
                else:
                    answer = _finished(build(constraint, _BYTES), missing)
        except MemoryError:
            is_out = True
            answer = _too_much_memory()
        except GrammarError as error:
            answer = error
        except Exception as error:  # not every error can be pickled
            answer = GrammarError(f"the constraint cannot be compiled: {type(error).__name__}: {error}"[:500])
        if is_out and not is_first:  # perhaps because of earlier constraints: another process will try
            return
        channel.put(answer)
        channel.flush()
        if is_out:
            return
        is_first, answer = False, None  # an error's traceback holds what was being built


def _next(channel: Channel) -> Any:
    received = channel.receive()
    assert received is not None, "its socket waits"
    return received()


def with_first_mask(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
    """The grammar, with its first mask computed. Raises GrammarError if no token can begin."""
    grammar = build(constraint, vocabulary)
    mask = np.zeros(vocabulary.words, np.int32)
    grammar.matcher().fill_mask(mask, FAR)  # with a budget, so that completion lengths are computed, too
    if not mask.any():
        raise GrammarError(f"no token of the model's vocabulary can begin what {constraint.kind} allows")
    return grammar


def _finished(grammar: Grammar, missing: bytes) -> FinishedAutomaton | None:
    if grammar.automaton is None:
        return None
    try:
        with time_limit(_FINISHING_SECONDS, thread_time):
            finished = finish(grammar.automaton, MAX_FINISHED_STATES)
    except GrammarTooLarge:
        return None
    return finished if finished is None or does_without(finished.tables, missing) else None
