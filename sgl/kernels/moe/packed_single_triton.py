"""Products of a single token's experts with `PackedExperts` in Triton, as single_triton.py has them: codes become
floats as in layers/grouped_single_triton.py. Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import overlap
from sgl.kernels.layers.grouped_triton import SIXTEEN, numbers, zeros_of
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.packed import PackedExperts
from sgl.kernels.moe.packed_triton import argument, floats, scales_of
from sgl.kernels.moe.route_triton import gated_by

_TILE = 1024  # pieces of 16 bytes that a program holds at a time, at most
_LEAST_PROGRAMS = 1024
_MOST_UNITS = 128
_MOST_WARPS = 4
_LANES = {4: 4, 8: 16}  # numbers of a unit that a thread loads at once, by bits


def gated_experts(x: torch.Tensor, ids: torch.Tensor, experts: Experts, matrices: PackedExperts) -> torch.Tensor:
    """`single_triton.gated_experts` of x [1, hidden]."""
    size, num_used = matrices.shape[1] // 2, len(ids)
    out = x.new_empty(num_used, size)
    alpha, limit = experts.clamped or (None, None)
    rows, shape = _cut(matrices, 2, 1, size, num_used)
    _gated[triton.cdiv(size, rows), num_used](
        x,
        ids,
        argument(matrices),
        experts.gate_up_bias,
        out,
        size,
        SIXTEEN,
        alpha=alpha,
        limit=limit,
        has_bias=experts.gate_up_bias is not None,
        **shape,
        rows=rows,
        **overlap(x.device),
    )
    return out


def add_down_(
    gated: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    experts: Experts,
    matrices: PackedExperts,
    residual: torch.Tensor,
) -> None:
    """`single_triton.add_down_` of gated [num_used, intermediate]."""
    size, num_used = matrices.shape[1], len(ids)
    slots = triton.next_power_of_2(num_used)
    rows, shape = _cut(matrices, slots, slots, size, 1)
    _down[(triton.cdiv(size, rows),)](
        gated,
        ids,
        shares,
        argument(matrices),
        experts.down_bias,
        residual,
        size,
        SIXTEEN,
        has_bias=experts.down_bias is not None,
        num_used=num_used,
        num_slots=slots,
        **shape,
        rows=rows,
        **overlap(gated.device),
    )


def _cut(
    matrices: PackedExperts, num_matrices: int, num_inputs: int, size: int, times: int
) -> tuple[int, dict[str, Any]]:
    """Rows of a program, of so many matrices each, where size rows are cut so many times; and its other constants."""
    lanes = _LANES[matrices.bits]
    units = min(triton.next_power_of_2(matrices.values.shape[2] // lanes), _MOST_UNITS)
    rows = max(1, _TILE // (num_matrices * units))
    while rows > 1 and size // rows * times < _LEAST_PROGRAMS:
        rows //= 2
    num_warps = min(max(1, num_inputs * units // limits.of(matrices.values.device).warp), _MOST_WARPS)
    return rows, {"units": units, "lanes": lanes, "num_warps": num_warps}


@triton.jit
def _row_sums(
    x,
    matrices,
    bias,
    first_rows,
    is_matrix,
    row,
    is_row,
    base,
    num_inputs: tl.constexpr,
    has_bias: tl.constexpr,
    units: tl.constexpr,
    lanes: tl.constexpr,
    waits: tl.constexpr,
):
    """Of some matrices' rows, times the input of each or the one of all, plus their biases: [matrices, rows]. waits:
    for the inputs.

    Units come first, which gives each thread the rows of one unit: it converts that unit's inputs once."""
    width: tl.constexpr = matrices.width
    middle: tl.constexpr = matrices.middle
    row_width: tl.constexpr = width // 8 if matrices.bits == 4 else width
    num_units: tl.constexpr = row_width // lanes
    units_of_group: tl.constexpr = num_units // matrices.num_groups
    inputs_of_unit: tl.constexpr = width // num_units
    unit, lane, own_input = tl.arange(0, units), tl.arange(0, lanes), tl.arange(0, num_inputs)
    rows_of = (first_rows[:, None] + row[None, :])[None, :, :]
    is_its = (is_matrix[:, None] & is_row[None, :])[None, :, :]
    first_lane = rows_of * row_width + (unit * lanes)[:, None, None]
    at = matrices.codes + first_lane[:, :, :, None] + lane[None, None, None, :]
    is_unit = unit < num_units
    weights = tl.load(at, mask=(is_its & is_unit[:, None, None])[:, :, :, None], other=0.0)
    if waits:
        gdc_wait()
        gdc_launch_dependents()
    at_x = x + (unit * inputs_of_unit)[:, None, None] + (own_input * width)[None, :, None] + lane[None, None, :]
    has_input = own_input == 0 if num_inputs == 1 else is_matrix
    sums = tl.zeros([units, first_rows.shape[0], row.shape[0]], tl.float32)
    for first in range(0, num_units, units):
        is_unit = first + unit < num_units
        group = rows_of * matrices.num_groups + ((first + unit) // units_of_group)[:, None, None]
        is_scaled = is_its & is_unit[:, None, None]
        scale = scales_of(matrices, group, is_scaled, 64)
        is_input = (is_unit[:, None] & has_input[None, :])[:, :, None]
        at_input = at_x + first * inputs_of_unit
        inputs = tl.load(at_input, mask=is_input, other=0.0).to(tl.float32)
        if matrices.bits == 4:
            even, odd = inputs, tl.zeros(inputs.shape, tl.float32)
            products = tl.zeros(weights.shape, tl.float32)
            for j in tl.static_range(8):
                if j > 0:
                    inputs = tl.load(at_input + 4 * j, mask=is_input, other=0.0).to(tl.float32)
                    even, odd = (even + inputs, odd) if j % 2 == 0 else (even, odd + inputs)
                if matrices.is_e2m1:  # far from the least floats; undone by the scale
                    codes, inputs = floats(weights, j), inputs * 18446744073709551616.0
                else:
                    codes = numbers(weights, j, base)
                products += codes * inputs[:, :, None, :]
            totals = tl.sum(even + odd, 2)
            of_unit = tl.sum(products, 3)
            if not matrices.is_e2m1:
                offsets = (256.0 + middle) * tl.sum(even, 2) + (16.0 + middle) * tl.sum(odd, 2)
                of_unit -= offsets[:, :, None]
        else:
            totals = tl.sum(inputs, 2)
            of_unit = tl.sum((weights.to(tl.float32) - middle) * inputs[:, :, None, :], 3)
        following = first + units
        inside = is_its & (following + unit < num_units)[:, None, None]
        weights = tl.load(at + following * lanes, mask=inside[:, :, :, None], other=0.0)
        if matrices.zeros is not None:
            of_unit -= zeros_of(matrices.zeros, group, is_scaled, 0) * totals[:, :, None]
        sums += of_unit * scale
    product = tl.sum(sums, 0)
    if has_bias:
        at_bias = bias + first_rows[:, None] + row[None, :]
        product += tl.load(at_bias, mask=is_matrix[:, None] & is_row[None, :], other=0.0).to(tl.float32)
    return product


@triton.jit(do_not_specialize=["size"])
def _gated(
    x,
    ids,
    matrices,
    bias,
    out,
    size,
    base,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    has_bias: tl.constexpr,
    units: tl.constexpr,
    lanes: tl.constexpr,
    rows: tl.constexpr,
    overlaps: tl.constexpr,
):
    base += (size < 0).to(tl.int32)  # else it would be loaded again for each code
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    is_row = row < size
    is_up = tl.arange(0, 2)
    first_rows = (tl.load(ids + slot, cache_modifier=".cg").to(tl.int64) * 2 + is_up) * size
    product = _row_sums(
        x, matrices, bias, first_rows, is_up >= 0, row, is_row, base, 1, has_bias, units, lanes, False
    )
    is_gate = (is_up == 0)[:, None]
    gate, up = tl.sum(tl.where(is_gate, product, 0.0), 0), tl.sum(tl.where(is_gate, 0.0, product), 0)
    gated = gated_by(gate, up, alpha, limit)
    tl.store(out + slot * size + row, gated.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["size"])
def _down(
    gated,
    ids,
    shares,
    matrices,
    bias,
    out,
    size,
    base,
    has_bias: tl.constexpr,
    num_used: tl.constexpr,
    num_slots: tl.constexpr,
    units: tl.constexpr,
    lanes: tl.constexpr,
    rows: tl.constexpr,
    overlaps: tl.constexpr,
):
    base += (size < 0).to(tl.int32)
    slot = tl.arange(0, num_slots)
    is_used = slot < num_used
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    is_row = row < size
    # complete, as single_triton.py says
    first_rows = tl.load(ids + slot, mask=is_used, other=0, cache_modifier=".cg").to(tl.int64) * size
    share = tl.load(shares + slot, mask=is_used, other=0.0, cache_modifier=".cg")
    product = _row_sums(
        gated, matrices, bias, first_rows, is_used, row, is_row, base, num_slots, has_bias, units, lanes, overlaps
    )
    added = tl.sum(product * share[:, None], 0)
    before = tl.load(out + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row, (before + added).to(out.dtype.element_ty), mask=is_row)
