"""Tokens to look up: ids in one growing array, searched from the newest for what came before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl.runtime.batch import Int32Array

MAX_CONTEXT = 16
"""Tokens compared at most; a longer match says no more."""
MOST_PLACES = 1 << 14
"""Newest places of a token that are compared further: a prompt may be one token a million times."""


class History:
    """Token ids in the order of their arrival. Appending costs amortised O(1) a token."""

    def __init__(self, token_ids: Int32Array | None = None) -> None:
        """token_ids: [n] the first ones, not copied until others follow."""
        self._ids = np.empty(0, np.int32) if token_ids is None else token_ids
        self._is_own = False
        self._length = len(self._ids)

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> Int32Array:
        """[n] all of them (a view)."""
        return self._ids[: self._length]

    def extend(self, token_ids: Sequence[int] | Int32Array) -> None:
        """Append tokens."""
        length = self._length + len(token_ids)
        if length > len(self._ids) or not self._is_own:
            grown = np.empty(max(2 * length, 64), np.int32)
            grown[: self._length] = self.ids
            self._ids, self._is_own = grown, True
        self._ids[self._length : length] = token_ids
        self._length = length

    def drop_first(self, count: int) -> None:
        """Forget the oldest tokens."""
        self._ids = self._ids[count : self._length].copy()
        self._is_own = True
        self._length = len(self._ids)


def search(text: Int32Array, context: Int32Array) -> tuple[int, int]:
    """Where in `text` [n] the longest end of `context` [m >= 1] ends that is there, the newest of them: (index
    behind it, tokens in common, at most MAX_CONTEXT); (0, 0) if not even the last token is. An end right at the
    end of text, behind which nothing stands, does not count, nor does one before the last token's MOST_PLACES newest
    places. O(n), in NumPy."""
    if len(text) < 2:
        return 0, 0
    found = (text[:-1] == context[-1]).nonzero()[0][-MOST_PLACES:]
    if not len(found):
        return 0, 0
    length = 1
    for length in range(1, min(len(context), MAX_CONTEXT)):
        # Within one token of the text's beginning, index -1 would wrap around.
        before = found[found >= length]
        before = before[text[before - length] == context[-1 - length]]
        if not len(before):
            return int(found[-1]) + 1, length
        found = before
    return int(found[-1]) + 1, min(len(context), MAX_CONTEXT)
