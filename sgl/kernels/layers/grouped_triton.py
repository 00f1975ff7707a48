"""Products of several tokens with a `GroupedMatrix` in Triton, whose tiles are dequantised in registers, and its
dequantised copy for many. Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import overlap
from sgl.kernels.layers.grouped import GroupedMatrix

SIXTEEN = 0x41800000  # the bits of 16.0
_TILE_ROWS = 64
_MOST_PARTS = 4
_STAGES = {16: 6, 32: 6, 64: 4, 128: 3}
"""By the tokens of a tile."""


def linear(x: torch.Tensor, matrix: GroupedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] times the matrix [n, k], plus the bias [n]: [T, n] in x's dtype."""
    return _multiplied(x, matrix, bias, 1)[0]


def linear_parts(
    x: torch.Tensor, matrix: GroupedMatrix, bias: torch.Tensor | None, num_processors: int
) -> torch.Tensor | None:
    """float32 [parts, T, n] to be summed, for two programs a multiprocessor; None: one part would do."""
    tokens = _tokens(len(x))
    num_tiles = triton.cdiv(len(x), tokens) * triton.cdiv(matrix.shape[0], _TILE_ROWS)
    num_parts = min(_MOST_PARTS, 2 * num_processors // num_tiles)
    return None if num_parts < 2 else _multiplied(x, matrix, bias, num_parts)


def _tokens(num_tokens: int) -> int:
    """Of a tile."""
    return min(max(16, 1 << (num_tokens - 1).bit_length()), 128)


def _multiplied(x: torch.Tensor, matrix: GroupedMatrix, bias: torch.Tensor | None, num_parts: int) -> torch.Tensor:
    """[parts, T, n], in x's dtype or several in float32."""
    (num_tokens, width), size = x.shape, matrix.shape[0]
    if matrix.order is not None:
        x = x.index_select(1, matrix.order)
    tokens = _tokens(num_tokens)
    columns = columns_of(matrix.bits, x.dtype)
    num_bytes = columns * (tokens * x.element_size() + _TILE_ROWS * matrix.bits // 8)
    chunk = triton.cdiv(triton.cdiv(width, num_parts), columns) * columns
    num_parts = triton.cdiv(width, chunk)
    dtype = x.dtype if num_parts == 1 else torch.float32
    out = torch.empty(num_parts, num_tokens, size, dtype=dtype, device=x.device)
    # tokens first: tiles of the same rows follow each other, and find them in the cache
    _linear[(triton.cdiv(num_tokens, tokens), triton.cdiv(size, _TILE_ROWS), num_parts)](
        x.contiguous(),
        *parts(matrix)[:3],
        bias,
        out,
        num_tokens,
        size,
        SIXTEEN,
        width=width,
        chunk=chunk,
        num_groups=matrix.scales.shape[1],
        middle=matrix.middle,
        bits=matrix.bits,
        has_bias=bias is not None,
        has_whole_groups=matrix.group % columns == 0,
        block_tokens=tokens,
        block_rows=_TILE_ROWS,
        block_columns=columns,
        num_warps=4,
        num_stages=limits.of(x.device).stages(_STAGES[tokens], num_bytes),
        **overlap(x.device),
    )
    return out


def columns_of(bits: int, dtype: torch.dtype) -> int:
    """Of a tile, of codes of so many bits and inputs: of those of two bytes, as many as make 64 bytes of codes."""
    return max(16 * 32 // bits, 128 * 8 // (dtype.itemsize * bits))


def dequantized(matrix: GroupedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """`GroupedMatrix.dequantized`."""
    size, width = matrix.shape
    out = torch.empty(size, width, dtype=dtype, device=matrix.values.device)
    num_words = matrix.values.shape[1]
    words = min(triton.next_power_of_2(num_words), 256)
    _dequantize[(size, triton.cdiv(num_words, words))](
        *parts(matrix),
        out,
        width=width,
        num_groups=matrix.scales.shape[1],
        middle=matrix.middle,
        bits=matrix.bits,
        has_order=matrix.order is not None,
        words=words,
        num_warps=4,
        **overlap(out.device),
    )
    return out


def parts(matrix: GroupedMatrix) -> tuple[Any, ...]:
    """A kernel's arguments."""
    return matrix.values, matrix.scales, matrix.zeros, matrix.order


@triton.jit
def numbers(words, j: tl.constexpr, base):
    """The code j of each word plus 256, or plus 16 of an odd one: in a float's mantissa. base: the bits of 16.0, as a
    number that the compiler does not know: it would set them by an instruction of its own."""
    shifted = words << (15 - 8 * (j // 2)) if j < 4 else words >> (8 * (j // 2) - 15)
    bits = base if j % 2 == 1 else base + 0x2000000
    return ((shifted & (15 << (15 + 4 * (j % 2)))) | bits).to(tl.float32, bitcast=True)


@triton.jit
def zeros_of(zeros, group, mask, middle: tl.constexpr):
    """float32 in group's shape; the middle where there are no zeros. mask: None: all groups are there."""
    if zeros is None:
        return tl.full(group.shape, middle, tl.float32)
    elif mask is None:  # noqa: RET505 - Triton compiles what follows a return
        return tl.load(zeros + group).to(tl.float32)
    else:
        return tl.load(zeros + group, mask=mask, other=0).to(tl.float32)


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
    chunk: tl.constexpr,
    num_groups: tl.constexpr,
    middle: tl.constexpr,
    bits: tl.constexpr,
    has_bias: tl.constexpr,
    has_whole_groups: tl.constexpr,
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
    chunk_width: tl.constexpr = chunk // 8 if bits == 4 else chunk
    group_width: tl.constexpr = row_width // num_groups
    part = tl.program_id(2)
    tokens = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    words = tl.arange(0, num_words)
    is_token = (tokens < num_tokens)[None, :]
    row = tl.minimum(rows, size - 1).to(tl.int64)[:, None]
    at = values + row * row_width + words[None, :]
    at_group = row * num_groups
    at_x = x + tokens.to(tl.int64)[None, :] * width
    sums = tl.zeros([block_rows, block_tokens], tl.float32)
    for start in range(0, chunk_width, num_words):
        first = part * chunk_width + start
        inside = (first + words < row_width)[None, :]
        is_input = is_token & (first + words < row_width)[:, None]
        weights = tl.load(at + first, mask=inside, other=0.0)
        if has_whole_groups:  # their scales are applied to their sums
            group = at_group + tl.minimum(first // group_width, num_groups - 1)
            scale = tl.load(scales + group).to(tl.float32)
            zero = zeros_of(zeros, group, None, middle)
        else:
            group = at_group + ((first + words) // group_width)[None, :]
            scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
            zero = zeros_of(zeros, group, inside, middle)
        of_group = tl.zeros([block_rows, block_tokens], tl.float32) if has_whole_groups else sums
        if bits == 4:
            columns = (first + words) // 4 * 32 + (first + words) % 4
            for j in tl.static_range(8):
                codes = numbers(weights, j, base) - ((256.0 if j % 2 == 0 else 16.0) + zero)
                codes = codes if has_whole_groups else codes * scale
                inputs = tl.load(at_x + (columns + 4 * j)[:, None], mask=is_input, other=0.0)
                of_group = tl.dot(codes.to(inputs.dtype), inputs, of_group, input_precision="ieee")
        else:
            codes = weights.to(tl.float32) - zero
            codes = codes if has_whole_groups else codes * scale
            inputs = tl.load(at_x + (first + words)[:, None], mask=is_input, other=0.0)
            of_group = tl.dot(codes.to(inputs.dtype), inputs, of_group, input_precision="ieee")
        sums = sums + of_group * scale if has_whole_groups else of_group
    if has_bias:
        sums += tl.where(part == 0, tl.load(bias + row).to(tl.float32), 0.0)
    to = out + (part * num_tokens + tokens).to(tl.int64)[None, :] * size + rows[:, None]
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
    zero = zeros_of(zeros, group, inside, middle)
    for j in tl.static_range(8 if bits == 4 else 1):
        column = word
        numbers = codes.to(tl.float32)
        if bits == 4:
            column = word // 4 * 32 + word % 4 + 4 * j
            numbers = ((codes >> (4 * j)) & 15).to(tl.float32)
        if has_order:
            column = tl.load(order + column, mask=inside, other=0)
        tl.store(out + row * width + column, ((numbers - zero) * scale).to(out.dtype.element_ty), mask=inside)
