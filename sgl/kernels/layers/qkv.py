"""Between a layer's qkv product and its attention: head norms, rotary embedding and the KV write.

The plain torch reference combines norm.py and rope.py; a GPU runs one Triton kernel, a CPU a compiled one.
"""

from __future__ import annotations

import torch

from sgl.kernels import cpu
from sgl.kernels.layers.norm import rms_norm
from sgl.kernels.layers.rope import apply_rotary


def rotate_and_store(
    qkv: torch.Tensor,
    num_heads: int,
    rotary: tuple[torch.Tensor, torch.Tensor],
    norm: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store the keys and values of T tokens in the cache, in place, and return their queries.

    qkv: [T, num_heads + 2 * num_kv_heads, head_dim], queries, keys, values; unchanged. It may also be float32 [parts,
    T, ...] to sum, and to round to the dtype of rotary. rotary: from `rope.rotary_rows`. norm: [num_heads +
    num_kv_heads, head_dim], weights of the head norms of queries and keys before rotation, with eps; None: no norm.
    key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim]. slots: int64 [T], page * page_size +
    offset; for equal slots, either entry may stay. Returns [T, num_heads, head_dim]: `out`, if given.
    """
    if qkv.is_cuda:
        from sgl.kernels.layers import fused_triton

        return fused_triton.rotate_and_store(qkv, num_heads, rotary, norm, eps, key_cache, value_cache, slots, out)
    if qkv.dim() > 3:
        qkv = qkv.sum(0).to(rotary[0].dtype)
    if cpu.takes(qkv, key_cache):
        return cpu.rotate_and_store(qkv, num_heads, rotary, norm, eps, key_cache, value_cache, slots, out)
    num_rotated = num_heads + key_cache.shape[2]
    rotated, values = qkv[:, :num_rotated], qkv[:, num_rotated:]
    if norm is not None:
        rotated = rms_norm(rotated, norm, eps)
    rotated = apply_rotary(rotated, *rotary)
    query, keys = rotated[:, :num_heads], rotated[:, num_heads:]
    key_cache.flatten(0, 1).index_copy_(0, slots, keys)
    value_cache.flatten(0, 1).index_copy_(0, slots, values)
    return query if out is None else out.copy_(query)
