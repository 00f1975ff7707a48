"""A layer's matrix products for a single token in Triton, fused with the norm before or the sum after.

At batch 1 a product is bound by reading its matrix, and launches between products cost more than they compute: each
program streams a few rows of the matrix past the one token. The matrix depends on no earlier kernel: with overlapping
launches its first tile is loaded while the previous kernel runs. A norm's scale is one number, computed beside the
product and applied at its end. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels.layers import grouped_single_triton
from sgl.kernels.layers.fused_triton import activated, overlap
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.layers.linear import Fp8Matrix, Matrix

_TILE = 8192  # matrix elements a program holds at a time: 128 bytes in flight for each of 128 threads
_GATED_BLOCK = 4096  # row elements at a time, at most. H200, Llama-3.1-8B: 52 µs a gated product, 4.5 TB/s;
_BLOCK = 1024  # 13.8, 9.1 and 27.6 µs for qkv, output and down, where cuBLAS takes 16.0, 12.5 and 30.3
_LONG_ROW = 4096  # shorter rows are read whole: Qwen3-0.6B's output product takes 2.3 µs, with cuBLAS 12.7
_WARPS = 4


def project(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    matrix: Matrix,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A matrix [n, k] times x [1, k], normed first where a norm [k] is given, plus the bias [n]: [1, n]."""
    if isinstance(matrix, GroupedMatrix):
        out = x.new_empty(1, len(matrix.values))
        grouped_single_triton.project(x, norm, eps, matrix, bias, out, adds=False)
        return out
    out = x.new_empty(1, len(_values(matrix)[0]))
    _multiply(x, norm, eps, matrix, bias, out, adds=False)
    return out


