"""RMS normalisation, alone and fused with the residual addition before it.

The plain torch reference equals transformers' modules bit for bit; GPUs have Triton twins, CPUs compiled ones
(cpu.py).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sgl.kernels import cpu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, is_invariant: bool = False) -> torch.Tensor:
    """Normalise the last dimension of x [..., n] to a root mean square of 1, then scale by weight.

    weight: [n], or anything that broadcasts against x, such as [heads, n]. The mean is in float32; x is rounded to the
    weight's dtype before scaling. is_invariant: see `add_rms_norm`. Returns a new tensor of x's shape and dtype.
    """
    if x.is_cuda and weight.dim() == 1 and x.is_contiguous():
        from sgl.kernels.layers import fused_triton

        return fused_triton.rms_norm(x, weight, eps, is_invariant=is_invariant)
    if weight.dim() == 1 and cpu.takes(x, weight):
        return cpu.rms_norm(x, weight, eps)
    if x.dtype == torch.float32:
        width = x.shape[-1:]
        if weight.dim() == 1:
            return functional.rms_norm(x, width, weight, eps)
        return functional.rms_norm(x, width, None, eps).mul_(weight)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide.mul_(scale).to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    before: torch.Tensor | None = None,
    *,
    is_invariant: bool = False,
) -> torch.Tensor:
    """Add x to residual in place, and return the normalised sum; x, residual: [..., n], contiguous.

    x may also be [parts, ..., n] to sum, as float32 of `linear.linear_add`, or None. weight: None returns the residual.
    before: the weight of a norm of x, [..., n], before it is added. is_invariant: a row's sums have the same order
    among any others; on a CPU they always do.
    """
    if x is None:
        return residual if weight is None else rms_norm(residual, weight, eps, is_invariant=is_invariant)
    if x.is_cuda:
        from sgl.kernels.layers import fused_triton

        return fused_triton.add_rms_norm(x, residual, weight, eps, before, is_invariant=is_invariant)
    if before is not None:
        x = rms_norm(x, before, eps)
    if weight is None:
        return residual.add_(x if x.dim() == residual.dim() else x.sum(0))
    if cpu.takes(x, residual, weight) and residual.is_contiguous():
        return cpu.add_rms_norm(x, residual, weight, eps)
    residual.add_(x if x.dim() == residual.dim() else x.sum(0))
    return rms_norm(residual, weight, eps)


def norm_parts_(x: torch.Tensor, weight: torch.Tensor, sizes: tuple[int, int], eps: float) -> None:
    """`rms_norm` of the first columns of x [T, n], and of the next ones, so many each, in place. weight: of both."""
    if x.is_cuda and x.is_contiguous():
        from sgl.kernels.layers import fused_triton

        return fused_triton.norm_parts_(x, weight, sizes, eps)
    parts = torch.split(x[:, : sum(sizes)], list(sizes), -1), torch.split(weight, list(sizes))
    for part, its in zip(*parts, strict=True):
        part.copy_(rms_norm(part, its, eps))
    return None
