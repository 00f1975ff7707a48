"""The weights of a layer's mixture of experts, as its kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's experts, or a rank's columns of them, and their router. Gated by silu, without biases."""

    router: torch.Tensor  # [num_experts, hidden]; one row more, if there is one, is the gate of a shared expert
    gate_up: torch.Tensor  # [num_experts, 2 * intermediate, hidden], gates first
    down: torch.Tensor  # [num_experts, hidden, intermediate]
    top_k: int  # experts of a token
    normalises: bool  # weights of a token's experts, to a sum of one

    @property
    def has_gate(self) -> bool:
        """Whether a shared expert is added with the sigmoid of its gate, not as it is."""
        return len(self.router) > len(self.down)

    @property
    def num_multiplied(self) -> int:
        """Elements of the matrices that a token is multiplied with."""
        return self.router.numel() + (self.gate_up.numel() + self.down.numel()) * self.top_k // len(self.down)
