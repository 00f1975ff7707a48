"""The Triton kernel of decode.py: each program walks its share of keys with an online softmax, row by row.

It handles all query heads of a kv head, of one query token or a few, so each key is read once. Narrower keys and values
are widened on reading. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import overlap

_STAGES = 5  # page numbers, and two tiles of keys and values in flight
_REGISTERS = 240  # a thread's, so that decode.py's number of programs fits: five of 192 take 1.4 times as long
LOG2E = 1.4426950408889634
_LANES = 16  # fewest rows that tensor cores multiply


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    scratch: tuple[torch.Tensor, torch.Tensor],
    plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    tile: int,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    overlaps: bool,
    firsts: torch.Tensor | None = None,
    queries: int = 1,
    window: int | None = None,
    warps: int,
) -> None:
    """`decode.DecodeAttention.run`. shared: the tensors of `decode.SharedOutput`. scratch: room for parts, and
    counters, zero before and after. plan: programs and segments of `decode.SplitWork`, and pages. firsts: of several
    `queries` a row, or of one behind which there may be keys, the first one's position, [B]; each sees what lies before
    it, in a window."""
    assert key_cache.stride() == value_cache.stride(), "the two caches lie alike"
    is_masked = firsts is not None
    assert is_masked or queries == 1
    assert shared is None or not is_masked
    programs, segments, pages = plan
    parts, counters = scratch
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    num_programs = len(programs)
    num_parts = 2 * num_programs * num_heads * queries
    # e4m3 converts to float16 in one instruction, to bfloat16 in many
    halves = key_cache.dtype.itemsize == 1 and query.dtype == torch.bfloat16
    its, options = limits.of(query.device), overlap(query.device)
    if its.is_nvidia:
        options = {**options, "maxnreg": _REGISTERS}
    lanes = max(_LANES, triton.next_power_of_2(group * queries))
    beside = (
        0 if queries == 1 else lanes * (head_dim + tile) * query.element_size()
    )  # the queries, and their shares
    _attend[(num_programs, num_kv_heads)](
        query,
        key_cache,
        value_cache,
        out,
        *(shared or (out, parts, programs)),
        parts,
        parts[num_parts * head_dim :],
        counters,
        programs,
        segments,
        pages,
        sinks,
        pages if firsts is None else firsts,
        LOG2E * scale if softcap is None else 2.0 * LOG2E * scale / softcap,
        num_heads,
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        has_shared=shared is not None,
        has_sinks=sinks is not None,
        cap=None if softcap is None else LOG2E * softcap,
        page_size=key_cache.shape[1],
        head_dim=head_dim,
        group=group,
        queries=queries,
        is_masked=is_masked,
        window=(window or 0) if is_masked else 0,
        lanes=lanes,
        block_dims=max(16, triton.next_power_of_2(head_dim)),
        halves=halves,
        tile=tile,
        stages=its.stages(_STAGES, 2 * tile * head_dim * key_cache.element_size(), beside),
        brings=overlaps and shared is None and not is_masked,
        num_warps=warps,
        **options,
    )


@triton.jit
def _attend(
    query,
    key_cache,
    value_cache,
    out,
    shared,
    shared_lse,
    shared_places,
    parts,
    part_lse,
    counters,
    programs,
    segments,
    pages,
    sinks,
    firsts,
    scale,
    num_heads,
    page_stride,
    slot_stride,
    head_stride,
    has_shared: tl.constexpr,
    has_sinks: tl.constexpr,
    cap: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    group: tl.constexpr,
    queries: tl.constexpr,
    is_masked: tl.constexpr,
    window: tl.constexpr,
    lanes: tl.constexpr,
    block_dims: tl.constexpr,
    halves: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    brings: tl.constexpr,
    overlaps: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    lane = tl.arange(0, lanes)
    is_lane = lane < group * queries
    dims = tl.arange(0, block_dims)
    is_dim = dims < head_dim
    inside = is_lane[:, None] & is_dim[None, :]
    # The plan is ready before the previous kernel ends. Segments are prefetched during the walk of the previous
    # one.
    at = programs + program * 8
    row, begin, end, first_page = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    first_program, num_parts = tl.load(at + 4), tl.load(at + 5)
    first_segment, end_segment = tl.load(at + 6), tl.load(at + 7)
    most = tl.full([lanes], float("-inf"), tl.float32)
    total = tl.zeros([lanes], tl.float32)
    sums = tl.zeros([lanes, block_dims], tl.float32)
    if overlaps:
        gdc_launch_dependents()
    if brings:
        # So are all keys but each row's last one: load the first tile early, unless it may hold that key.
        is_early = begin + tile < end
        early = begin + tl.arange(0, tile)
        early_page = tl.load(pages + first_page + early // page_size, mask=is_early, other=0).to(tl.int64)
        at_early = early_page * page_stride + (early % page_size) * slot_stride + kv_head * head_stride
        is_early_read = (is_dim & is_early)[None, :]
        early_k = tl.load(key_cache + at_early[:, None] + dims[None, :], mask=is_early_read, other=0.0)
        early_v = tl.load(value_cache + at_early[:, None] + dims[None, :], mask=is_early_read, other=0.0)
        if overlaps:
            gdc_wait()
        if is_early:
            early_heads = row.to(tl.int64) * num_heads + kv_head * group + lane
            early_q = tl.load(query + early_heads[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
            if halves:
                early_q = early_q.to(tl.float16)
            early_scores = tl.dot(early_q, tl.trans(early_k.to(early_q.dtype)), input_precision="ieee") * scale
            if cap is not None:
                early_scores = capped(early_scores, cap)
            most = tl.max(early_scores, 1)
            early_shares = tl.exp2(early_scores - most[:, None])
            total = tl.sum(early_shares, 1)
            sums = tl.dot(early_shares.to(early_q.dtype), early_v.to(early_q.dtype), input_precision="ieee")
            begin += tile
    elif overlaps:
        _bring(pages + first_page + begin // page_size)
        gdc_wait()
    for segment in range(first_segment, end_segment):
        at = segments + tl.minimum(segment + 1, end_segment - 1) * 6
        next_row, next_begin, next_end, next_page = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        next_program, next_parts = tl.load(at + 4), tl.load(at + 5)
        if queries == 1:
            of_head = row.to(tl.int64) * num_heads + kv_head * group + lane
        else:
            of_head = (row.to(tl.int64) * queries + lane // group) * num_heads + kv_head * group + lane % group
        if is_masked:
            position = tl.load(firsts + row).to(tl.int32) + lane // group
        at_query = of_head[:, None] * head_dim + dims[None, :]
        q = tl.load(query + at_query, mask=inside, other=0.0)
        if halves:
            q = q.to(tl.float16)
        if has_shared:
            place = tl.load(shared_places + row)
            if (place >= 0) & (program == first_program):
                at_shared = place.to(tl.int64) * num_heads + kv_head * group + lane
                most = tl.load(shared_lse + at_shared, mask=is_lane, other=0.0)
                total = tl.full([lanes], 1.0, tl.float32)
                at_shared = at_shared[:, None] * head_dim + dims[None, :]
                sums = tl.load(shared + at_shared, mask=inside, other=0.0).to(tl.float32)
        counter = counters + first_program * tl.num_programs(1) + kv_head
        num_ended = 0
        if (num_parts == 2) & (segment > first_segment):
            # The row's end was the next program's first work and is often done by now: ask early.
            num_ended = tl.atomic_add(counter, 0, sem="acquire")
        # Starts at 0: in nested loops, Triton 3.6 takes a lower bound from before the outer one.
        for offset in tl.range(0, end - begin, tile, num_stages=stages):
            key = begin + offset + tl.arange(0, tile)
            is_key = key < end
            page = tl.load(pages + first_page + key // page_size, mask=is_key, other=0).to(tl.int64)
            at_key = page * page_stride + (key % page_size) * slot_stride + kv_head * head_stride
            is_read = is_key[:, None]
            if head_dim < block_dims:
                is_read = is_read & is_dim[None, :]
            k = tl.load(key_cache + at_key[:, None] + dims[None, :], mask=is_read, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if cap is not None:
                scores = capped(scores, cap)
            if not is_masked:
                scores = tl.where(is_key[None, :], scores, float("-inf"))
                now = tl.maximum(most, tl.max(scores, 1))
                shares = tl.exp2(scores - now[:, None])
                fade = tl.exp2(most - now)
            else:
                is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
                if window > 0:
                    is_seen = is_seen & (key[None, :] > position[:, None] - window)
                scores = tl.where(is_seen, scores, float("-inf"))
                now = tl.maximum(most, tl.max(scores, 1))
                safe = tl.where(now > float("-inf"), now, 0.0)  # some queries see none of these keys
                shares = tl.exp2(scores - safe[:, None])
                fade = tl.exp2(most - safe)
            v = tl.load(value_cache + at_key[:, None] + dims[None, :], mask=is_read, other=0.0).to(q.dtype)
            sums = sums * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
            total = total * fade + tl.sum(shares, 1)
            most = now
        if is_masked:
            total = tl.where(total > 0, total, 1.0)
        result = sums / total[:, None]
        if num_parts > 1:
            if (num_parts == 2) & (num_ended == 0):  # if the other part is done, this one need not be stored
                num_ended = tl.atomic_add(counter, 0, sem="acquire")
            if (num_parts > 2) | (num_ended == 0):
                # At most two parts a program: a row's end, and after all ends another row's beginning.
                of_part = program + (program == first_program).to(tl.int32) * tl.num_programs(0)
                at_part = (of_part * tl.num_programs(1) + kv_head) * group * queries + lane
                tl.store(parts + at_part[:, None] * head_dim + dims[None, :], result, mask=inside)
                tl.store(part_lse + at_part, most + tl.log2(total), mask=is_lane)
                tl.debug_barrier()  # all stores come before the count
                num_ended = tl.atomic_add(counter, 1, sem="acq_rel")
        if num_ended == num_parts - 1:
            if num_parts > 1:
                tl.debug_barrier()
                tl.store(counter, 0)
                own, own_lse = result, most + tl.log2(total)
                most = tl.full([lanes], float("-inf"), tl.float32)
                total = tl.zeros([lanes], tl.float32)
                result = tl.zeros([lanes, block_dims], tl.float32)
                of_part = first_program + tl.num_programs(0)
                for part in tl.range(0, num_parts, 1, loop_unroll_factor=4):
                    # in key order, whoever ends last
                    is_own = first_program + part == program
                    at_lse = (of_part * tl.num_programs(1) + kv_head) * group * queries + lane
                    lse = tl.load(part_lse + at_lse, mask=is_lane & (not is_own), other=0.0, cache_modifier=".cg")
                    lse = tl.where(is_own, own_lse, lse)
                    at_value = at_lse[:, None] * head_dim + dims[None, :]
                    value = tl.load(parts + at_value, mask=inside & (not is_own), other=0.0, cache_modifier=".cg")
                    value = tl.where(is_own, own, value)
                    now = tl.maximum(most, lse)
                    safe = tl.where(now > float("-inf"), now, 0.0) if is_masked else now
                    fade = tl.exp2(most - safe)
                    weight = tl.exp2(lse - safe)
                    result = result * fade[:, None] + value * weight[:, None]
                    total = total * fade + weight
                    most = now
                    of_part = first_program + part + 1
                result = result / total[:, None]
            if has_sinks:  # here once, of all keys: however the row was cut, most and total are those of all
                of_sink = lane if queries == 1 else lane % group
                sink = tl.load(sinks + kv_head * group + of_sink, mask=is_lane, other=0.0)
                result *= beside_sink(most + tl.log2(total), sink)[:, None]
            tl.store(out + at_query, result.to(out.dtype.element_ty), mask=inside)
        row, begin, end, first_page = next_row, next_begin, next_end, next_page
        first_program, num_parts = next_program, next_parts
        most = tl.full([lanes], float("-inf"), tl.float32)
        total = tl.zeros([lanes], tl.float32)
        sums = tl.zeros([lanes, block_dims], tl.float32)


@triton.jit
def capped(scores, cap: tl.constexpr):
    """cap * tanh(scores / 2), with scores and cap in units of base-2 logarithms."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(scores))


@triton.jit
def beside_sink(lse, sink):
    """What a sink leaves of the weights: lse, base-2 log-sum-exp of all scores; sink, the sink's score."""
    return 1.0 / (1.0 + tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - lse))


@triton.jit
def _bring(address):
    """Prefetch to the L2 cache, to load a page number faster."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
