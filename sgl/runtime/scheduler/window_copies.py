"""Copies of windowed pages in host memory, of a model that has layers with a window and others.

A copied prefix can be taken over only where the pages that the next token sees have copies, too: so of a prefix these
are copied, as far as the device still has them, and brought back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import Int32Array, joined
from sgl.runtime.cache.host import HostCache
from sgl.runtime.cache.ledger import check_windows
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.window_pages import Mask, WindowPages
from sgl.runtime.cache.windows import first_seen_page

_MOST_LOADING = 0.5  # of the device's pages, for loads under way
_NO_PAGES: Int32Array = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class WindowLoad:
    """Pages on their way to the device."""

    first: int  # the page at which the window begins
    is_missing: Mask  # of its pages
    pages: Int32Array  # private ones for these
    there: Int32Array  # the others, held
    copies: Int32Array  # held


class WindowCopies:
    """Of one scheduler. Single-threaded."""

    def __init__(self, device: WindowPages, host: HostCache) -> None:
        assert host.windows is not None, "the model has windowed pages"
        self.pool = device.pool
        self._device, self._copies, self._tree = device, host.windows, host.tree
        self._saves: list[Int32Array] = []  # for the next move
        self._loads: list[Int32Array] = []  # likewise
        self._saving: list[Int32Array] = []  # held copies
        self._loading: list[WindowLoad] = []

    def usable(self, node: Node) -> int:
        """Tokens up to a device node that can be taken over."""
        return self._device.usable_length(node)

    def copied(self, node: Node) -> Node:
        """The end of what can be taken over up to a node of copies."""
        return self._tree.cut(node, self._copies.usable_length(node))

    def save(self, node: Node, copy: Node) -> Int32Array | None:
        """Copy what the token behind the locked `copy` sees of a device node's prefix, which can be taken over there.
        Returns held copies, for `saved`; None if there is nothing to do, or no room."""
        first, ours = self._copies.seen_behind(copy)
        is_missing = ours == 0
        if not is_missing.any():
            return None
        there = self._copies.hold(copy)
        pages = self._copies.alloc(int(is_missing.sum()))
        if pages is None:
            self._copies.release(there, is_end=True)
            return None
        theirs = self._device.pages_from(node, first)[: len(ours)]
        insert_held(self._copies, copy, first + np.flatnonzero(is_missing), pages)
        self._saves.append(np.stack((theirs[is_missing], pages), axis=1))
        held: Int32Array = np.concatenate((there, pages))
        self._saving.append(held)
        return held

    def saved(self, held: Int32Array) -> None:
        """A save has ended."""
        self._saving = [its for its in self._saving if its is not held]
        self._copies.release(held, is_end=True)

    def hold(self, copy: Node) -> tuple[Int32Array, Int32Array]:
        """The copies that have arrived of what the token behind a locked node sees, held until `release_copies`: the
        numbers of pages before each, and the pages."""
        first, pages = self._copies.seen_behind(copy)
        is_there = (pages != 0) & ~np.isin(pages, np.concatenate([_NO_PAGES, *self._saving]))
        self._copies.hold_pages(pages[is_there])
        return (first + np.flatnonzero(is_there)).astype(np.int32), pages[is_there]

    def release_copies(self, pages: Int32Array) -> None:
        """Undo `hold`."""
        self._copies.release(pages, is_end=True)

    def load(self, node: Node, copy: Node) -> WindowLoad | None:
        """Bring what the token behind `copy` sees and the device lacks; both nodes are locked, and `node` ends there
        or before. None if there is no room."""
        page_size, length = self.pool.page_size, copy.length
        first = first_seen_page(self._device.window, page_size, length)
        present = np.zeros(length // page_size - first, np.int32)
        own = self._device.pages_from(node, first)
        present[: len(own)] = own
        is_missing = present == 0
        number, busy = int(is_missing.sum()), sum(len(load.pages) for load in self._loading)
        if busy + number > _MOST_LOADING * self.pool.num_pages:
            return None
        there = present[~is_missing]
        self._device.hold_pages(there)
        copies = self._copies.hold(copy)  # before others make room for what is evicted
        pages = self._device.alloc(number)
        if pages is None:
            self._device.release(there, is_end=True)
            self._copies.release(copies, is_end=True)
            return None
        self._loads.append(np.stack((copies[is_missing], pages), axis=1))
        load = WindowLoad(first, is_missing, pages, there, copies)
        self._loading.append(load)
        return load

    def cancel(self, load: WindowLoad) -> None:
        """Undo the last `load`, before it is taken."""
        self._loads.pop()
        self._loading.remove(load)
        self.pool.free(load.pages)
        self._device.release(load.there, is_end=True)
        self._copies.release(load.copies, is_end=True)

    def arrived(self, load: WindowLoad, node: Node) -> Int32Array:
        """A load that ends at `node` has ended. Returns the device's pages, held."""
        self._loading.remove(load)
        self._copies.release(load.copies, is_end=True)
        mine = insert_held(self._device, node, load.first + np.flatnonzero(load.is_missing), load.pages)
        return np.concatenate((load.there, mine))

    def release(self, pages: Int32Array) -> None:
        """Give up what has `arrived`."""
        self._device.release(pages, is_end=True)

    def take(self) -> list[Int32Array]:
        """(device page, host page) and (host page, device page) pairs of the next move, if there are any."""
        saves, loads, self._saves, self._loads = self._saves, self._loads, [], []
        return [joined(saves), joined(loads)]

    def private(self) -> Iterator[Int32Array]:
        """The device's pages of loads, for the ledger."""
        return (load.pages for load in self._loading)

    def held(self) -> Iterator[Int32Array]:
        """The device's pages that loads hold, for the ledger."""
        return (load.there for load in self._loading)

    def check(self, private: Sequence[Int32Array], held: Sequence[Int32Array]) -> list[str]:
        """Breaches of ownership of copies, besides others' that are private, and that are held."""
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
