"""A mixture of experts for a single token in Triton, fused with the norm before and the sum after.

At batch 1 the chosen experts' weights are streamed past the one token, as layers/single_triton.py does with matrices of
all tokens, in three launches. The first scores the experts; its program that ends last chooses among them, so that
those of the two products only look up which rows they read: each reads a few and ends, and others take its place,
which keeps loads in flight. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels.layers.fused_triton import overlap
from sgl.kernels.layers.linear import Matrix
from sgl.kernels.layers.single_triton import project_add_, project_gated, row_sums
from sgl.kernels.moe import packed_single_triton
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.packed import PackedExperts
from sgl.kernels.moe.route_triton import (
    gated_by,
    group_ranks,
    of_choice,
    rules,
    scores_of,
    shares_of,
    within_groups,
)

_RANKED = 128  # scores that others are compared to at a time
_LEAST_BLOCK = 256
_UNROLLED = 4  # blocks of a row, at most


class Shape(NamedTuple):
    """A program's rows of the result, at most so many elements of a row at a time, its warps."""

    rows: int
    block: int
    warps: int


class Cut(NamedTuple):
    """The shapes of the three products."""

    router: Shape
    gate_up: Shape  # rows: of as many gates and as many ups
    down: Shape  # rows: of each expert


CUT = Cut(Shape(1, 2048, 4), Shape(4, 256, 2), Shape(8, 256, 4))


def cut_of(experts: Experts) -> Cut:
    """CUT, in powers of two that divide the rows of these experts, unless they were too short to read fast."""

    def fitted(shape: Shape, width: int) -> Shape:
        divisor = width & -width
        block = divisor if divisor >= _LEAST_BLOCK else triton.next_power_of_2(width)
        return shape._replace(block=min(block, shape.block))

    hidden, size = experts.down.shape[1:]
    return Cut(fitted(CUT.router, hidden), fitted(CUT.gate_up, hidden), fitted(CUT.down, size))


class Chosen(NamedTuple):
    """What a token's experts get, and which they are."""

    x: torch.Tensor  # [1, hidden], normed
    logits: torch.Tensor  # float32 [rows of the router]
    ids: torch.Tensor  # int32 [num_used]
    shares: torch.Tensor  # float32 [num_used]


def mixture_add_(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    experts: Experts,
    shared: tuple[Matrix, Matrix] | None,
    residual: torch.Tensor,
    cut: Cut | None = None,
) -> None:
    """Add `mixture` of x [1, hidden], normed first where a norm [hidden] is given, to residual [1, hidden], in place.

    shared: gate_up and down of an expert for all tokens. x may be the residual itself.
    cut: if not `cut_of`."""
    cut = cut or cut_of(experts)
    chosen = choose(x, norm, eps, experts, cut.router)
    of_shared = None
    if shared is not None:
        of_shared = project_gated(chosen.x, None, eps, shared[0], None)
        if experts.has_gate:
            of_shared *= chosen.logits[experts.num_experts :].sigmoid()
    add_down_(gated_experts(chosen, experts, cut.gate_up), chosen, experts, residual, cut.down)
    if shared is not None and of_shared is not None:
        project_add_(of_shared, shared[1], None, residual)


def choose(x: torch.Tensor, norm: torch.Tensor | None, eps: float, experts: Experts, shape: Shape) -> Chosen:
    """The experts of x [1, hidden], normed first where a norm [hidden] is given."""
    size, width = experts.plain_router.shape
    normed = x if norm is None else torch.empty_like(x)
    logits, shares = (
        torch.empty(count, dtype=torch.float32, device=x.device) for count in (size, experts.num_used)
    )
    ids = torch.empty(experts.num_used, dtype=torch.int32, device=x.device)
    num_programs = triton.cdiv(size, shape.rows)
    _choose[(num_programs,)](
        x,
        norm,
        experts.router,
        experts.router_bias,
        experts.bias,
        experts.scored,
        normed,
        logits,
        ids,
        shares,
        size,
        eps,
        width=width,
        own=triton.next_power_of_2(triton.cdiv(width, num_programs)),
        has_norm=norm is not None,
        has_router_bias=experts.router_bias is not None,
        num_used=experts.num_used,
        num_slots=triton.next_power_of_2(experts.num_used),
        **rules(experts),
        ranked=min(_RANKED, triton.next_power_of_2(experts.num_experts)),
        rows=shape.rows,
        block=shape.block,
        num_warps=shape.warps,
        **overlap(x.device),
    )
    return Chosen(normed, logits, ids, shares)


