"""A layer's matrix products for a single token, fused with the norm before or the sum after.

At batch 1 a product is bound by reading its matrix, and launches between products cost more than they compute. The
plain torch reference; Triton twins stream the matrix at memory speed.
"""

from __future__ import annotations

import torch

from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.linear import Matrix, linear
from sgl.kernels.layers.norm import rms_norm


def project(
    x: torch.Tensor, norm: torch.Tensor, eps: float, matrix: Matrix, bias: torch.Tensor | None
) -> torch.Tensor:
    """A matrix [n, k] times the normed x [1, k], plus the bias [n]: [1, n]."""
    if x.is_cuda:
        from sgl.kernels.layers import single_triton

        return single_triton.project(x, norm, eps, matrix, bias)
    return linear(rms_norm(x, norm, eps), matrix, bias)


def project_gated(
    x: torch.Tensor, norm: torch.Tensor, eps: float, gate_up: Matrix, bias: torch.Tensor | None
) -> torch.Tensor:
    """silu(gate) * up of a matrix [2n, k], gates first, times the normed x [1, k]: [1, n]."""
    if x.is_cuda:
        from sgl.kernels.layers import single_triton

        return single_triton.project_gated(x, norm, eps, gate_up, bias)
    return silu_and_mul(linear(rms_norm(x, norm, eps), gate_up, bias))


def project_add_(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
    """Add a matrix [n, k] times x [1, k], plus the bias [n], to residual [1, n], in place."""
    if x.is_cuda:
        from sgl.kernels.layers import single_triton

        single_triton.project_add_(x, matrix, bias, residual)
    else:
        residual.add_(linear(x, matrix, bias))
