"""Holds on cached prefixes by those who do not run: a program that waits for its client keeps its pages this way.

A lease is one lock on a tree node. It gives way to whoever runs: the scheduler drops leases, oldest first, before
it retracts a request or turns one away. Who holds a lease looks at `lost` to learn whether it still does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from sgl.runtime.cache.radix import Node, RadixCache


class Lease:
    """A locked prefix. `num_holders` may share it, so handing it on costs nothing."""

    __slots__ = ("lost", "node", "num_holders", "num_pages")

    def __init__(self, node: Node, num_pages: int) -> None:
        self.node = node
        self.num_pages = num_pages  # pages that nobody else held when it was taken
        self.num_holders = 1
        self.lost: Literal["expired", "evicted"] | None = None


class Leases:
    """Every lease on one cache. One thread uses it."""

    def __init__(self, cache: RadixCache) -> None:
        self.num_pages = 0
        """Sum of the leases' `num_pages`: about what would become evictable if all of them went."""
        self._cache = cache
        self._leases: dict[Lease, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._leases)

    def nodes(self) -> Iterator[Node]:
        """The node of every lease, for the ledger."""
        return (lease.node for lease in self._leases)

    def take(self, key: bytes, namespace: str | None) -> Lease | None:
        """Lock what is cached of a key; None if that is nothing."""
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
        """One holder is done with it."""
        lease.num_holders -= 1
        if not lease.num_holders and lease.lost is None:
            self._unlock(lease)

    def expire(self, lease: Lease) -> None:
        """Take it from all its holders, because nobody came back to it in time."""
        if lease.lost is None:
            self._unlock(lease)
            lease.lost = "expired"

    def drop_oldest(self) -> bool:
        """Take the oldest lease from its holders, because its pages are needed; False if there is none."""
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
