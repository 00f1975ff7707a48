"""The choice of experts, their blocks of pairs and their gates in Triton, as mixture.py defines them. Imported only
where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from sgl.kernels.moe.experts import MOST_GROUPS, Experts


def rules(experts: Experts) -> dict[str, Any]:
    """The choice as constants of a kernel."""
    assert experts.num_groups <= MOST_GROUPS, "configs with more are refused"
    return {
        "top_k": experts.top_k,
        "normalises": experts.normalises,
        "sigmoid": experts.scores == "sigmoid",
        "has_bias": experts.bias is not None,
        "weight_scale": experts.scale,
        "num_groups": experts.num_groups,
        "top_groups": experts.top_groups,
        "best_of_group": experts.best_of_group,
        "num_experts": experts.num_experts,
        "num_padded": triton.next_power_of_2(experts.num_experts),
    }


def most_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """As many blocks as num_pairs may fill, each of one expert's pairs."""
    most_used = min(num_experts, num_pairs)
    return most_used + (num_pairs - most_used) // block


@triton.jit
def scores_of(logits, index, num_experts: tl.constexpr, sigmoid: tl.constexpr):
    """By which experts `index` are weighted: logits, or their sigmoids; -inf for no number and no expert.

    Read past the L1 cache, in which an older layer's may be: programs may begin before the previous kernel ends."""
    scores = tl.load(logits + index, mask=index < num_experts, other=float("-inf"), cache_modifier=".cg")
    is_number = (scores == scores) & (index < num_experts)
    if sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    return tl.where(is_number, scores, float("-inf"))


@triton.jit
def of_choice(scores, bias, index, num_experts: tl.constexpr, has_bias: tl.constexpr):
    """By which experts are chosen."""
    if has_bias:
        scores += tl.load(bias + index, mask=index < num_experts, other=0.0)
    return scores


@triton.jit
def group_ranks(
    chosen_by,
    num_experts: tl.constexpr,
    num_groups: tl.constexpr,
    best_of_group: tl.constexpr,
    num_padded: tl.constexpr,
):
    """How many groups come before each, [16]; chosen_by: `of_choice` of all experts, [num_padded]."""
    index = tl.arange(0, num_padded)
    places = tl.arange(0, 16)
    of_group = tl.full([16], float("-inf"), tl.float32)
    for group in tl.static_range(num_groups):
        its = tl.where(index // (num_experts // num_groups) == group, chosen_by, float("-inf"))
        best = tl.max(its, 0)
        if best_of_group == 2:
            first = tl.min(tl.where(its == best, index, num_padded), 0)
            best += tl.max(tl.where(index == first, float("-inf"), its), 0)
        of_group = tl.where(places == group, best, of_group)
    theirs, ours = of_group[:, None], of_group[None, :]
    is_before = (theirs > ours) | ((theirs == ours) & (places[:, None] < places[None, :]))
    return tl.sum(is_before.to(tl.int32), 0)


@triton.jit
def within_groups(
    chosen_by, index, ranks, num_experts: tl.constexpr, num_groups: tl.constexpr, top_groups: tl.constexpr
):
    """`of_choice` of experts `index`, -inf outside the best groups by their ranks."""
    is_own = (index // (num_experts // num_groups))[:, None] == tl.arange(0, 16)[None, :]
    rank = tl.sum(tl.where(is_own, ranks[None, :], 0), 1)
    return tl.where(rank < top_groups, chosen_by, float("-inf"))


@triton.jit
def shares_of(scores, sigmoid: tl.constexpr):
    """Weights before they are normalised, and what all of them sum up to; scores: of all experts."""
    if sigmoid:
        shares = tl.where(scores > float("-inf"), scores, 0.0)
        total = 1.0
    else:
        shares = tl.exp(scores - tl.max(scores, 0))
        total = tl.sum(shares, 0)
    return shares, total


@triton.jit
def gated_by(gates, ups, alpha: tl.constexpr, limit: tl.constexpr):
    """silu(gates) * ups, or `activation.clamped_and_mul` with a limit."""
    turned = gates
    if limit is not None:
        gates = tl.minimum(gates, limit)
        ups = tl.minimum(tl.maximum(ups, -limit), limit) + 1.0
        turned = alpha * gates
    return gates / (1.0 + tl.exp(-turned)) * ups


@triton.jit
def find_block(counts, block, num_experts, num_padded: tl.constexpr, block_tokens: tl.constexpr):
    """A block's expert, its first pair among the expert's, how many those are, and how many earlier experts have."""
    index = tl.arange(0, num_padded)
    its = tl.load(counts + index, mask=index < num_experts, other=0)
    blocks = (its + block_tokens - 1) // block_tokens
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    is_before = index < expert
    first = (block - tl.sum(tl.where(is_before, blocks, 0), 0)) * block_tokens
    count = tl.sum(tl.where(index == expert, its, 0), 0)
    return expert, first, count, tl.sum(tl.where(is_before, its, 0), 0)


@triton.jit
def pairs_of(lists, expert, first, count, num_tokens, block_tokens: tl.constexpr):
    """A block's places among its expert's pairs, which of them there are, and the pairs: [block_tokens] each."""
    places = first + tl.arange(0, block_tokens)
    is_pair = places < count
    return places, is_pair, tl.load(lists + expert.to(tl.int64) * num_tokens + places, mask=is_pair, other=0)
