"""A Triton kernel that merges attention over two sets of keys, or with sinks. Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl.kernels.attention.decode_triton import beside_sink

_ROWS = 16  # of a program; each is a token's head


def merge_(
    out: torch.Tensor,
    lse: torch.Tensor,
    other: torch.Tensor | None,
    other_lse: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge attention over other keys into out, in place, and let sinks take their part.

    out, other: [T, num_heads, head_dim], contiguous. lse, other_lse: float32 [T, num_heads], contiguous, base-2
    log-sum-exp. sinks: [num_heads], see `AttentionBackend.run`.
    """
    num_rows, num_heads, head_dim = lse.numel(), *out.shape[1:]
    _merge[(triton.cdiv(num_rows, _ROWS),)](
        out,
        lse,
        other,
        other_lse,
        sinks,
        num_rows,
        head_dim,
        num_heads=None if sinks is None else num_heads,
        has_other=other is not None,
        rows=_ROWS,
        block=triton.next_power_of_2(head_dim),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _merge(
    out,
    lse,
    other,
    other_lse,
    sinks,
    num_rows,
    head_dim,
    num_heads: tl.constexpr,
    has_other: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    dims = tl.arange(0, block)[None, :]
    is_row = row < num_rows
    inside = is_row[:, None] & (dims < head_dim)
    ours = tl.load(lse + row, mask=is_row, other=0.0)
    at = row.to(tl.int64)[:, None] * head_dim + dims
    merged = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    if has_other:
        theirs = tl.load(other_lse + row, mask=is_row, other=0.0)
        share = 1.0 / (1.0 + tl.exp2(theirs - ours))  # our share of the exponentials
        yours = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        merged = yours + share[:, None] * (merged - yours)
    if num_heads is not None:
        if has_other:
            larger = tl.maximum(ours, theirs)
            ours = larger + tl.log2(tl.exp2(ours - larger) + tl.exp2(theirs - larger))
        merged *= beside_sink(ours, tl.load(sinks + row % num_heads, mask=is_row, other=0.0))[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