def gated_experts(chosen: Chosen, experts: Experts, shape: Shape) -> torch.Tensor:
    """[num_used, intermediate] in x's dtype: silu(gate) * up, or as `clamped` says, of a token's experts."""
    if isinstance(experts.gate_up, PackedExperts):
        return packed_single_triton.gated_experts(chosen.x, chosen.ids, experts, experts.gate_up)
    _, size, width = experts.gate_up.shape
    size //= 2
    out = chosen.x.new_empty(experts.num_used, size)
    alpha, limit = experts.clamped or (None, None)
    _gated[triton.cdiv(size, shape.rows), experts.num_used](
        chosen.x,
        chosen.ids,
        experts.gate_up,
        experts.gate_up_bias,
        out,
        size,
        alpha=alpha,
        limit=limit,
        has_bias=experts.gate_up_bias is not None,
        width=width,
        rows=shape.rows,
        block=shape.block,
        num_warps=shape.warps,
        **overlap(out.device),
    )
    return out


def add_down_(gated: torch.Tensor, chosen: Chosen, experts: Experts, residual: torch.Tensor, shape: Shape) -> None:
    """Add the products of a token's experts with gated [num_used, intermediate] to residual [1, hidden]."""
    if isinstance(experts.down, PackedExperts):
        ids, shares = chosen.ids, chosen.shares
        packed_single_triton.add_down_(gated, ids, shares, experts, experts.down, residual)
        return
    _, size, width = experts.down.shape
    _down[(triton.cdiv(size, shape.rows),)](
        gated,
        chosen.ids,
        chosen.shares,
        experts.down,
        experts.down_bias,
        residual,
        size,
        has_bias=experts.down_bias is not None,
        width=width,
        num_used=experts.num_used,
        num_slots=triton.next_power_of_2(experts.num_used),
        unrolled=min(_UNROLLED, triton.cdiv(width, shape.block)),
        rows=shape.rows,
        block=shape.block,
        num_warps=shape.warps,
        **overlap(gated.device),
    )


@triton.jit
def _ranks(
    logits,
    bias,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
    num_groups: tl.constexpr,
    top_groups: tl.constexpr,
    best_of_group: tl.constexpr,
    num_experts: tl.constexpr,
    num_padded: tl.constexpr,
    ranked: tl.constexpr,
):
    """Scores [num_padded], and how many come before each; equal ones in their order. No rank comes twice."""
    index = tl.arange(0, num_padded)
    scores = scores_of(logits, index, num_experts, sigmoid)
    ours = of_choice(scores, bias, index, num_experts, has_bias)
    if num_groups > 1:
        of_groups = group_ranks(ours, num_experts, num_groups, best_of_group, num_padded)
        ours = within_groups(ours, index, of_groups, num_experts, num_groups, top_groups)
    ranks = tl.zeros([num_padded], tl.int32)
    for start in range(0, num_padded, ranked):
        others = start + tl.arange(0, ranked)
        their = of_choice(scores_of(logits, others, num_experts, sigmoid), bias, others, num_experts, has_bias)
        if num_groups > 1:
            their = within_groups(their, others, of_groups, num_experts, num_groups, top_groups)
        their = their[:, None]
        is_before = (their > ours[None, :]) | ((their == ours[None, :]) & (others[:, None] < index[None, :]))
        ranks += tl.sum(is_before.to(tl.int32), 0)
    return scores, ranks


