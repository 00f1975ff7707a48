"""The order of a hybrid's rows: heads' dimensions so that those that rotate together lie half a head apart, queries
apart from gates, and what delta nets store by key head by kind."""

from __future__ import annotations

import torch

from sgl.runtime.model.gdn.config import HybridConfig


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """The dimensions of a head so that those that rotate together lie half a head apart."""
    half, rest = rotary_dim // 2, (head_dim + rotary_dim) // 2
    return [*range(half), *range(rotary_dim, rest), *range(half, rotary_dim), *range(rest, head_dim)]


def query_order(config: HybridConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a checkpoint's q_proj that are queries, in our order, and those that are gates: int64."""
    rows = torch.arange(2 * config.num_heads * config.head_dim).view(config.num_heads, 2, -1)
    return rows[:, 0, rotary_order(config.head_dim, config.rotary_dim)].flatten(), rows[:, 1].flatten()


def grouped_order(config: HybridConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a checkpoint's in_proj_qkvz and in_proj_ba, one key head after the other, in our order: int64."""
    shared = config.value_heads // config.key_heads
    values = shared * config.value_dim

    def order(*sizes: int) -> torch.Tensor:
        rows = torch.arange(config.key_heads * sum(sizes)).view(config.key_heads, -1)
        return torch.cat([part.flatten() for part in torch.split(rows, list(sizes), 1)])

    return order(config.key_dim, config.key_dim, values, values), order(shared, shared)
