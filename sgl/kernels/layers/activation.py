"""The gate of a SwiGLU feed-forward layer: plain torch reference, with GPU and CPU twins."""

from __future__ import annotations

import torch
from torch.nn import functional

from sgl.kernels import cpu


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [..., 2n], gate first. Returns a new tensor [..., n]."""
    if gate_up.is_cuda and gate_up.is_contiguous():
        from sgl.kernels.layers import fused_triton

        return fused_triton.silu_and_mul(gate_up)
    if cpu.takes(gate_up) and gate_up.is_contiguous():
        return cpu.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
