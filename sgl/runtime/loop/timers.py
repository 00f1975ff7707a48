"""Actions due at a time, for the engine's thread, which asks how long it may wait and runs due ones between steps."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_MANY_CANCELLED = 64


@dataclass(slots=True, order=True)
class Timer:
    """An action due at a time; see `Timers.call_at`."""

    when: float  # monotonic seconds
    number: int
    action: Callable[[], None] | None = field(compare=False)  # None: cancelled or done


class Timers:
    """Actions ordered by time. Single-threaded."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._numbers = itertools.count()
        self._num_cancelled = 0  # of those in the heap

    def call_at(self, when: float, action: Callable[[], None]) -> Timer:
        """Run an action at `when` (monotonic seconds) or soon after; it must not raise. Raises ValueError unless
        `when` is finite: a NaN at the heap's root would block all others."""
        if not math.isfinite(when):
            raise ValueError(f"a timer needs a finite time, not {when!r}")
        timer = Timer(when, next(self._numbers), action)
        heapq.heappush(self._heap, timer)
        return timer

    def cancel(self, timer: Timer) -> None:
        """Forget a timer, unless it has run."""
        if timer.action is not None:
            timer.action = None
            self._num_cancelled += 1
            if self._num_cancelled > _MANY_CANCELLED and self._num_cancelled > len(self._heap) // 2:
                self._heap = [kept for kept in self._heap if kept.action is not None]
                heapq.heapify(self._heap)
                self._num_cancelled = 0

    def seconds_left(self) -> float:
        """Seconds until the next timer; not positive if one is due."""
        return self._heap[0].when - time.monotonic() if self._heap else threading.TIMEOUT_MAX

    def run_due(self) -> None:
        """Run due actions in order."""
        while self._heap and self._heap[0].when <= time.monotonic():
            timer = heapq.heappop(self._heap)
            action, timer.action = timer.action, None
            if action is None:
                self._num_cancelled -= 1
            else:
                action()
