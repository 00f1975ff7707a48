"""The pool of KV pages: which are free, and which kind of owner holds the others.

It knows page numbers, but no tokens, requests or KV memory. `RowMemory.reach` and `RowMemory.grow` allocate a request's
private tail, through the tree, which evicts if needed. `RowMemory.leave` frees it when the request ends or is
retracted, `RowMemory.share` what the tree has already. `RadixCache.insert` adopts, `RadixCache.evict` releases.

    alloc            adopt
    FREE ──────────▶ PRIVATE ──────────▶ TREE          DUMMY: page 0, where padded rows write; never leaves
      ▲               │  ▲ │ free          │ release
      │        expect ▼  │ │               │
      │          INCOMING┘ arrived         │           INCOMING: a read from another engine may still write to it
      └────────────────────┴───────────────┘
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import Int32Array

FREE: Final = 0
PRIVATE: Final = 1
TREE: Final = 2
DUMMY: Final = 3
INCOMING: Final = 4

OWNER_NAMES: Final = ("free", "private", "in the tree", "the dummy page", "incoming")


class PagePool:
    """`num_pages` pages of `page_size` tokens, including the dummy page 0, which is never handed out.

    A method costs a few NumPy calls, whatever the pool's size. Forbidden moves (a double free, a page listed twice)
    assert before anything changes.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 2, f"a pool needs the dummy page and at least one more, not {num_pages} pages"
        assert page_size >= 1, f"a page holds at least one token, not {page_size}"
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages - 1
        self.owner: npt.NDArray[np.uint8] = np.full(num_pages, FREE, np.uint8)
        """Who holds each page: FREE, PRIVATE, TREE, DUMMY or INCOMING. Only the pool writes it."""
        self.owner[0] = DUMMY
        self._stack: Int32Array = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # the first num_free are free
        self._order: Int32Array = np.arange(num_pages, dtype=np.int32)
        self._seen_at: Int32Array = np.zeros(num_pages, np.int32)  # scratch: a page's last index in a list

    def alloc(self, num_pages: int) -> Int32Array | None:
        """`num_pages` PRIVATE pages, int32 [num_pages], or None if fewer are free."""
        if num_pages > self.num_free:
            return None
        top = self.num_free - num_pages
        pages = self._stack[top : self.num_free][::-1].copy()
        self.num_free = top
        self.owner[pages] = PRIVATE
        return pages

    def free(self, pages: Int32Array) -> None:
        """Take back PRIVATE pages."""
        self._push(pages, PRIVATE)

    def adopt(self, pages: Int32Array) -> None:
        """Pass PRIVATE pages to the tree. Only the radix cache calls it."""
        self._check(pages, PRIVATE)
        self.owner[pages] = TREE

    def release(self, pages: Int32Array) -> None:
        """Take back pages of the TREE. Only the radix cache calls it."""
        self._push(pages, TREE)

    def expect(self, pages: Int32Array) -> None:
        """Keep PRIVATE pages from all other use, as INCOMING, while something else writes to them."""
        self._check(pages, PRIVATE)
        self.owner[pages] = INCOMING

    def arrived(self, pages: Int32Array) -> None:
        """Nothing writes to INCOMING pages any more: they are PRIVATE."""
        self._check(pages, INCOMING)
        self.owner[pages] = PRIVATE

    def free_list(self) -> Int32Array:
        """A copy, for the ledger."""
        return self._stack[: self.num_free].copy()

    def _push(self, pages: Int32Array, owner: int) -> None:
        self._check(pages, owner)
        self.owner[pages] = FREE
        top = self.num_free + len(pages)
        self._stack[self.num_free : top] = pages[::-1]  # neighbours stay neighbours
        self.num_free = top

    def _check(self, pages: Int32Array, owner: int) -> None:
        owners = self.owner[pages]
        if np.count_nonzero(owners == owner) != len(pages):  # several times faster than all()
            at = int((owners != owner).argmax())
            raise AssertionError(
                f"page {pages[at]} is {OWNER_NAMES[owners[at]]}, but the caller took it for {OWNER_NAMES[owner]}"
            )
        order = self._order[: len(pages)]
        self._seen_at[pages] = order
        listed_once = np.count_nonzero(self._seen_at[pages] == order) == len(pages)
        assert listed_once, "a page is listed twice, so it would be owned twice"


class NeighbourPool(PagePool):
    """Hands out pages in few runs of neighbours, each of which one copy takes. An `alloc` sorts what is free: it is for
    some a second, not for each step."""

    def alloc(self, num_pages: int) -> Int32Array | None:
        """See `PagePool`. Out of the shortest run that has them all, else out of the longest ones."""
        free = np.sort(self._stack[: self.num_free])
        if 0 < num_pages <= len(free):
            run = np.append(0, np.cumsum(np.diff(free) != 1))  # that each is in
            lengths = np.bincount(run)
            fitting = np.flatnonzero(lengths >= num_pages)
            if len(fitting):
                lengths[fitting[lengths[fitting].argmin()]] = self.num_pages  # the first to be taken
            self._stack[: len(free)] = free[np.lexsort((-free, lengths[run]))]
        return super().alloc(num_pages)
