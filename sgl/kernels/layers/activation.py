"""The gate of a SwiGLU or GeGLU feed-forward layer, and the soft cap of logits: plain torch reference, with GPU and CPU
twins."""

from __future__ import annotations

import torch
from torch.nn import functional

from sgl.kernels import cpu


def silu_and_mul(gate_up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up for gate_up [..., 2n], gate first. Returns a new tensor [..., n]. added: to gate_up before."""
    if gate_up.is_cuda and gate_up.is_contiguous():
        from sgl.kernels.layers import fused_triton

        return fused_triton.silu_and_mul(gate_up, added)
    if added is not None:
        gate_up = gate_up + added
    if cpu.takes(gate_up) and gate_up.is_contiguous():
        return cpu.gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, by tanh, as `silu_and_mul`."""
    if gate_up.is_cuda and gate_up.is_contiguous():
        from sgl.kernels.layers import fused_triton

        return fused_triton.silu_and_mul(gate_up, is_gelu=True)
    if cpu.takes(gate_up) and gate_up.is_contiguous():
        return cpu.gate(gate_up, is_gelu=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def cap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of float32 x, in place."""
    if x.is_cuda and x.is_contiguous():
        from sgl.kernels.layers import fused_triton

        return fused_triton.cap_(x, cap)
    if cpu.takes(x) and x.is_contiguous():
        return cpu.cap_(x, cap)
    return x.div_(cap).tanh_().mul_(cap)


def clamped_and_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1) for gate_up [..., 2n], gates first, gates of at most `limit` and ups
    within it: [..., n]."""
    if cpu.takes(gate_up) and gate_up.is_contiguous():
        return cpu.gate(gate_up, clamped=(alpha, limit))
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)
