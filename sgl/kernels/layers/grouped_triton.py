"""Products with a `GroupedMatrix` in Triton: of a single token as in single_triton.py, and of several.

At batch 1 a product is bound by reading its matrix as long as a code takes few instructions. A code becomes a float by
setting its bits into the mantissa of 1.0, without a conversion; what that adds to a product does not depend on the row
and is subtracted at the end of a unit. Two codes share a shift, at bits 15 and 19. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels.layers.fused_triton import activated, overlap
from sgl.kernels.layers.grouped import GroupedMatrix

_ROWS = 8  # of a program, at most: each thread has 16 bytes of each in flight
_UNITS = 64  # of a row at a time, at most: one for each thread
_LEAST_PROGRAMS = 512  # so that each multiprocessor has some
_SIXTEEN = 0x41800000  # the bits of 16.0
_LANES = {4: 4, 8: 16}  # numbers of a unit that a thread loads at once, by bits
_TILE_ROWS = 64
_TILES = {16: (256, 4), 32: (256, 4), 64: (256, 3), 128: (128, 3)}
"""Columns of a tile in four bits with inputs of two bytes, and its stages, by its tokens."""


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
    (size, width), lanes = matrix.shape, _LANES[matrix.bits]
    size = size // 2 if is_gated else size
    num_units = width // (lanes * 32 // matrix.bits if matrix.bits == 4 else lanes)
    divisor = num_units & -num_units
    units = min(divisor if divisor >= 32 else triton.next_power_of_2(num_units), _UNITS)
    rows = _ROWS
    while rows > 2 and matrix.shape[0] // rows < _LEAST_PROGRAMS:
        rows //= 2
    _project[(triton.cdiv(matrix.shape[0], rows),)](
        x,
        norm,
        *_tensors(matrix),
        bias,
        out,
        size,
        eps,
        _SIXTEEN,
        width=width,
        num_groups=matrix.scales.shape[1],
        middle=matrix.middle,
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
        num_warps=max(1, units // 32),
        **overlap(x.device),
    )


def linear(x: torch.Tensor, matrix: GroupedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] times the matrix [n, k], plus the bias [n]: [T, n] in x's dtype."""
    (num_tokens, width), size = x.shape, matrix.shape[0]
    if matrix.order is not None:
        x = x.index_select(1, matrix.order)
    tokens = min(max(16, triton.next_power_of_2(num_tokens)), 128)
    columns, stages = _TILES[tokens]
    out = x.new_empty(num_tokens, size)
    # tokens last: tiles of the same rows follow each other, and find them in the cache
    _linear[(triton.cdiv(num_tokens, tokens), triton.cdiv(size, _TILE_ROWS))](
        x.contiguous(),
        *_tensors(matrix)[:3],
        bias,
        out,
        num_tokens,
        size,
        _SIXTEEN,
        width=width,
        num_groups=matrix.scales.shape[1],
        middle=matrix.middle,
        bits=matrix.bits,
        has_zeros=matrix.zeros is not None,
        has_bias=bias is not None,
        block_tokens=tokens,
        block_rows=_TILE_ROWS,
        block_columns=max(16 * 32 // matrix.bits, columns * 8 // (x.dtype.itemsize * matrix.bits)),
        num_warps=4,
        num_stages=stages,
        **overlap(x.device),
    )
    return out


def dequantized(matrix: GroupedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """`GroupedMatrix.dequantized`."""
    size, width = matrix.shape
    out = torch.empty(size, width, dtype=dtype, device=matrix.values.device)
    num_words = matrix.values.shape[1]
    words = min(triton.next_power_of_2(num_words), 256)
    _dequantize[(size, triton.cdiv(num_words, words))](
        *_tensors(matrix),
        out,
        width=width,
        num_groups=matrix.scales.shape[1],
        middle=matrix.middle,
        bits=matrix.bits,
        has_zeros=matrix.zeros is not None,
        has_order=matrix.order is not None,
        words=words,
        num_warps=4,
        **overlap(out.device),
    )
    return out


def _tensors(matrix: GroupedMatrix) -> tuple[Any, ...]:
    return matrix.values, matrix.scales, matrix.zeros, matrix.order


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
    bits: tl.constexpr,
    has_norm: tl.constexpr,
    has_order: tl.constexpr,
):
    """Of each row and unit, codes times inputs; of each unit, the inputs' sum and their squares'."""
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
            sums += _numbers(weights, j, base) * inputs[None, :, :]
        evens, odds = tl.sum(even, 1), tl.sum(odd, 1)
        return tl.sum(sums, 2) - (256.0 * evens + 16.0 * odds)[None, :], evens + odds, tl.sum(squares, 1)
    inputs, squares = _inputs(x, norm, order, columns, inside, has_norm, has_order)
    return tl.sum(weights.to(tl.float32) * inputs[None, :, :], 2), tl.sum(inputs, 1), tl.sum(squares, 1)


@triton.jit
def _numbers(words, j: tl.constexpr, base):
    """The code j of each word plus 256, or plus 16 of an odd one: in a float's mantissa. base: the bits of 16.0, as a
    number that the compiler does not know: it would set them by an instruction of its own."""
    shifted = words << (15 - 8 * (j // 2)) if j < 4 else words >> (8 * (j // 2) - 15)
    bits = base if j % 2 == 1 else base + 0x2000000
    return ((shifted & (15 << (15 + 4 * (j % 2)))) | bits).to(tl.float32, bitcast=True)


@triton.jit
def _inputs(x, norm, order, columns, inside, has_norm: tl.constexpr, has_order: tl.constexpr):
    if has_order:
        columns = tl.load(order + columns, mask=inside, other=0)
    inputs = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    squares = inputs * inputs
    if has_norm:
        inputs *= tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    return inputs, squares


@triton.jit
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
    at = values + row[:, None, None] * row_width + unit[None, :, None] * lanes + lane[None, None, :]
    inside = is_row[:, None, None] & (unit < num_units)[None, :, None]
    weights = tl.load(at, mask=inside, other=0.0)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([rows, units], tl.float32)
    squares = tl.zeros([units], tl.float32)
    for first in range(0, num_units, units):
        is_unit = is_row[:, None] & (first + unit < num_units)[None, :]
        group = row[:, None] * num_groups + ((first + unit) // units_of_group)[None, :]
        products, totals, square = _unit_sums(
            x, norm, order, weights, first, unit, lane, base, width, bits, has_norm, has_order
        )
        following = first + units
        inside = is_row[:, None, None] & (following + unit < num_units)[None, :, None]
        weights = tl.load(at + following * lanes, mask=inside, other=0.0)
        squares += square
        if has_zeros:
            products -= tl.load(zeros + group, mask=is_unit, other=0).to(tl.float32) * totals[None, :]
        elif middle > 0:
            products -= middle * totals[None, :]
        sums += products * tl.load(scales + group, mask=is_unit, other=0.0).to(tl.float32)
    product = tl.sum(sums, 1)
    if has_norm:
        product *= 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    if has_bias:
        product += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    if is_gated:
        pairs = tl.reshape(product, [2, rows // 2])
        is_gate = (tl.arange(0, 2) == 0)[:, None]
        gate = tl.sum(tl.where(is_gate, pairs, 0.0), 0)
        product = activated(gate, is_gelu) * tl.sum(tl.where(is_gate, 0.0, pairs), 0)
        result = tl.program_id(0) * (rows // 2) + tl.arange(0, rows // 2)
    if adds:
        product += tl.load(out + result, mask=result < size, other=0.0).to(tl.float32)
    tl.store(out + result, product.to(out.dtype.element_ty), mask=result < size)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear(
    x,
    values,
    scales,
    zeros,
    bias,
    out,
    num_tokens,
    size,
    base,
    width: tl.constexpr,
    num_groups: tl.constexpr,
    middle: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    has_bias: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    num_words: tl.constexpr = block_columns // 8 if bits == 4 else block_columns
    row_width: tl.constexpr = width // 8 if bits == 4 else width
    group_width: tl.constexpr = row_width // num_groups
    tokens = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    words = tl.arange(0, num_words)
    is_token = (tokens < num_tokens)[None, :]
    row = tl.minimum(rows, size - 1).to(tl.int64)[:, None]
    at = values + row * row_width + words[None, :]
    at_group = row * num_groups
    at_x = x + tokens.to(tl.int64)[None, :] * width
    sums = tl.zeros([block_rows, block_tokens], tl.float32)
    for first in range(0, row_width, num_words):
        inside = (first + words < row_width)[None, :]
        weights = tl.load(at + first, mask=inside, other=0.0)
        group = at_group + ((first + words) // group_width)[None, :]
        scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
        if has_zeros:
            zero = tl.load(zeros + group, mask=inside, other=0).to(tl.float32)
        else:
            zero = tl.full([block_rows, num_words], middle, tl.float32)
        if bits == 4:
            columns = (first + words) // 4 * 32 + (first + words) % 4
            for j in tl.static_range(8):
                codes = _numbers(weights, j, base) - ((256.0 if j % 2 == 0 else 16.0) + zero)
                inputs = tl.load(
                    at_x + (columns + 4 * j)[:, None],
                    mask=is_token & (first + words < row_width)[:, None],
                    other=0.0,
                )
                sums = tl.dot((codes * scale).to(inputs.dtype), inputs, sums, input_precision="ieee")
        else:
            inputs = tl.load(
                at_x + (first + words)[:, None], mask=is_token & (first + words < row_width)[:, None], other=0.0
            )
            codes = weights.to(tl.float32) - zero
            sums = tl.dot((codes * scale).to(inputs.dtype), inputs, sums, input_precision="ieee")
    if has_bias:
        sums += tl.load(bias + row).to(tl.float32)
    to = out + tokens.to(tl.int64)[None, :] * size + rows[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_token & (rows < size)[:, None])


@triton.jit
def _dequantize(
    values,
    scales,
    zeros,
    order,
    out,
    width: tl.constexpr,
    num_groups: tl.constexpr,
    middle: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    has_order: tl.constexpr,
    words: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row_width: tl.constexpr = width // 8 if bits == 4 else width
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * words + tl.arange(0, words)
    inside = word < row_width
    group = row * num_groups + word // (row_width // num_groups)
    codes = tl.load(values + row * row_width + word, mask=inside, other=0.0)
    scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    zero = tl.full([words], middle, tl.float32)
    if has_zeros:
        zero = tl.load(zeros + group, mask=inside, other=0).to(tl.float32)
    for j in tl.static_range(8 if bits == 4 else 1):
        column = word
        numbers = codes.to(tl.float32)
        if bits == 4:
            column = word // 4 * 32 + word % 4 + 4 * j
            numbers = ((codes >> (4 * j)) & 15).to(tl.float32)
        if has_order:
            column = tl.load(order + column, mask=inside, other=0)
        tl.store(out + row * width + column, ((numbers - zero) * scale).to(out.dtype.element_ty), mask=inside)
