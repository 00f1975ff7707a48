"""Paged attention in plain torch: the definition that all backends are tested against.

Slow, row by row, but for any device, dtype and head size.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionShape, AttentionStep

_MOST_SCORES = 1 << 24  # held at once; a single query token may have more


class TorchAttention(AttentionBackend):
    """The `AttentionBackend` in plain torch."""

    def __init__(self, shape: AttentionShape, *, one_by_one: bool = False) -> None:
        """one_by_one: query tokens are computed alone, so that a token's result has the same bits in any step."""
        self._shape = shape
        self._one_by_one = one_by_one
        self._rows: list[tuple[int, int, torch.Tensor]] = []
        """Query tokens, keys, and pages, int64 [ceil(keys / page_size)] on the device."""

    def plan(self, step: AttentionStep) -> None:
        table = torch.from_numpy(step.page_table.astype(np.int64))
        if self._shape.device.type != "cpu":
            table = table.pin_memory().to(self._shape.device, non_blocking=True)
        rows = zip(step.q_lens.tolist(), step.kv_lens.tolist(), table, strict=True)
        self._rows = [(q_len, kv_len, row[: -(-kv_len // self._shape.page_size)]) for q_len, kv_len, row in rows]

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], value_cache.shape[3])
        start = 0
        for q_len, kv_len, pages in self._rows:
            keys = key_cache[pages].flatten(0, 1)[:kv_len]
            values = value_cache[pages].flatten(0, 1)[:kv_len]
            size = 1 if self._one_by_one else max(1, _MOST_SCORES // (kv_len * self._shape.num_heads))
            for first in range(0, q_len, size):
                if self._one_by_one:
                    token, seen = start + first, kv_len - q_len + first + 1
                    one = query[token : token + 1].clone()  # lies like any other
                    its = slice(0 if window is None else max(0, seen - window), seen)
                    out[token] = self._attend(one, keys[its], values[its], seen - 1, None, sinks)[0]
                    continue
                tokens = slice(start + first, start + min(first + size, q_len))
                out[tokens] = self._attend(query[tokens], keys, values, kv_len - q_len + first, window, sinks)
            start += q_len
        return out

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        position: int,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query: [q, num_heads, head_dim], starting at `position`; keys, values: [k, num_kv_heads, head_dim],
        starting at 0. Computes in float32. Returns [q, num_heads, width of the values]."""
        q, k = len(query), len(keys)
        # [num_kv_heads, group * q, head_dim]: a kv head serves a group of query heads
        heads = query.float().reshape(q, keys.shape[1], -1, query.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
        scores = heads @ keys.float().permute(1, 2, 0) * self._shape.scale
        if self._shape.softcap is not None:
            scores = (scores / self._shape.softcap).tanh_().mul_(self._shape.softcap)
        if q > 1 or window is not None:
            seen_from = torch.arange(position, position + q, device=query.device)[:, None]
            places = torch.arange(k, device=query.device)
            hidden = places > seen_from
            if window is not None:
                hidden |= places <= seen_from - window
            scores.view(-1, q, k).masked_fill_(hidden, -math.inf)
        if sinks is not None:
            its = sinks.float().reshape(keys.shape[1], -1, 1).expand(-1, -1, q).reshape(keys.shape[1], -1, 1)
            scores = torch.cat((scores, its), -1)
        attended = scores.softmax(-1)[..., :k] @ values.float().transpose(0, 1)
        return attended.view(keys.shape[1], -1, q, values.shape[2]).permute(2, 0, 1, 3).flatten(1, 2)
