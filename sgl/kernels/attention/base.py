"""The seam between a model and the many ways to attend over a paged KV cache.

A backend is planned once a step from host integers and then run once a layer. New keys and values are in the
cache before `run` is called; query token i of row b sits at position kv_len[b] - q_len[b] + i and sees every
position up to its own (and not further back than the layer's window).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

MAX_INPUTS = 4
"""So many arrays may `GraphAttention.plan_decode` copy besides."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know of the model and the cache, once."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens a page
    scale: float
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = (None,)  # every window that `run` will be called with
    kv_dtype: torch.dtype | None = None  # of the cache, where it is not that of the queries

    @property
    def cache_dtype(self) -> torch.dtype:
        """In which keys and values are kept."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype


@dataclass(slots=True)
class AttentionStep:
    """One ragged step over B rows and T = q_lens.sum() query tokens."""

    q_lens: npt.NDArray[np.int32]  # [B] >= 1, host
    kv_lens: npt.NDArray[np.int32]  # [B] >= q_lens, host
    page_table: npt.NDArray[np.int32]  # [B, max_pages], host; entries past ceil(kv_len / page_size) are arbitrary


class AttentionBackend(Protocol):
    """Plans once a step, runs once a layer."""

    def plan(self, step: AttentionStep) -> None:
        """Prepare for the step. Never waits for the device."""

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attend in one layer.

        query: [T, num_heads, head_dim]; key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim].
        window: a query sees itself and the window - 1 positions before it; None: all of them.
        Returns [T, num_heads, head_dim] in the query's dtype.
        """
        ...


class GraphAttention(AttentionBackend, Protocol):
    """A backend whose runs may be captured in a CUDA graph and replayed for other steps of as many rows.

    It may have several ways to attend, called variants and numbered from 0, each captured by itself.
    """

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
        out: torch.Tensor | None = None,
        *,
        overlaps: bool = False,
    ) -> torch.Tensor:
        """As `AttentionBackend.run`; the result is written to `out` where it is given. overlaps: rows of one query
        token may be set up while the kernels ahead run, and then read keys and values of earlier steps."""
        ...

    def variants(self, num_rows: int) -> range:
        """What to capture for steps of so many rows."""

    def variant(self, step: AttentionStep) -> int:
        """The best variant for these rows of one query token."""

    def plan_decode(
        self, step: AttentionStep, variant: int, inputs: Sequence[npt.NDArray[np.int64]]
    ) -> list[torch.Tensor]:
        """Like `plan`, for rows of one query token each. Runs that were captured after it do what they should when
        they are replayed after it with another step, of as many rows and the same variant. Rows at the end that
        `variant` was not asked about may be added as padding. Never waits for the device.

        inputs: int64 [B], MAX_INPUTS of them at most, which the same copy brings to the device; for steps of as many
        rows, and as many of them, always to where they are then, which is returned."""
        ...
