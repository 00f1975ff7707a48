"""Proves that every page has one owner and that the radix tree's counters are true.

It changes nothing and reports instead of raising. It walks the whole tree: for tests and idle moments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.checkpoints import Checkpoints
from sgl.runtime.cache.keys import TOKEN_BYTES
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.pages import DUMMY, FREE, INCOMING, OWNER_NAMES, PRIVATE, TREE, PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.window_pages import WindowPages

Holder: TypeAlias = Node | tuple[Node, Node | None]


def check(
    pool: PagePool,
    cache: RadixCache,
    private: Iterable[Int32Array],
    locked: Iterable[Holder] | None = None,
    incoming: Iterable[Int32Array] = (),
) -> list[str]:
    """Problems, one sentence each. `private`: the pages of every live private tail. `locked`: a node for each held
    lock, or with it the one above what it holds; without it, locks are only checked along the tree. `incoming`: the
    pages that reads from other engines may write to."""
    nodes = list(_walk(cache))
    problems = _check_pages(pool, [node.pages for node in nodes], list(private), list(incoming))
    problems += _check_shape(cache, nodes)
    problems += _check_locks(cache, nodes, locked)
    problems += _check_lru(cache, nodes)
    return problems


def check_states(checkpoints: Checkpoints, cache: RadixCache, kept: Iterable[int]) -> list[str]:
    """Problems of free ⊎ tree ⊎ requests = all slots of checkpoints. `kept`: the slots of requests."""
    problems = []
    owners = Counter([*checkpoints.free, *checkpoints.of_node.values(), *kept])
    for slot in owners.keys() | set(range(checkpoints.num_slots)):
        if owners[slot] != 1 or not 0 <= slot < checkpoints.num_slots:
            problems.append(f"checkpoint {slot} of {checkpoints.num_slots} has {owners[slot]} owners")
    gone = checkpoints.of_node.keys() - set(_walk(cache))
    return problems + [f"{node} has a checkpoint, but is not in the tree" for node in gone]


def check_windows(windows: WindowPages, private: Iterable[Int32Array], held: Iterable[Int32Array]) -> list[str]:
    """Problems of windowed pages. private: those of every live private tail; held: of the tree's, what each holder
    holds."""
    tree = {node: pages[pages != 0] for node, pages in windows.of_node.items()}
    problems = [f"windowed: {each}" for each in _check_pages(windows.pool, list(tree.values()), list(private))]
    held, num_pages = list(held), windows.pool.num_pages
    holders = np.bincount(np.concatenate(held) if held else np.empty(0, np.int32), minlength=num_pages)
    for node, pages in windows.of_node.items():
        if len(pages) != len(node.pages) or not node.length or not pages.any():
            problems.append(f"{node} has windowed pages for {len(pages)} pages, or is gone, or has none")
    owned = np.concatenate([np.empty(0, np.int32), *tree.values()])
    is_owned = np.zeros(num_pages, np.bool_)
    is_owned[owned] = True
    counted = np.where(is_owned, windows.holders, 0)
    problems += [f"windowed page {page} has {holders[page]} holders" for page in np.flatnonzero(counted != holders)]
    unheld, evictable = set(owned[holders[owned] == 0].tolist()), [*windows.evictable[0], *windows.evictable[1]]
    if unheld != set(evictable) or len(unheld) != len(evictable):
        problems.append(f"windowed pages {sorted(unheld)} are held by nobody, and {sorted(evictable)} evictable")
    return problems


def _walk(cache: RadixCache) -> Iterator[Node]:
    stack = [*cache.root.children.values(), *cache.detached]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _check_pages(
    pool: PagePool, tree: list[Int32Array], private: list[Int32Array], incoming: Sequence[Int32Array] = ()
) -> list[str]:
    """free ⊎ tree ⊎ private ⊎ incoming ⊎ {dummy} = all pages, as the pool's owner states say."""
    claims: dict[int, Sequence[Int32Array]] = {
        DUMMY: [np.zeros(1, np.int32)],
        FREE: [pool.free_list()],
        TREE: tree,
        PRIVATE: private,
        INCOMING: incoming,
    }
    problems = []
    times = np.zeros(pool.num_pages, np.int64)
    for owner, lists in claims.items():
        pages = np.concatenate(lists) if lists else np.empty(0, np.int32)
        outside = (pages < 0) | (pages >= pool.num_pages)
        problems += [f"there is no page {page}, yet it is {OWNER_NAMES[owner]}" for page in pages[outside]]
        pages = pages[~outside]
        times += np.bincount(pages, minlength=pool.num_pages)
        for page in pages[pool.owner[pages] != owner]:
            stated = OWNER_NAMES[pool.owner[page]]
            problems.append(f"page {page} is {OWNER_NAMES[owner]}, but the pool takes it for {stated}")
    problems += [f"page {page} is lost: nobody owns it" for page in np.flatnonzero(times == 0)]
    problems += [f"page {page} has {times[page]} owners" for page in np.flatnonzero(times > 1)]
    return problems


