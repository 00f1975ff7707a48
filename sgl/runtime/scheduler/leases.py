"""Locks on cached prefixes for waiting programs.

The scheduler drops the oldest leases before it retracts or refuses a request; a holder then finds `lost` set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.window_pages import WindowPages


class Demotes(Protocol):
    """Keeps copies of what leases protected."""

    def demote(self, lease: Lease, *, now: bool) -> bool:
        """Keep one, before the lease loses its pages; now: they are needed at once. Returns whether there is one."""
        ...

    def forget_lease(self, lease: Lease) -> None:
        """It is not needed any more."""

    def finished(self, lease: Lease, length: int) -> None:
        """`forget_lease`; and nobody is known to need what is behind the first `length` tokens."""


class Lease:
    """One lock on a tree node, shared by `num_holders`."""

    __slots__ = ("lost", "node", "num_holders", "num_pages", "window_pages")

    def __init__(self, node: Node, num_pages: int, window_pages: Int32Array | None = None) -> None:
        self.node = node
        self.num_pages = num_pages  # pages that nobody else held then
        self.window_pages = window_pages  # held, of layers with a window
        self.num_holders = 1
        self.lost: Literal["expired", "evicted", "demoted", "outdated"] | None = None


class Leases:
    """All leases on one cache. Single-threaded."""

    def __init__(self, cache: RadixCache, windows: WindowPages | None = None) -> None:
        self.num_pages = 0
        """Roughly what would become evictable without leases."""
        self._cache = cache
        self._windows = windows
        self.demotes: Demotes | None = None
        """Where their pages go instead of nowhere."""
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
        lease = self.hold(match.node)
        if self._windows is not None:
            lease.window_pages = self._windows.hold(self._windows.usable(match).node)
        return lease

    def hold(self, node: Node) -> Lease:
        """Lock the prefix that ends at a node."""
        before = self._cache.evictable_pages
        self._cache.lock(node)
        lease = Lease(node, before - self._cache.evictable_pages)
        self._leases[lease] = None
        self.num_pages += lease.num_pages
        return lease

    def release(self, lease: Lease) -> None:
        """One holder gives it up."""
        lease.num_holders -= 1
        if lease.num_holders:
            return
        if lease.lost is None:
            self._unlock(lease)
        if self.demotes is not None:
            self.demotes.forget_lease(lease)

    def finish(self, lease: Lease, length: int) -> None:
        """`release`; nobody else is known to need what is behind its first `length` tokens."""
        if self.demotes is None or lease.num_holders > 1:
            self.release(lease)
            return
        lease.num_holders = 0
        if lease.lost is None:
            self._unlock(lease)
        self.demotes.finished(lease, length)

    def expire(self, lease: Lease) -> None:
        """Take it from all holders: nobody returned in time."""
        if lease.lost is None:
            if self.demotes is not None:
                self.demotes.demote(lease, now=False)
            self._unlock(lease)
            lease.lost = "expired"

    def drop_oldest(self) -> bool:
        """Take the oldest lease: its pages are needed. False if there is none."""
        oldest = next(iter(self._leases), None)
        if oldest is None:
            return False
        is_demoted = self.demotes is not None and self.demotes.demote(oldest, now=True)
        self._unlock(oldest)
        oldest.lost = "demoted" if is_demoted else "evicted"
        return True

    def outdate(self) -> None:
        """Take all: what they protect was computed with weights that are gone."""
        for lease in list(self._leases):
            self._unlock(lease)
            lease.lost = "outdated"

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
