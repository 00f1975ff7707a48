"""Rotary position embedding of queries and keys, with dimensions paired by halves as in transformers.

The plain torch reference; on a GPU a Triton twin reads the table, and qkv.py rotates. runtime/model/rotary.py
scales the frequencies.
"""

from __future__ import annotations

import torch


def rotary_rows(
    table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the rotary table for a step, for all layers.

    table: float32 [max_positions, head_dim], cosines, then sines. positions: int64 [T]. Returns cos, sin, each
    dtype [T, 1, head_dim]; the first half of sin is negated, so rotation is x * cos + swap_halves(x) * sin.
    """
    if table.is_cuda:
        from sgl.kernels.layers import fused_triton

        return fused_triton.rotary_rows(table, positions, dtype)
    cos, sin = table.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary_rows_by_axis(
    table: torch.Tensor, places: torch.Tensor, axes: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_rows` of tokens with several positions. places: int64 [axes, T]. axes: int64 [head_dim / 2], whose
    position each frequency turns by."""
    columns = torch.arange(len(axes), device=table.device)
    rows = places.index_select(0, axes).t()  # [T, head_dim / 2]
    cos, sin = (table[rows, columns + start].to(dtype).unsqueeze(1) for start in (0, len(axes)))
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, head_dim] by `rotary_rows`. Returns a new contiguous tensor like x."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)
