"""Which pages, and how many, a request needs of layers that attend to a sliding window."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_EXTRA_PAGES: Final = 3
"""Those that begin before the window, that is written next, and whose last token may be computed again."""


def give_back_unit(window: int, page_size: int) -> int:
    """Pages that are given back together, at least: a quarter of a window."""
    return max(1, window // page_size // 4)


def pages_in_window(window: int, page_size: int, step_tokens: int) -> int:
    """Pages that a request holds at most which computes so many tokens at a time."""
    return -(-(window + step_tokens) // page_size) + give_back_unit(window, page_size) + _EXTRA_PAGES


def first_seen_page(window: int, page_size: int, position: int) -> int:
    """The first page with a token that the token at `position` sees."""
    return max(0, position - window + 1) // page_size


def usable_pages(there: npt.NDArray[np.bool_], window: int, page_size: int) -> int:
    """The most first pages behind which a token finds all windowed pages that it sees. there: which pages have some."""
    places = np.arange(len(there))
    last_gaps = np.maximum.accumulate(np.where(there, -1, places))
    first_seen = np.maximum((places + 1) * page_size - window + 1, 0) // page_size
    ends = np.flatnonzero(last_gaps < first_seen)
    return int(ends[-1]) + 1 if len(ends) else 0
