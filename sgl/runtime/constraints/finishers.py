"""Finishes automata in parallel processes, managed by one thread.

More threads would compete for the GIL, which torch releases at every launch. During launches answers stay packed:
unpacking one takes a millisecond and would delay the next launch.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic

from sgl.grammar.automaton.finished import FinishedAutomaton
from sgl.grammar.compiler import Constraint
from sgl.runtime.constraints.process import Channel, GrammarProcess, StaleProcess
from sgl.time_limit import OutOfTime

Answer = FinishedAutomaton | BaseException | None

_LOOK_SECONDS = 0.003  # between checks whether launching is over
_LONGEST_WAIT = 0.2  # seconds that an answer waits for launching to end


@dataclass(slots=True, eq=False)
class _Job:
    constraint: Constraint
    ended: Callable[[Answer], None]
    came_late: Callable[[Answer], None]
    is_late: bool = False
    patient_until: float = 0.0  # monotonic seconds, counted from when a process starts on it
    until: float = math.inf
    answer: Callable[[], Answer] = lambda: None  # unpacks it
    answered: float = 0.0  # monotonic seconds

    @property
    def due(self) -> float:
        """When to look at it, answered or not."""
        return self.until if self.is_late else min(self.patient_until, self.until)


class Finishers:
    """`num_processes` processes that finish automata. Seconds count from when a process takes a constraint up:
    `deadline` those that it has a processor, and ten times as many in all, `patience` its caller's. Answers are
    delivered when nobody `is_launching`, or 0.2 s later; lateness is reported at once. Safe from any thread."""

    def __init__(
        self,
        num_processes: int,
        *,
        deadline: float,
        patience: float,
        missing: bytes = b"",
        is_launching: Callable[[], bool] = lambda: False,
    ) -> None:
        """missing: bytes that the automata must do without."""
        self._pid = os.getpid()
        self._deadline = deadline
        self._patience = patience
        self._is_launching = is_launching
        self._processes = [GrammarProcess(None, missing=missing) for _ in range(num_processes)]
        self._at_rest = list(self._processes)
        self._busy: dict[GrammarProcess, _Job] = {}
        self._channels: dict[GrammarProcess, Channel] = {}  # of busy ones
        self._waiting: deque[_Job] = deque()
        self._answered: deque[_Job] = deque()  # answers not yet delivered
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._sleeps = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="finishers", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start the processes now instead of on first use."""
        for process in self._processes:
            process.start()

    def finish(
        self, constraint: Constraint, ended: Callable[[Answer], None], came_late: Callable[[Answer], None]
    ) -> None:
        """Finish a constraint's automaton. `ended` is called once in this object's thread, and must not raise: with
        the automaton, the error, or None if it is too large or exceeds `patience`; after the latter, `came_late`
        once with the later answer."""
        self._waiting.append(_Job(constraint, ended, came_late))
        if self._sleeps and self._at_rest:  # else it looks anyway, and a system call would release the GIL
            self._rouse()

    def close(self) -> None:
        """End thread and processes; no further callbacks start. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._is_over = True
        self._rouse()
        for process in self._processes:
            process.kill()

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake
            self._wake.send(b"\0")

    def _run(self) -> None:
        while not self._is_over:
            while self._waiting and self._at_rest and not self._is_over:
                self._ask(self._at_rest.pop(), self._waiting.popleft())
            may_tell = self._may_tell()
            self._sleeps = True
            if self._waiting and self._at_rest:  # arrived before _sleeps was set
                continue
            ready = self._selector.select(0.0 if may_tell else self._seconds_left())
            self._sleeps = False
            now = monotonic()  # answers that arrive from here on are not late
            for key, _ in ready:
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif not self._is_over:
                    self._get_on(key.data)
            for process in [process for process, job in self._busy.items() if job.due <= now]:
                if not self._is_over:
                    self._is_due(process, self._busy[process], now)
            if may_tell and not self._is_over:
                self._tell(self._answered.popleft())
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _may_tell(self) -> bool:
        if not self._answered:
            return False
        return not self._is_launching() or monotonic() - self._answered[0].answered > _LONGEST_WAIT

    def _seconds_left(self) -> float | None:
        dues = [job.due for job in self._busy.values()]
        left = max(min(dues) - monotonic(), 0.0) if dues else None
        if self._answered:
            return _LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS)
        return left

    def _ask(self, process: GrammarProcess, job: _Job) -> None:
        job.patient_until = monotonic() + self._patience
        self._busy[process] = job
        self._put(process, job)

    def _put(self, process: GrammarProcess, job: _Job) -> None:
        try:
            channel = process.ask(job.constraint, self._deadline)
        except BaseException as error:  # the job's answer
            self._end(process, partial(_same, error))
        else:
            self._selector.register(channel, channel.events, process)
            self._channels[process] = channel
            self._get_on(process)

    def _get_on(self, process: GrammarProcess) -> None:
        try:
            answer = process.answer(self._deadline)
        except StaleProcess:
            self._selector.unregister(self._channels.pop(process))
            self._put(process, self._busy[process])
            return
        except BaseException as error:  # the job's answer
            self._end(process, partial(_same, error))
            return
        if answer is not None:
            self._end(process, answer)
        else:
            channel = self._channels[process]
            self._busy[process].until = process.due()
            if self._selector.get_key(channel).events != channel.events:
                self._selector.modify(channel, channel.events, process)

    def _is_due(self, process: GrammarProcess, job: _Job, now: float) -> None:
        if now >= job.until:
            job.until = process.due()
            if now < job.until:
                return
            process.kill(for_good=False)
            self._end(process, partial(_same, OutOfTime(self._deadline)))
        else:
            job.is_late = True
            job.ended(None)

    def _end(self, process: GrammarProcess, answer: Callable[[], Answer]) -> None:
        job, channel = self._busy.pop(process), self._channels.pop(process, None)
        if channel is not None:
            self._selector.unregister(channel)
        self._at_rest.append(process)
        job.answer, job.answered = answer, monotonic()
        self._answered.append(job)

    def _tell(self, job: _Job) -> None:
        try:
            found = job.answer()
        except BaseException as error:  # handed on as what was found
            found = error
        (job.came_late if job.is_late else job.ended)(found)


def _same(error: BaseException) -> BaseException:
    return error