def _check_shape(cache: RadixCache, nodes: list[Node]) -> list[str]:
    page_size = cache.pool.page_size
    page_bytes = page_size * TOKEN_BYTES
    problems = []
    for node in nodes:
        parent = node.parent
        if node.is_attached != _is_attached(cache, node):
            problems.append(f"{node} does not know whether the root leads to it")
        if parent is None and node in cache.detached:
            continue
        if parent is None or parent.children.get(node.edge) is not node:
            problems.append(f"{node} is not where its parent, {parent}, looks for it")
            continue
        edge = node.edge[1] if isinstance(node.edge, tuple) else node.edge
        if isinstance(node.edge, tuple) != (parent is cache.root):
            problems.append(f"{node} has a namespace in its edge, or lacks it, in the wrong place")
        if edge != node.key[:page_bytes]:
            problems.append(f"{node} is filed under another page than its first")
        if not len(node.pages) or len(node.key) != len(node.pages) * page_bytes:
            problems.append(f"{node} has {len(node.key)} bytes of key, which are not its pages' worth")
        if node.length != parent.length + len(node.pages) * page_size:
            problems.append(f"{node} has not the length of its parent, {parent}, and its own pages")
    if cache.num_nodes != len(nodes):
        problems.append(f"the tree counts {cache.num_nodes} nodes and has {len(nodes)}")
    return problems


def _is_attached(cache: RadixCache, node: Node) -> bool:
    while node.parent is not None:
        node = node.parent
    return node is cache.root


def _check_locks(cache: RadixCache, nodes: list[Node], locked: Iterable[Holder] | None) -> list[str]:
    problems = []
    if locked is None:
        held = Counter({node: node.lock_ref for node in (cache.root, *nodes)})
        for node in nodes:
            if node.parent is not None and node.lock_ref > node.parent.lock_ref:
                problems.append(f"{node} has more holders than its parent, {node.parent}")
    else:
        held = Counter()
        for holder in locked:
            above: Node | None
            above, end = holder if isinstance(holder, tuple) else (holder, None)
            while above is not None and above is not end:
                held[above] += 1
                above = above.parent
        for node in (cache.root, *nodes):
            if node.lock_ref != held[node]:
                problems.append(f"{node} has {held[node]} holders")
        for node in held.keys() - {cache.root, *nodes}:
            problems.append(f"{node} is held, but not in the tree")
    num_locked = sum(len(node.pages) for node in nodes if held[node])
    num_evictable = sum(len(node.pages) for node in nodes if not held[node])
    if cache.locked_pages != num_locked:
        problems.append(f"the tree counts {cache.locked_pages} locked pages and has {num_locked}")
    if cache.evictable_pages != num_evictable:
        problems.append(f"the tree counts {cache.evictable_pages} evictable pages and has {num_evictable}")
    return problems


def _check_lru(cache: RadixCache, nodes: list[Node]) -> list[str]:
    """The LRU order holds exactly the unlocked nodes, each before its parent."""
    problems = []
    place = {node: at for at, node in enumerate(cache.lru)}
    for node in nodes:
        if (node in place) == bool(node.lock_ref):
            problems.append(f"{node} is {'in' if node in place else 'missing from'} the eviction order")
        elif node in place and node.parent in place and place[node] > place[node.parent]:
            problems.append(f"{node} comes after its parent, {node.parent}, in the eviction order")
    problems += [f"{node} is in the eviction order, but not in the tree" for node in place.keys() - set(nodes)]
    return problems
