"""Triton twins of `ops`: shrink reads each tile's A once, in several runs of the input's columns; expand reads its B.

A tile is up to 16 or 64 tokens of one adapter. Grids depend on shapes alone, so that steps can be captured; unused
tiles return at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import overlap
from sgl.kernels.lora.rows import SMALL, AdapterRows

_WHOLE_RANK = 64  # columns of A x that a program works out at once
_WIDTH = 128  # input columns at a time
_SHRINK_STAGES = 4
_EXPAND: dict[str, int] = {"num_warps": 4}
_NARROW, _WIDE = 64, 128  # output columns of a program
_RUN, _MOST_SPLITS = 2048, 8  # columns of a program at least, and programs side by side, for few tokens


def shrink(x: torch.Tensor, a: torch.Tensor, rows: AdapterRows, num_parts: int) -> torch.Tensor:
    """See `ops.shrink`: float32 [splits, T, parts * rank]; places of tokens without adapter are undefined."""
    num_tokens, width = len(rows.order), x.shape[1]
    columns = a.shape[-2]
    rank = min(columns // num_parts, _WHOLE_RANK)
    num_tiles, num_blocks = len(rows.tiles), columns // rank
    splits = 1  # of shapes alone: each number is a kernel of its own
    while rows.block == SMALL and splits < _MOST_SPLITS and 2 * splits * _RUN <= width:
        splits *= 2
    shrunk = torch.empty(splits, num_tokens, columns, dtype=torch.float32, device=x.device)
    _shrink[num_tiles, num_blocks, splits](
        x,
        a,
        rows.order,
        rows.tiles,
        shrunk,
        num_tokens,
        width,
        x.stride(0),
        a.stride(0),
        columns,
        triton.cdiv(width, splits * _WIDTH) * _WIDTH,
        num_experts=_num_experts(a),
        tokens=rows.block,
        rank=rank,
        block=_WIDTH,
        precision=_precision(x),
        num_warps=4,
        num_stages=limits.of(x.device).stages(_SHRINK_STAGES, (rows.block + rank) * _WIDTH * x.element_size()),
        **overlap(x.device),
    )
    return shrunk


def expand_(
    shrunk: torch.Tensor, b: torch.Tensor, out: torch.Tensor, rows: AdapterRows, parts: tuple[int, ...]
) -> None:
    """See `ops.expand_`."""
    first, second, third = (*parts, 0, 0)[:3]
    block = _columns(max(parts), rows)
    numbers = [triton.cdiv(each, block) for each in parts]
    rank = b.shape[-1]
    _expand[sum(numbers), len(rows.tiles)](
        shrunk,
        b,
        rows.order,
        rows.tiles,
        out,
        shrunk.shape[1] * shrunk.shape[2],
        shrunk.shape[2],
        b.stride(0),
        out.stride(0),
        first,
        second,
        third,
        num_experts=_num_experts(b),
        tokens=rows.block,
        rank=min(rank, _WHOLE_RANK),
        num_ranks=rank // min(rank, _WHOLE_RANK),
        splits=shrunk.shape[0],
        block=block,
        precision=_precision(b),
        **_EXPAND,
        **overlap(b.device),
    )


def expand_silu_and_mul(
    shrunk: torch.Tensor, b: torch.Tensor, gate_up: torch.Tensor, rows: AdapterRows
) -> torch.Tensor:
    """See `ops.expand_silu_and_mul`."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block = _columns(width, rows)
    rank = b.shape[2]
    _expand_silu_and_mul[triton.cdiv(width, block), len(rows.tiles)](
        shrunk,
        b,
        rows.order,
        rows.tiles,
        gate_up,
        out,
        shrunk.shape[1] * shrunk.shape[2],
        shrunk.shape[2],
        b.stride(0),
        gate_up.stride(0),
        width,
        tokens=rows.block,
        rank=min(rank, _WHOLE_RANK),
        num_ranks=rank // min(rank, _WHOLE_RANK),
        splits=shrunk.shape[0],
        block=block,
        precision=_precision(b),
        **_EXPAND,
        **overlap(b.device),
    )
    return out


def _columns(width: int, rows: AdapterRows) -> int:
    """Of an output, in a program."""
    return _WIDE if width >= 8192 and rows.block == SMALL else _NARROW


def _num_experts(stacked: torch.Tensor) -> int:
    return 1 if stacked.dim() == 3 else stacked.shape[1]


def _precision(x: torch.Tensor) -> str:
    """Of sums, whose inputs a product of 16 bits has rounded; AMD's tensor cores have no tf32."""
    return "tf32" if x.dtype != torch.float32 and limits.of(x.device).is_nvidia else "ieee"


