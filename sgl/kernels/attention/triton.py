"""Paged attention in Triton: for GPUs that FlashInfer does not serve, NVIDIA's or another vendor's.

One kernel for every row of a step. A program takes some query tokens of a row with all query heads of a kv head, so
that a key is read once for the group, and walks the keys that they see with an online softmax. Where a step of
decodes has fewer programs than the GPU has room for, the keys of a row are split between programs and merged.
Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from sgl.kernels.attention.base import AttentionShape, AttentionStep
from sgl.kernels.attention.ragged import Int32Array, RaggedRows
from sgl.kernels.staging import Uploader, carve

_PROMPT_TILE = 64  # query tokens times query heads of a kv head in a program
_DECODE_TILE = 16  # the fewest that tensor cores multiply
_KEYS = 64  # in a program at a time
_MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class _Plan:
    tile_rows: torch.Tensor  # int32 [tiles]
    tile_starts: torch.Tensor  # int32 [tiles] index of the tile's first query token within its row
    query_starts: torch.Tensor  # int32 [B + 1]
    page_starts: torch.Tensor  # int32 [B + 1]
    kv_lens: torch.Tensor  # int32 [B]
    pages: torch.Tensor  # int32, from page_starts[0] on
    tile_tokens: int
    num_splits: int

    @staticmethod
    def of(tensors: list[torch.Tensor], tile_tokens: int, num_splits: int) -> _Plan:
        """From the tensors in the order of the fields."""
        tile_rows, tile_starts, query_starts, page_starts, kv_lens, pages = tensors
        return _Plan(tile_rows, tile_starts, query_starts, page_starts, kv_lens, pages, tile_tokens, num_splits)


class TritonAttention:
    """The `GraphAttention` in Triton. `max_graph_rows` bounds the steps of `plan_decode`, and `max_pages` the pages
    of a row in them."""

    def __init__(self, shape: AttentionShape, *, max_graph_rows: int = 0, max_pages: int = 0) -> None:
        self._shape = shape
        self._group: int = triton.next_power_of_2(shape.num_heads // shape.num_kv_heads)
        self._uploader = Uploader(shape.device)
        self._graph_inputs = torch.zeros(4 * (max_graph_rows * (max_pages + 5) + 2) + 96, dtype=torch.uint8).to(
            shape.device
        )
        self._num_processors = 1
        if shape.device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
        self._current: _Plan | None = None

    def plan(self, step: AttentionStep) -> None:
        """See `AttentionBackend.plan`."""
        host, tile_tokens = self._host(step), self._tile_tokens(step)
        arrays = (*_tiles(step.q_lens, tile_tokens), host.query_starts, host.page_starts, host.kv_lens, host.pages)
        self._current = _Plan.of(self._uploader.upload(*arrays), tile_tokens, self._num_splits(step))

    def variants(self, num_rows: int) -> range:
        """See `GraphAttention.variants`."""
        return range(1)

    def variant(self, step: AttentionStep) -> int | None:
        """See `GraphAttention.variant`."""
        return 0

    def plan_decode(self, step: AttentionStep, variant: int) -> None:
        """See `GraphAttention.plan_decode`."""
        host, tile_tokens = self._host(step), self._tile_tokens(step)
        arrays = (*_tiles(step.q_lens, tile_tokens), host.query_starts, host.page_starts, host.kv_lens, host.pages)
        self._uploader.upload_into(self._graph_inputs, *arrays)
        self._current = _Plan.of(carve(self._graph_inputs, arrays), tile_tokens, self._num_splits(step))

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        plan, shape = self._current, self._shape
        assert plan is not None, "planned before it is run"
        assert key_cache.stride() == value_cache.stride(), "the two caches lie alike"
        num_tokens, num_heads, head_dim = query.shape
        splits = plan.num_splits
        out = torch.empty_like(query)
        parts, lse = out, out
        if splits > 1:
            parts = torch.empty(splits, num_tokens, num_heads, head_dim, dtype=torch.float32, device=out.device)
            lse = torch.empty(splits, num_tokens, num_heads, dtype=torch.float32, device=out.device)
        block_dims = max(16, triton.next_power_of_2(head_dim))
        _attend[(len(plan.tile_rows), shape.num_kv_heads, splits)](
            query,
            key_cache,
            value_cache,
            parts,
            lse,
            plan.tile_rows,
            plan.tile_starts,
            plan.query_starts,
            plan.page_starts,
            plan.kv_lens,
            plan.pages,
            shape.scale * 1.4426950408889634,
            num_tokens,
            num_heads,
            key_cache.stride(0),
            key_cache.stride(1),
            key_cache.stride(2),
            window=window or 0,
            page_size=shape.page_size,
            head_dim=head_dim,
            group=num_heads // shape.num_kv_heads,
            block_group=self._group,
            block_tokens=plan.tile_tokens,
            block_keys=_KEYS,
            block_dims=block_dims,
            is_split=splits > 1,
            num_warps=4,
        )
        if splits > 1:
            _merge[(num_tokens, num_heads)](
                parts, lse, out, num_tokens, num_heads, head_dim, splits=splits, block_dims=block_dims, num_warps=1
            )
        return out

    def _host(self, step: AttentionStep) -> RaggedRows:
        return RaggedRows.of(step, slice(0, None), self._shape.page_size)

    def _tile_tokens(self, step: AttentionStep) -> int:
        """Query tokens a program takes."""
        size = _PROMPT_TILE if int(step.q_lens.max()) > 1 else _DECODE_TILE
        return max(1, size // self._group)

    def _num_splits(self, step: AttentionStep) -> int:
        """Of each row's keys; depends on the number of rows alone, as captured launches must."""
        if int(step.q_lens.max()) > 1:
            return 1
        programs = len(step.q_lens) * self._shape.num_kv_heads
        wanted: int = triton.next_power_of_2(max(1, 2 * self._num_processors // programs))
        return min(_MAX_SPLITS, wanted)


def _tiles(q_lens: Int32Array, tile_tokens: int) -> tuple[Int32Array, Int32Array]:
    """Row and first query token of every tile."""
    counts = -(-q_lens // tile_tokens)
    rows = np.repeat(np.arange(len(q_lens), dtype=np.int32), counts)
    first = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, (first * tile_tokens).astype(np.int32)


@triton.jit
def _attend(
    query,
    key_cache,
    value_cache,
    parts,
    lse,
    tile_rows,
    tile_starts,
    query_starts,
    page_starts,
    kv_lens,
    pages,
    scale,
    num_tokens,
    num_heads,
    page_stride,
    slot_stride,
    head_stride,
    window: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    group: tl.constexpr,
    block_group: tl.constexpr,
    block_tokens: tl.constexpr,
    block_keys: tl.constexpr,
    block_dims: tl.constexpr,
    is_split: tl.constexpr,
):
    # tl.dot multiplies no fewer than 16 rows: those past the tile are padding
    size: tl.constexpr = block_tokens * block_group if block_tokens * block_group > 16 else 16
    row = tl.load(tile_rows + tl.program_id(0))
    tile_start = tl.load(tile_starts + tl.program_id(0))
    kv_head = tl.program_id(1)
    query_start = tl.load(query_starts + row)
    q_len = tl.load(query_starts + row + 1) - query_start
    kv_len = tl.load(kv_lens + row)
    lane = tl.arange(0, size)
    token = tile_start + lane // block_group
    head = kv_head * group + lane % block_group
    is_lane = (lane < block_tokens * block_group) & (token < q_len) & (lane % block_group < group)
    position = kv_len - q_len + token
    dims = tl.arange(0, block_dims)
    of_query = (query_start + token).to(tl.int64) * num_heads + head
    q = tl.load(
        query + of_query[:, None] * head_dim + dims[None, :],
        mask=is_lane[:, None] & (dims < head_dim)[None, :],
        other=0.0,
    )
    begin = 0
    end = tl.minimum(kv_len, kv_len - q_len + tile_start + block_tokens)
    if window > 0:
        begin = tl.maximum(kv_len - q_len + tile_start - window + 1, 0) // block_keys * block_keys
    if is_split:
        share = tl.cdiv(tl.cdiv(end - begin, block_keys), tl.num_programs(2)) * block_keys
        begin = begin + tl.program_id(2) * share
        end = tl.minimum(end, begin + share)
    first_page = pages + tl.load(page_starts + row)
    most = tl.full([size], float("-inf"), tl.float32)
    total = tl.zeros([size], tl.float32)
    sums = tl.zeros([size, block_dims], tl.float32)
    start = begin
    while start < end:
        key = start + tl.arange(0, block_keys)
        is_key = key < end
        page = tl.load(first_page + key // page_size, mask=is_key, other=0).to(tl.int64)
        at = page * page_stride + (key % page_size) * slot_stride + kv_head * head_stride
        inside = is_key[:, None] & (dims < head_dim)[None, :]
        k = tl.load(key_cache + at[:, None] + dims[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(now > float("-inf"), now, 0.0)
        shares = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(most - safe)
        v = tl.load(value_cache + at[:, None] + dims[None, :], mask=inside, other=0.0)
        sums = sums * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(shares, 1)
        most = now
        start += block_keys
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    to = of_query
    if is_split:
        to = to + tl.program_id(2).to(tl.int64) * num_tokens * num_heads
        tl.store(
            lse + to,
            tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf")),
            mask=is_lane,
        )
    tl.store(
        parts + to[:, None] * head_dim + dims[None, :],
        result.to(parts.dtype.element_ty),
        mask=is_lane[:, None] & (dims < head_dim)[None, :],
    )


@triton.jit
def _merge(parts, lse, out, num_tokens, num_heads, head_dim, splits: tl.constexpr, block_dims: tl.constexpr):
    """Weigh the parts of one token and head by how much of the softmax each holds; a part may be empty."""
    of_out = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split = tl.arange(0, splits)
    dims = tl.arange(0, block_dims)
    at = split.to(tl.int64) * num_tokens * num_heads + of_out
    logs = tl.load(lse + at)
    weights = tl.exp2(logs - tl.max(logs, 0))
    inside = (dims < head_dim)[None, :] & (weights > 0)[:, None]
    values = tl.load(parts + at[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
    merged = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + of_out * head_dim + dims, merged.to(out.dtype.element_ty), mask=dims < head_dim)
