"""A mixture of experts for a single token in Triton, fused with the norm before and the sum after.

At batch 1 the chosen experts' weights are streamed past the one token, as layers/single_triton.py does with matrices of
all tokens: three launches, of which the first scores the experts. Each later program ranks the scores for itself, which
takes less than a launch. Imported only where Triton is.
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
from sgl.kernels.layers.single_triton import project, project_add_, project_gated
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.route_triton import group_ranks, of_choice, rules, scores_of, shares_of, within_groups

_RANKED = 128  # scores that others are compared to at a time


class Shape(NamedTuple):
    """How a product is cut: matrix elements that a program holds at a time, programs for each multiprocessor, most
    elements of a row at a time, warps."""

    tile: int
    programs: int
    block: int
    warps: int


GATE_UP = Shape(8192, 4, 2048, 4)
DOWN = Shape(8192, 4, 512, 4)


def mixture_add_(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    experts: Experts,
    shared: tuple[Matrix, Matrix] | None,
    residual: torch.Tensor,
    shapes: tuple[Shape, Shape] = (GATE_UP, DOWN),
) -> None:
    """Add `mixture` of x [1, hidden], normed first where a norm [hidden] is given, to residual [1, hidden], in place.

    shared: gate_up and down of an expert for all tokens. x may be the residual itself."""
    logits = project(x, norm, eps, experts.router, None, torch.float32)
    num_experts = experts.num_experts
    of_shared = None
    if shared is not None:
        of_shared = project_gated(x, norm, eps, shared[0], None)
        if experts.has_gate:
            of_shared *= logits[:, num_experts:].sigmoid()
    gated = _gated_experts(x, norm, eps, experts, logits, shapes[0])
    _add_down_(gated, experts, logits, residual, shapes[1])
    if shared is not None and of_shared is not None:
        project_add_(of_shared, shared[1], None, residual)


def _gated_experts(
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, experts: Experts, logits: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """float32 [num_used, intermediate]: silu(gate) * up of a token's experts, times their weights."""
    _, size, width = experts.gate_up.shape
    size //= 2
    out = torch.empty(experts.num_used, size, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(width), shape.block)
    rows = max(1, shape.tile // block // 2)
    parts = max(1, shape.programs * _num_processors(x.device) // experts.num_used)
    per_program = triton.cdiv(triton.cdiv(size, rows), parts) * rows
    _gated[experts.num_used, triton.cdiv(size, per_program)](
        x,
        norm,
        logits,
        experts.bias,
        experts.gate_up,
        out,
        size,
        eps,
        width=width,
        per_program=per_program,
        has_norm=norm is not None,
        **rules(experts),
        ranked=min(_RANKED, triton.next_power_of_2(experts.num_experts)),
        rows=rows,
        block=block,
        num_warps=shape.warps,
        **overlap(x.device),
    )
    return out


def _add_down_(
    gated: torch.Tensor, experts: Experts, logits: torch.Tensor, residual: torch.Tensor, shape: Shape
) -> None:
    """Add the products of a token's experts with gated [num_used, intermediate] to residual [1, hidden]."""
    _, size, width = experts.down.shape
    slots = triton.next_power_of_2(experts.num_used)
    divisor = width & -width
    block = min(divisor if divisor >= 128 else triton.next_power_of_2(width), shape.block)
    rows = max(1, shape.tile // block // slots)
    while rows > 1 and size // rows < shape.programs * _num_processors(gated.device):
        rows //= 2
    _down[(triton.cdiv(size, rows),)](
        gated,
        logits,
        experts.bias,
        experts.down,
        residual,
        size,
        width=width,
        num_used=experts.num_used,
        **rules(experts),
        ranked=min(_RANKED, triton.next_power_of_2(experts.num_experts)),
        num_slots=slots,
        rows=rows,
        block=block,
        num_warps=shape.warps,
        **overlap(gated.device),
    )


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


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
def _gated(
    x,
    norm,
    logits,
    bias,
    matrix,
    out,
    size,
    eps,
    width: tl.constexpr,
    per_program: tl.constexpr,
    has_norm: tl.constexpr,
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
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(0)
    scores, ranks = _ranks(
        logits, bias, sigmoid, has_bias, num_groups, top_groups, best_of_group, num_experts, num_padded, ranked
    )
    chosen = tl.sum(tl.where(ranks == slot, tl.arange(0, num_padded), 0), 0)
    expert = tl.where(slot < top_k, chosen, num_experts + slot - top_k)
    columns = tl.arange(0, block)
    row = tl.program_id(1) * per_program + tl.arange(0, rows)
    base = matrix + expert.to(tl.int64) * 2 * size * width
    at = base + row[:, None] * width + columns[None, :]
    at_up = at + tl.cast(size, tl.int64) * width
    inside = (row < size)[:, None] & (columns < width)[None, :]
    gate_weights = tl.load(at, mask=inside, other=0.0)
    up_weights = tl.load(at_up, mask=inside, other=0.0)
    shares, total = shares_of(scores, sigmoid)
    if normalises:
        total = tl.sum(tl.where(ranks < top_k, shares, 0.0), 0) + (1e-20 if sigmoid else 0.0)
    share = tl.sum(tl.where(ranks == slot, shares, 0.0), 0) / total * weight_scale
    share = tl.where(slot < top_k, share, 1.0)
    for done in range(0, per_program, rows):
        gates = tl.zeros([rows, block], tl.float32)
        ups = tl.zeros([rows, block], tl.float32)
        squares = tl.zeros([block], tl.float32)
        for start in tl.static_range(0, width, block):
            inputs = tl.load(x + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
            if has_norm:
                squares += inputs * inputs
                inputs *= tl.load(norm + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
            gates += gate_weights.to(tl.float32) * inputs[None, :]
            ups += up_weights.to(tl.float32) * inputs[None, :]
            # the next tile: of the same rows, or the first of the next ones
            if start + block < width:
                following, ahead = start + block, 0
            else:
                following, ahead = 0, rows
            is_row = (row + done + ahead < size) & (done + ahead < per_program)
            inside = is_row[:, None] & (following + columns < width)[None, :]
            step = (done + ahead) * width + following
            gate_weights = tl.load(at + step, mask=inside, other=0.0)
            up_weights = tl.load(at_up + step, mask=inside, other=0.0)
        gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
        if has_norm:
            scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
            gate *= scale
            up *= scale
        gated = gate / (1.0 + tl.exp(-gate)) * up * share
        tl.store(out + slot * size + row + done, gated, mask=row + done < size)


@triton.jit
def _down(
    gated,
    logits,
    bias,
    matrix,
    out,
    size,
    width: tl.constexpr,
    num_used: tl.constexpr,
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
    num_slots: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    # The scores are complete: programs begin when all of the previous kernel have waited for them.
    _, ranks = _ranks(
        logits, bias, sigmoid, has_bias, num_groups, top_groups, best_of_group, num_experts, num_padded, ranked
    )
    index = tl.arange(0, num_slots * rows)
    slot = index // rows
    experts = tl.sum(tl.where(ranks[None, :] == slot[:, None], tl.arange(0, num_padded)[None, :], 0), 1)
    experts = tl.where(slot < top_k, experts, num_experts + slot - top_k)
    row = tl.program_id(0) * rows + index % rows
    columns = tl.arange(0, block)
    at = matrix + (experts.to(tl.int64) * size + row)[:, None] * width + columns[None, :]
    is_row = ((row < size) & (slot < num_used))[:, None]
    weights = tl.load(at, mask=is_row & (columns < width)[None, :], other=0.0)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([num_slots * rows, block], tl.float32)
    at_gated = gated + slot[:, None] * width + columns[None, :]
    for start in range(0, width, block):
        inputs = tl.load(at_gated + start, mask=is_row & (start + columns < width)[None, :], other=0.0)
        sums += weights.to(tl.float32) * inputs
        following = start + block
        weights = tl.load(at + following, mask=is_row & (following + columns < width)[None, :], other=0.0)
    added = tl.sum(tl.reshape(tl.sum(sums, 1), [num_slots, rows]), 0)
    to = tl.program_id(0) * rows + tl.arange(0, rows)
    before = tl.load(out + to, mask=to < size, other=0.0).to(tl.float32)
    tl.store(out + to, (before + added).to(out.dtype.element_ty), mask=to < size)
