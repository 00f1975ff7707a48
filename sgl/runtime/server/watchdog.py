"""Seconds without progress of an engine, while the watcher was awake; a new step restarts the count."""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_SECONDS = 1.0
_MOST_A_TICK = 2 * TICK_SECONDS  # longer gaps were not watched


class Watchdog:
    """Watches one engine process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._age = 0.0
        self._stuck = 0.0

    def heard(self, age: float) -> None:
        """Report the seconds the engine has been at its current step; 0: idle."""
        if age < self._age or age <= 0:
            self._stuck = 0.0
        self._age = age

    def tick(self) -> float:
        """Call every `TICK_SECONDS`; returns seconds seen at one step or silent."""
        now = self._clock()
        self._stuck += min(now - self._last, _MOST_A_TICK)
        self._last = now
        return self._stuck
