"""The mixture of experts of DeepSeek's layers: the choice, in plain torch, and the experts' sum."""

from __future__ import annotations

import torch
from torch.nn import functional

from sgl.kernels.layers.activation import silu_and_mul
from sgl.runtime.model.mla.config import Routing
from sgl.runtime.model.mla.weights import Experts


def choose(x: torch.Tensor, experts: Experts, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Of tokens x [T, hidden] the experts, int64 [T, top_k], and their weights, float32 [T, top_k]. In float32."""
    logits = functional.linear(x.float(), experts.router.float())
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
    of_choice = scores if experts.router_bias is None else scores + experts.router_bias
    if routing.num_groups > 1:
        groups = of_choice.view(len(x), routing.num_groups, -1)
        of_group = groups.topk(routing.best_of_group, -1)[0].sum(-1)
        is_best = torch.zeros_like(of_group, dtype=torch.bool)
        is_best.scatter_(1, of_group.topk(routing.top_groups, -1)[1], True)
        of_choice = groups.masked_fill(~is_best[..., None], -torch.inf).flatten(1)
    ids = of_choice.topk(routing.top_k, -1)[1]
    weights = scores.gather(1, ids)
    if routing.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * routing.scale


def mix(x: torch.Tensor, experts: Experts, routing: Routing) -> torch.Tensor:
    """The sum of the experts that each token of x [T, hidden] takes, shared ones included: [T, hidden]."""
    ids, weights = choose(x, experts, routing)
    out = torch.zeros_like(x)
    for expert in torch.unique(ids).tolist():
        tokens, which = (ids == expert).nonzero(as_tuple=True)
        its = functional.linear(_gated(x[tokens], experts, expert), experts.down[expert])
        out.index_add_(0, tokens, (its * weights[tokens, which, None]).to(x.dtype))
    for expert in range(len(experts.router), len(experts.gate_up)):
        out += functional.linear(_gated(x, experts, expert), experts.down[expert])
    return out


def _gated(x: torch.Tensor, experts: Experts, expert: int) -> torch.Tensor:
    return silu_and_mul(functional.linear(x, experts.gate_up[expert]))
