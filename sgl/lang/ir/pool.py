"""Fair shares of an amount."""

from __future__ import annotations


class Pool:
    """What each tenant has taken. A tenant may have as much as it leaves free: alone half, two a third each. None is
    anonymous and may take all. Single-threaded."""

    def __init__(self) -> None:
        self.taken = 0
        self._of: dict[str | None, int] = {}

    def of(self, tenant: str | None) -> int:
        """What a tenant has."""
        return self._of.get(tenant, 0)

    def room(self, size: int, tenant: str | None) -> int:
        """What the tenant may still take of `size`; negative if it has too much."""
        free = size - self.taken
        return free if tenant is None else (free - self.of(tenant)) // 2

    def take(self, number: int, tenant: str | None) -> None:
        """Take, or below 0 give back."""
        self.taken += number
        left = self._of.pop(tenant, 0) + number
        if left:
            self._of[tenant] = left
