"""A mixture of experts in Triton: twin of mixture.py for several tokens.

Each expert multiplies the tokens that chose it, in blocks of rows: counts and lists by expert stay on the device, and
as many programs are launched as blocks may be needed, of which the last have nothing to do. Few tokens are bound by
reading the weights of the chosen experts, each once; many by the products. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import overlap
from sgl.kernels.lora.experts import ExpertAdapters
from sgl.kernels.moe import packed_triton
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.packed import PackedExperts
from sgl.kernels.moe.route_triton import (
    find_block,
    gated_by,
    group_ranks,
    most_blocks,
    of_choice,
    pairs_of,
    rules,
    scores_of,
    shares_of,
    within_groups,
)


class Tiles(NamedTuple):
    """A program's tile sizes and launch options."""

    tokens: int
    rows: int  # of the matrix; of gate_up, as many gates and as many ups
    columns: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The tiles of both products."""

    gate_up: Tiles
    down: Tiles


# By the most pairs of a token and its expert for each expert, on average.
PLANS = {
    8: Plan(Tiles(16, 64, 256, 8, 3), Tiles(16, 128, 128, 4, 4)),
    24: Plan(Tiles(32, 64, 128, 4, 3), Tiles(32, 128, 128, 4, 3)),
    64: Plan(Tiles(64, 64, 64, 4, 4), Tiles(64, 128, 64, 4, 4)),
}
INVARIANT = PLANS[64]
"""For any number of tokens."""
MANY = Plan(Tiles(128, 128, 64, 8, 3), Tiles(128, 256, 64, 8, 3))
_WIDE = Plan(Tiles(16, 32, 32, 4, 2), Tiles(16, 32, 32, 4, 2))  # in float32, which only tests are
_FEW_TOKENS = 256  # of the router's product
_ROUTER_FEW, _ROUTER_MANY = Tiles(16, 16, 256, 4, 3), Tiles(64, 64, 64, 4, 3)
_ROUTER_WIDE = Tiles(16, 16, 64, 4, 2)


def mixture(
    x: torch.Tensor,
    experts: Experts,
    shared: torch.Tensor | None = None,
    plan: Plan | None = None,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """`mixture.mixture` for contiguous x: [num_used, T, hidden] in x's dtype, with `shared` one part more.

    plan: the tiles, if not those of PLANS."""
    num_tokens, hidden = x.shape
    num_all, top_k = len(experts.down), experts.num_used
    out = x.new_empty(top_k + (shared is not None), num_tokens, hidden)
    if experts.is_invariant and x.dtype.itemsize < 4:
        plan = INVARIANT
    router = experts.plain_router, experts.router_bias
    logits, counts = _scores(x, *router, num_all, is_invariant=experts.is_invariant)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x.device)
    lists = torch.empty(num_all, num_tokens, dtype=torch.int32, device=x.device)
    ids = None if adapters is None else torch.empty(num_tokens, top_k, dtype=torch.int32, device=x.device)
    num_padded = triton.next_power_of_2(num_all)
    _select[(num_tokens,)](
        logits,
        experts.bias,
        weights,
        counts,
        lists,
        ids,
        num_tokens,
        logits.stride(0),
        num_used=top_k,
        num_slots=triton.next_power_of_2(top_k),
        **rules(experts),
        num_warps=min(4, max(1, num_padded // 128)),
        **overlap(x.device),
    )
    if adapters is None or ids is None:
        multiply(x, experts, weights, counts, lists, out, plan)
    else:
        pairs = adapters.pairs(ids)
        gated = multiply(x, experts, weights, counts, lists, out, plan, adapters.added(x, pairs))
        adapters.add_down_(gated, weights, out[:top_k].view(-1, hidden), pairs)
    if shared is not None and experts.has_gate:
        torch.mul(shared, logits[:, experts.num_experts :].sigmoid(), out=out[top_k])
    elif shared is not None:
        out[top_k] = shared
    return out


def multiply(
    x: torch.Tensor,
    experts: Experts,
    weights: torch.Tensor,
    counts: torch.Tensor,
    lists: torch.Tensor,
    out: torch.Tensor,
    plan: Plan | None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill out [num_used, T, hidden] with what the chosen experts make of x [T, hidden], times float32 weights
    [T, num_used].

    counts: int32 [experts], pairs of a token and its expert; lists: int32 [experts, T], which: token * num_used + slot.
    plan: the tiles, if not those of PLANS. added: [num_used * T, 2 * intermediate] to gates and ups, in the order of
    `ExpertAdapters`, in which the gated pairs [num_used * T, intermediate] are returned then."""
    biases = experts.gate_up_bias, experts.down_bias
    alpha, limit = experts.clamped or (None, None)
    num_experts, hidden, size = experts.down.shape
    num_tokens, top_k = weights.shape
    num_pairs, options = num_tokens * top_k, overlap(x.device)
    plan = plan or choose(num_pairs / num_experts, x.dtype.itemsize)
    gated = x.new_empty(num_pairs, size)
    for is_down, tiles in enumerate(plan):
        num_rows = hidden if is_down else size
        matrices = experts.down if is_down else experts.gate_up
        if isinstance(matrices, PackedExperts) and (
            added is not None or packed_triton.is_worth_a_copy(matrices, num_pairs / num_experts, x.dtype)
        ):
            matrices = packed_triton.dequantized(matrices, counts, x.dtype)
        if isinstance(matrices, PackedExperts):
            inputs, to = (gated, out) if is_down else (x, gated)
            packed_triton.multiply(inputs, matrices, weights, counts, lists, to, experts, is_down=bool(is_down))
            continue
        blocks = most_blocks(num_pairs, num_experts, tiles.tokens)
        rows = tiles.rows if is_down else 2 * tiles.rows
        num_bytes = (tiles.tokens + rows) * tiles.columns * x.element_size()
        tensors = (gated, matrices, weights, counts, lists, out) if is_down else (x, matrices, counts, lists, gated)
        more = {"is_by_slot": added is not None} if is_down else {"alpha": alpha, "limit": limit, "added": added}
        (_down if is_down else _gate_up)[(blocks * triton.cdiv(num_rows, tiles.rows),)](
            *tensors,
            biases[is_down],
            num_tokens,
            num_experts,
            num_rows,
            **more,
            has_bias=biases[is_down] is not None,
            width=size if is_down else hidden,
            top_k=top_k,
            num_padded=triton.next_power_of_2(num_experts),
            block_tokens=tiles.tokens,
            block_rows=tiles.rows,
            block_columns=tiles.columns,
            num_warps=tiles.warps,
            num_stages=limits.of(x.device).stages(tiles.stages, num_bytes),
            **options,
        )
    return gated