@triton.jit
def _matrix(stacked, slot, slot_stride, size, num_experts: tl.constexpr):
    """Where a slot's matrix of `size` elements begins; of experts, slot counts them, too."""
    expert = slot % num_experts
    return stacked + (slot // num_experts).to(tl.int64) * slot_stride + expert.to(tl.int64) * size


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x,
    a,
    order,
    tiles,
    shrunk,
    num_tokens,
    width,
    x_stride,
    slot_stride,
    columns,
    run,
    num_experts: tl.constexpr,
    tokens: tl.constexpr,
    rank: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    slot, first, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if (slot < 0) | (count == 0):
        return
    place = tl.arange(0, tokens)
    is_used = place < count
    token = tl.load(order + first + place, mask=is_used, other=0).to(tl.int64)
    column = tl.program_id(1) * rank + tl.arange(0, rank)
    of_slot = _matrix(a, slot, slot_stride, columns * width, num_experts)
    matrix = of_slot + column[None, :].to(tl.int64) * width
    begin = tl.program_id(2) * run
    total = tl.zeros((tokens, rank), tl.float32)
    for start in range(begin, tl.minimum(begin + run, width), block):
        at = start + tl.arange(0, block)
        is_there = at < width
        of_x = tl.load(
            x + token[:, None] * x_stride + at[None, :], mask=is_used[:, None] & is_there[None, :], other=0.0
        )
        of_a = tl.load(matrix + at[:, None], mask=is_there[:, None], other=0.0)
        total = tl.dot(of_x, of_a, total, input_precision=precision)
    row = tl.program_id(2).to(tl.int64) * num_tokens + first + place
    tl.store(shrunk + row[:, None] * columns + column[None, :], total, mask=is_used[:, None])


@triton.jit
def _product(
    shrunk,
    matrix,
    row,
    is_used,
    column,
    is_there,
    split_stride,
    columns,
    start,
    tokens: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    """B times A x, from column `start` of what was shrunk: float32 [tokens, block]."""
    total = tl.zeros((tokens, block), tl.float32)
    for part in tl.static_range(num_ranks):
        at = part * rank + tl.arange(0, rank)
        source = shrunk + row[:, None].to(tl.int64) * columns + start + at[None, :]
        x = tl.load(source, mask=is_used[:, None], other=0.0)
        for split in tl.static_range(1, splits):
            x += tl.load(source + split * split_stride, mask=is_used[:, None], other=0.0)
        of_b = tl.load(
            matrix + column[None, :].to(tl.int64) * (num_ranks * rank) + at[:, None],
            mask=is_there[None, :],
            other=0.0,
        )
        total = tl.dot(x.to(of_b.dtype), of_b, total, input_precision=precision)
    return total


@triton.jit
def _expand(
    shrunk,
    b,
    order,
    tiles,
    out,
    split_stride,
    columns,
    slot_stride,
    out_stride,
    first_width,
    second_width,
    third_width,
    num_experts: tl.constexpr,
    tokens: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(1)
    slot, first, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if (slot < 0) | (count == 0):
        return
    # blocks end where parts do
    number = tl.program_id(0)
    of_first, of_second = tl.cdiv(first_width, block), tl.cdiv(second_width, block)
    part = (number >= of_first).to(tl.int32) + (number >= of_first + of_second).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, first_width, first_width + second_width))
    end = begin + tl.where(part == 0, first_width, tl.where(part == 1, second_width, third_width))
    number -= tl.where(part == 0, 0, tl.where(part == 1, of_first, of_first + of_second))
    place = tl.arange(0, tokens)
    is_used = place < count
    token = tl.load(order + first + place, mask=is_used, other=0).to(tl.int64)
    column = begin + number * block + tl.arange(0, block)
    is_there = column < end
    total = _product(
        shrunk,
        _matrix(b, slot, slot_stride, (first_width + second_width + third_width) * (num_ranks * rank), num_experts),
        first + place,
        is_used,
        column,
        is_there,
        split_stride,
        columns,
        part * (num_ranks * rank),
        tokens,
        rank,
        num_ranks,
        splits,
        block,
        precision,
    )
    target = out + token[:, None] * out_stride + column[None, :]
    is_inside = is_used[:, None] & is_there[None, :]
    total += tl.load(target, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _expand_silu_and_mul(
    shrunk,
    b,
    order,
    tiles,
    gate_up,
    out,
    split_stride,
    columns,
    slot_stride,
    gate_up_stride,
    width,
    tokens: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(1)
    slot, first, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if count == 0:
        return
    place = tl.arange(0, tokens)
    is_used = place < count
    token = tl.load(order + first + place, mask=is_used, other=0).to(tl.int64)
    column = tl.program_id(0) * block + tl.arange(0, block)
    is_there = column < width
    is_inside = is_used[:, None] & is_there[None, :]
    source = gate_up + token[:, None] * gate_up_stride + column[None, :]
    gate = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=is_inside, other=0.0).to(tl.float32)
    if slot >= 0:
        matrix = b + slot.to(tl.int64) * slot_stride
        gate += _product(
            shrunk,
            matrix,
            first + place,
            is_used,
            column,
            is_there,
            split_stride,
            columns,
            0,
            tokens,
            rank,
            num_ranks,
            splits,
            block,
            precision,
        )
        up += _product(
            shrunk,
            matrix + width.to(tl.int64) * (num_ranks * rank),
            first + place,
            is_used,
            column,
            is_there,
            split_stride,
            columns,
            num_ranks * rank,
            tokens,
            rank,
            num_ranks,
            splits,
            block,
            precision,
        )
    # rounded as between kernels
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    target = out + token[:, None] * width + column[None, :]
    tl.store(target, (gated * up).to(out.dtype.element_ty), mask=is_inside)
