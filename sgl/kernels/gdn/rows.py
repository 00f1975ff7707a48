"""Which tokens of a ragged step change which recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 64
"""Tokens of a prompt that are computed at once."""
NORM_EPS = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True, slots=True)
class Rows:
    """Which tokens of a step change which states: B rows, T tokens. Rows with one token each come first."""

    slots: torch.Tensor  # int64 [B] of their states
    num_single: int
    """Rows with one token."""
    starts: torch.Tensor  # int32 [B + 1] first tokens of rows, and T
    chunks: torch.Tensor
    """int32 [N, 2] (row, first token) for every `CHUNK` tokens of other rows."""
    first_chunks: torch.Tensor
    """int32 [len(lens) + 1] the number of each such row's first chunk, and N."""
    lens: tuple[int, ...] = ()
    """Tokens of these other rows, on the host."""

    @staticmethod
    def of_decodes(slots: torch.Tensor) -> Rows:
        """One token each."""
        nothing = slots[:0]
        return Rows(slots, len(slots), nothing, nothing, nothing)

    @staticmethod
    def arrays(rows: npt.NDArray[np.int32], q_lens: npt.NDArray[np.int32]) -> tuple[npt.NDArray[Any], ...]:
        """Host arrays of a step, to upload: slots, starts, chunks, first_chunks."""
        starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(q_lens, dtype=np.int32)))
        num_single = Rows.count_single(q_lens)
        counts = -(-q_lens[num_single:] // CHUNK)
        of_row = np.repeat(np.arange(num_single, len(rows), dtype=np.int32), counts)
        firsts = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
        nth = np.arange(len(of_row), dtype=np.int32) - np.repeat(firsts[:-1], counts)
        chunks = np.stack((of_row, starts[of_row] + nth * np.int32(CHUNK)), axis=1)
        return rows.astype(np.int64), starts, chunks, firsts

    @staticmethod
    def count_single(q_lens: npt.NDArray[np.int32]) -> int:
        """Rows at the beginning with one token each."""
        longer = np.flatnonzero(q_lens != 1)
        return int(longer[0]) if len(longer) else len(q_lens)
