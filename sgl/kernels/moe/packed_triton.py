"""Products of several tokens with `PackedExperts` in Triton: as grouped_triton.py has them, of tiles that are
dequantised in registers. Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import overlap
from sgl.kernels.layers.grouped_triton import columns_of, zeros_of
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.packed import PackedExperts
from sgl.kernels.moe.route_triton import find_block, gated_by, most_blocks, pairs_of

_ROWS = 64  # of a tile; of gate_up, half are gates and half are ups
_STAGES = {16: 4, 32: 4, 64: 3, 128: 3}
"""By the tokens of a tile."""
_MANY, _MANY_FLOATS = 64, 24  # pairs for each expert that are worth a copy
_MOST_BYTES = 3 << 30  # of a copy
_COPIED_ROWS = 16  # of a program


def multiply(
    x: torch.Tensor,
    matrices: PackedExperts,
    weights: torch.Tensor,
    counts: torch.Tensor,
    lists: torch.Tensor,
    out: torch.Tensor,
    experts: Experts,
    *,
    is_down: bool,
) -> None:
    """Fill out by the lists of pairs by expert: [pairs, intermediate] of x [T, hidden], gated, or is_down: [top_k, T,
    hidden] of x [pairs, intermediate], times the weights. experts: has their biases and gate."""
    num_experts, size, _ = matrices.shape
    num_tokens, top_k = weights.shape
    num_pairs = num_tokens * top_k
    bias = experts.down_bias if is_down else experts.gate_up_bias
    alpha, limit = experts.clamped or (None, None)
    tokens = min(max(16, triton.next_power_of_2(triton.cdiv(num_pairs, num_experts))), 128)
    columns = columns_of(matrices.bits, x.dtype)
    num_bytes = columns * (tokens * x.element_size() + _ROWS * matrices.bits // 8)
    own = _ROWS if is_down else _ROWS // 2
    size = size if is_down else size // 2
    _product[(most_blocks(num_pairs, num_experts, tokens) * triton.cdiv(size, own),)](
        x,
        argument(matrices),
        bias,
        weights,
        counts,
        lists,
        out,
        num_tokens,
        num_experts,
        size,
        is_down=is_down,
        alpha=alpha,
        limit=limit,
        has_bias=bias is not None,
        has_whole_groups=matrices.group % columns == 0,
        top_k=top_k,
        num_padded=triton.next_power_of_2(num_experts),
        block_tokens=tokens,
        block_rows=_ROWS,
        block_columns=columns,
        num_warps=4,
        num_stages=limits.of(x.device).stages(_STAGES[tokens], num_bytes),
        **overlap(x.device),
    )


def is_worth_a_copy(matrices: PackedExperts, pairs_per_expert: float, dtype: torch.dtype) -> bool:
    """Whether so many pairs of a token and its expert are multiplied faster with a dequantised copy, that is not too
    large."""
    many = _MANY_FLOATS if matrices.is_e2m1 else _MANY
    return pairs_per_expert >= many and matrices.numel() * dtype.itemsize <= _MOST_BYTES


def dequantized(matrices: PackedExperts, counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[experts, n, k] of the experts that have pairs; others are not written."""
    num_experts, size, width = matrices.shape
    out = torch.empty(num_experts, size, width, dtype=dtype, device=counts.device)
    row_width = matrices.values.shape[2]
    words = min(triton.next_power_of_2(row_width), 128 if matrices.bits == 4 else 1024)
    _dequantize[num_experts * triton.cdiv(size, _COPIED_ROWS), triton.cdiv(row_width, words)](
        argument(matrices),
        counts,
        out,
        size,
        rows=_COPIED_ROWS,
        words=words,
        num_warps=4,
        **overlap(counts.device),
    )
    return out


