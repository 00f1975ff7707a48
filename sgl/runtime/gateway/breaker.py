"""When a worker gets no requests because those before failed.

Closed: it gets all. Open, after failures in a row: none for a while. Half open, after that: one, whose end closes or
opens it again, for twice as long."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_SECONDS = 30.0


class Breaker:
    """Of one worker."""

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._least_seconds = self._seconds = seconds
        self._clock = clock
        self._failures = 0
        self._until: float | None = None  # None: closed
        self._tries, self._trying = 0, 0  # the try that goes on, by its number

    @property
    def lets_pass(self) -> bool:
        """Whether a request may go to the worker now."""
        return not self.seconds_left and not self._trying

    @property
    def is_open(self) -> bool:
        """Whether the worker is thought to be broken."""
        return self._until is not None

    @property
    def seconds_left(self) -> float:
        """Until it lets a request pass again."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def began(self) -> int:
        """A request goes there. If it is to try whether the worker is well again, the number of that try."""
        self._tries += self.is_open
        self._trying = self._tries if self.is_open else 0
        return self._trying

    def began_to_answer(self) -> None:
        """It gets requests again. Whether it is well shows when an answer has ended: until then, another failure is
        one too many."""
        if self._until is not None:
            self._failures, self._until, self._trying = self._most, None, 0

    def succeeded(self) -> None:
        """It answered, to the end."""
        self._failures, self._until, self._trying = 0, None, 0
        self._seconds = self._least_seconds

    def failed(self) -> None:
        """It did not."""
        self._failures += 1
        if self._failures > self._most and (self._until is None or self._trying):  # it was open before
            self._seconds = min(2 * self._seconds, max(MOST_SECONDS, self._least_seconds))
        if self._failures >= self._most or self._trying:
            self._until = self._clock() + self._seconds
        self._trying = 0

    def left(self, number: int) -> None:
        """That try ended. If it said nothing about the worker, since its client left, another may try."""
        if self._trying == number:
            self._trying = 0
