"""Paged attention in plain torch: the definition that all backends are tested against.

Slow, row by row, but for any device, dtype and head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionShape, AttentionStep
from sgl.kernels.attention.ragged import RaggedRows

_MOST_SCORES = 1 << 24  # held at once; a single query token may have more


@dataclass(frozen=True, slots=True)
class _Row:
    start: int  # its first query token in the step
    q_len: int
    kv_len: int
    pages: torch.Tensor  # int64 [ceil(kv_len / page_size)], on the device


class TorchAttention(AttentionBackend):
    """The `AttentionBackend` in plain torch."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._rows: list[_Row] = []

    def plan(self, step: AttentionStep) -> None:
        rows = RaggedRows.of(step, slice(None), self._shape.page_size)
        pages = torch.from_numpy(rows.pages.astype(np.int64))
        if self._shape.device.type != "cpu":
            pages = pages.pin_memory().to(self._shape.device, non_blocking=True)
        self._rows = [
            _Row(start, q_len, kv_len, pages[first:last])
            for start, q_len, kv_len, first, last in zip(
                *(each.tolist() for each in (rows.query_starts[:-1], step.q_lens, rows.kv_lens)),
                *(each.tolist() for each in (rows.page_starts[:-1], rows.page_starts[1:])),
                strict=True,
            )
        ]

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for row in self._rows:
            keys = key_cache[row.pages].flatten(0, 1)[: row.kv_len]
            values = value_cache[row.pages].flatten(0, 1)[: row.kv_len]
            size = max(1, _MOST_SCORES // (row.kv_len * self._shape.num_heads))
            for first in range(0, row.q_len, size):
                last = min(first + size, row.q_len)
                tokens = slice(row.start + first, row.start + last)
                position = row.kv_len - row.q_len + first
                out[tokens] = self._attend(query[tokens], keys, values, position, window)
        return out

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, window: int | None
    ) -> torch.Tensor:
        """query: [q, num_heads, head_dim], starting at `position`; keys, values: [k, num_kv_heads, head_dim],
        starting at 0. Computes in float32. Returns [q, num_heads, head_dim]."""
        q, k = len(query), len(keys)
        # [num_kv_heads, group * q, head_dim]: a kv head serves a group of query heads
        heads = query.float().reshape(q, keys.shape[1], -1, query.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
        scores = heads @ keys.float().permute(1, 2, 0) * self._shape.scale
        if q > 1 or window is not None:
            seen_from = torch.arange(position, position + q, device=query.device)[:, None]
            places = torch.arange(k, device=query.device)
            hidden = places > seen_from
            if window is not None:
                hidden |= places <= seen_from - window
            scores.view(-1, q, k).masked_fill_(hidden, -math.inf)
        attended = scores.softmax(-1) @ values.float().transpose(0, 1)
        return attended.view(keys.shape[1], -1, q, query.shape[2]).permute(2, 0, 1, 3).flatten(1, 2)
