"""When a program that failed at one worker after the other is given up."""

from __future__ import annotations

from sgl.runtime.gateway.passing import Passing

MOST_FAILURES = 10


class Failures:
    """Of workers in a row, while the program's client had no news."""

    def __init__(self, passing: Passing) -> None:
        self.number = 0
        self.tried: dict[str, int] = {}
        """See `Passed`."""
        self._first = 1  # number in `tried` of the row's first
        self._begun = 0  # failures of workers that had begun the program
        self._passing = passing

    def add(self, worker: str | None, *, has_begun: bool) -> None:
        """One more. worker: None if it did not answer."""
        self.number += 1
        self._begun += has_begun
        self._passing.lost(worker)

    def end(self) -> None:
        """The client had news."""
        if self.number:
            self.number = self._begun = 0
            self._first = max(self.tried.values())

    @property
    def are_too_many(self) -> bool:
        """Whether nobody else is to run the program: all have tried, or it may be what ends those that begin it."""
        if self.number <= MOST_FAILURES:
            return False
        return self._begun > MOST_FAILURES or not self._passing.has_untried(self.tried, self._first)
