"""Attention of transformers' modules, registered there by name: writes keys and values to our cache, and calls our
backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sgl.kernels.attention.base import AttentionBackend
from sgl.kernels.layers.linear import E4M3_MAX
from sgl.runtime.model.kv_cache import KVCache

NAME = "sgl"


@dataclass(slots=True)
class Step:
    """What a model's layers read of the step that is computed."""

    slots: torch.Tensor  # int64 [T], or [2, T]: see `KVCache.slots_of`
    kv: KVCache
    attention: AttentionBackend
    _rotary: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    def rotary(
        self, cos: torch.Tensor, sin: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`rotary_rows` of transformers' cosines and sines, [1, T, head_dim] or half of that: once for all layers that
        share them. None if a part of each head is rotated."""
        if self._rotary is None or self._rotary[0] is not sin:
            halves = sin[0].chunk(2, -1) if sin.shape[-1] == head_dim else (sin[0], sin[0])
            signed = torch.cat((-halves[0], halves[1]), -1).unsqueeze(1)
            whole = cos[0] if cos.shape[-1] == head_dim else torch.cat((cos[0], cos[0]), -1)
            self._rotary = sin, (whole.unsqueeze(1).contiguous(), signed)
        rows = self._rotary[1]
        return rows if rows[0].shape[-1] == rows[1].shape[-1] == head_dim else None


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's attention. Its module has it as `sgl_attention`."""

    index: int  # of its keys and values
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    window: int | None
    relative_scale: float  # of queries, beside the backend's
    step: list[Step]  # one, while a step is computed

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """query: [1, num_heads, T, head_dim]; key, value: [1, num_kv_heads, T, head_dim], narrower or fewer than in the
        cache. sinks: [num_heads], see `AttentionBackend.run`. Returns [1, T, num_heads, width of the values]."""
        step, width = self.step[0], value.shape[-1]
        keys, values = step.kv.keys[self.index], step.kv.values[self.index]
        num_cached, head_dim = keys.shape[-2:]
        if self.relative_scale != 1.0:
            query = query * self.relative_scale
        for cache, new in ((keys, key), (values, value)):
            rows = _widened(new, head_dim)[0].transpose(0, 1)
            if rows.shape[1] < num_cached:
                rows = rows.repeat_interleave(num_cached // rows.shape[1], 1)
            _store(cache.flatten(0, 1), step.kv.slots_of(self.index, step.slots), rows)
        query = _widened(query, head_dim)[0].transpose(0, 1).contiguous()
        return self.run(query, sinks)[None, ..., :width]

    def run(self, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """`AttentionBackend.run`, with keys and values in the cache."""
        step = self.step[0]
        keys, values = step.kv.keys[self.index], step.kv.values[self.index]
        if sinks is None:
            return step.attention.run(query, keys, values, self.window)
        return step.attention.run(query, keys, values, self.window, sinks=sinks)


def _store(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows to their slots, rounded to a cache in e4m3."""
    if cache.dtype != rows.dtype:
        rows = rows.clamp(-E4M3_MAX, E4M3_MAX).to(cache.dtype)
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)  # which all devices can copy
    cache.index_copy_(0, slots, rows)


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """With zeros behind: they change no product of queries and keys."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    # Masks, windows, scales and caps follow from the config: probe.py found them.
    return module.sgl_attention.attend(query, key, value, s_aux), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
