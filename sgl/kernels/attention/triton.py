"""Paged attention in Triton, for GPUs without FlashInfer.

Leading rows of one token use decode.py's kernel. For others, a program takes some query tokens with all query heads
of a kv head, so each key is read once, and walks the visible keys with an online softmax. Imported only where
Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from sgl.kernels import limits
from sgl.kernels.attention.base import MAX_INPUTS, AttentionShape, AttentionStep, GraphAttention
from sgl.kernels.attention.decode import DecodeAttention, DecodePlan
from sgl.kernels.attention.decode_triton import LOG2E, beside_sink, capped
from sgl.kernels.attention.ragged import Int32Array, Int64Array, RaggedRows
from sgl.kernels.staging import ALIGNMENT, Uploader, views_into

_TILE = 64  # query tokens times query heads of a kv head in a program
_KEYS = 64  # in a program at a time,
_STAGES = 3  # of their tiles
_WIDE = 128  # of heads up to so many numbers; of wider ones fewer fit


@dataclass(frozen=True, slots=True)
class _Prompts:
    tile_rows: torch.Tensor  # int32 [tiles]
    tile_starts: torch.Tensor  # int32 [tiles] index of the tile's first query token within its row
    query_starts: torch.Tensor  # int32 [B + 1]
    page_starts: torch.Tensor  # int32 [B + 1]
    kv_lens: torch.Tensor  # int32 [B]
    pages: torch.Tensor  # int32, from page_starts[0] on


class TritonAttention(GraphAttention):
    """The `GraphAttention` in Triton. `max_graph_rows` and `max_pages` (of a row) bound `plan_decode`."""

    def __init__(
        self, shape: AttentionShape, *, max_graph_rows: int = 0, max_pages: int = 0, max_queries: int = 1
    ) -> None:
        self._shape = shape
        self._group: int = triton.next_power_of_2(shape.num_heads // shape.num_kv_heads)
        self._uploader = Uploader(shape.device)
        bounds = {"max_graph_rows": max_graph_rows, "max_pages": max_pages, "max_queries": max_queries}
        self._decode = DecodeAttention(shape, **bounds)
        self.max_queries = self._decode.max_queries
        self._decodes: DecodePlan | None = None
        self._prompts: _Prompts | None = None

    def plan(self, step: AttentionStep) -> None:
        longer = np.flatnonzero(step.q_lens > 1)
        num_decodes = int(longer[0]) if len(longer) else len(step.q_lens)
        self._decodes = self._decode.plan(step, num_decodes) if num_decodes else None
        self._prompts = None
        if num_decodes < len(step.q_lens):
            host = RaggedRows.of(step, slice(num_decodes, None), self._shape.page_size)
            cut = tiles(step.q_lens[num_decodes:], self._tile_tokens)
            arrays = (*cut, host.query_starts, host.page_starts, host.kv_lens, host.pages)
            self._prompts = _Prompts(*self._uploader.upload(*arrays))

    def variants(self, num_rows: int) -> range:
        return range(1)

    def variant(self, step: AttentionStep) -> int:
        return 0

    def plan_decode(self, step: AttentionStep, variant: int, inputs: Sequence[Int64Array]) -> list[torch.Tensor]:
        self._decodes, placed = self._decode.plan_for_graph(step, inputs)
        self._prompts = None
        return placed

    def plan_verify(self, step: AttentionStep, queries: int, inputs: Sequence[Int64Array]) -> list[torch.Tensor]:
        self._decodes, placed = self._decode.plan_verify(step, queries, inputs)
        self._prompts = None
        return placed

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
        out: torch.Tensor | None = None,
        *,
        sinks: torch.Tensor | None = None,
        overlaps: bool = False,
    ) -> torch.Tensor:
        out = torch.empty_like(query) if out is None else out
        num_decodes = 0
        if self._decodes is not None:
            num_decodes = self._decodes.num_rows * self._decodes.queries
            some, some_out = query[:num_decodes], out[:num_decodes]
            caches = key_cache, value_cache
            self._decode.run(self._decodes, some, *caches, window, some_out, sinks=sinks, overlaps=overlaps)
        if self._prompts is not None:
            some, some_out = query[num_decodes:], out[num_decodes:]
            self._run_prompts(self._prompts, some, key_cache, value_cache, window, some_out, sinks)
        return out

    def _run_prompts(
        self,
        prompts: _Prompts,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        shape = self._shape
        assert key_cache.stride() == value_cache.stride(), "the two caches lie alike"
        _, num_heads, head_dim = query.shape
        block_keys = _KEYS if head_dim <= _WIDE else _KEYS // query.dtype.itemsize
        num_bytes = 2 * block_keys * head_dim * key_cache.element_size()
        _attend[(len(prompts.tile_rows), shape.num_kv_heads)](
            query,
            key_cache,
            value_cache,
            out,
            prompts.tile_rows,
            prompts.tile_starts,
            prompts.query_starts,
            prompts.page_starts,
            prompts.kv_lens,
            prompts.pages,
            sinks,
            LOG2E * shape.scale if shape.softcap is None else 2.0 * LOG2E * shape.scale / shape.softcap,
            num_heads,
            key_cache.stride(0),
            key_cache.stride(1),
            key_cache.stride(2),
            has_sinks=sinks is not None,
            cap=None if shape.softcap is None else LOG2E * shape.softcap,
            window=window or 0,
            page_size=shape.page_size,
            head_dim=head_dim,
            group=num_heads // shape.num_kv_heads,
            block_group=self._group,
            block_tokens=self._tile_tokens,
            block_keys=block_keys,
            block_dims=max(16, triton.next_power_of_2(head_dim)),
            stages=limits.of(query.device).stages(_STAGES, num_bytes),
            num_warps=4,
        )

    @property
    def _tile_tokens(self) -> int:
        return max(1, _TILE // self._group)


class InvariantAttention(TritonAttention):
    """Rows of one query token and of more by the same kernel, which walks keys in tiles that begin at multiples of
    their size: a query token's result has the same bits in any step."""

    def __init__(self, shape: AttentionShape, *, max_graph_rows: int = 0, max_pages: int = 0) -> None:
        super().__init__(shape)
        num_integers = max_graph_rows * (max_pages + 2 * MAX_INPUTS + 5) + 2
        num_bytes = 4 * num_integers + ALIGNMENT * (MAX_INPUTS + 6)
        self._graph_inputs = torch.zeros(num_bytes, dtype=torch.uint8).to(shape.device)
        self._graph_plans: dict[tuple[int, int], tuple[_Prompts, list[torch.Tensor]]] = {}

    def plan(self, step: AttentionStep) -> None:
        self._prompts = _Prompts(*self._uploader.upload(*self._host(step)))

    def plan_decode(self, step: AttentionStep, variant: int, inputs: Sequence[Int64Array]) -> list[torch.Tensor]:
        assert len(inputs) <= MAX_INPUTS, "there is room for so many"
        arrays: tuple[npt.NDArray[Any], ...] = (*inputs, *self._host(step))
        self._uploader.upload_into(self._graph_inputs, *arrays)
        key = len(step.q_lens), len(inputs)
        if key not in self._graph_plans:  # pages come last, so all arrays keep their addresses
            views = views_into(self._graph_inputs, arrays)
            self._graph_plans[key] = _Prompts(*views[len(inputs) :]), views[: len(inputs)]
        self._prompts, placed = self._graph_plans[key]
        return placed

    def _host(self, step: AttentionStep) -> tuple[Int32Array, ...]:
        rows = RaggedRows.of(step, slice(None), self._shape.page_size)
        cut = tiles(step.q_lens, self._tile_tokens)
        return (*cut, rows.query_starts, rows.page_starts, rows.kv_lens, rows.pages)


