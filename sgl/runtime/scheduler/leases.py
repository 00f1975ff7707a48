"""Locks on cached prefixes for waiting programs.

The scheduler drops the oldest leases before it retracts or refuses a request; a holder then finds `lost` set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.cache.radix import Node, RadixCache
from sgl.runtime.cache.window_pages import WindowPages


class Lease:
    """One lock on a tree node, shared by `num_holders`."""

    __slots__ = ("lost", "node", "num_holders", "num_pages", "window_pages")

    def __init__(self, node: Node, num_pages: int, window_pages: Int32Array | None = None) -> None:
        self.node = node
        self.num_pages = num_pages  # pages that nobody else held then
        self.window_pages = window_pages  # held, of layers with a window
        self.num_holders = 1
        self.lost: Literal["expired", "evicted"] | None = None


class Leases:
    """All leases on one cache. Single-threaded."""

    def __init__(self, cache: RadixCache, windows: WindowPages | None = None) -> None:
        self.num_pages = 0
        """Roughly what would become evictable without leases."""
        self._cache = cache
        self._windows = windows
        self._leases: dict[Lease, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._leases)

    def nodes(self) -> Iterator[Node]:
        """One node for each lease, for the ledger."""
        return (lease.node for lease in self._leases)

    def window_pages(self) -> Iterator[Int32Array]:
        """Those that each lease holds, if there are any."""
        return (lease.window_pages for lease in self._leases if lease.window_pages is not None)

    def take(self, key: bytes, namespace: Namespace) -> Lease | None:
        """Lock a key's cached prefix; None if there is none."""
        match = self._cache.match(key, namespace)
        if not match.length:
            return None
        before = self._cache.evictable_pages
        self._cache.lock(match.node)
        window_pages = None
        if self._windows is not None:
            window_pages = self._windows.hold(self._windows.usable(match).node)
        lease = Lease(match.node, before - self._cache.evictable_pages, window_pages)
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
        if self._windows is not None and lease.window_pages is not None:
            self._windows.release(lease.window_pages, is_end=True)
        self._cache.unlock(lease.node)


@dataclass(frozen=True, slots=True)
class _Prefix:
    lease: Lease
    until: float  # on time.monotonic


class HeldPrefixes:
    """Leases by name, each for a while. Together they hold at most a share of the pages: the oldest make room.
    Single-threaded."""

    def __init__(self, leases: Leases, max_pages: int, ttl: float) -> None:
        self._leases = leases
        self._max_pages = max_pages
        self._ttl = ttl  # seconds
        self._prefixes: dict[str, _Prefix] = {}  # oldest first
        self._num_pages = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def hold(self, name: str, key: bytes, namespace: Namespace, now: float) -> None:
        """Hold what is cached of a key under a name, instead of what it held."""
        self.release(name)
        lease = self._leases.take(key, namespace)
        if lease is not None:
            self._prefixes[name] = _Prefix(lease, now + self._ttl)
            self._num_pages += lease.num_pages
        while (oldest := next(iter(self._prefixes), None)) is not None:
            if self._num_pages <= self._max_pages and self._prefixes[oldest].until > now:
                return
            self.release(oldest)

    def release(self, name: str) -> None:
        """Give a name's pages up, if it has any."""
        prefix = self._prefixes.pop(name, None)
        if prefix is not None:
            self._num_pages -= prefix.lease.num_pages
            self._leases.release(prefix.lease)

    def clear(self) -> None:
        """Give all up."""
        for name in list(self._prefixes):
            self.release(name)
