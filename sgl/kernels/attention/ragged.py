"""A ragged attention step as host arrays for kernels over paged caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl.kernels.attention.base import AttentionStep

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """B rows of a step, concatenated."""

    query_starts: Int32Array  # [B + 1]
    page_starts: Int32Array  # [B + 1]
    pages: Int32Array  # at least [page_starts[-1]]
    last_page_lens: Int32Array  # [B] tokens in the last page
    kv_lens: Int32Array  # [B]

    @staticmethod
    def of(step: AttentionStep, rows: slice, page_size: int, skipped: Int32Array | None = None) -> RaggedRows:
        """Some rows of a step, each without its first `skipped` pages."""
        kv_lens = np.ascontiguousarray(step.kv_lens[rows])
        counts = -(-kv_lens // page_size)
        table = step.page_table[rows, : int(counts.max())]
        columns = np.arange(table.shape[1])
        is_used = columns < counts[:, None]
        if skipped is not None:
            is_used &= columns >= skipped[:, None]
            counts, kv_lens = counts - skipped, kv_lens - skipped * page_size
        return RaggedRows(
            query_starts=starts(step.q_lens[rows]),
            page_starts=starts(counts),
            pages=table[is_used],
            last_page_lens=kv_lens - (counts - 1) * page_size,
            kv_lens=kv_lens,
        )

    @staticmethod
    def over_full_pages(
        q_lens: Sequence[int], pages: Sequence[Int32Array | Int64Array], page_size: int
    ) -> RaggedRows:
        """Rows with q_lens query tokens, each over its own full pages."""
        counts = np.array([len(each) for each in pages], np.int32)
        return RaggedRows(
            query_starts=starts(np.array(q_lens, np.int32)),
            page_starts=starts(counts),
            pages=np.concatenate([*pages, np.zeros(1, np.int32)], dtype=np.int32),  # at least one
            last_page_lens=np.full(len(counts), page_size, np.int32),
            kv_lens=counts * page_size,
        )

    def arrays(self) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """query_starts, page_starts, pages, last_page_lens"""
        return self.query_starts, self.page_starts, self.pages, self.last_page_lens


def starts(lengths: Int32Array) -> Int32Array:
    """The start of each of consecutive runs, and the end of the last: [B + 1]."""
    begins = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=begins[1:])
    return begins