class Matrices(NamedTuple):
    """A kernel's argument: `PackedExperts`, and what of them it is compiled for."""

    codes: torch.Tensor  # the values: a tuple has its own in Triton
    scales: torch.Tensor
    zeros: torch.Tensor | None
    width: tl.constexpr  # k
    num_groups: tl.constexpr
    middle: tl.constexpr  # 0 with zeros
    bits: tl.constexpr
    is_e2m1: tl.constexpr


def argument(matrices: PackedExperts) -> Matrices:
    """Of a kernel."""
    middle = matrices.middle if matrices.zeros is None else 0
    constants = matrices.shape[2], matrices.scales.shape[2], middle, matrices.bits, matrices.is_e2m1
    return Matrices(matrices.values, matrices.scales, matrices.zeros, *(tl.constexpr(its) for its in constants))


@triton.jit
def floats(words, j):
    """The four-bit float j of each word, times two to the power of -126."""
    numbers_of = (words << (22 - 3 * j)) & 0x01C00000
    return (numbers_of | ((words << (7 - j)) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def numbers(words, zero, scale, is_e2m1: tl.constexpr, dtype: tl.constexpr):
    """[rows, 8 * words] in the order of columns: codes less a zero, times a scale, [rows, words] each or [rows, 1]."""
    j = tl.arange(0, 8)[None, None, :]
    word = words[:, :, None]
    if is_e2m1:
        codes = floats(word, j)
    else:  # in the mantissa of a float
        codes = (((word >> (4 * j)) & 15) | 0x4B000000).to(tl.float32, bitcast=True)
        codes -= 8388608.0 + zero[:, :, None]
    codes = (codes * scale[:, :, None]).to(dtype)
    places = tl.reshape(codes, [words.shape[0], words.shape[1] // 4, 4, 8])
    return tl.reshape(tl.permute(places, 0, 1, 3, 2), [words.shape[0], words.shape[1] * 8])


@triton.jit
def scales_of(matrices, group, mask, less: tl.constexpr = 0):
    """float32; of four-bit floats, times two to the power of 126 - less."""
    if matrices.is_e2m1:
        exponents = tl.load(matrices.scales + group, mask=mask, other=0).to(tl.int32)
        return ((exponents + 126 - less) << 23).to(tl.float32, bitcast=True)
    return tl.load(matrices.scales + group, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x,
    matrices,
    bias,
    weights,
    counts,
    lists,
    out,
    num_tokens,
    num_experts,
    size,
    is_down: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    has_bias: tl.constexpr,
    has_whole_groups: tl.constexpr,
    top_k: tl.constexpr,
    num_padded: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    own: tl.constexpr = block_rows if is_down else block_rows // 2  # rows of the result
    num_tiles = tl.cdiv(size, own)
    expert, first, count, before = find_block(
        counts, tl.program_id(0) // num_tiles, num_experts, num_padded, block_tokens
    )
    if expert >= num_experts:
        return
    width: tl.constexpr = matrices.width
    num_groups: tl.constexpr = matrices.num_groups
    num_words: tl.constexpr = block_columns // 8 if matrices.bits == 4 else block_columns
    row_width: tl.constexpr = width // 8 if matrices.bits == 4 else width
    group_width: tl.constexpr = row_width // num_groups
    places, is_pair, pairs = pairs_of(lists, expert, first, count, num_tokens, block_tokens)
    tile = tl.arange(0, block_rows)
    result = (tl.program_id(0) % num_tiles) * own + tile % own
    words, columns = tl.arange(0, num_words), tl.arange(0, block_columns)
    # gates, then what they gate
    row = (expert.to(tl.int64) * (1 if is_down else 2) + tile // own) * size + tl.minimum(result, size - 1)
    at = matrices.codes + row[:, None] * row_width + words[None, :]
    at_group = row[:, None] * num_groups
    inputs_at = before + places if is_down else pairs // top_k
    at_x = x + inputs_at.to(tl.int64)[:, None] * width
    sums = tl.zeros([block_rows, block_tokens], tl.float32)
    for start in range(0, row_width, num_words):
        inside = (start + words < row_width)[None, :]
        codes_of = tl.load(at + start, mask=inside, other=0.0)
        if has_whole_groups:  # their scales are applied to their sums
            group = at_group + tl.minimum(start // group_width, num_groups - 1)
            scale = scales_of(matrices, group, group >= 0)
            zero = zeros_of(matrices.zeros, group, None, matrices.middle)
        else:
            group = at_group + ((start + words) // group_width)[None, :]
            scale = scales_of(matrices, group, inside)
            zero = zeros_of(matrices.zeros, group, inside, matrices.middle)
        if matrices.bits == 4:
            once = tl.full(scale.shape, 1.0, tl.float32) if has_whole_groups else scale
            codes = numbers(codes_of, zero, once, matrices.is_e2m1, x.dtype.element_ty)
        else:
            codes = codes_of.to(tl.float32) - zero
            codes = (codes if has_whole_groups else codes * scale).to(x.dtype.element_ty)
        column = start * (block_columns // num_words) + columns
        inputs = tl.load(at_x + column[None, :], mask=is_pair[:, None] & (column < width)[None, :], other=0.0)
        if has_whole_groups:
            sums += tl.dot(codes, tl.trans(inputs), input_precision="ieee") * scale
        else:
            sums = tl.dot(codes, tl.trans(inputs), sums, input_precision="ieee")
    if has_bias:
        sums += tl.load(bias + row).to(tl.float32)[:, None]
    if is_down:
        sums *= tl.load(weights + pairs, mask=is_pair, other=0.0)[None, :]
        to = out + ((pairs % top_k) * num_tokens + pairs // top_k).to(tl.int64)[None, :] * size + result[:, None]
        tl.store(to, sums.to(out.dtype.element_ty), mask=is_pair[None, :] & (result < size)[:, None])
    else:
        both = tl.reshape(sums, [2, own, block_tokens])
        is_gate = (tl.arange(0, 2) == 0)[:, None, None]
        gates, ups = tl.sum(tl.where(is_gate, both, 0.0), 0), tl.sum(tl.where(is_gate, 0.0, both), 0)
        result = (tl.program_id(0) % num_tiles) * own + tl.arange(0, own)
        to = out + (before + places).to(tl.int64)[None, :] * size + result[:, None]
        gated = gated_by(gates, ups, alpha, limit).to(out.dtype.element_ty)
        tl.store(to, gated, mask=is_pair[None, :] & (result < size)[:, None])


@triton.jit
def _dequantize(
    matrices,
    counts,
    out,
    size,
    rows: tl.constexpr,
    words: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    width: tl.constexpr = matrices.width
    row_width: tl.constexpr = width // 8 if matrices.bits == 4 else width
    numbers_of_word: tl.constexpr = width // row_width
    num_tiles = tl.cdiv(size, rows)
    expert = tl.program_id(0) // num_tiles
    if tl.load(counts + expert) == 0:
        return
    its = (tl.program_id(0) % num_tiles) * rows + tl.arange(0, rows)
    row = (expert.to(tl.int64) * size + its)[:, None]
    word = tl.program_id(1) * words + tl.arange(0, words)
    inside = (its < size)[:, None] & (word < row_width)[None, :]
    codes_of = tl.load(matrices.codes + row * row_width + word[None, :], mask=inside, other=0.0)
    group = row * matrices.num_groups + (word // (row_width // matrices.num_groups))[None, :]
    scale = scales_of(matrices, group, inside)
    zero = zeros_of(matrices.zeros, group, inside, matrices.middle)
    if matrices.bits == 4:
        codes = numbers(codes_of, zero, scale, matrices.is_e2m1, out.dtype.element_ty)
    else:
        codes = ((codes_of.to(tl.float32) - zero) * scale).to(out.dtype.element_ty)
    column = tl.program_id(1) * words * numbers_of_word + tl.arange(0, words * numbers_of_word)
    tl.store(out + row * width + column[None, :], codes, mask=(its < size)[:, None] & (column < width)[None, :])
