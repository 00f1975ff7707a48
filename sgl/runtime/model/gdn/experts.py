"""The sparse MLP of a hybrid: experts that a router chooses, and one that all tokens take."""

from __future__ import annotations

import torch
from torch.nn import functional

from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.linear import linear
from sgl.runtime.model.gdn.config import ExpertsConfig
from sgl.runtime.model.gdn.weights import SparseWeights


def sparse_mlp(x: torch.Tensor, layer: SparseWeights, config: ExpertsConfig) -> torch.Tensor:
    """[T, hidden] of x [T, hidden]."""
    scores = functional.linear(x, layer.router).softmax(-1, dtype=torch.float32)
    weights, chosen = scores.topk(config.num_chosen, dim=-1)
    if config.is_normed:
        weights = weights / weights.sum(-1, keepdim=True)
    routed = experts(x, layer.gate_up, layer.down, weights.to(x.dtype), chosen)
    shared = linear(silu_and_mul(linear(x, layer.shared.gate_up, None)), layer.shared.down, None)
    return routed + functional.linear(x, layer.shared_gate).sigmoid() * shared


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """The sum over the chosen experts of each token, [T, hidden], one expert after the other."""
    out = torch.zeros_like(x)
    for expert in torch.bincount(chosen.flatten()).nonzero()[:, 0].tolist():
        tokens, which = (chosen == expert).nonzero(as_tuple=True)
        y = linear(silu_and_mul(linear(x[tokens], gate_up[expert], None)), down[expert], None)
        out.index_add_(0, tokens, y * weights[tokens, which, None])
    return out
