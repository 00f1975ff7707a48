"""Copies of cached pages in host memory: a second radix tree, over the host's pages.

It knows page numbers, but no memory. A prefix lies on the device, in host memory, or in both: its copy stays when it is
loaded, so that giving its device pages up again costs nothing. A copy is always that of a whole prefix, from the first
token on: what nothing leads to could not be found. Pages under way to or from the device or a file are locked, or
private, until that has ended.
"""

from __future__ import annotations

import numpy as np

from sgl.runtime.batch import Int32Array, no_pairs
from sgl.runtime.cache.checkpoints import Checkpoints
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.window_pages import WindowPages


def path_of(node: Node) -> tuple[bytes, Namespace]:
    """The tokens from the root to the end of a node that it leads to, and their namespace."""
    parts: list[bytes] = []
    namespace: Namespace = None
    above: Node | None = node
    while above is not None and above.parent is not None:
        parts.append(above.key)
        if isinstance(above.edge, tuple):
            namespace = above.edge[0]
        above = above.parent
    return b"".join(parts[::-1]), namespace


def cool(cache: RadixCache, node: Node, length: int) -> list[Node]:
    """Have the end of a prefix evicted next: what is behind its first `length` tokens (whole pages), as far as nobody
    holds it or goes on from it. Returns these nodes, the deepest first."""
    chain: list[Node] = []
    top = cache.cut(node, length)
    at: Node | None = node
    while at is not None and at is not top and not at.lock_ref and len(at.children) <= bool(chain):
        chain.append(at)
        at = at.parent
    for each in reversed(chain):
        cache.lru.move_to_end(each, last=False)
    return chain


class HostCache:
    """`num_pages` host pages beside the device's tree."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_states: int | None = None,
        num_window_pages: int = 0,
        window: int | None = None,
    ) -> None:
        """num_states: copies of checkpoints of recurrent states; None: the model has none. num_window_pages: copies of
        pages of layers with this window, if others have none."""
        self.pool = PagePool(num_pages + 1, page_size)  # page 0 is as unused as the device's dummy page
        self.tree = RadixCache(self.pool)
        self.page_size = page_size
        self.states = None if num_states is None else Checkpoints(num_states)
        self.tree.end_watcher = self.states
        self.windows: WindowPages | None = None
        if num_window_pages and window is not None:
            self.windows = WindowPages(PagePool(num_window_pages + 1, page_size), self.tree, window)

    @property
    def num_used(self) -> int:
        """Pages that hold copies, or are about to."""
        return self.pool.num_pages - 1 - self.pool.num_free

    def length(self, key: bytes, namespace: Namespace) -> int:
        """How many first tokens of `key` have a copy."""
        return self.tree.match(key, namespace).length

    def add(self, node: Node, most: int, length: int) -> tuple[Node, Int32Array]:
        """Room for the pages of the first `length` tokens up to the end of a device `node` that have no copy: for the
        first `most` of them, as far as there is room. Returns the copy's node, and (device page, host page) of those to
        copy, [n, 2]; it is locked if there are any."""
        key, namespace = path_of(node)
        copy = self.tree.match(key[: TOKEN_BYTES * length], namespace).node
        first = copy.length // self.page_size
        num_pages = min(length // self.page_size - first, most)
        if num_pages <= 0:
            return copy, no_pairs()
        self.tree.lock(copy)
        pages = self.alloc(num_pages)
        if not len(pages):
            self.tree.unlock(copy)
            return copy, no_pairs()
        end, page_bytes = first + len(pages), self.page_size * TOKEN_BYTES
        held = self.tree.insert(key[first * page_bytes : end * page_bytes], pages, namespace, after=copy).node
        self.tree.move_lock(copy, held)
        return held, np.stack((node.pages_from(0)[first:end], pages), axis=1)

    def drop(self, key: bytes, namespace: Namespace, length: int) -> None:
        """Give up the copy of what is behind the first `length` tokens of `key`, as far as nothing else needs it."""
        match = self.tree.match(key, namespace)
        if match.length > length:
            self.tree.evict(sum(len(node.pages) for node in cool(self.tree, match.node, length)))

    def alloc(self, num_pages: int) -> Int32Array:
        """Up to so many private pages; the least recently used copies give way."""
        room = self.pool.num_free + self.tree.evictable_pages
        pages = self.tree.alloc(min(num_pages, room))
        assert pages is not None, "evictable and free pages were counted"
        return pages
