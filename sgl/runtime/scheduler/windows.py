"""The windowed pages of running requests, of a model that has layers with a window and others.

A row's windowed pages are [given back | shared with the tree, held | private tail], and end where its full pages end.
They are given back as the window passes over them: to the tree as long as it has room, or, without sharing, to the
free list.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.ledger import check_windows
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.window_pages import Mask, WindowPages
from sgl.runtime.cache.windows import first_seen_page, give_back_unit, pages_in_window
from sgl.runtime.scheduler.beside import Beside
from sgl.runtime.scheduler.leases import Leases
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.rows import RowTable


class RowWindows:
    """Windowed pages of one scheduler's rows. Single-threaded."""

    def __init__(self, pool: PagePool, cache: RadixCache, rows: RowTable, window: int) -> None:
        self.pool = pool
        self.window = window
        self.pages = WindowPages(pool, cache, window)
        self.table: Int32Array = np.zeros_like(rows.pages)  # 0: none
        self.given_back: Int32Array = np.zeros_like(rows.num_pages)
        """The first pages of each row, that it does not hold any more."""
        self._rows = rows
        self._least_given = give_back_unit(window, pool.page_size)
        self._ends: dict[int, set[int]] = {}  # by uid: lengths at which others may go on
        self._writes: list[Int32Array] = []

    def pop_writes(self) -> Int32Array:
        """The table's changes since the last batch, [n, 3] of (row, index, page), without repeats."""
        writes, self._writes = self._writes, []
        return np.concatenate(writes) if writes else np.empty((0, 3), np.int32)

    def most_pages(self, num_tokens: int, step_tokens: int | None) -> int:
        """Pages that a request holds at most which has so many known tokens to compute, in parts of step_tokens."""
        at_once = max(1, num_tokens if step_tokens is None else min(num_tokens, step_tokens))
        return pages_in_window(self.window, self.pool.page_size, at_once)

    def enter(self, request: Request, node: Node, matched_len: int) -> None:
        """A request has a row and goes on behind `node`, for which it holds what it sees; the tree has matched_len of
        its tokens."""
        row, page_size = request.row, self.pool.page_size
        first, pages = self.pages.seen_behind(node)
        self.given_back[row] = first
        self.table[row] = 0
        self._set(row, first, pages)
        self._ends[request.uid] = {matched_len, (request.num_known - 1) // page_size * page_size}

    def want(self, uid: int, length: int) -> None:
        """Others will go on at this length of a running request's tokens."""
        self._ends[uid].add(length)

    def extend(self, row: int, start: int, num_pages: int) -> None:
        """Give the row pages from that index on; so many are available."""
        pages = self.pages.alloc(num_pages)
        assert pages is not None, "evictable and free pages were counted"
        self._set(row, start, pages)

    def grow(self, rows: Int32Array, index: Int32Array) -> None:
        """Give each row a page at its index; so many are available."""
        pages = self.pages.alloc(len(rows))
        assert pages is not None, "evictable and free pages were counted"
        self.table[rows, index] = pages
        self._writes.append(np.stack((rows, index, pages), axis=1))

    def share(self, row: int, node: Node, first: int, end: int) -> None:
        """Hand a row's pages of that range to the tree, where it ends at `node`."""
        replaced = self.pages.insert(node, self.table[row, first:end])
        if len(replaced):
            self._write(row, first + replaced)

    def may_give_back(self, request: Request) -> bool:
        """Whether the window has passed over enough: a few together, since they are shared before."""
        return self._passed(request) - int(self.given_back[request.row]) >= self._least_given

    def give_back(self, request: Request, num_shared: int | None) -> None:
        """Give back the pages of what no token sees that the request computes from here on. num_shared: its first pages
        that the tree has; None: nothing is shared."""
        row, first = request.row, int(self.given_back[request.row])
        end = self._passed(request) if num_shared is None else min(self._passed(request), num_shared)
        if end <= first:
            return
        pages = self.table[row, first:end].copy()
        if num_shared is None:
            self.pool.free(pages)
        else:
            self.pages.release(pages, self._before_ends(request, first, end))
        self.table[row, first:end] = 0
        self.given_back[row] = end

    def leave(self, request: Request, num_shared: int) -> None:
        """It gives its row back. Others may go on at its end."""
        row, first = request.row, int(self.given_back[request.row])
        num_shared, end = max(num_shared, first), int(self._rows.num_pages[row])
        self.pool.free(self.table[row, num_shared:end].copy())
        self.pages.release(self.table[row, first:num_shared].copy(), is_end=True)
        self._writes = [writes[writes[:, 0] != row] for writes in self._writes]
        del self._ends[request.uid]

    def check(self, running: dict[int, Request], leases: Leases, beside: Beside | None) -> list[str]:
        """Breaches of ownership. beside: has loads, too."""
        private, held = [], list(leases.window_pages())
        if beside is not None:
            private, held = beside.private(), [*held, *beside.held()]
        for row, request in running.items():
            first, end = int(self.given_back[row]), int(self._rows.num_pages[row])
            shared = max(request.tree_len // self.pool.page_size, first)
            held.append(self.table[row, first:shared])
            private.append(self.table[row, shared:end])
        return check_windows(self.pages, private, held)

    def _passed(self, request: Request) -> int:
        last = int(self._rows.kv_len[request.row]) - 1  # a draft may have to be computed again
        return first_seen_page(self.window, self.pool.page_size, last)

    def _before_ends(self, request: Request, first: int, end: int) -> Mask:
        """Which of these pages a token sees where others may go on."""
        places, found = np.arange(first, end), np.zeros(end - first, np.bool_)
        for length in self._ends[request.uid]:
            begin = first_seen_page(self.window, self.pool.page_size, length)
            found |= (begin <= places) & (places < length // self.pool.page_size)
        return found

    def _set(self, row: int, start: int, pages: Int32Array) -> None:
        self.table[row, start : start + len(pages)] = pages
        self._write(row, np.arange(start, start + len(pages)))

    def _write(self, row: int, index: npt.NDArray[np.int64]) -> None:
        writes = np.empty((len(index), 3), np.int32)
        writes[:, 0], writes[:, 1], writes[:, 2] = row, index, self.table[row, index]
        self._writes.append(writes)
