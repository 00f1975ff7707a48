"""The Muon optimizer: momentum whose singular values are all brought near one.

Published by Jordan et al. (kellerjordan.github.io/posts/muon, 2024); the scale of an update is that of Liu et al.
(arXiv 2502.16982), which makes AdamW's learning rates fit. Matrices of one shape are updated as one batch: on a small
model, launching kernels matrix by matrix would take longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at zero, so that five steps suffice


class Muon(torch.optim.Optimizer):
    """For matrices of hidden layers. Gradients must be there for all parameters."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                gradients = torch.stack([p.grad for p in parameters])
                state = self.state[parameters[0]]
                if not state:
                    state["momentum"] = torch.zeros_like(gradients)
                velocity = state["momentum"].lerp_(gradients, 1 - group["momentum"])
                update = orthogonalized(gradients.lerp(velocity, group["momentum"]))
                scale = 0.2 * max(shape) ** 0.5 * group["lr"]
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(update.to(gradients.dtype).unbind()), alpha=-scale)


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest matrices with singular values about one, by five Newton-Schulz steps. [n, rows, columns]."""
    a, b, c = QUINTIC
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.mT if is_tall else x
