"""Products with weight matrices, plain, in 8 bits, in 4 or 8 bits by groups, packed for a CPU, or invariant.

An 8-bit matrix is e4m3 values with a scale for each row. Inputs are scaled by their largest element and rounded to
e4m3 alike: in plain torch here, on a GPU by a Triton twin and torch's 8-bit product.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.nn import functional

from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.layers.invariant import InvariantMatrix

E4M3_MAX = 448.0
# oneDNN keeps half a megabyte for each combination of matrix shape, rows and threads. The number of rows is
# therefore rounded up where that costs little, and large products are cut.
_STEPS = (1, 2, 2, 2, 2, 4, 4, 8, 32, 64)  # what 1, 2, up to 4, up to 8, ... up to 512 rows are rounded up to
_PARTS = (512,)  # rows of a product's parts except the last; more are hardly faster
_RARE_PARTS = (512, 64)  # with one of several threads, which is rare for many rows: up to a fifth slower
_HAS_THREADS = torch.get_num_threads() > 1
MOST_PLAIN = 1 << 17  # elements of a packed matrix that is also kept plain
_MANY_ROWS = 1024  # that are worth a dequantised copy of a matrix in groups
_LEAST_SCALE = 1e-12  # of a row of zeros


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [n, k]: each row is its e4m3 values times its scale."""

    values: torch.Tensor  # float8_e4m3fn [n, k]
    scales: torch.Tensor  # float32 [n, 1]

    @staticmethod
    def of(matrix: torch.Tensor) -> Fp8Matrix:
        """Round a matrix [n, k]."""
        return Fp8Matrix(*quantize_rows(matrix))


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [n, k] in oneDNN's blocks. A plain float32 product reorders its matrix each time: on an EPYC
    (AVX-512) 32 rows take 2 to 2.5 times as long, one row up to twice. But oneDNN needs at least 10 µs even for one
    row or a small matrix."""

    values: torch.Tensor  # opaque to all but `linear`
    plain: torch.Tensor | None  # [n, k] if small, for single rows

    @staticmethod
    def can_hold(matrix: torch.Tensor) -> bool:
        """Whether oneDNN supports such matrices here."""
        if matrix.is_cuda or platform.machine() not in ("x86_64", "AMD64") or not torch._C._has_mkldnn:
            return False
        is_bf16 = matrix.dtype == torch.bfloat16
        return matrix.dtype == torch.float32 or (is_bf16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    @staticmethod
    def of(matrix: torch.Tensor) -> PackedMatrix:
        """Pack a matrix [n, k] without loss."""
        is_kept = matrix.dtype == torch.float32 and matrix.numel() <= MOST_PLAIN
        return PackedMatrix(torch.ops.mkldnn._reorder_linear_weight(matrix, None), matrix if is_kept else None)


Matrix = torch.Tensor | Fp8Matrix | PackedMatrix | GroupedMatrix | InvariantMatrix


def linear(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] times the matrix [n, k], plus the bias [n]: [T, n] in x's dtype."""
    if isinstance(matrix, torch.Tensor):
        return functional.linear(x, matrix, bias)
    if isinstance(matrix, PackedMatrix):
        if len(x) == 1 and matrix.plain is not None:
            return functional.linear(x, matrix.plain, bias)
        num_rows = len(x)
        if num_rows > _RARE_PARTS[-1] and len(parts := _parts(num_rows)) > 1:
            return torch.cat([linear(part, matrix, bias) for part in torch.split(x, parts)])
        num_padding = _rounded(num_rows) - num_rows
        padded = functional.pad(x, (0, 0, 0, num_padding)) if num_padding else x
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, matrix.values, bias, "none", [], "")
        return product[:num_rows]
    if isinstance(matrix, GroupedMatrix):
        return _grouped(x, matrix, bias)
    if isinstance(matrix, InvariantMatrix):
        return matrix.times(x, bias)
    values, scales = quantize_rows(x)
    if x.is_cuda:
        return torch._scaled_mm(
            values,
            matrix.values.t(),
            scale_a=scales,
            scale_b=matrix.scales.t(),
            bias=bias,
            out_dtype=x.dtype,
        )
    wide = functional.linear(values.float(), matrix.values.float()) * scales * matrix.scales.t()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def _grouped(x: torch.Tensor, matrix: GroupedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    if not x.is_cuda:
        return functional.linear(x, matrix.dequantized(x.dtype), bias)
    if len(x) > 1 and matrix.of_several is not None:
        product = matrix.of_several(x)
        return product if bias is None else product.add_(bias)
    from sgl.kernels.layers import grouped_triton

    if len(x) < _MANY_ROWS:
        return grouped_triton.linear(x, matrix, bias)
    return functional.linear(x, grouped_triton.dequantized(matrix, x.dtype), bias)


def _rounded(num_rows: int) -> int:
    step = _STEPS[(num_rows - 1).bit_length()]
    return -(-num_rows // step) * step


def _parts(num_rows: int) -> list[int]:
    parts = []
    for size in _RARE_PARTS if _HAS_THREADS and torch.get_num_threads() == 1 else _PARTS:
        parts += [size] * (num_rows // size)
        num_rows %= size
    return [*parts, num_rows] if num_rows else parts


def prepare(matrix: Matrix, bias: torch.Tensor | None, most_rows: int) -> None:
    """Run the products of up to most_rows with the present number of threads, so that oneDNN allocates now."""
    if isinstance(matrix, PackedMatrix):
        _, width = matrix.values.shape
        for num_rows in sorted({_rounded(its) for its in range(1, min(most_rows, _PARTS[0]) + 1)}):
            linear(torch.zeros(num_rows, width, dtype=matrix.values.dtype), matrix, bias)


def linear_add(
    x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, residual: torch.Tensor, *, captured: bool
) -> torch.Tensor | None:
    """Add `linear` to residual [T, n] in place as far as possible; returns the rest, for `norm.add_rms_norm`.

    On a GPU in 16 bits nothing is left. In captured steps it may be float32 [parts, T, n] to sum, where that is
    faster; its kernel costs more to launch. Both round once, after the sum.
    """
    if x.is_cuda and x.dtype.itemsize == 2 and isinstance(matrix, torch.Tensor):
        if captured:
            from sgl.kernels.layers import few_triton, parts_triton

            of = x, matrix, bias, _num_processors(x.device)
            parts = few_triton.linear_parts(*of)
            parts = parts_triton.linear_parts(*of) if parts is None else parts
            if parts is not None:
                return parts
        if bias is None:
            torch.addmm(residual, x, matrix.t(), out=residual)
            return None
    if x.is_cuda and captured and isinstance(matrix, GroupedMatrix) and matrix.of_several is None:
        from sgl.kernels.layers import grouped_triton

        parts = grouped_triton.linear_parts(x, matrix, bias, _num_processors(x.device))
        if parts is not None:
            return parts
    return linear(x, matrix, bias)


def linear_overlapped(
    x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, *, has_parts: bool = False
) -> torch.Tensor | None:
    """`linear` for captured steps, by a kernel that later ones may overlap with, unlike torch's; None where torch's
    is faster. has_parts: it may be float32 [parts, T, n] to sum."""
    if not _is_overlapped(matrix, x):
        return None
    from sgl.kernels.layers import few_triton, parts_triton

    of = x, matrix, bias, _num_processors(x.device)
    whole = parts_triton.linear_whole(*of)
    return few_triton.linear_parts(*of) if whole is None and has_parts else whole


def gated_overlapped(
    x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, *, is_gelu: bool
) -> torch.Tensor | None:
    """`activation.silu_and_mul`, or `gelu_and_mul`, of `linear` in one kernel, otherwise as `linear_overlapped`."""
    if bias is not None or not _is_overlapped(matrix, x):
        return None
    from sgl.kernels.layers import few_triton

    return few_triton.gated(x, matrix, _num_processors(x.device), is_gelu=is_gelu)


def launches_overlap(device: torch.device) -> bool:
    """Whether a kernel can start there while previous ones run."""
    if device.type != "cuda":
        return False
    from sgl.kernels.layers import fused_triton

    return bool(fused_triton.overlap(device)["overlaps"])


def _is_overlapped(matrix: Matrix, x: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether there are kernels for it that others overlap with."""
    return launches_overlap(x.device) and x.dtype.itemsize == 2 and isinstance(matrix, torch.Tensor)


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows of x [n, k] to float8_e4m3fn [n, k], with their scales, float32 [n, 1]."""
    if x.is_cuda and x.is_contiguous():
        from sgl.kernels.layers import fused_triton

        return fused_triton.quantize_rows(x)
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_(min=_LEAST_SCALE)
    return (wide / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales
