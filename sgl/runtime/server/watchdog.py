"""How long an engine has made no progress while the watcher was awake: a stopped process or a sleeping machine makes
beats look old, too. A beat that shows another step starts the count anew."""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_SECONDS = 1.0
_MOST_A_TICK = 2 * TICK_SECONDS  # what is longer was not watched


class Watchdog:
    """Counts for one process of an engine; its replacement gets another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._age = 0.0
        self._stuck = 0.0

    def heard(self, age: float) -> None:
        """The engine says for how many seconds it has been at its present step; 0: at none."""
        if age < self._age or age <= 0:
            self._stuck = 0.0
        self._age = age

    def tick(self) -> float:
        """To be called every `TICK_SECONDS`: for how many seconds it was seen at one step, or silent."""
        now = self._clock()
        self._stuck += min(now - self._last, _MOST_A_TICK)
        self._last = now
        return self._stuck
