"""Finishes automata in processes side by side, all of them looked after by one thread.

A thread for each would be so many that want the interpreter's lock whenever the scheduler's thread lets go of it, which
torch does at every launch. Where that thread launches hundreds of kernels one by one, this one leaves answers packed:
unpacking one takes a millisecond, for which the other would wait at every launch.
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
from sgl.runtime.constraints.process import Channel, GrammarProcess, NotToBlame
from sgl.time_limit import OutOfTime

Answer = FinishedAutomaton | BaseException | None

_LOOK_SECONDS = 0.003  # between two looks whether somebody still launches
_LONGEST_WAIT = 0.2  # seconds, of an answer for somebody who launches


@dataclass(slots=True, eq=False)
class _Job:
    constraint: Constraint
    ended: Callable[[Answer], None]
    came_late: Callable[[Answer], None]
    is_late: bool = False
    patient_until: float = 0.0  # monotonic seconds; from when a process takes it up
    until: float = math.inf
    answer: Callable[[], Answer] = lambda: None  # unpacks it
    answered: float = 0.0  # monotonic seconds

    @property
    def due(self) -> float:
        """When it is to be looked at, answered or not."""
        return self.until if self.is_late else min(self.patient_until, self.until)


class Finishers:
    """`num_processes` processes; seconds: `deadline` for one constraint, `patience` that anybody waits for it. Both
    count from when a process takes it up, the deadline from when that is ready. What a process answers is told when
    nobody `is_launching`, or a fifth of a second later; that it takes longer than `patience` is told at once. Safe from
    any thread."""

    def __init__(
        self,
        num_processes: int,
        *,
        deadline: float,
        patience: float,
        is_launching: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pid = os.getpid()
        self._deadline = deadline
        self._patience = patience
        self._is_launching = is_launching
        self._processes = [GrammarProcess(None) for _ in range(num_processes)]
        self._at_rest = list(self._processes)
        self._busy: dict[GrammarProcess, _Job] = {}
        self._channels: dict[GrammarProcess, Channel] = {}  # of busy ones
        self._waiting: deque[_Job] = deque()
        self._answered: deque[_Job] = deque()  # and nobody was told yet
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
        """Start the processes, which would otherwise start when they are first needed."""
        for process in self._processes:
            process.start()

    def finish(
        self, constraint: Constraint, ended: Callable[[Answer], None], came_late: Callable[[Answer], None]
    ) -> None:
        """Begin to finish the automaton of a constraint. `ended` is called once in the thread of this object, and must
        not raise: with the finished automaton, with what it failed with, or with None if it is too large or takes
        longer than anybody waits; then `came_late` is called once with what comes of it."""
        self._waiting.append(_Job(constraint, ended, came_late))
        if self._sleeps and self._at_rest:  # else it will look; a system call would let others have the interpreter
            self._rouse()

    def close(self) -> None:
        """End the thread and the processes. Nothing is called from then on, but for what is just being called. Nothing
        in a forked child: they are the parent's."""
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
            if self._waiting and self._at_rest:  # what came before that was set
                continue
            ready = self._selector.select(0.0 if may_tell else self._seconds_left())
            self._sleeps = False
            now = monotonic()  # what answers while these are read is not late
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
        """Until there is something to do, if nothing happens; None: nothing."""
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
        except BaseException as error:
            self._end(process, partial(_same, error))
        else:
            self._selector.register(channel, channel.events, process)
            self._channels[process] = channel
            self._get_on(process)

    def _get_on(self, process: GrammarProcess) -> None:
        """Send and read what can be sent and read."""
        try:
            answer = process.answer(self._deadline)
        except NotToBlame:
            self._selector.unregister(self._channels.pop(process))
            self._put(process, self._busy[process])
            return
        except BaseException as error:
            self._end(process, partial(_same, error))
            return
        if answer is not None:
            self._end(process, answer)
        else:
            channel = self._channels[process]
            self._busy[process].until = process.due(self._deadline)
            if self._selector.get_key(channel).events != channel.events:
                self._selector.modify(channel, channel.events, process)

    def _is_due(self, process: GrammarProcess, job: _Job, now: float) -> None:
        if now >= job.until:
            process.kill(for_good=False)
            self._end(process, partial(_same, OutOfTime(self._deadline)))
        else:
            job.is_late = True
            job.ended(None)

    def _end(self, process: GrammarProcess, answer: Callable[[], Answer]) -> None:
        """Let the process rest; what came of its job is told later."""
        job, channel = self._busy.pop(process), self._channels.pop(process, None)
        if channel is not None:
            self._selector.unregister(channel)
        self._at_rest.append(process)
        job.answer, job.answered = answer, monotonic()
        self._answered.append(job)

    def _tell(self, job: _Job) -> None:
        try:
            found = job.answer()
        except BaseException as error:
            found = error
        (job.came_late if job.is_late else job.ended)(found)


def _same(error: BaseException) -> BaseException:
    return error
