"""What the radix tree stores and drops, for others than the scheduler: recorded on its thread, and read on another.

Recording is an append to a queue. A queue that nobody reads in time is dropped as a whole, and says so: whoever follows
begins anew."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import NamedTuple

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.cache.node import Edge, Node, Watcher
from sgl.runtime.cache.radix import RadixCache

MOST = 100_000
"""Events that wait to be read."""


class Stored(NamedTuple):
    """Whole pages were added below a page; None: at the beginning of a prompt, in that namespace."""

    parent: int | None
    key: bytes
    pages: Int32Array
    namespace: Namespace


class Removed(NamedTuple):
    """Pages were dropped."""

    pages: list[Int32Array]


class Lost(NamedTuple):
    """Events were dropped: what is stored is not known any more."""


class PageEvents(Watcher):
    """Records one tree's, and passes on what its watcher wants to know."""

    def __init__(self, cache: RadixCache) -> None:
        self._inner: Watcher | None = cache.watcher
        self._waiting: deque[Stored | Removed | Lost] = deque()
        cache.watcher = self
        cache.on_removed = self._removed

    def take(self) -> list[Stored | Removed | Lost]:
        """All that wait, in order. Safe from one other thread."""
        taken: list[Stored | Removed | Lost] = []
        with suppress(IndexError):  # there are no more, or all were dropped meanwhile
            while True:
                taken.append(self._waiting.popleft())
        return taken

    def grown(self, node: Node, edge: Edge) -> None:
        if self._inner is not None:
            self._inner.grown(node, edge)
        leaf = node.children[edge]
        if leaf.is_attached:
            parent = int(node.pages[-1]) if len(node.pages) else None
            namespace = edge[0] if isinstance(edge, tuple) else None
            self._put(Stored(parent, leaf.key, leaf.pages, namespace))

    def split(self, node: Node, upper: Node) -> None:
        if self._inner is not None:
            self._inner.split(node, upper)

    def _removed(self, pages: list[Int32Array]) -> None:
        self._put(Removed(pages))

    def _put(self, event: Stored | Removed) -> None:
        if len(self._waiting) >= MOST:
            self._waiting.clear()
            self._waiting.append(Lost())
        self._waiting.append(event)
