"""How a page's bytes lie in rows of buffers: engines cut a model's heads among other numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PageShape:
    """Of a whole model's page: of each part of its heads, of each fragment (keys or values of a layer), of each token,
    the numbers of its heads."""

    num_fragments: int
    num_tokens: int
    num_heads: int  # with keys and values
    tp_size: int  # of the own engine

    def num_parts(self, tp_size: int) -> int:
        """Ranks with other heads: where there are fewer heads than ranks, several hold the same one."""
        return min(tp_size, self.num_heads)

    def fit(self, row: npt.NDArray[np.uint8], tp_size: int) -> None:
        """Turn a row that begins with the page of an engine with this tp_size into the own engine's: the same page,
        once for each of its ranks that hold the same heads."""
        theirs, ours = self.num_parts(tp_size), self.num_parts(self.tp_size)
        num_bytes = len(row) * ours // self.tp_size
        page = row[:num_bytes]
        if theirs != ours:
            fragments, tokens = self.num_fragments, self.num_tokens
            by_part = page.reshape(theirs, fragments, tokens, -1)
            by_token = by_part.transpose(1, 2, 0, 3).reshape(fragments, tokens, ours, -1)
            page.reshape(ours, fragments, tokens, -1)[:] = by_token.transpose(2, 0, 1, 3)
        for start in range(num_bytes, len(row), num_bytes):
            row[start : start + num_bytes] = page
