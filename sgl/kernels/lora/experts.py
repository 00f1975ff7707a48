"""Low-rank adapters of a layer's experts, as `ops` has them for products: each pair of a token and an expert that it
chose has the A and B of its adapter and expert.

A pair is slot * T + token, slot its place among the token's experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sgl.kernels.lora.ops import expand_, shrink
from sgl.kernels.lora.rows import AdapterRows


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """Those of T tokens, some of which have one. Matrices of all slots and experts; B is scaled."""

    rows: AdapterRows  # of the tokens
    gate_up: tuple[torch.Tensor, torch.Tensor]  # A [slots, experts, 2 * rank, hidden], B [slots, experts, 2n, rank]
    down: tuple[torch.Tensor, torch.Tensor]  # A [slots, experts, rank, n], B [slots, experts, hidden, rank]

    def pairs(self, ids: torch.Tensor) -> AdapterRows:
        """Of tokens that chose experts ids [T, num_used]."""
        num_slots, num_experts = self.down[0].shape[:2]
        return self.rows.of_experts(ids, num_slots, num_experts)

    def added(self, x: torch.Tensor, pairs: AdapterRows) -> torch.Tensor:
        """What is added to the pairs' gates and ups of x [T, hidden]: [num_used * T, 2n] in x's dtype."""
        a, b = self.gate_up
        out = x.new_zeros(len(pairs.order), b.shape[2])
        of_tokens = replace(pairs, order=pairs.order % len(x))
        expand_(shrink(x, a, of_tokens, 2), b, out, pairs, (b.shape[2] // 2,) * 2)
        return out

    def add_down_(self, gated: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, pairs: AdapterRows) -> None:
        """Add what gated pairs [num_used * T, n] become, times float32 weights [T, num_used], to out
        [num_used * T, hidden]."""
        a, b = self.down
        shrunk = shrink(gated, a, pairs, 1)
        shrunk = shrunk * weights.T.flatten()[pairs.order].unsqueeze(1).to(shrunk.dtype)
        expand_(shrunk, b, out, pairs, (b.shape[2],))
