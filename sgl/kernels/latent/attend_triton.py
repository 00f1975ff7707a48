"""Attention over latents in Triton: all query heads, or a group of many, read a token's one cached row at once.

The row's first numbers, which are the values, too, are read once for both. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.attention.decode_triton import LOG2E
from sgl.kernels.layers.fused_triton import overlap

_LANES = 16  # fewest rows that tensor cores multiply
_MOST_LANES = 64  # heads, or tokens times heads, of a program: their sums fill its registers;
_FEW_LANES = 32  # where they would not fit into shared memory. A multiprocessor has room for two programs of so few
_STAGES = 5, 4  # of few and of many: page numbers, and two tiles in flight
_KEYS, _FEW_KEYS = 32, 16  # of a program of prompts at a time, by its memory
_LARGE_MEMORY = 160 << 10  # bytes, shared: more keys may be in flight


def head_groups(num_heads: int, dtype: torch.dtype, device: torch.device) -> int:
    """Programs that share a token's heads equally, as few as can."""
    least = -(-num_heads // (_MOST_LANES if _has_room(dtype, device) else _FEW_LANES))
    return next(count for count in range(least, num_heads + 1) if num_heads % count == 0)


def programs_per_processor(num_heads: int) -> int:
    """Of decodes, that run at once, each with so many heads."""
    return 2 if num_heads <= _FEW_LANES else 1


def attend_decodes(
    query: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor | None,
    scratch: tuple[torch.Tensor, torch.Tensor],
    plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    rank: int,
    tile: int,
) -> None:
    """Attention of rows of one token: query [B, num_heads, rank + rope_dim], contiguous, cache
    [num_pages, page_size, 1, rank + rope_dim], out [B, num_heads, rank]. scratch and plan: see
    `decode_triton.attend`. out None: each program leaves its part, not merged."""
    programs, segments, pages = plan
    parts, counters = scratch
    num_heads, width = query.shape[1:]
    groups = head_groups(num_heads, query.dtype, query.device)
    group = num_heads // groups
    num_programs = len(programs)
    lanes = max(_LANES, triton.next_power_of_2(group))
    _decodes[(num_programs, groups)](
        query,
        cache,
        parts if out is None else out,
        parts,
        parts[2 * num_programs * num_heads * rank :],
        counters,
        programs,
        segments,
        pages,
        scale * LOG2E,
        cache.stride(0),
        cache.stride(1),
        merges=out is not None,
        page_size=cache.shape[1],
        rank=rank,
        rope_dim=width - rank,
        group=group,
        lanes=lanes,
        block_rank=max(16, triton.next_power_of_2(rank)),
        block_rope=max(16, triton.next_power_of_2(width - rank)),
        tile=tile,
        stages=_STAGES[lanes > _FEW_LANES] if _has_room(query.dtype, query.device) else 3,
        num_warps=4 if lanes <= _FEW_LANES else 8,
        **overlap(query.device),
    )


def attend_prompts(
    query: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    plan: tuple[torch.Tensor, ...],
    scale: float,
    rank: int,
) -> None:
    """Attention of rows of several tokens: query [T, num_heads, rank + rope_dim], contiguous, out
    [T, num_heads, rank]. plan: rows and first tokens of tiles of `tile_tokens`, query_starts, page_starts, kv_lens and
    pages of `ragged.RaggedRows`, int32."""
    tile_rows, *rest = plan
    num_heads, width = query.shape[1:]
    groups = head_groups(num_heads, query.dtype, query.device)
    group, has_room = num_heads // groups, _has_room(query.dtype, query.device)
    _prompts[(len(tile_rows), groups)](
        query,
        cache,
        out,
        tile_rows,
        *rest,
        scale * LOG2E,
        num_heads,
        cache.stride(0),
        cache.stride(1),
        page_size=cache.shape[1],
        rank=rank,
        rope_dim=width - rank,
        group=group,
        block_group=triton.next_power_of_2(group),
        block_tokens=tile_tokens(num_heads, query.dtype, query.device),
        block_rank=max(16, triton.next_power_of_2(rank)),
        block_rope=max(16, triton.next_power_of_2(width - rank)),
        block_keys=_KEYS if has_room else _FEW_KEYS,
        stages=2 if has_room else 1,
        num_warps=8,
    )


def tile_tokens(num_heads: int, dtype: torch.dtype, device: torch.device) -> int:
    """Query tokens of a program of prompts."""
    lanes: int = triton.next_power_of_2(num_heads // head_groups(num_heads, dtype, device))
    return max(1, (_MOST_LANES if _has_room(dtype, device) else _FEW_LANES) // lanes)


def _has_room(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether shared memory holds most lanes, and tiles of keys that are loaded while others are multiplied."""
    return dtype.itemsize == 2 and (limits.of(device).shared_memory or 0) > _LARGE_MEMORY


@triton.jit
def _decodes(
    query,
    cache,
    out,
    parts,
    part_lse,
    counters,
    programs,
    segments,
    pages,
    scale,
    page_stride,
    slot_stride,
    merges: tl.constexpr,
    page_size: tl.constexpr,
    rank: tl.constexpr,
    rope_dim: tl.constexpr,
    group: tl.constexpr,
    lanes: tl.constexpr,
    block_rank: tl.constexpr,
    block_rope: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    overlaps: tl.constexpr,
):
    program, block = tl.program_id(0), tl.program_id(1)
    num_groups = tl.num_programs(1)
    lane = tl.arange(0, lanes)
    is_lane = lane < group
    dims, rotated = tl.arange(0, block_rank), tl.arange(0, block_rope)
    inside = is_lane[:, None] & (dims < rank)[None, :]
    is_rotated = is_lane[:, None] & (rotated < rope_dim)[None, :]
    # The plan is ready before the previous kernel ends.
    at = programs + program * 8
    row, begin, end, first_page = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    first_program, num_parts = tl.load(at + 4), tl.load(at + 5)
    first_segment, end_segment = tl.load(at + 6), tl.load(at + 7)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    for segment in range(first_segment, end_segment):
        at = segments + tl.minimum(segment + 1, end_segment - 1) * 6
        next_row, next_begin, next_end, next_page = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        next_program, next_parts = tl.load(at + 4), tl.load(at + 5)
        of_head = (row.to(tl.int64) * num_groups + block) * group + lane
        at_query = query + of_head[:, None] * (rank + rope_dim)
        q = tl.load(at_query + dims[None, :], mask=inside, other=0.0)
        q_rotated = tl.load(at_query + rank + rotated[None, :], mask=is_rotated, other=0.0)
        most = tl.full([lanes], float("-inf"), tl.float32)
        total = tl.zeros([lanes], tl.float32)
        sums = tl.zeros([lanes, block_rank], tl.float32)
        # Starts at 0: in nested loops, Triton 3.6 takes a lower bound from before the outer one.
        for offset in tl.range(0, end - begin, tile, num_stages=stages):
            key = begin + offset + tl.arange(0, tile)
            is_key = key < end
            page = tl.load(pages + first_page + key // page_size, mask=is_key, other=0).to(tl.int64)
            at_key = cache + (page * page_stride + (key % page_size) * slot_stride)[:, None]
            is_read = is_key[:, None] & (dims < rank)[None, :]
            latent = tl.load(at_key + dims[None, :], mask=is_read, other=0.0)
            is_read = is_key[:, None] & (rotated < rope_dim)[None, :]
            k = tl.load(at_key + rank + rotated[None, :], mask=is_read, other=0.0)
            scores = tl.dot(q_rotated, tl.trans(k), input_precision="ieee")
            scores = tl.dot(q, tl.trans(latent), scores, input_precision="ieee") * scale
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            now = tl.maximum(most, tl.max(scores, 1))
            shares = tl.exp2(scores - now[:, None])
            fade = tl.exp2(most - now)
            sums = sums * fade[:, None]
            sums = tl.dot(shares.to(latent.dtype), latent, sums, input_precision="ieee")
            total = total * fade + tl.sum(shares, 1)
            most = now
        result = sums / total[:, None]
        lse = most + tl.log2(total)
        num_ended = 0
        counter = counters + first_program * num_groups + block
        if num_parts > (1 if merges else 0):
            # At most two parts a program: a row's end, and after all ends another row's beginning.
            of_part = program + (program == first_program).to(tl.int32) * tl.num_programs(0)
            at_part = (of_part.to(tl.int64) * num_groups + block) * group + lane
            tl.store(parts + at_part[:, None] * rank + dims[None, :], result, mask=inside)
            tl.store(part_lse + at_part, lse, mask=is_lane)
            if merges:
                tl.debug_barrier()  # all stores come before the count
                num_ended = tl.atomic_add(counter, 1, sem="acq_rel")
        if merges:  # noqa: SIM102 - known when this is compiled
            if num_ended == num_parts - 1:
                if num_parts > 1:
                    tl.debug_barrier()
                    tl.store(counter, 0)
                    most = tl.full([lanes], float("-inf"), tl.float32)
                    total = tl.zeros([lanes], tl.float32)
                    result = tl.zeros([lanes, block_rank], tl.float32)
                    of_part = first_program + tl.num_programs(0)
                    for part in tl.range(0, num_parts, 1, loop_unroll_factor=2):
                        # in key order, whoever ends last
                        at_part = (of_part.to(tl.int64) * num_groups + block) * group + lane
                        lse = tl.load(part_lse + at_part, mask=is_lane, other=0.0, cache_modifier=".cg")
                        at_value = parts + at_part[:, None] * rank + dims[None, :]
                        value = tl.load(at_value, mask=inside, other=0.0, cache_modifier=".cg")
                        now = tl.maximum(most, lse)
                        fade = tl.exp2(most - now)
                        weight = tl.exp2(lse - now)
                        result = result * fade[:, None] + value * weight[:, None]
                        total = total * fade + weight
                        most = now
                        of_part = first_program + part + 1
                    result = result / total[:, None]
                to = out + of_head[:, None] * rank + dims[None, :]
                tl.store(to, result.to(out.dtype.element_ty), mask=inside)
        row, begin, end, first_page = next_row, next_begin, next_end, next_page
        first_program, num_parts = next_program, next_parts


@triton.jit
def _prompts(
    query,
    cache,
    out,
    tile_rows,
    tile_starts,
    query_starts,
    page_starts,
    kv_lens,
    pages,
    scale,
    num_heads,
    page_stride,
    slot_stride,
    page_size: tl.constexpr,
    rank: tl.constexpr,
    rope_dim: tl.constexpr,
    group: tl.constexpr,
    block_group: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rank: tl.constexpr,
    block_rope: tl.constexpr,
    block_keys: tl.constexpr,
    stages: tl.constexpr,
):
    # tl.dot needs 16 rows: rows past the tile are padding
    size: tl.constexpr = block_tokens * block_group if block_tokens * block_group > 16 else 16
    row = tl.load(tile_rows + tl.program_id(0))
    tile_start = tl.load(tile_starts + tl.program_id(0))
    query_start = tl.load(query_starts + row)
    q_len = tl.load(query_starts + row + 1) - query_start
    kv_len = tl.load(kv_lens + row)
    lane = tl.arange(0, size)
    token = tile_start + lane // block_group
    head = tl.program_id(1) * group + lane % block_group
    is_lane = (lane < block_tokens * block_group) & (token < q_len) & (lane % block_group < group)
    position = kv_len - q_len + token
    dims, rotated = tl.arange(0, block_rank), tl.arange(0, block_rope)
    of_query = (query_start + token).to(tl.int64) * num_heads + head
    at_query = query + of_query[:, None] * (rank + rope_dim)
    inside = is_lane[:, None] & (dims < rank)[None, :]
    q = tl.load(at_query + dims[None, :], mask=inside, other=0.0)
    is_rotated = is_lane[:, None] & (rotated < rope_dim)[None, :]
    q_rotated = tl.load(at_query + rank + rotated[None, :], mask=is_rotated, other=0.0)
    end = tl.minimum(kv_len, kv_len - q_len + tile_start + block_tokens)
    first_page = pages + tl.load(page_starts + row)
    most = tl.full([size], float("-inf"), tl.float32)
    total = tl.zeros([size], tl.float32)
    sums = tl.zeros([size, block_rank], tl.float32)
    for start in tl.range(0, end, block_keys, num_stages=stages):
        key = start + tl.arange(0, block_keys)
        is_key = key < end
        page = tl.load(first_page + key // page_size, mask=is_key, other=0).to(tl.int64)
        at_key = cache + (page * page_stride + (key % page_size) * slot_stride)[:, None]
        latent = tl.load(at_key + dims[None, :], mask=is_key[:, None] & (dims < rank)[None, :], other=0.0)
        is_read = is_key[:, None] & (rotated < rope_dim)[None, :]
        k = tl.load(at_key + rank + rotated[None, :], mask=is_read, other=0.0)
        scores = tl.dot(q_rotated, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q, tl.trans(latent), scores, input_precision="ieee") * scale
        # every lane sees the first key, so no maximum stays infinite; padding lanes see what the first token sees
        is_seen = key[None, :] <= tl.where(is_lane, position, kv_len - q_len + tile_start)[:, None]
        scores = tl.where(is_key[None, :] & is_seen, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        shares = tl.exp2(scores - now[:, None])
        fade = tl.exp2(most - now)
        sums = sums * fade[:, None]
        sums = tl.dot(shares.to(latent.dtype), latent, sums, input_precision="ieee")
        total = total * fade + tl.sum(shares, 1)
        most = now
    result = sums / total[:, None]
    tl.store(
        out + of_query[:, None] * rank + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=inside,
    )
