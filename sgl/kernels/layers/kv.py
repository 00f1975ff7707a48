"""Writes new keys and values into a paged cache, in plain torch; qkv.py's twins do so themselves."""

from __future__ import annotations

import torch


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store the keys and values of T tokens, in place.

    key, value: [T, num_kv_heads, head_dim]; key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim].
    slots: int64 [T], page * page_size + offset; for equal slots, either entry may stay.
    """
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
