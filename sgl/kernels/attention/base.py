"""The interface between a model and its attention backends over a paged KV cache.

A backend is planned once a step from host integers and run once a layer. New keys and values are in the cache
before `run`. Query token i of row b is at position kv_len[b] - q_len[b] + i and sees all positions up to its own,
within the layer's window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

MAX_INPUTS = 7
"""Most extra arrays that `GraphAttention.plan_decode` copies; one of several rows counts as so many."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The backend's view of model and cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens a page
    scale: float
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = (None,)  # every window passed to `run`
    pooled_windows: tuple[int, ...] = ()  # those of layers whose pages are of a pool of their own
    kv_dtype: torch.dtype | None = None  # the cache's, if not the queries'
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    has_sinks: bool = False  # `run` is given sinks
    latent_dim: int = 0  # the first numbers of a key are its value; 0: values are as wide as keys

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of cached keys and values."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype


@dataclass(slots=True)
class AttentionStep:
    """One ragged step over B rows and T = q_lens.sum() query tokens."""

    q_lens: npt.NDArray[np.int32]  # [B] >= 1, host
    kv_lens: npt.NDArray[np.int32]  # [B] >= q_lens, host
    page_table: npt.NDArray[np.int32]  # [B, max_pages], host; entries past ceil(kv_len / page_size) are arbitrary
    windowed: AttentionStep | None = None
    """The step in layers of `AttentionShape.pooled_windows`: the same rows without pages that no query token sees."""


class PlannedAttention(Protocol):
    """Attention of a step."""

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend in one layer.

        query: [T, num_heads, head_dim]; key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim], with a
        latent_dim that of the values. window: a query sees itself and the window - 1 positions before; None: all.
        sinks: [num_heads], the score of each head's sink, whose weight goes to no value; neither scaled nor capped.
        Returns [T, num_heads, width of the values] in the query's dtype.
        """
        ...


class AttentionBackend(PlannedAttention, Protocol):
    """Planned once a step, run once a layer."""

    def plan(self, step: AttentionStep) -> None:
        """Prepare for the step. Never waits for the device."""


class GraphAttention(AttentionBackend, Protocol):
    """A backend whose runs can be captured in a CUDA graph and replayed for other steps with as many rows. Its
    variants, numbered from 0, are captured separately."""

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
        out: torch.Tensor | None = None,
        *,
        sinks: torch.Tensor | None = None,
        overlaps: bool = False,
    ) -> torch.Tensor:
        """`AttentionBackend.run`, writing to `out` if given. overlaps: rows of one query token may start while the
        previous kernels run, and read keys and values of earlier steps."""
        ...

    def variants(self, num_rows: int) -> range:
        """The variants to capture for so many rows."""

    def variant(self, step: AttentionStep) -> int:
        """The best variant for these rows of one query token."""

    def plan_decode(
        self, step: AttentionStep, variant: int, inputs: Sequence[npt.NDArray[np.int64]]
    ) -> list[torch.Tensor]:
        """`plan` for rows of one query token. Runs captured after it may be replayed after planning another step
        with as many rows and the same variant. Padding rows, unknown to `variant`, may be appended. Never waits for
        the device.

        inputs: up to MAX_INPUTS arrays int64 [B], or [n, B] with one more column at most, to copy along. Returns their
        device tensors; addresses depend only on the number of rows and of inputs.
        """
        ...

    max_queries: int = 1
    """Most query tokens of a row in `plan_verify`; 1: there is none."""

    def plan_verify(
        self, step: AttentionStep, queries: int, inputs: Sequence[npt.NDArray[np.int64]]
    ) -> list[torch.Tensor]:
        """`plan_decode` for rows of `queries` tokens each, 2 to max_queries. Where a row's q_len is less, what follows
        its last token is padding, whose results mean nothing. inputs: int64 [B * queries], or [n, B * queries]. Returns
        also int32 [B] the position of each row's first token, by which it sees keys: it may be made less before a
        run."""
        raise AssertionError("max_queries is 1")
