"""Host mirrors of the runner's tables by request row, in NumPy: a step over hundreds of rows is a few array
operations."""

from __future__ import annotations

import numpy as np

from sgl.runtime.batch import Int32Array


class RowTable:
    """`num_rows` request rows with room for `max_pages` pages each."""

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self.kv_len: Int32Array = np.zeros(num_rows, np.int32)  # tokens in KV, launched steps included
        self.num_pages: Int32Array = np.zeros(num_rows, np.int32)
        self.given_back: Int32Array = np.zeros(num_rows, np.int32)  # first pages that it holds no more
        self.samples_left: Int32Array = np.zeros(num_rows, np.int32)  # tokens still to be launched
        self.offset: Int32Array = np.zeros(num_rows, np.int32)  # of positions behind images
        self.has_images = False  # any row, at any time
        self.adapter: Int32Array = np.full(num_rows, -1, np.int32)  # slot of a LoRA adapter; -1: none
        self.pages: Int32Array = np.zeros((num_rows, max_pages), np.int32)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Unoccupied rows."""
        return len(self._free)

    def take(self) -> int:
        """Occupy a row."""
        row = self._free.pop()
        self.kv_len[row] = self.num_pages[row] = self.given_back[row] = 0
        return row

    def give_back(self, row: int) -> None:
        """Free a row. Its pages must have another owner."""
        self._free.append(row)

    def held_from(self, row: int, first: int) -> Int32Array:
        """The row's pages from that index on, in order of position (a view)."""
        return self.pages[row, max(first, int(self.given_back[row])) : self.num_pages[row]]

    def skip(self, row: int, num_pages: int) -> None:
        """Its first pages are not held, or not any more: nothing reads them."""
        self.pages[row, self.given_back[row] : num_pages] = 0
        self.given_back[row] = num_pages
        self.num_pages[row] = max(num_pages, int(self.num_pages[row]))

    def append(self, row: int, pages: Int32Array) -> Int32Array:
        """Add pages; returns the page-table writes, [n, 3] of (row, index, page)."""
        start = int(self.num_pages[row])
        self.num_pages[row] = start + len(pages)
        self.pages[row, start : start + len(pages)] = pages
        return self.writes(row, start, len(pages))

    def writes(self, row: int, start: int, count: int) -> Int32Array:
        """Page-table writes for `count` entries from index `start`, [count, 3]."""
        writes = np.empty((count, 3), np.int32)
        writes[:, 0] = row
        writes[:, 1] = np.arange(start, start + count)
        writes[:, 2] = self.pages[row, start : start + count]
        return writes
