"""The Triton twin of merge.py. Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS = 8  # of one token in a program


def merge_attention_(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, rows: torch.Tensor
) -> None:
    """`merge.merge_attention_` for contiguous tensors."""
    num_tokens, num_heads, head_dim = part.shape
    block = triton.next_power_of_2(head_dim)
    _merge[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        out, lse, part, part_lse, rows, num_heads, head_dim, block_heads=_HEADS, block=block, num_warps=4
    )


@triton.jit
def _merge(out, lse, part, part_lse, rows, num_heads, head_dim, block_heads: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    heads = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    is_head = heads < num_heads
    before = tl.load(lse + row * num_heads + heads, mask=is_head, other=0.0)
    added = tl.load(part_lse + token * num_heads + heads, mask=is_head, other=0.0)
    weight = 1.0 / (1.0 + tl.exp2(before - added))
    dims = tl.arange(0, block)[None, :]
    inside = is_head[:, None] & (dims < head_dim)
    at = out + (row * num_heads + heads[:, None]) * head_dim + dims
    ours = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    theirs = tl.load(part + (token * num_heads + heads[:, None]) * head_dim + dims, mask=inside, other=0.0)
    merged = ours + (theirs.to(tl.float32) - ours) * weight[:, None]
    tl.store(at, merged.to(out.dtype.element_ty), mask=inside)
