"""Locks on cached prefixes for waiting programs.

The scheduler drops the oldest leases before it retracts or refuses a request; a holder then finds `lost` set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from sgl.runtime.cache.radix import Node, RadixCache


class Lease:
    """One lock on a tree node, shared by `num_holders`."""

    __slots__ = ("lost", "node", "num_holders", "num_pages")

    def __init__(self, node: Node, num_pages: int) -> None:
        self.node = node
        self.num_pages = num_pages  # pages that nobody else held then
        self.num_holders = 1
        self.lost: Literal["expired", "evicted"] | None = None


class Leases:
    """All leases on one cache. Single-threaded."""

    def __init__(self, cache: RadixCache) -> None:
        self.num_pages = 0
        """Roughly what would become evictable without leases."""
        self._cache = cache
        self._leases: dict[Lease, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._leases)

    def nodes(self) -> Iterator[Node]:
        """One node for each lease, for the ledger."""
        return (lease.node for lease in self._leases)

    def take(self, key: bytes, namespace: str | None) -> Lease | None:
        """Lock a key's cached prefix; None if there is none."""
        match = self._cache.match(key, namespace)
        if not match.length:
            return None
        before = self._cache.evictable_pages
        self._cache.lock(match.node)
        lease = Lease(match.node, before - self._cache.evictable_pages)
        self._leases[lease] = None
        self.num_pages += lease.num_pages
        return lease

    def release(self, lease: Lease) -> None:
        """One holder gives it up."""
        lease.num_holders -= 1
        if not lease.num_holders and lease.lost is None:
            self._unlock(lease)

    def expire(self, lease: Lease) -> None:
        """Take it from all holders: nobody returned in time."""
        if lease.lost is None:
            self._unlock(lease)
            lease.lost = "expired"

    def drop_oldest(self) -> bool:
        """Take the oldest lease: its pages are needed. False if there is none."""
        oldest = next(iter(self._leases), None)
        if oldest is None:
            return False
        self._unlock(oldest)
        oldest.lost = "evicted"
        return True

    def _unlock(self, lease: Lease) -> None:
        del self._leases[lease]
        self.num_pages -= lease.num_pages
        self._cache.unlock(lease.node)
