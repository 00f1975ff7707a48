"""A Triton kernel that merges attention over two sets of keys. Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16  # of a program; each is a token's head


def merge_(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge attention over other keys into out, in place.

    out, other: [T, num_heads, head_dim], contiguous. lse, other_lse: float32 [T, num_heads], contiguous, base-2
    log-sum-exp.
    """
    num_rows, head_dim = lse.numel(), out.shape[2]
    block = triton.next_power_of_2(head_dim)
    _merge[(triton.cdiv(num_rows, _ROWS),)](out, lse, other, other_lse, num_rows, head_dim, rows=_ROWS, block=block)


@triton.jit(do_not_specialize=["num_rows"])
def _merge(out, lse, other, other_lse, num_rows, head_dim, rows: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    dims = tl.arange(0, block)[None, :]
    is_row = row < num_rows
    inside = is_row[:, None] & (dims < head_dim)
    ours = tl.load(lse + row, mask=is_row, other=0.0)
    theirs = tl.load(other_lse + row, mask=is_row, other=0.0)
    share = 1.0 / (1.0 + tl.exp2(theirs - ours))  # our share of the exponentials
    at = row.to(tl.int64)[:, None] * head_dim + dims
    mine = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    yours = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    merged = yours + share[:, None] * (mine - yours)
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
