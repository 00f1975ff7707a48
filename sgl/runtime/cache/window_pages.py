"""Pages of the layers with a sliding window, in a pool of their own beside the radix tree's, of a model that has other
layers, too.

Nodes have full pages for all of their tokens, and windowed pages for some. A prefix can be taken over only where the
next token finds all windowed pages that it sees. It knows nodes and page numbers, but no requests and no KV memory.

- A page of a node is held by requests and leases, each once, and counted. Whoever holds it has locked the node.
- Pages that nobody holds are evicted one by one, and nodes stay: first those that requests passed over, then those
  before an end, where others may go on (the end of a request or of its prompt, a fork), each the least recently used
  first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.node import Match, Node, PageWatcher
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.windows import first_seen_page, usable_pages

Mask = npt.NDArray[np.bool_]


class WindowPages(PageWatcher):
    """The windowed pages of a tree's nodes: its `RadixCache.page_watcher`. window: tokens that a token sees, itself
    included."""

    def __init__(self, pool: PagePool, cache: RadixCache, window: int) -> None:
        assert pool.page_size == cache.pool.page_size, "both pools have pages of as many tokens"
        self.pool = pool
        self.window = window
        self.of_node: dict[Node, Int32Array] = {}
        """[len(node.pages)]; 0: none. Without an entry, a node has none at all."""
        self.holders: Int32Array = np.zeros(pool.num_pages, np.int32)
        self.evictable: tuple[OrderedDict[int, None], OrderedDict[int, None]] = OrderedDict(), OrderedDict()
        """Pages of nodes that nobody holds, least recently used first: those passed over, and those before an end."""
        self.on_taken: Callable[[Node], None] | None = None
        """Called before a node loses pages before an end."""
        self._is_end: Mask = np.zeros(pool.num_pages, np.bool_)
        self._node_of: dict[int, Node] = {}
        self._cache = cache
        cache.page_watcher = self

    @property
    def available(self) -> int:
        """Free or evictable pages."""
        return self.pool.num_free + sum(map(len, self.evictable))

    # ── lookup ──────────────────────────────────────────────────────────────────────────────────────────────────

    def usable_length(self, node: Node) -> int:
        """Tokens of the longest prefix of the path to `node` that can be taken over."""
        _, pages = self.seen_behind(node)
        if pages.all():
            return node.length
        page_size = self.pool.page_size
        return usable_pages(self.pages_from(node, 0) != 0, self.window, page_size) * page_size

    def usable(self, match: Match) -> Match:
        """The part of a match that can be taken over."""
        length = self.usable_length(match.node)
        if length == match.length:
            return match
        node = self._cache.cut(match.node, length)
        return Match(node, length, match.namespace, None)

    def seen_behind(self, node: Node) -> tuple[int, Int32Array]:
        """What the token behind `node` sees: the number of pages before, and the pages, of which some may be 0."""
        first = first_seen_page(self.window, self.pool.page_size, node.length)
        return first, self.pages_from(node, first)

    def pages_from(self, node: Node, first: int) -> Int32Array:
        """Those of the path to `node`, without so many at its beginning."""
        parts: list[Int32Array] = [np.empty(0, np.int32)]
        above: Node | None = node
        at = node.length // self.pool.page_size
        while above is not None and at > first:
            start = at - len(above.pages)
            pages = self.of_node.get(above, np.zeros(len(above.pages), np.int32))
            parts.append(pages[max(first - start, 0) :])
            above, at = above.parent, start
        return np.concatenate(parts[::-1])

    # ── holders ─────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, node: Node) -> Int32Array:
        """Keep the pages that the token behind a locked node sees, and that are there, until `release`. Others go on
        here."""
        _, pages = self.seen_behind(node)
        there: Int32Array = pages[pages != 0]
        self.hold_pages(there)
        self._is_end[there] = True
        return there

    def release(self, pages: Int32Array, is_end: Mask | bool) -> None:
        """One holder of each page gives it up; is_end: which are before an end."""
        assert (self.holders[pages] > 0).all(), "a page is released more often than it was held"
        self.holders[pages] -= 1
        self._is_end[pages] |= is_end
        for page in pages[self.holders[pages] == 0].tolist():
            self.evictable[int(self._is_end[page])][page] = None

    def hold_pages(self, pages: Int32Array) -> None:
        """Keep these until `release`."""
        for page in pages[self.holders[pages] == 0].tolist():
            del self.evictable[int(self._is_end[page])][page]
        self.holders[pages] += 1

    def insert(self, node: Node, mine: Int32Array) -> npt.NDArray[np.int64]:
        """Pass a request's PRIVATE pages of the last len(mine) pages before the end of `node` to the tree, for it to
        hold there; 0: it has none. Nodes keep the pages that they have: `mine` gets their numbers, and its own are
        freed. Returns which."""
        replaced: list[npt.NDArray[np.int64]] = []
        end = len(mine)
        while end:
            start = end - len(node.pages)
            assert start >= 0, f"{node} begins before these pages"
            part = mine[start:end]
            if part.any():
                pages = self.of_node.setdefault(node, np.zeros(len(node.pages), np.int32))
                is_new, is_known = (part != 0) & (pages == 0), (part != 0) & (pages != 0)
                new, known = part[is_new], pages[is_known]
                self.pool.adopt(new)
                pages[is_new] = new
                self.holders[new], self._is_end[new] = 1, False
                self._node_of.update(dict.fromkeys(new.tolist(), node))
                self.pool.free(part[is_known])
                self.hold_pages(known)
                part[is_known] = known
                replaced.append(start + np.flatnonzero(is_known))
            assert node.parent is not None, "the path is as long as these pages"
            node, end = node.parent, start
        return np.concatenate(replaced) if replaced else np.empty(0, np.int64)

    # ── eviction ────────────────────────────────────────────────────────────────────────────────────────────────

    def alloc(self, num_pages: int) -> Int32Array | None:
        """Allocate private pages, evicting as needed; None, without evicting, if there are too few."""
        if num_pages > self.available:
            return None
        if num_pages > self.pool.num_free:
            self.evict(num_pages - self.pool.num_free)
        return self.pool.alloc(num_pages)

    def evict(self, num_pages: int) -> None:
        """Free so many evictable pages; nodes stay."""
        if self.on_taken is not None and (ends := num_pages - len(self.evictable[0])) > 0:
            for node in {self._node_of[page]: None for page in islice(self.evictable[1], ends)}:
                self.on_taken(node)
        by_node: dict[Node, list[int]] = {}
        for _ in range(num_pages):
            page, _ = (self.evictable[0] or self.evictable[1]).popitem(last=False)
            by_node.setdefault(self._node_of.pop(page), []).append(page)
        for node, numbers in by_node.items():
            gone, pages = np.array(numbers, np.int32), self.of_node[node]
            pages[np.isin(pages, gone)] = 0
            if not pages.any():
                del self.of_node[node]
            self.pool.release(gone)

    def cut(self, node: Node, num_pages: int) -> None:
        pages = self.of_node.pop(node, None)
        if pages is None:
            return
        gone = pages[num_pages:]
        gone = gone[gone != 0]
        for page in gone.tolist():
            del self.evictable[int(self._is_end[page])][page], self._node_of[page]
        self.pool.release(gone)
        if pages[:num_pages].any():
            self.of_node[node] = pages[:num_pages].copy()

    def split(self, node: Node, upper: Node) -> None:
        pages = self.of_node.pop(node, None)
        if pages is None:
            return
        for its, part in ((upper, pages[: len(upper.pages)]), (node, pages[len(upper.pages) :])):
            if part.any():
                self.of_node[its] = part.copy()
                self._node_of.update(dict.fromkeys(part[part != 0].tolist(), its))
