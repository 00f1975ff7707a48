"""The mixture of experts of a feed-forward layer: plain torch, which defines it and serves CPUs, and its Triton twin.

A router scores the experts for each token. The best ones compute it, each as a gated feed-forward network of its own,
and their results are added with the weights of the router.
"""

from __future__ import annotations

import torch

from sgl.kernels.layers.activation import clamped_and_mul, silu_and_mul
from sgl.kernels.layers.linear import linear
from sgl.kernels.lora.experts import ExpertAdapters
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.packed import matrix_of

LEAST_SUM = 1e-20  # of weights that are normalised, as DeepSeek adds it


def mixture(
    x: torch.Tensor, experts: Experts, shared: torch.Tensor | None = None, adapters: ExpertAdapters | None = None
) -> torch.Tensor:
    """The sum of what the experts make of x [T, hidden], in x's dtype: [T, hidden], or [parts, T, hidden] to sum.

    shared: what an expert for all tokens makes of x, [T, hidden], added with the sigmoid of its gate if it has one.
    adapters: of the experts, and of some tokens. Nothing waits for a GPU, and all shapes follow from T.
    """
    if x.is_cuda:
        from sgl.kernels.moe import grouped_triton

        return grouped_triton.mixture(x, experts, shared, adapters=adapters)
    logits = linear(x, experts.router, experts.router_bias).float()
    num_experts = experts.num_experts
    weights, ids = route(logits[:, :num_experts], experts)
    out = summed(x, experts, weights, ids, adapters)
    if shared is not None:
        out += shared * logits[:, num_experts:].sigmoid() if experts.has_gate else shared
    return out.to(x.dtype)


def route(logits: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """The best experts by float32 logits [T, num_experts], best first, then the shared ones: float32 weights and int64
    ids [T, num_used]."""
    scores = logits.sigmoid() if experts.scores == "sigmoid" else logits.softmax(-1)
    of_choice = scores if experts.bias is None else scores + experts.bias
    if experts.num_groups > 1:
        groups = of_choice.view(len(logits), experts.num_groups, -1)
        of_group = groups.topk(experts.best_of_group, -1)[0].sum(-1)
        is_best = torch.zeros_like(of_group, dtype=torch.bool)
        is_best.scatter_(1, of_group.topk(experts.top_groups, -1)[1], True)
        of_choice = groups.masked_fill(~is_best[..., None], -torch.inf).flatten(1)
    ids = of_choice.topk(experts.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if experts.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    if experts.scale != 1.0:
        weights = weights * experts.scale
    if not experts.num_shared:
        return weights, ids
    shared = torch.arange(experts.num_experts, len(experts.down), device=ids.device).expand(len(ids), -1)
    return torch.cat((weights, torch.ones_like(shared, dtype=weights.dtype)), 1), torch.cat((ids, shared), 1)


def summed(
    x: torch.Tensor,
    experts: Experts,
    weights: torch.Tensor,
    ids: torch.Tensor,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """float32 [T, hidden] of x [T, hidden] and `route`'s weights and ids, [T, num_used]. adapters: see `mixture`.

    Each expert computes its tokens at once; experts without tokens cost nothing."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat = ids.flatten()
    pairs = flat.argsort(stable=True)
    tokens, scales = pairs // ids.shape[1], weights.flatten()[pairs].unsqueeze(1)
    if adapters is not None:
        adapted, numbers = adapters.pairs(ids), pairs % ids.shape[1] * len(x) + tokens
        added, kept = adapters.added(x, adapted), x.new_empty(len(pairs), experts.down.shape[2])
    counts = torch.bincount(flat, minlength=len(experts.down)).tolist()
    end = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        start, end = end, end + count
        its = tokens[start:end]
        biases = experts.gate_up_bias, experts.down_bias
        before, after = (None if bias is None else bias[expert] for bias in biases)
        product = linear(x[its], matrix_of(experts.gate_up, expert, x.dtype), before)
        if adapters is not None:
            product += added[numbers[start:end]]
        gated = silu_and_mul(product) if experts.clamped is None else clamped_and_mul(product, *experts.clamped)
        if adapters is not None:
            kept[numbers[start:end]] = gated
        product = linear(gated, matrix_of(experts.down, expert, x.dtype), after)
        out.index_add_(0, its, product.float() * scales[start:end])
    if adapters is not None:
        more = x.new_zeros(len(pairs), x.shape[1])
        adapters.add_down_(kept, weights, more, adapted)
        out += more.view(-1, *x.shape).float().sum(0)
    return out
