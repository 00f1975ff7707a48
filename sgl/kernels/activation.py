"""The gate of a SwiGLU feed-forward layer. The plain torch reference; faster twins keep the signature."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [..., 2n], gate in the first half. Returns a new tensor [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
