"""The weights of a layer's mixture of experts, as its kernels take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from sgl.kernels.layers.invariant import InvariantExperts, InvariantMatrix
from sgl.kernels.moe.packed import ExpertMatrices

MOST_GROUPS = 16


class _Counter:
    """What kernels keep beside the weights."""

    __slots__ = ("scored",)
    scored: torch.Tensor  # int32 [1]: programs that have scored, 0 between launches


@dataclass(frozen=True, slots=True)
class Experts(_Counter):
    """A layer's experts, or a rank's columns of them, and their router. Gated by silu, or as `clamped` says."""

    router: (
        torch.Tensor | InvariantMatrix
    )  # [num_experts, hidden]; one row more, if there is one, is the gate of a shared expert
    gate_up: ExpertMatrices  # [num_experts + num_shared, 2 * intermediate, hidden], gates first
    down: ExpertMatrices  # [num_experts + num_shared, hidden, intermediate]
    top_k: int  # experts that a token chooses
    normalises: bool  # weights of a token's chosen experts, to a sum of one
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits: the weights
    scale: float = 1.0  # of the weights
    bias: torch.Tensor | None = None  # float32 [num_experts], added to sigmoid scores for the choice alone
    num_groups: int = 1  # of neighbouring experts, at most MOST_GROUPS, of which
    top_groups: int = 1  # so many are chosen first, and experts within these,
    best_of_group: Literal[1, 2] = 1  # by the sum of so many best scores
    num_shared: int = 0  # experts of every token, without weights, behind the others
    router_bias: torch.Tensor | None = None  # [num_experts]; all biases or none
    gate_up_bias: torch.Tensor | None = None  # [num_experts, 2 * intermediate]
    down_bias: torch.Tensor | None = None  # [num_experts, hidden]
    clamped: tuple[float, float] | None = None
    """See `activation.clamped_and_mul`."""
    is_invariant: bool = False
    """Whether a token's result has the same bits among any others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scored", torch.zeros(1, dtype=torch.int32, device=self.router.device))

    @property
    def is_packed(self) -> bool:
        """Whether a matrix of theirs is."""
        return not (isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor))

    @property
    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up and down, none of which is packed."""
        assert isinstance(self.gate_up, torch.Tensor)
        assert isinstance(self.down, torch.Tensor)
        return self.gate_up, self.down

    def invariant(self) -> Experts:
        """The same experts, so."""
        if self.is_invariant:
            return self
        if self.router.device.type == "cuda":
            return replace(self, is_invariant=True)
        gate_up, down = map(InvariantExperts.of, self.unpacked)
        router = InvariantMatrix.of(self.plain_router)
        return replace(self, router=router, gate_up=gate_up, down=down, is_invariant=True)

    def plain(self) -> Experts:
        """The same experts, whose matrices are tensors: on a GPU these themselves, on a CPU copies."""
        router = self.router.plain() if isinstance(self.router, InvariantMatrix) else self.router
        gate_up, down = (
            its.plain() if isinstance(its, InvariantExperts) else its for its in (self.gate_up, self.down)
        )
        return replace(self, router=router, gate_up=gate_up, down=down, is_invariant=False)

    @property
    def plain_router(self) -> torch.Tensor:
        """The router, which is not invariant on a CPU."""
        assert isinstance(self.router, torch.Tensor)
        return self.router

    @property
    def num_experts(self) -> int:
        """That are chosen among."""
        return len(self.down) - self.num_shared

    @property
    def num_used(self) -> int:
        """Experts of a token."""
        return self.top_k + self.num_shared

    @property
    def has_gate(self) -> bool:
        """Whether a shared expert is added with the sigmoid of its gate, not as it is."""
        return len(self.router) > self.num_experts

    @property
    def num_multiplied(self) -> int:
        """Elements of the matrices that a token is multiplied with."""
        return self.router.numel() + (self.gate_up.numel() + self.down.numel()) * self.num_used // len(self.down)
