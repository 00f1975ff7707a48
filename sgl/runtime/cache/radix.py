"""The radix tree of cached KV pages: finds a prompt's stored prefix, counts its holders, and evicts the least
recently used.

It knows keys (bytes of int32 token ids) and page numbers, but no requests or KV memory. Only the scheduler's thread
calls it. All namespaces share one tree: edges from the root carry the namespace.

Invariants:
- A node spans one or more whole pages. Its tokens never change; only eviction may cut its end, while nobody holds it.
  `length`, the tokens from the root to its end, becomes 0 when the node is removed.
- A split adds a new node *above*: the old object keeps its end, children and `length`. A match or lock that refers to
  it therefore keeps its meaning.
- `lock_ref` counts holders at or below a node. A holder may give back the beginning of its path, which it does not
  read any more (`give_back`): only then are there unlocked nodes above locked ones.
- `lru` lists exactly the unlocked nodes by last access, each before its parent. What is below the oldest is therefore
  locked, mostly there is nothing, and eviction in exact LRU order is O(1) a node, without a heap.
- What is locked below an evicted page stays with its holders, *detached*: nothing matches it, and its unlocked nodes
  are evicted first.

When unlocked nodes do not suffice, locks give way: leases first (`RowMemory._reclaim`), then running requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace, common_prefix
from sgl.runtime.cache.node import NO_PAGES, Edge, EndWatcher, Inserted, Match, Node, PageWatcher, Watcher
from sgl.runtime.cache.pages import PagePool


class RadixCache:
    """A tree of whole-page prefixes over `pool`. Costs depend on the key and its path, never on the tree:
    `num_nodes`, `evictable_pages` and `locked_pages` are kept current.

    While `version` stays the same, every match stays valid.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.root = Node(0, None, b"", b"", NO_PAGES, 0)
        self.lru: OrderedDict[Node, None] = OrderedDict()
        self.num_nodes = 0  # without the root
        self.evictable_pages = 0
        self.locked_pages = 0
        self.evicted_pages = 0  # since the start
        self.version = 0
        self.detached: dict[Node, None] = {}  # those without a parent
        self.watcher: Watcher | None = None
        self.end_watcher: EndWatcher | None = None
        self.page_watcher: PageWatcher | None = None
        self.on_removed: Callable[[list[Int32Array]], None] | None = None  # gets evicted pages
        self._page_bytes = pool.page_size * TOKEN_BYTES
        self._next_id = 1

    # ── lookup ──────────────────────────────────────────────────────────────────────────────────────────────────

    def match(self, key: bytes, namespace: Namespace = None) -> Match:
        """The longest stored prefix of `key` in whole pages. May split a node; otherwise changes only access times."""
        return self._match_from(self.root, key, namespace)

    def is_current(self, match: Match) -> bool:
        """Whether `match` is still the longest stored prefix of its key. Exact, in one look-up."""
        node = match.node
        return node.length == match.length and match.next_edge not in node.children and node.is_attached

    def refresh(self, match: Match, key: bytes) -> Match:
        """The current match of `key`: `match` itself if current, without touching access times, else searched on."""
        if self.is_current(match):
            return match
        start = match.node if match.node.length and match.node.is_attached else self.root
        return self._match_from(start, key, match.namespace)

    def _match_from(self, start: Node, key: bytes, namespace: Namespace) -> Match:
        node = self._walk(start, key, start.length * TOKEN_BYTES, namespace)
        self._touch(node)
        return Match(node, node.length, namespace, self._edge(node, key, node.length * TOKEN_BYTES, namespace))

    def _walk(self, node: Node, key: bytes, start: int, namespace: Namespace) -> Node:
        """Descend along `key[start:]` as far as whole pages are stored, and split there."""
        edge = self._edge(node, key, start, namespace)
        while edge is not None and (child := node.children.get(edge)) is not None:
            if not key.startswith(child.key, start):
                return self._split(child, common_prefix(child.key, key, start, self._page_bytes))
            node = child
            start += len(child.key)
            edge = self._edge(node, key, start, namespace)
        return node

    def _edge(self, node: Node, key: bytes, start: int, namespace: Namespace) -> Edge | None:
        """The edge that continues `key` at byte `start`; None without a whole page."""
        page = key[start : start + self._page_bytes]
        if len(page) < self._page_bytes:
            return None
        return page if node is not self.root else (namespace, page)

    # ── growth ──────────────────────────────────────────────────────────────────────────────────────────────────

    def insert(
        self, key: bytes, pages: Int32Array, namespace: Namespace = None, after: Node | None = None
    ) -> Inserted:
        """Store `key`, whose KV lies in `pages` (int32, one for each page of `key`), below the root or `after`.

        Already stored pages stay, and the caller's are returned as duplicates: rewrite the page table, then free
        them. The rest pass from PRIVATE to the tree. Lock the returned node before anything may evict. `after` is a
        node locked by the caller, which `key` and `pages` follow; what comes before it costs nothing.
        """
        assert len(key) == len(pages) * self._page_bytes, f"{len(pages)} pages do not hold {len(key)} bytes of key"
        base = self.root if after is None else after
        assert base.length or base is self.root, f"cannot insert below {base}: it is gone from the tree"
        node = self._walk(base, key, 0, namespace)
        matched_len = node.length - base.length
        num_matched = matched_len // self.pool.page_size
        canonical = duplicates = NO_PAGES
        if num_matched:
            canonical = node.pages_from(base.length)
            duplicates = pages[:num_matched]
            duplicates = duplicates[duplicates != canonical]
        if num_matched < len(pages):
            self.pool.adopt(pages[num_matched:])
            node = self._add_leaf(
                node, key[num_matched * self._page_bytes :], pages[num_matched:].copy(), namespace
            )
        self._touch(node)
        return Inserted(node, matched_len, canonical, duplicates)

    def _add_leaf(self, parent: Node, key: bytes, pages: Int32Array, namespace: Namespace) -> Node:
        edge = self._edge(parent, key, 0, namespace)
        assert edge is not None, "a leaf spans at least one page"
        leaf = Node(self._new_id(), parent, edge, key, pages, parent.length + len(key) // TOKEN_BYTES)
        leaf.is_attached = parent.is_attached
        parent.children[edge] = leaf
        self.lru[leaf] = None
        self.evictable_pages += len(pages)
        self.num_nodes += 1
        self.version += 1
        if self.watcher is not None:
            self.watcher.grown(parent, edge)
        return leaf

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` bytes (whole pages) of its key; returns the new node above."""
        num_pages = at // self._page_bytes
        parent = node.parent
        length = node.length - (len(node.key) - at) // TOKEN_BYTES
        upper = Node(self._new_id(), parent, node.edge, node.key[:at], node.pages[:num_pages].copy(), length)
        upper.lock_ref, upper.is_attached = node.lock_ref, node.is_attached
        if parent is not None:
            parent.children[node.edge] = upper
        else:
            del self.detached[node]
            self.detached[upper] = None
        node.parent = upper
        node.edge = node.key[at : at + self._page_bytes]
        node.key = node.key[at:]
        node.pages = node.pages[num_pages:].copy()
        upper.children[node.edge] = node
        if not upper.lock_ref:
            self.lru[upper] = None  # in LRU order, since only an access that ends or passes here splits
        self.num_nodes += 1
        if self.page_watcher is not None:
            self.page_watcher.split(node, upper)
        if self.watcher is not None:
            self.watcher.split(node, upper)
        return upper

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _touch(self, node: Node) -> None:
        """Make the path's unlocked nodes the most recently used, each before its parent; not where it is detached."""
        above: Node | None = node if node.is_attached else None
        while above is not None and above is not self.root:
            if not above.lock_ref:
                self.lru.move_to_end(above)
            above = above.parent

    # ── locks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def lock(self, node: Node, above: Node | None = None) -> None:
        """Protect the prefix that ends at `node` from eviction until `unlock(node)`: of it what is below `above`."""
        self._lock_up_to(above, node)

    def unlock(self, node: Node, above: Node | None = None) -> None:
        """Undo one `lock(node, above)`. Pages without holders count as used just now."""
        at: Node | None = node
        while at is not None and at is not above:
            assert at.lock_ref > 0, f"{at} is unlocked more often than it was locked"
            at.lock_ref -= 1
            if not at.lock_ref and at is not self.root:
                self.lru[at] = None
                self.evictable_pages += len(at.pages)
                self.locked_pages -= len(at.pages)
            at = at.parent
        if not node.is_attached:
            self._cool(self._first(node))
        elif above is not None:
            self._touch(above)

    def move_lock(self, old: Node, new: Node) -> None:
        """`lock(new)`, then `unlock(old)`; visits only the nodes between them if `new` is below `old`."""
        if not self._lock_up_to(old, new):
            self.unlock(old)

    def cut(self, node: Node, length: int) -> Node:
        """The node at or above `node` that ends after `length` tokens, split off where there is none."""
        while node.length - len(node.key) // TOKEN_BYTES > length:
            assert node.parent is not None, f"the first {length} tokens of {node} are gone from the tree"
            node = node.parent
        if node.length == length:
            return node
        at = length - node.length + len(node.key) // TOKEN_BYTES
        if at:
            upper = self._split(node, at * TOKEN_BYTES)
            self._touch(upper)
            return upper
        assert node.parent is not None, f"the first {length} tokens of {node} are gone from the tree"
        return node.parent

    def give_back(self, node: Node, above: Node | None, length: int) -> Node:
        """Unlock the first `length` tokens (whole pages) of what `lock(node, above)` protects. If they are evicted,
        nothing matches the rest. Returns the new `above`."""
        top = self.cut(node, length)
        self.unlock(top, above)
        return top

    def _lock_up_to(self, held: Node | None, node: Node) -> bool:
        """Add a holder from `node` up to the root, or to below `held`, which has the rest; whether it met that."""
        assert node.length or node is self.root, f"{node} cannot be locked: it is gone from the tree"
        above: Node | None = node
        while above is not None and above is not held:
            if not above.lock_ref and above is not self.root:
                del self.lru[above]
                self.evictable_pages -= len(above.pages)
                self.locked_pages += len(above.pages)
            above.lock_ref += 1
            above = above.parent
        return above is not None

    # ── eviction ────────────────────────────────────────────────────────────────────────────────────────────────

    def alloc(self, num_pages: int) -> Int32Array | None:
        """Allocate private pages, evicting as needed; None, without evicting, if there are too few."""
        if (missing := num_pages - self.pool.num_free) > self.evictable_pages:
            return None
        if missing > 0:
            self.evict(missing)
        return self.pool.alloc(num_pages)

    def evict(self, num_pages: int) -> int:
        """Free that many pages, or all unlocked ones: oldest leaves first, each from its end. How many."""
        missing = min(num_pages, self.evictable_pages)
        freed: list[Int32Array] = []
        while missing > 0:
            leaf = next(iter(self.lru))
            self._detach_children(leaf)
            kept = max(len(leaf.pages) - missing, 0)
            if self.end_watcher is not None:
                self.end_watcher.cut(leaf)
            if self.page_watcher is not None:
                self.page_watcher.cut(leaf, kept)
            freed.append(leaf.pages[kept:])
            missing -= len(leaf.pages) - kept
            if kept:
                self._shorten(leaf, kept)
            else:
                self._remove(leaf)
        return self._free(freed)

    def reset(self, *, detach: bool = False) -> int:
        """Evict what nobody holds; detach: nothing finds the rest again. Returns how many pages remain locked."""
        self.evict(self.evictable_pages)
        if detach:
            self.root.lock_ref -= sum(child.lock_ref for child in self.root.children.values())
            self._detach_children(self.root)
            self.version += 1
        return self.locked_pages

    def forget(self, adapter: int) -> int:
        """Evict what nobody holds of an adapter's namespaces. Returns how many pages."""
        found = [
            child
            for edge, child in self.root.children.items()
            if isinstance(edge, tuple) and isinstance(edge[0], tuple) and edge[0][0] == adapter
        ]
        for node in found:  # parents before children
            found += node.children.values()
        freed = [node.pages for node in found if not node.lock_ref]
        for node in reversed(found):
            if not node.lock_ref:
                if self.end_watcher is not None:
                    self.end_watcher.cut(node)
                if self.page_watcher is not None:
                    self.page_watcher.cut(node, 0)
                self._detach_children(node)
                self._remove(node)
        return self._free(freed[::-1])

    def _free(self, evicted: list[Int32Array]) -> int:
        """Give pages back that the tree had, children first. Returns how many."""
        if not evicted:
            return 0
        if self.on_removed is not None:
            self.on_removed(evicted)
        pages = np.concatenate(evicted[::-1])  # parents first, as they were handed out
        self.pool.release(pages)
        self.evictable_pages -= len(pages)
        self.evicted_pages += len(pages)
        self.version += 1
        return len(pages)

    def _shorten(self, leaf: Node, num_pages: int) -> None:
        leaf.length -= (len(leaf.pages) - num_pages) * self.pool.page_size
        leaf.key = leaf.key[: num_pages * self._page_bytes]
        leaf.pages = leaf.pages[:num_pages].copy()

    def _remove(self, leaf: Node) -> None:
        assert leaf is not self.root, "the root is never evicted"
        del self.lru[leaf]
        if leaf.parent is None:
            del self.detached[leaf]
        else:
            del leaf.parent.children[leaf.edge]
        leaf.parent = None
        leaf.length = 0
        self.num_nodes -= 1

    def _detach_children(self, node: Node) -> None:
        """Before the end of `node` is evicted."""
        for child in node.children.values():
            assert child.lock_ref, f"{node} is due for eviction before its children"
            child.parent = None
            self.detached[child] = None
            self._cool(child)
        node.children.clear()

    def _first(self, node: Node) -> Node:
        while node.parent is not None:
            node = node.parent
        return node

    def _cool(self, first: Node) -> None:
        """What is detached with `first` is the next to be evicted, where it is unlocked."""
        stack = [first]
        while stack:
            node = stack.pop()
            node.is_attached = False
            if not node.lock_ref:
                self.lru.move_to_end(node, last=False)
            stack.extend(node.children.values())
