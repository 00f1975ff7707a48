"""The kernel of sums over ranks that reads the others' memory. Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

Rows = tuple[int, int, int]
"""The first, the one behind the last, and how many each owner has."""


def sum_rows(
    sources: torch.Tensor,
    flags: torch.Tensor,
    offset: int,
    meeting: int,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    rows: Rows,
    eps: float,
    *,
    rank: int,
    is_of_owners: bool,
    num_blocks: int,
) -> None:
    """Meet the other ranks, then write sums of their rows to out [T, n], which begins with the first row.

    sources, flags: int64 [ranks], addresses on each rank. Numbers are `offset` elements behind a source; flags are
    int32 [ranks, num_blocks]. meeting: the number of this one. is_of_owners: take each row from its owner, who has it
    summed. residual [T, n], weight [n]: add to residual in place, and normalise.
    """
    width = out.shape[-1]
    block = triton.next_power_of_2(width)
    _sum[(num_blocks,)](
        sources,
        flags,
        offset,
        meeting,
        residual,
        weight,
        out,
        *rows,
        width,
        eps,
        rank=rank,
        size=len(sources),
        is_of_owners=is_of_owners,
        num_blocks=num_blocks,
        block=block,
        num_warps=min(16, max(1, block // 512)),
    )


@triton.jit(do_not_specialize=["meeting", "first", "last", "each"])
def _sum(
    sources,
    flags,
    offset,
    meeting,
    residual,
    weight,
    out,
    first,
    last,
    each,
    width,
    eps,
    rank: tl.constexpr,
    size: tl.constexpr,
    is_of_owners: tl.constexpr,
    num_blocks: tl.constexpr,
    block: tl.constexpr,
):
    """Sum rows [first, last) of all sources, or take each from its owner, who has the next `each` rows; add them to the
    residual and normalise them, if there is one. out begins with row first."""
    number = tl.program_id(0)
    place = rank * num_blocks + number
    for other in tl.static_range(size):
        if other != rank:
            theirs = tl.load(flags + other).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + place, meeting, sem="release", scope="sys")
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for other in tl.static_range(size):
        if other != rank:
            at = own + other * num_blocks + number
            seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
            while seen - meeting < 0:
                seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
    columns = tl.arange(0, block)
    inside = columns < width
    stride = width.to(tl.int64)
    if weight is not None:
        scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(first + number, last, num_blocks):
        wide = tl.zeros([block], tl.float32)
        if is_of_owners:
            owner = row // each
            source = tl.load(sources + owner).to(tl.pointer_type(out.dtype.element_ty))
            source = tl.multiple_of(source, 16) + offset + stride * (row - owner * each)
            wide += tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        else:
            for other in tl.static_range(size):
                source = tl.load(sources + other).to(tl.pointer_type(out.dtype.element_ty))
                source = tl.multiple_of(source, 16) + offset + stride * row
                wide += tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        to = stride * (row - first) + columns
        if residual is not None:
            wide += tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
            rounded = wide.to(out.dtype.element_ty)
            tl.store(residual + to, rounded, mask=inside)
            wide = rounded.to(tl.float32)
        if weight is not None:
            wide = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps))
            wide = wide.to(out.dtype.element_ty).to(tl.float32) * scales
        tl.store(out + to, wide.to(out.dtype.element_ty), mask=inside)
