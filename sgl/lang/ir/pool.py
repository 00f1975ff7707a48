"""An amount that several share. Knows numbers only; whoever asks says what there is of it."""

from __future__ import annotations


class Pool:
    """What has been taken, in all and by each tenant. One may have as much as it leaves free: alone it takes half,
    the next has a third like the first in the end, and what any of them gives back is everybody's. None is told apart
    from nobody, and may take all. One thread uses it."""

    def __init__(self) -> None:
        self.taken = 0
        self._of: dict[str | None, int] = {}

    def of(self, tenant: str | None) -> int:
        """What one has."""
        return self._of.get(tenant, 0)

    def room(self, size: int, tenant: str | None) -> int:
        """How much more it may take of so much; less than 0 if it has more than it may."""
        free = size - self.taken
        return free if tenant is None else (free - self.of(tenant)) // 2

    def take(self, number: int, tenant: str | None) -> None:
        """Count what it takes, or, below 0, gives back."""
        self.taken += number
        left = self._of.pop(tenant, 0) + number
        if left:
            self._of[tenant] = left
