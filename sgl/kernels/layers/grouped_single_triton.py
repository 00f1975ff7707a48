"""Products of a single token with a `GroupedMatrix` in Triton, fused as in single_triton.py.

Such a product is bound by reading its matrix as long as a code takes few instructions. A code becomes a float by
setting its bits into the mantissa of 16 or 256, without a conversion; what that adds to a product does not depend on
the row and is subtracted at the end of a unit. Two codes share a shift. Where a program's threads hold a whole row, it
keeps the inputs in registers for many rows. Codes are loaded as rows of words, whose order leaves Triton no choice:
of three dimensions, release 3.6 gives a warp's threads eight rows, and spills. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import activated, overlap
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.layers.grouped_triton import SIXTEEN, numbers, parts

_ROWS = 8  # of a program at a time, at most: each thread has 16 bytes of each in flight, and loads the next
_UNITS = 128  # of a row at a time, at most: one for each thread
_LEAST_PROGRAMS = 512  # so that each multiprocessor has some
_MOST_PROGRAMS = 4  # for each multiprocessor, by their registers, of those that keep the inputs
_LANES = {4: 4, 8: 16}  # numbers of a unit that a thread loads at once, by bits


def project(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    matrix: GroupedMatrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    adds: bool,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> None:
    """A matrix times x [1, k], normed first where a norm [k] is given, plus the bias, to out [1, n], or added to it.
    is_gated: out is silu(gate), or is_gelu: gelu by tanh, * up of a matrix [2n, k], gates first."""
    (num_rows, width), lanes = matrix.shape, _LANES[matrix.bits]
    num_units = matrix.values.shape[1] // lanes
    divisor = num_units & -num_units
    units = min(divisor if divisor >= 32 else triton.next_power_of_2(num_units), _UNITS)
    rows = _ROWS
    while rows > 2 and num_rows // rows < _LEAST_PROGRAMS:
        rows //= 2
    num_tiles = triton.cdiv(num_rows, rows)
    is_whole = num_units <= units
    most = _MOST_PROGRAMS * _num_processors(x.device) if is_whole else num_tiles
    (_project_rows if is_whole else _project)[(min(num_tiles, most),)](
        x,
        norm,
        *parts(matrix),
        bias,
        out,
        num_rows // 2 if is_gated else num_rows,
        eps,
        SIXTEEN,
        num_tiles,
        width=width,
        num_groups=matrix.scales.shape[1],
        middle=matrix.middle if matrix.zeros is None else 0,
        bits=matrix.bits,
        has_norm=norm is not None,
        has_zeros=matrix.zeros is not None,
        has_order=matrix.order is not None,
        has_bias=bias is not None,
        adds=adds,
        is_gated=is_gated,
        is_gelu=is_gelu,
        rows=rows,
        units=units,
        lanes=lanes,
        num_warps=max(1, units // limits.of(x.device).warp),
        **overlap(x.device),
    )


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _unit_sums(
    x,
    norm,
    order,
    weights,
    first,
    unit,
    lane,
    base,
    width: tl.constexpr,
    middle: tl.constexpr,
    bits: tl.constexpr,
    has_norm: tl.constexpr,
    has_order: tl.constexpr,
):
    """Of each row and unit, codes less the middle times inputs; of each unit, the inputs' sum and their squares'."""
    inputs_of_unit: tl.constexpr = 32 if bits == 4 else 16
    columns = (first + unit)[:, None] * inputs_of_unit + lane[None, :]
    inside = ((first + unit) * inputs_of_unit < width)[:, None]
    if bits == 4:
        sums = tl.zeros(weights.shape, tl.float32)
        even = tl.zeros(columns.shape, tl.float32)
        odd = tl.zeros(columns.shape, tl.float32)
        squares = tl.zeros(columns.shape, tl.float32)
        for j in tl.static_range(8):
            inputs, square = _inputs(x, norm, order, columns + 4 * j, inside, has_norm, has_order)
            squares += square
            if j % 2 == 0:
                even += inputs
            else:
                odd += inputs
            sums += numbers(weights, j, base) * inputs[None, :, :]
        evens, odds = tl.sum(even, 1), tl.sum(odd, 1)
        offsets = (256.0 + middle) * evens + (16.0 + middle) * odds
        return tl.sum(sums, 2) - offsets[None, :], evens + odds, tl.sum(squares, 1)
    inputs, squares = _inputs(x, norm, order, columns, inside, has_norm, has_order)
    return tl.sum((weights.to(tl.float32) - middle) * inputs[None, :, :], 2), tl.sum(inputs, 1), tl.sum(squares, 1)


@triton.jit
def _inputs(x, norm, order, columns, inside, has_norm: tl.constexpr, has_order: tl.constexpr):
    if has_order:
        columns = tl.load(order + columns, mask=inside, other=0)
    inputs = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    squares = inputs * inputs
    if has_norm:
        inputs *= tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    return inputs, squares


@triton.jit(do_not_specialize=["size", "num_tiles"])
def _project(
    x,
    norm,
    values,
    scales,
    zeros,
    order,
    bias,
    out,
    size,
    eps,
    base,
    num_tiles,
    width: tl.constexpr,
    num_groups: tl.constexpr,
    middle: tl.constexpr,
    bits: tl.constexpr,
    has_norm: tl.constexpr,
    has_zeros: tl.constexpr,
    has_order: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    rows: tl.constexpr,
    units: tl.constexpr,
    lanes: tl.constexpr,
    overlaps: tl.constexpr,
):
    base += (size < 0).to(tl.int32)  # else it would be loaded again for each code
    row_width: tl.constexpr = width // 8 if bits == 4 else width
    num_units: tl.constexpr = row_width // lanes
    units_of_group: tl.constexpr = num_units // num_groups
    own = rows // 2 if is_gated else rows  # of the result
    tile = tl.arange(0, rows)
    result = tl.program_id(0) * own + tile % own
    row = result.to(tl.int64) + tile // own * size  # gates, then what they gate
    unit = tl.arange(0, units)
    lane = tl.arange(0, lanes)
    is_row = result < size
    word = tl.arange(0, units * lanes)
    at = values + row[:, None] * row_width + word[None, :]
    words = tl.load(at, mask=is_row[:, None] & (word < row_width)[None, :], other=0.0)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([rows, units], tl.float32)
    squares = tl.zeros([units], tl.float32)
    for first in range(0, num_units, units):
        is_unit = is_row[:, None] & (first + unit < num_units)[None, :]
        group = row[:, None] * num_groups + ((first + unit) // units_of_group)[None, :]
        weights = tl.reshape(words, [rows, units, lanes])
        products, totals, square = _unit_sums(
            x, norm, order, weights, first, unit, lane, base, width, middle, bits, has_norm, has_order
        )
        following = (first + units) * lanes
        inside = is_row[:, None] & (following + word < row_width)[None, :]
        words = tl.load(at + following, mask=inside, other=0.0)
        squares += square
        if has_zeros:
            products -= tl.load(zeros + group, mask=is_unit, other=0).to(tl.float32) * totals[None, :]
        sums += products * tl.load(scales + group, mask=is_unit, other=0.0).to(tl.float32)
    scale = 1.0
    if has_norm:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    product = tl.sum(sums, 1) * scale
    _store(product, bias, out, size, tl.program_id(0), row, is_row, has_bias, adds, is_gated, is_gelu, rows)


@triton.jit
def _store(
    product,
    bias,
    out,
    size,
    tile,
    row,
    is_row,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    rows: tl.constexpr,
):
    """What becomes of a tile's rows."""
    if has_bias:
        product += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    result = tile * rows + tl.arange(0, rows)
    if is_gated:
        pairs = tl.reshape(product, [2, rows // 2])
        is_gate = (tl.arange(0, 2) == 0)[:, None]
        gate = tl.sum(tl.where(is_gate, pairs, 0.0), 0)
        product = activated(gate, is_gelu) * tl.sum(tl.where(is_gate, 0.0, pairs), 0)
        result = tile * (rows // 2) + tl.arange(0, rows // 2)
    if adds:
        product += tl.load(out + result, mask=result < size, other=0.0).to(tl.float32)
    tl.store(out + result, product.to(out.dtype.element_ty), mask=result < size)


@triton.jit(do_not_specialize=["size", "num_tiles"])
def _project_rows(
    x,
    norm,
    values,
    scales,
    zeros,
    order,
    bias,
    out,
    size,
    eps,
    base,
    num_tiles,
    width: tl.constexpr,
    num_groups: tl.constexpr,
    middle: tl.constexpr,
    bits: tl.constexpr,
    has_norm: tl.constexpr,
    has_zeros: tl.constexpr,
    has_order: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    rows: tl.constexpr,
    units: tl.constexpr,
    lanes: tl.constexpr,
    overlaps: tl.constexpr,
):
    """With all of a row in a program's threads, which keep the inputs for several tiles of rows."""
    base += (size < 0).to(tl.int32)  # else it would be loaded again for each code
    row_width: tl.constexpr = width // 8 if bits == 4 else width
    num_units: tl.constexpr = row_width // lanes
    units_of_group: tl.constexpr = num_units // num_groups
    inputs_of_unit: tl.constexpr = 32 if bits == 4 else 16
    own = rows // 2 if is_gated else rows  # of the result
    place = tl.arange(0, rows)
    unit = tl.arange(0, units)
    lane = tl.arange(0, lanes)
    is_unit = unit < num_units
    word = tl.arange(0, units * lanes)
    is_word = (word < row_width)[None, :]
    of_row = values + word[None, :]
    first = tl.program_id(0)
    result = first * own + place % own
    row = result.to(tl.int64) + place // own * size  # gates, then what they gate
    words = tl.load(of_row + row[:, None] * row_width, mask=(result < size)[:, None] & is_word, other=0.0)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    columns = unit[:, None] * inputs_of_unit + lane[None, :]
    has_inputs = is_unit[:, None]
    x0, squares = _inputs(x, norm, order, columns, has_inputs, has_norm, has_order)
    totals = tl.sum(x0, 1)
    offsets = middle * totals
    if bits == 4:
        x1, square1 = _inputs(x, norm, order, columns + 4, has_inputs, has_norm, has_order)
        x2, square2 = _inputs(x, norm, order, columns + 8, has_inputs, has_norm, has_order)
        x3, square3 = _inputs(x, norm, order, columns + 12, has_inputs, has_norm, has_order)
        x4, square4 = _inputs(x, norm, order, columns + 16, has_inputs, has_norm, has_order)
        x5, square5 = _inputs(x, norm, order, columns + 20, has_inputs, has_norm, has_order)
        x6, square6 = _inputs(x, norm, order, columns + 24, has_inputs, has_norm, has_order)
        x7, square7 = _inputs(x, norm, order, columns + 28, has_inputs, has_norm, has_order)
        squares += square1 + square2 + square3 + square4 + square5 + square6 + square7
        evens, odds = tl.sum(x0 + x2 + x4 + x6, 1), tl.sum(x1 + x3 + x5 + x7, 1)
        totals = evens + odds
        offsets = (256.0 + middle) * evens + (16.0 + middle) * odds
    scale = 1.0
    if has_norm:
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / width + eps)
    for tile in range(first, num_tiles, tl.num_programs(0)):
        result = tile * own + place % own
        row = result.to(tl.int64) + place // own * size
        is_row = result < size
        following = result + tl.num_programs(0) * own
        following_row = following.to(tl.int64) + place // own * size
        inside = (following < size)[:, None] & is_word
        next_words = tl.load(of_row + following_row[:, None] * row_width, mask=inside, other=0.0)
        group = row[:, None] * num_groups + (unit // units_of_group)[None, :]
        is_scaled = is_row[:, None] & is_unit[None, :]
        weights = tl.reshape(words, [rows, units, lanes])
        if bits == 4:
            sums = numbers(weights, 0, base) * x0[None, :, :]
            sums += numbers(weights, 1, base) * x1[None, :, :]
            sums += numbers(weights, 2, base) * x2[None, :, :]
            sums += numbers(weights, 3, base) * x3[None, :, :]
            sums += numbers(weights, 4, base) * x4[None, :, :]
            sums += numbers(weights, 5, base) * x5[None, :, :]
            sums += numbers(weights, 6, base) * x6[None, :, :]
            sums += numbers(weights, 7, base) * x7[None, :, :]
        else:
            sums = weights.to(tl.float32) * x0[None, :, :]
        products = tl.sum(sums, 2) - offsets[None, :]
        if has_zeros:
            products -= tl.load(zeros + group, mask=is_scaled, other=0).to(tl.float32) * totals[None, :]
        products *= tl.load(scales + group, mask=is_scaled, other=0.0).to(tl.float32)
        product = tl.sum(products, 1) * scale
        _store(product, bias, out, size, tile, row, is_row, has_bias, adds, is_gated, is_gelu, rows)
        words = next_words
