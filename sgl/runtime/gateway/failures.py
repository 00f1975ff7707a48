"""When a program that failed at one worker after the other is given up."""

from __future__ import annotations

from sgl.runtime.gateway.workers import Server, Servers

MOST_FAILURES = 10


class Failures:
    """Of workers in a row, while the program's client had no news."""

    def __init__(self, servers: Servers) -> None:
        self.number = 0
        self.tried: dict[str, int] = {}
        """See `Passed`."""
        self._first = 1  # number in `tried` of the row's first
        self._begun = 0  # failures of workers that had begun the program
        self._servers = servers

    def add(self, server: Server | None, *, has_begun: bool) -> None:
        """One more. server: None if it did not answer."""
        self.number += 1
        self._begun += has_begun
        if server is not None:
            server.failed()

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
        ready = self._servers.ready_for(None, self.tried)
        return self._begun > MOST_FAILURES or all(self.tried.get(its.id, 0) >= self._first for its in ready)
