"""Copies of windowed pages in host memory, of a model that has layers with a window and others.

A copied prefix can be taken over only where the pages that the next token sees have copies, too: so of a prefix these
are copied, as far as the device still has them, and brought back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import Int32Array, joined
from sgl.runtime.cache.files import Kind
from sgl.runtime.cache.host import HostCache
from sgl.runtime.cache.ledger import check_windows
from sgl.runtime.cache.node import NO_PAGES, Node
from sgl.runtime.cache.window_pages import Mask, WindowPages
from sgl.runtime.cache.windows import first_seen_page, usable_pages
from sgl.runtime.scheduler.beside import Beside

_MOST_LOADING = 0.5  # of the device's pages, for loads under way


@dataclass(slots=True, eq=False)
class WindowLoad:
    """Pages on their way to the device."""

    first: int  # the page at which the window begins
    is_missing: Mask  # of its pages
    pages: Int32Array  # private ones for these
    there: Int32Array  # the others, held
    copies: Int32Array  # held


class WindowCopies(Beside):
    """Of one scheduler."""

    kind = Kind.WINDOWED

    def __init__(self, device: WindowPages, host: HostCache) -> None:
        assert host.windows is not None, "windowed pages have copies"
        self.pools = (device.pool,)
        self._pool, self._device, self._copies, self._tree = device.pool, device, host.windows, host.tree
        self._saves: list[Int32Array] = []  # for the next move
        self._loads: list[Int32Array] = []  # likewise
        self._saving: list[Int32Array] = []  # held copies
        self._loading: list[WindowLoad] = []

    def usable(self, node: Node) -> int:
        return self._device.usable_length(node)

    def copied(self, copy: Node) -> Node:
        return self._tree.cut(copy, self._copies.usable_length(copy))

    def is_end(self, node: Node) -> bool:
        return self.usable(node) == node.length

    def save(self, node: Node, copy: Node) -> Int32Array | None:
        self._tree.lock(copy)
        first, ours = self._copies.seen_behind(copy)
        is_missing = ours == 0
        there, pages = NO_PAGES, None
        if is_missing.any():
            there = self._copies.hold(copy)
            pages = self._copies.alloc(int(is_missing.sum()))
        if pages is None:
            self.release_copies(there)
            self._tree.unlock(copy)
            return None
        theirs = self._device.pages_from(node, first)[: len(ours)]
        insert_held(self._copies, copy, first + np.flatnonzero(is_missing), pages)
        self._saves.append(np.stack((theirs[is_missing], pages), axis=1))
        held: Int32Array = np.concatenate((there, pages))
        self._saving.append(held)
        return held

    def saved(self, rows: Int32Array) -> None:
        self._saving = [its for its in self._saving if its is not rows]
        self.release_copies(rows)

    def hold(self, copy: Node) -> tuple[Sequence[int], Int32Array]:
        first, pages = self._copies.seen_behind(copy)
        is_there = (pages != 0) & ~np.isin(pages, np.concatenate([NO_PAGES, *self._saving]))
        self._copies.hold_pages(pages[is_there])
        return (first + np.flatnonzero(is_there)).tolist(), pages[is_there]

    def hold_seen(self, copy: Node, length: int) -> Int32Array:
        pages = self._copies.pages_from(copy, first_seen_page(self._device.window, self._pool.page_size, length))
        there: Int32Array = pages[pages != 0]
        self._copies.hold_pages(there)
        return there

    def release_copies(self, rows: Int32Array) -> None:
        self._copies.release(rows, is_end=True)

    def find(self, copy: Node, least: int, reach: int, has: Callable[[int], bool]) -> tuple[int, list[int]]:
        window, size = self._device.window, self._pool.page_size
        start = min(first_seen_page(window, size, least * size), reach)
        copied = np.zeros(reach, np.bool_)
        its = self._copies.pages_from(copy, 0)[:reach] != 0
        copied[: len(its)] = its
        there = copied.copy()
        there[:start] = True  # nothing behind `least` sees them
        for place in (start + np.flatnonzero(~there[start:])).tolist():
            there[place] = has(place)
        end = usable_pages(there, window, size)
        seen = first_seen_page(window, size, end * size)
        return end, (seen + np.flatnonzero(~copied[seen:end])).tolist()

    def alloc_copies(self, number: int) -> Int32Array | None:
        return self._copies.alloc(number)

    def free_copies(self, rows: Int32Array) -> None:
        self._copies.pool.free(rows)

    def insert_copies(self, copy: Node, places: Sequence[int], rows: Int32Array) -> None:
        self.release_copies(insert_held(self._copies, copy, np.array(places), rows))

    def load(self, node: Node, copy: Node) -> WindowLoad | None:
        page_size, length = self._pool.page_size, copy.length
        first = first_seen_page(self._device.window, page_size, length)
        present = np.zeros(length // page_size - first, np.int32)
        own = self._device.pages_from(node, first)
        present[: len(own)] = own
        is_missing = present == 0
        number, busy = int(is_missing.sum()), sum(len(load.pages) for load in self._loading)
        if busy + number > _MOST_LOADING * self._pool.num_pages:
            return None
        there = present[~is_missing]
        self._device.hold_pages(there)
        copies = self._copies.hold(copy)  # before others make room for what is evicted
        pages = self._device.alloc(number)
        if pages is None:
            self._device.release(there, is_end=True)
            self.release_copies(copies)
            return None
        self._loads.append(np.stack((copies[is_missing], pages), axis=1))
        load = WindowLoad(first, is_missing, pages, there, copies)
        self._loading.append(load)
        return load

    def cancel(self, load: WindowLoad) -> None:
        self._loads.pop()
        self._loading.remove(load)
        self._pool.free(load.pages)
        self._device.release(load.there, is_end=True)
        self.release_copies(load.copies)

    def arrived(self, load: WindowLoad, node: Node) -> Int32Array:
        self._loading.remove(load)
        self.release_copies(load.copies)
        mine = insert_held(self._device, node, load.first + np.flatnonzero(load.is_missing), load.pages)
        return np.concatenate((load.there, mine))

    def take(self) -> dict[str, Int32Array]:
        saves, loads, self._saves, self._loads = self._saves, self._loads, [], []
        return {"window_saves": joined(saves), "window_loads": joined(loads)}

    def private(self) -> list[Int32Array]:
        return [load.pages for load in self._loading]

    def held(self) -> list[Int32Array]:
        return [load.there for load in self._loading]

    def check(self, private: Iterable[Int32Array], held: Iterable[Int32Array]) -> list[str]:
        mine = (load.copies for load in self._loading)
        return check_windows(self._copies, private, [*self._saving, *mine, *held])


def insert_held(windows: WindowPages, node: Node, places: npt.NDArray[np.int64], pages: Int32Array) -> Int32Array:
    """Pass private pages to the tree, to be held there; places: the numbers of pages before each. Returns those that it
    has there."""
    mine: Int32Array = np.zeros(node.length // windows.pool.page_size, np.int32)
    mine[places] = pages
    windows.insert(node, mine)
    its: Int32Array = mine[places]
    return its
