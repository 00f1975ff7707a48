"""A layer's matrix products for a single token, with the norm before them or the sum after them in the same kernel.

At batch 1 a product only reads its matrix, and what lies between two products costs more than it computes. The
plain torch reference; on a GPU Triton twins stream the matrix at the memory's speed.
"""

from __future__ import annotations

import torch

from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.linear import Matrix, linear
from sgl.kernels.layers.norm import rms_norm


def project(
    x: torch.Tensor, norm: torch.Tensor, eps: float, matrix: Matrix, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product of a matrix [n, k] and the normed x [1, k], plus the bias [n]: [1, n]."""
    if x.is_cuda:
        from sgl.kernels.layers import single_triton

        return single_triton.project(x, norm, eps, matrix, bias)
    return linear(rms_norm(x, norm, eps), matrix, bias)


def project_gated(
    x: torch.Tensor, norm: torch.Tensor, eps: float, gate_up: Matrix, bias: torch.Tensor | None
) -> torch.Tensor:
    """silu(gate) * up of the products with a matrix [2n, k], gates first, and the normed x [1, k]: [1, n]."""
    if x.is_cuda:
        from sgl.kernels.layers import single_triton

        return single_triton.project_gated(x, norm, eps, gate_up, bias)
    return silu_and_mul(linear(rms_norm(x, norm, eps), gate_up, bias))


def project_add_(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
    """Add the product of a matrix [n, k] and x [1, k], plus the bias [n], to residual [1, n], in place."""
    if x.is_cuda:
        from sgl.kernels.layers import single_triton

        single_triton.project_add_(x, matrix, bias, residual)
    else:
        residual.add_(linear(x, matrix, bias))