def tiles(q_lens: Int32Array, tile_tokens: int) -> tuple[Int32Array, Int32Array]:
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
    out,
    tile_rows,
    tile_starts,
    query_starts,
    page_starts,
    kv_lens,
    pages,
    sinks,
    scale,
    num_heads,
    page_stride,
    slot_stride,
    head_stride,
    has_sinks: tl.constexpr,
    cap: tl.constexpr,
    window: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    group: tl.constexpr,
    block_group: tl.constexpr,
    block_tokens: tl.constexpr,
    block_keys: tl.constexpr,
    block_dims: tl.constexpr,
    stages: tl.constexpr,
):
    # tl.dot needs 16 rows: rows past the tile are padding
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
    first_page = pages + tl.load(page_starts + row)
    most = tl.full([size], float("-inf"), tl.float32)
    total = tl.zeros([size], tl.float32)
    sums = tl.zeros([size, block_dims], tl.float32)
    for start in tl.range(begin, end, block_keys, num_stages=stages):
        key = start + tl.arange(0, block_keys)
        is_key = key < end
        page = tl.load(first_page + key // page_size, mask=is_key, other=0).to(tl.int64)
        at = page * page_stride + (key % page_size) * slot_stride + kv_head * head_stride
        inside = is_key[:, None] & (dims < head_dim)[None, :]
        k = tl.load(key_cache + at[:, None] + dims[None, :], mask=inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if cap is not None:
            scores = capped(scores, cap)
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(now > float("-inf"), now, 0.0)
        shares = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(most - safe)
        v = tl.load(value_cache + at[:, None] + dims[None, :], mask=inside, other=0.0).to(q.dtype)
        sums = sums * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(shares, 1)
        most = now
    total = tl.where(total > 0, total, 1.0)
    result = sums / total[:, None]
    if has_sinks:
        sink = tl.load(sinks + head, mask=is_lane, other=0.0)
        result *= beside_sink(most + tl.log2(total), sink)[:, None]
    tl.store(
        out + of_query[:, None] * head_dim + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=is_lane[:, None] & (dims < head_dim)[None, :],
    )
