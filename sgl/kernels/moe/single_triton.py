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
    num_experts = len(experts.gate_up)
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
    """float32 [top_k, intermediate]: silu(gate) * up of the best experts, times their weights."""
    num_experts, size, width = experts.gate_up.shape
    size //= 2
    out = torch.empty(experts.top_k, size, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(width), shape.block)
    rows = max(1, shape.tile // block // 2)
    parts = max(1, shape.programs * _num_processors(x.device) // experts.top_k)
    per_program = triton.cdiv(triton.cdiv(size, rows), parts) * rows
    _gated[experts.top_k, triton.cdiv(size, per_program)](
        x,
        norm,
        logits,
        experts.gate_up,
        out,
        size,
        eps,
        num_experts,
        width=width,
        per_program=per_program,
        has_norm=norm is not None,
        top_k=experts.top_k,
        normalises=experts.normalises,
        num_padded=triton.next_power_of_2(num_experts),
        ranked=min(_RANKED, triton.next_power_of_2(num_experts)),
        rows=rows,
        block=block,
        num_warps=shape.warps,
        **overlap(x.device),
    )
    return out


def _add_down_(
    gated: torch.Tensor, experts: Experts, logits: torch.Tensor, residual: torch.Tensor, shape: Shape
) -> None:
    """Add the best experts' products with gated [top_k, intermediate] to residual [1, hidden]."""
    num_experts, size, width = experts.down.shape
    slots = triton.next_power_of_2(experts.top_k)
    divisor = width & -width
    block = min(divisor if divisor >= 128 else triton.next_power_of_2(width), shape.block)
    rows = max(1, shape.tile // block // slots)
    while rows > 1 and size // rows < shape.programs * _num_processors(gated.device):
        rows //= 2
    _down[(triton.cdiv(size, rows),)](
        gated,
        logits,
        experts.down,
        residual,
        size,
        num_experts,
        width=width,
        top_k=experts.top_k,
        num_padded=triton.next_power_of_2(num_experts),
        ranked=min(_RANKED, triton.next_power_of_2(num_experts)),
        num_slots=slots,
        rows=rows,
        block=block,
        num_warps=shape.warps,
        **overlap(gated.device),
    )


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _ranks(logits, num_experts, num_padded: tl.constexpr, ranked: tl.constexpr):
    """Scores [num_padded], and how many come before each; equal ones in their order. No rank comes twice.

    Read past the L1 cache, in which an older layer's scores may be: programs may begin before the previous kernel
    ends."""
    index = tl.arange(0, num_padded)
    scores = tl.load(logits + index, mask=index < num_experts, other=float("-inf"), cache_modifier=".cg")
    scores = tl.where(scores == scores, scores, float("-inf"))
    ranks = tl.zeros([num_padded], tl.int32)
    for start in range(0, num_padded, ranked):
        others = start + tl.arange(0, ranked)
        their = tl.load(logits + others, mask=others < num_experts, other=float("-inf"), cache_modifier=".cg")
        their = tl.where(their == their, their, float("-inf"))[:, None]
        is_before = (their > scores[None, :]) | ((their == scores[None, :]) & (others[:, None] < index[None, :]))
        ranks += tl.sum(is_before.to(tl.int32), 0)
    return scores, ranks


@triton.jit
def _gated(
    x,
    norm,
    logits,
    matrix,
    out,
    size,
    eps,
    num_experts,
    width: tl.constexpr,
    per_program: tl.constexpr,
    has_norm: tl.constexpr,
    top_k: tl.constexpr,
    normalises: tl.constexpr,
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
    scores, ranks = _ranks(logits, num_experts, num_padded, ranked)
    expert = tl.sum(tl.where(ranks == slot, tl.arange(0, num_padded), 0), 0)
    columns = tl.arange(0, block)
    row = tl.program_id(1) * per_program + tl.arange(0, rows)
    base = matrix + expert.to(tl.int64) * 2 * size * width
    at = base + row[:, None] * width + columns[None, :]
    at_up = at + tl.cast(size, tl.int64) * width
    inside = (row < size)[:, None] & (columns < width)[None, :]
    gate_weights = tl.load(at, mask=inside, other=0.0)
    up_weights = tl.load(at_up, mask=inside, other=0.0)
    largest = tl.max(scores, 0)
    shares = tl.exp(scores - largest)
    total = tl.sum(tl.where(ranks < top_k, shares, 0.0), 0) if normalises else tl.sum(shares, 0)
    share = tl.sum(tl.where(ranks == slot, shares, 0.0), 0) / total
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
    matrix,
    out,
    size,
    num_experts,
    width: tl.constexpr,
    top_k: tl.constexpr,
    num_padded: tl.constexpr,
    ranked: tl.constexpr,
    num_slots: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    # The scores are complete: programs begin when all of the previous kernel have waited for them.
    _, ranks = _ranks(logits, num_experts, num_padded, ranked)
    index = tl.arange(0, num_slots * rows)
    slot = index // rows
    experts = tl.sum(tl.where(ranks[None, :] == slot[:, None], tl.arange(0, num_padded)[None, :], 0), 1)
    row = tl.program_id(0) * rows + index % rows
    columns = tl.arange(0, block)
    at = matrix + (experts.to(tl.int64) * size + row)[:, None] * width + columns[None, :]
    is_row = ((row < size) & (slot < top_k))[:, None]
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