def choose(pairs_per_expert: float, itemsize: int) -> Plan:
    """The tiles for so many pairs of a token and its expert, of numbers of so many bytes."""
    if itemsize == 4:
        return _WIDE
    return next((plan for most, plan in PLANS.items() if pairs_per_expert <= most), MANY)


def _scores(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, num_experts: int, *, is_invariant: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 logits [T, rows of the router], and int32 zeros [num_experts]."""
    num_tokens, width = x.shape
    logits = torch.empty(num_tokens, len(router), dtype=torch.float32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    tiles = _ROUTER_FEW if num_tokens <= _FEW_TOKENS and not is_invariant else _ROUTER_MANY
    if x.dtype.itemsize == 4:
        tiles = _ROUTER_WIDE
    num_bytes = (tiles.tokens + tiles.rows) * tiles.columns * x.element_size()
    _router[triton.cdiv(len(router), tiles.rows), triton.cdiv(num_tokens, tiles.tokens)](
        x,
        router,
        bias,
        logits,
        counts,
        num_tokens,
        num_experts,
        len(router),
        has_bias=bias is not None,
        width=width,
        num_padded=triton.next_power_of_2(num_experts),
        block_tokens=tiles.tokens,
        block_rows=tiles.rows,
        block_columns=tiles.columns,
        num_warps=tiles.warps,
        num_stages=limits.of(x.device).stages(tiles.stages, num_bytes),
        **overlap(x.device),
    )
    return logits, counts


@triton.jit
def _multiplied(
    at_x,
    at,
    width: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Sums [block_tokens, block_rows] of rows at at_x with rows at `at`, [block, block_columns], width columns."""
    columns = tl.arange(0, block_columns)
    sums = tl.zeros([block_tokens, block_rows], tl.float32)
    for start in range(0, width, block_columns):
        if width % block_columns == 0:
            inputs = tl.load(at_x + start)
            weights = tl.load(at + start)
        else:
            inside = (columns + start < width)[None, :]
            inputs = tl.load(at_x + start, mask=inside, other=0.0)
            weights = tl.load(at + start, mask=inside, other=0.0)
        sums = tl.dot(inputs, tl.trans(weights), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def _router(
    x,
    matrix,
    bias,
    logits,
    counts,
    num_tokens,
    num_experts,
    size,
    has_bias: tl.constexpr,
    width: tl.constexpr,
    num_padded: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        index = tl.arange(0, num_padded)
        tl.store(counts + index, tl.zeros([num_padded], tl.int32), mask=index < num_experts)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    tokens = tl.program_id(1) * block_tokens + tl.arange(0, block_tokens)
    columns = tl.arange(0, block_columns)
    at_x = x + tl.minimum(tokens, num_tokens - 1).to(tl.int64)[:, None] * width + columns[None, :]
    at = matrix + tl.minimum(rows, size - 1).to(tl.int64)[:, None] * width + columns[None, :]
    sums = _multiplied(at_x, at, width, block_tokens, block_rows, block_columns)
    if has_bias:
        sums += tl.load(bias + rows, mask=rows < size, other=0.0).to(tl.float32)[None, :]
    to = logits + tokens.to(tl.int64)[:, None] * size + rows[None, :]
    tl.store(to, sums, mask=(tokens < num_tokens)[:, None] & (rows < size)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _select(
    logits,
    bias,
    weights,
    counts,
    lists,
    to_ids,
    num_tokens,
    logits_stride,
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
    overlaps: tl.constexpr,
):
    """The best experts of one token, each another one whatever the logits are, and their lists of pairs."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    index, slots = tl.arange(0, num_padded), tl.arange(0, num_slots)
    scores = scores_of(logits + token.to(tl.int64) * logits_stride, index, num_experts, sigmoid)
    all_shares, total = shares_of(scores, sigmoid)
    chosen_by = of_choice(scores, bias, index, num_experts, has_bias)
    if num_groups > 1:
        ranks = group_ranks(chosen_by, num_experts, num_groups, best_of_group, num_padded)
        chosen_by = within_groups(chosen_by, index, ranks, num_experts, num_groups, top_groups)
    is_left = index < num_experts
    ids = num_experts + slots - top_k  # the shared ones
    shares = tl.zeros([num_slots], tl.float32)
    for slot in tl.static_range(top_k):
        best = tl.max(tl.where(is_left, chosen_by, float("-inf")), 0)
        chosen = tl.min(tl.where(is_left & (chosen_by == best), index, num_padded - 1), 0)
        ids = tl.where(slots == slot, chosen, ids)
        shares = tl.where(slots == slot, tl.sum(tl.where(index == chosen, all_shares, 0.0), 0), shares)
        is_left = is_left & (index != chosen)
    if normalises:
        total = tl.sum(shares, 0) + (1e-20 if sigmoid else 0.0)
    shares = tl.where(slots < top_k, shares / total * weight_scale, 1.0)
    is_slot = slots < num_used
    tl.store(weights + token * num_used + slots, shares, mask=is_slot)
    if to_ids is not None:
        tl.store(to_ids + token * num_used + slots, ids, mask=is_slot)
    place = tl.atomic_add(counts + ids, 1, mask=is_slot, sem="relaxed")
    tl.store(lists + ids.to(tl.int64) * num_tokens + place, token * num_used + slots, mask=is_slot)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up(
    x,
    matrix,
    counts,
    lists,
    out,
    bias,
    num_tokens,
    num_experts,
    size,
    added,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    has_bias: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    num_padded: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    num_tiles = tl.cdiv(size, block_rows)
    expert, first, count, before = find_block(
        counts, tl.program_id(0) // num_tiles, num_experts, num_padded, block_tokens
    )
    if expert >= num_experts:
        return
    places, is_pair, pairs = pairs_of(lists, expert, first, count, num_tokens, block_tokens)
    columns = tl.arange(0, block_columns)
    at_x = x + (pairs // top_k).to(tl.int64)[:, None] * width + columns[None, :]
    rows = (tl.program_id(0) % num_tiles) * block_rows + tl.arange(0, block_rows)
    row = expert.to(tl.int64) * 2 * size + tl.minimum(rows, size - 1)
    at = matrix + row[:, None] * width + columns[None, :]
    at_up = at + tl.cast(size, tl.int64) * width
    gates = tl.zeros([block_tokens, block_rows], tl.float32)
    ups = tl.zeros([block_tokens, block_rows], tl.float32)
    for start in range(0, width, block_columns):
        if width % block_columns == 0:
            inputs = tl.load(at_x + start)
            gate_weights = tl.load(at + start)
            up_weights = tl.load(at_up + start)
        else:
            inside = (columns + start < width)[None, :]
            inputs = tl.load(at_x + start, mask=inside, other=0.0)
            gate_weights = tl.load(at + start, mask=inside, other=0.0)
            up_weights = tl.load(at_up + start, mask=inside, other=0.0)
        gates = tl.dot(inputs, tl.trans(gate_weights), gates, input_precision="ieee")
        ups = tl.dot(inputs, tl.trans(up_weights), ups, input_precision="ieee")
    if has_bias:
        gates += tl.load(bias + row).to(tl.float32)[None, :]
        ups += tl.load(bias + row + size).to(tl.float32)[None, :]
    is_inside = is_pair[:, None] & (rows < size)[None, :]
    place = before + places
    if added is not None:
        place = (pairs % top_k) * num_tokens + pairs // top_k
        at_added = added + place.to(tl.int64)[:, None] * (2 * size) + rows[None, :]
        gates += tl.load(at_added, mask=is_inside, other=0.0).to(tl.float32)
        ups += tl.load(at_added + size, mask=is_inside, other=0.0).to(tl.float32)
    gated = gated_by(gates, ups, alpha, limit)
    to = out + place.to(tl.int64)[:, None] * size + rows[None, :]
    tl.store(to, gated.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _down(
    gated,
    matrix,
    weights,
    counts,
    lists,
    out,
    bias,
    num_tokens,
    num_experts,
    size,
    is_by_slot: tl.constexpr,
    has_bias: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    num_padded: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    num_tiles = tl.cdiv(size, block_rows)
    expert, first, count, before = find_block(
        counts, tl.program_id(0) // num_tiles, num_experts, num_padded, block_tokens
    )
    if expert >= num_experts:
        return
    places, is_pair, pairs = pairs_of(lists, expert, first, count, num_tokens, block_tokens)
    shares = tl.load(weights + pairs, mask=is_pair, other=0.0)
    columns = tl.arange(0, block_columns)
    number = (pairs % top_k) * num_tokens + pairs // top_k
    place = number if is_by_slot else before + tl.minimum(places, count - 1)
    at_x = gated + place.to(tl.int64)[:, None] * width + columns[None, :]
    rows = (tl.program_id(0) % num_tiles) * block_rows + tl.arange(0, block_rows)
    row = expert.to(tl.int64) * size + tl.minimum(rows, size - 1)
    at = matrix + row[:, None] * width + columns[None, :]
    sums = _multiplied(at_x, at, width, block_tokens, block_rows, block_columns)
    if has_bias:
        sums += tl.load(bias + row).to(tl.float32)[None, :]
    sums *= shares[:, None]
    to = out + number.to(tl.int64)[:, None] * size + rows[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & (rows < size)[None, :])