def project_gated(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    gate_up: Matrix,
    bias: torch.Tensor | None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """silu(gate), or gelu by tanh, * up of a matrix [2n, k], gates first, times x [1, k] as in `project`: [1, n]."""
    if isinstance(gate_up, GroupedMatrix):
        out = x.new_empty(1, len(gate_up.values) // 2)
        grouped_single_triton.project(x, norm, eps, gate_up, bias, out, adds=False, is_gated=True, is_gelu=is_gelu)
        return out
    out = x.new_empty(1, len(_values(gate_up)[0]) // 2)
    block = _block(x.shape[1], _GATED_BLOCK)
    rows = max(1, _TILE // block // 2)
    _launch(_gated, x, norm, eps, gate_up, bias, out, rows, block, is_gelu=is_gelu)
    return out


def project_add_(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
    """Add a matrix [n, k] times x [1, k], plus the bias [n], to residual [1, n], in place."""
    if isinstance(matrix, GroupedMatrix):
        grouped_single_triton.project(x, None, 0.0, matrix, bias, residual, adds=True)
        return
    _multiply(x, None, 0.0, matrix, bias, residual, adds=True)


def _multiply(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    matrix: Matrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    adds: bool,
) -> None:
    size, width = _values(matrix)[0].shape
    block = _block(width, _BLOCK if width >= _LONG_ROW else _LONG_ROW)
    rows = max(1, _TILE // block)
    while rows > 1 and size // rows < 512:
        rows //= 2  # enough programs for every multiprocessor
    _launch(_product, x, norm, eps, matrix, bias, out, rows, block, adds=adds)


def _launch(kernel, x, norm, eps, matrix, bias, out, rows: int, block: int, **more: bool) -> None:
    """One of the kernels below, with programs of so many rows of out [1, n], and row elements at a time."""
    values, scales = _values(matrix)
    size = out.shape[1]
    kernel[(triton.cdiv(size, rows),)](
        x,
        norm,
        values,
        scales,
        bias,
        out,
        size,
        eps,
        width=values.shape[1],
        has_norm=norm is not None,
        has_scales=scales is not None,
        has_bias=bias is not None,
        **more,
        rows=rows,
        block=block,
        num_warps=_WARPS,
        **overlap(x.device),
    )


def _values(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The elements, and the scales of the rows."""
    if isinstance(matrix, torch.Tensor):
        return matrix, None
    assert isinstance(matrix, Fp8Matrix), "packed matrices are a CPU's"
    return matrix.values, matrix.scales


def _block(width: int, most: int) -> int:
    """The largest power of two that divides the width, at most `most`, unless it is too short to read fast."""
    divisor = width & -width
    return min(divisor if divisor >= 512 else triton.next_power_of_2(width), most)


@triton.jit
def row_sums(x, norm, at, is_row, columns, width: tl.constexpr, has_norm: tl.constexpr, overlaps: tl.constexpr):
    """float32: products [rows] of a matrix's rows with x [width], times norm [width] where has_norm, and parts [block]
    of the sum of x's squares. at: pointers [rows, block] to the rows' first columns.

    Waits for the previous kernel after the first load of the matrix."""
    block: tl.constexpr = at.shape[1]
    weights = tl.load(at, mask=is_row[:, None] & (columns < width)[None, :], other=0.0)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros(at.shape, tl.float32)
    squares = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        inputs = tl.load(x + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
        if has_norm:
            squares += inputs * inputs
            inputs *= tl.load(norm + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
        sums += weights.to(tl.float32) * inputs[None, :]
        following = start + block
        weights = tl.load(at + following, mask=is_row[:, None] & (following + columns < width)[None, :], other=0.0)
    return tl.sum(sums, 1), squares


@triton.jit
def _product(
    x,
    norm,
    matrix,
    scales,
    bias,
    out,
    size,
    eps,
    width: tl.constexpr,
    has_norm: tl.constexpr,
    has_scales: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    columns = tl.arange(0, block)
    at = matrix + row.to(tl.int64)[:, None] * width + columns[None, :]
    product, squares = row_sums(x, norm, at, row < size, columns, width, has_norm, overlaps)
    if has_norm:
        product *= 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    if has_scales:
        product *= tl.load(scales + row, mask=row < size, other=0.0)
    if has_bias:
        product += tl.load(bias + row, mask=row < size, other=0.0).to(tl.float32)
    if adds:
        product += tl.load(out + row, mask=row < size, other=0.0).to(tl.float32)
    tl.store(out + row, product.to(out.dtype.element_ty), mask=row < size)


@triton.jit
def _gated(
    x,
    norm,
    matrix,
    scales,
    bias,
    out,
    size,
    eps,
    width: tl.constexpr,
    has_norm: tl.constexpr,
    has_scales: tl.constexpr,
    has_bias: tl.constexpr,
    is_gelu: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    columns = tl.arange(0, block)
    gate_at = matrix + row.to(tl.int64)[:, None] * width + columns[None, :]
    up_at = gate_at + tl.cast(size, tl.int64) * width
    inside = (row < size)[:, None] & (columns < width)[None, :]
    gate_weights = tl.load(gate_at, mask=inside, other=0.0)
    up_weights = tl.load(up_at, mask=inside, other=0.0)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    gates = tl.zeros([rows, block], tl.float32)
    ups = tl.zeros([rows, block], tl.float32)
    squares = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        inputs = tl.load(x + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
        if has_norm:
            squares += inputs * inputs
            inputs *= tl.load(norm + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
        gates += gate_weights.to(tl.float32) * inputs[None, :]
        ups += up_weights.to(tl.float32) * inputs[None, :]
        following = start + block
        inside = (row < size)[:, None] & (following + columns < width)[None, :]
        gate_weights = tl.load(gate_at + following, mask=inside, other=0.0)
        up_weights = tl.load(up_at + following, mask=inside, other=0.0)
    scale = 1.0
    if has_norm:  # before the other sums: behind them, the product took an H200 a quarter longer
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    gate = tl.sum(gates, 1) * scale
    up = tl.sum(ups, 1) * scale
    if has_scales:
        gate *= tl.load(scales + row, mask=row < size, other=0.0)
        up *= tl.load(scales + size + row, mask=row < size, other=0.0)
    if has_bias:
        gate += tl.load(bias + row, mask=row < size, other=0.0).to(tl.float32)
        up += tl.load(bias + size + row, mask=row < size, other=0.0).to(tl.float32)
    tl.store(out + row, (activated(gate, is_gelu) * up).to(out.dtype.element_ty), mask=row < size)