@triton.jit
def _choose(
    x,
    norm,
    matrix,
    router_bias,
    bias,
    scored,
    normed,
    logits,
    ids,
    shares,
    size,
    eps,
    width: tl.constexpr,
    own: tl.constexpr,
    has_norm: tl.constexpr,
    has_router_bias: tl.constexpr,
    num_used: tl.constexpr,
    num_slots: tl.constexpr,
    top_k: tl.constexpr,
    normalises: tl.constexpr,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
    weight_scale: tl.constexpr,
    num_groups: tl.constexpr,
    top_groups: tl.constexpr,
    best_of_group: tl.constexpr,
    num_experts: tl.constexpr,
    num_padded: tl.constexpr,
    ranked: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    columns = tl.arange(0, block)
    at = matrix + row[:, None] * width + columns[None, :]
    product, squares = row_sums(x, norm, at, row < size, columns, width, has_norm, overlaps)
    if has_norm:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
        product *= scale
        its = tl.program_id(0) * own + tl.arange(0, own)
        inputs = tl.load(x + its, mask=its < width, other=0.0).to(tl.float32) * scale
        inputs *= tl.load(norm + its, mask=its < width, other=0.0).to(tl.float32)
        tl.store(normed + its, inputs.to(normed.dtype.element_ty), mask=its < width)
    if has_router_bias:
        product += tl.load(router_bias + row, mask=row < size, other=0.0).to(tl.float32)
    tl.store(logits + row, product, mask=row < size)
    tl.debug_barrier()  # all threads' scores are stored before this program is counted
    if tl.atomic_add(scored, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        scores, ranks = _ranks(
            logits, bias, sigmoid, has_bias, num_groups, top_groups, best_of_group, num_experts, num_padded, ranked
        )
        its_shares, total = shares_of(scores, sigmoid)
        is_chosen = ranks < top_k
        if normalises:
            total = tl.sum(tl.where(is_chosen, its_shares, 0.0), 0) + (1e-20 if sigmoid else 0.0)
        tl.store(ids + ranks, tl.arange(0, num_padded), mask=is_chosen)
        tl.store(shares + ranks, its_shares / total * weight_scale, mask=is_chosen)
        if num_used > top_k:
            slots = tl.arange(0, num_slots)
            is_shared = (slots >= top_k) & (slots < num_used)
            tl.store(ids + slots, num_experts + slots - top_k, mask=is_shared)
            tl.store(shares + slots, tl.full([num_slots], 1.0, tl.float32), mask=is_shared)
        tl.store(scored, 0)


@triton.jit
def _gated(
    x,
    ids,
    matrix,
    bias,
    out,
    size,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    has_bias: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    columns = tl.arange(0, block)
    first = tl.load(ids + slot, cache_modifier=".cg").to(tl.int64) * 2 * size
    at = matrix + first * width + row[:, None] * width + columns[None, :]
    at_up = at + tl.cast(size, tl.int64) * width
    inside = (row < size)[:, None] & (columns < width)[None, :]
    gate_weights = tl.load(at, mask=inside, other=0.0)
    up_weights = tl.load(at_up, mask=inside, other=0.0)
    gates = tl.zeros([rows, block], tl.float32)
    ups = tl.zeros([rows, block], tl.float32)
    for start in range(0, width, block):
        inputs = tl.load(x + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
        gates += gate_weights.to(tl.float32) * inputs[None, :]
        ups += up_weights.to(tl.float32) * inputs[None, :]
        following = start + block
        inside = (row < size)[:, None] & (following + columns < width)[None, :]
        gate_weights = tl.load(at + following, mask=inside, other=0.0)
        up_weights = tl.load(at_up + following, mask=inside, other=0.0)
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if has_bias:
        gate += tl.load(bias + first + row, mask=row < size, other=0.0).to(tl.float32)
        up += tl.load(bias + first + size + row, mask=row < size, other=0.0).to(tl.float32)
    gated = gated_by(gate, up, alpha, limit)
    tl.store(out + slot * size + row, gated.to(out.dtype.element_ty), mask=row < size)


@triton.jit
def _down(
    gated,
    ids,
    shares,
    matrix,
    bias,
    out,
    size,
    has_bias: tl.constexpr,
    width: tl.constexpr,
    num_used: tl.constexpr,
    num_slots: tl.constexpr,
    unrolled: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    index = tl.arange(0, num_slots * rows)
    slot = index // rows
    is_used = slot < num_used
    # The choice is complete: programs begin when all of the previous kernel have waited for it. Read past the L1
    # cache, in which an older layer's may be.
    expert = tl.load(ids + slot, mask=is_used, other=0, cache_modifier=".cg").to(tl.int64)
    share = tl.load(shares + slot, mask=is_used, other=0.0, cache_modifier=".cg")
    row = tl.program_id(0) * rows + index % rows
    columns = tl.arange(0, block)
    at = matrix + (expert * size + row)[:, None] * width + columns[None, :]
    is_row = ((row < size) & is_used)[:, None]
    weights = tl.load(at, mask=is_row & (columns < width)[None, :], other=0.0)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([num_slots * rows, block], tl.float32)
    at_gated = gated + slot[:, None] * width + columns[None, :]
    for start in tl.range(0, width, block, loop_unroll_factor=unrolled):
        inside = is_row & (start + columns < width)[None, :]
        inputs = tl.load(at_gated + start, mask=inside, other=0.0).to(tl.float32)
        sums += weights.to(tl.float32) * inputs
        following = start + block
        weights = tl.load(at + following, mask=is_row & (following + columns < width)[None, :], other=0.0)
    products = tl.sum(sums, 1)
    if has_bias:
        products += tl.load(bias + expert * size + row, mask=(row < size) & is_used, other=0.0).to(tl.float32)
    added = tl.sum(tl.reshape(products * share, [num_slots, rows]), 0)
    to = tl.program_id(0) * rows + tl.arange(0, rows)
    before = tl.load(out + to, mask=to < size, other=0.0).to(tl.float32)
    tl.store(out + to, (before + added).to(out.dtype.element_ty), mask=to < size)
