"""Decode attention: rows of one query token each, or of the same few, with equal shares of keys for all programs
(stream-K: arXiv 2301.03598).

This is the host side, the split-KV work list. The keys of all rows, in tiles, are cut into one equal share for each
concurrent program, counting a cost for each row's start; all programs thus end together. The last program to finish
a cut row merges its parts. The kernel is in decode_triton.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sgl.kernels import limits
from sgl.kernels.attention.base import MAX_INPUTS, AttentionShape, AttentionStep
from sgl.kernels.attention.ragged import Int32Array, Int64Array, RaggedRows
from sgl.kernels.staging import ALIGNMENT, Uploader, views_into

_TILE = 32  # keys a program takes at a time,
_WIDE, _WIDE_TILE = 128, 16  # and of wider heads, as many bytes
_LEAST_SHARE = 128  # keys; smaller shares cost more to merge than they save
_ROW_COST = 64  # keys that take as long as starting a row
_PER_PROCESSOR = 4  # concurrent programs of a multiprocessor, limited by registers,
_WARPS = 2  # of so many warps each
_FEW_ROWS = 8  # up to so many are shared among half the programs
_STEADY_ROWS = 16  # up to so many whose consecutive steps often need no new tile, and so no new shares


def has_room(shape: AttentionShape, queries: int, tile: int | None = None) -> bool:
    """Whether shared memory holds so many query tokens of a row, their shares, and a tile of keys and values (None:
    the usual one), by what programs compiled for A100, L40 and MI300X take at most. On AMD's the sums lie there, not
    the queries."""
    its = limits.of(shape.device)
    if queries == 1 or its.shared_memory is None:
        return True
    lanes, dims = (
        max(16, 1 << (number - 1).bit_length())  # what tensor cores multiply
        for number in (shape.num_heads // shape.num_kv_heads * queries, shape.head_dim)
    )
    size, tile = shape.dtype.itemsize, tile or _tile(shape)
    in_loop = (lanes * tile + 2 * tile * dims + its.is_nvidia * lanes * dims) * size
    return max(in_loop, 0 if its.is_nvidia else 4 * lanes * dims) <= its.shared_memory


def _tile(shape: AttentionShape) -> int:
    return _TILE if shape.head_dim <= _WIDE else _WIDE_TILE


@dataclass(frozen=True, slots=True)
class SplitWork:
    """The split-KV work list; int32. A segment is a run of keys of one row in one share."""

    starts: Int32Array  # [num_programs + 1] each program's first segment
    segments: Int32Array
    """[n, 6] row, first key, end, the row's first page, the first program with its keys, and their number."""

    @staticmethod
    def of(
        begins: Int32Array,
        ends: Int32Array,
        first_pages: Int32Array,
        num_programs: int,
        tile: int,
        least_share: int = _LEAST_SHARE,
    ) -> SplitWork:
        """Split keys begins[row] ≤ key < ends[row] of every row, none empty. first_pages: index of each row's first
        page. tile: keys that stay together. least_share: of a program, in keys, if there are so many, but a tile."""
        tiles = -(-(ends - begins) // tile)
        stops = tiles.cumsum()
        firsts = stops - tiles
        total = int(stops[-1])
        costs = (tiles * tile + _ROW_COST).cumsum()
        share = max(least_share, tile, -(-int(costs[-1]) // num_programs))
        edges = np.minimum(np.arange(num_programs + 1) * share, costs[-1])
        row = np.minimum(costs.searchsorted(edges, side="right"), len(tiles) - 1)
        # the nearest tile; an edge within a row's starting cost means its first tile
        spent = edges - (costs - tiles * tile)[row]
        edges = firsts[row] + np.maximum(spent + tile // 2, 0) // tile
        is_cut = np.zeros(total + 1, np.bool_)
        is_cut[firsts] = is_cut[edges] = is_cut[total] = True
        cuts = is_cut.nonzero()[0]
        cuts, next_cuts = cuts[:-1], cuts[1:]
        rows = firsts.searchsorted(cuts, side="right") - 1
        first_programs = edges.searchsorted(firsts, side="right") - 1
        num_parts = edges.searchsorted(stops - 1, side="right") - first_programs
        begins_at = begins - firsts * tile
        segments = np.empty((len(cuts), 6), np.int32)
        segments[:, 0] = rows
        segments[:, 1] = begins_at[rows] + cuts * tile
        segments[:, 2] = np.minimum(ends[rows], begins_at[rows] + next_cuts * tile)
        for column, of_row in enumerate((first_pages, first_programs, num_parts), 3):
            segments[:, column] = of_row[rows]
        return SplitWork(cuts.searchsorted(edges).astype(np.int32), segments)

    @property
    def programs(self) -> Int32Array:
        """[num_programs, 8] what a program reads first, at once: its first segment, that one's number, and the next
        program's first."""
        programs = np.empty((len(self.starts) - 1, 8), np.int32)
        programs[:, 6], programs[:, 7] = self.starts[:-1], self.starts[1:]
        programs[:, :6] = self.segments[np.minimum(programs[:, 6], len(self.segments) - 1)]
        return programs


class Programs(NamedTuple):
    """Those that run at once for a kv head."""

    number: int
    warps: int
    tile: int  # keys that one takes at a time


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The shares of a step's programs; reusable for these rows until one needs another tile, or the longest of several
    another page."""

    key: tuple[bytes, bytes, Programs]  # the rows' numbers of tiles, where their pages begin, and who shares them
    ends: Int64Array  # [B] each row's last segment, whose end advances
    firsts: Int32Array  # [num_programs] each program's first segment
    programs: Int32Array
    segments: Int32Array

    @staticmethod
    def of(
        key: tuple[bytes, bytes, Programs], num_rows: int, programs: Int32Array, segments: Int32Array
    ) -> _Arrays:
        used = segments[: programs[-1, 7]]
        ends = used[:, 0].searchsorted(np.arange(num_rows), side="right") - 1
        return _Arrays(key, ends, np.minimum(programs[:, 6], len(used) - 1), programs, segments)

    def at(self, kv_lens: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Programs and segments for the rows' present lengths."""
        programs, segments = self.programs.copy(), self.segments.copy()
        segments[self.ends, 2] = kv_lens
        programs[:, :6] = segments[self.firsts]
        return programs, segments


@dataclass(frozen=True, slots=True)
class SharedOutput:
    """Attention over shared keys, to be merged with that over each row's own."""

    out: torch.Tensor  # [N, num_heads, head_dim]
    lse: torch.Tensor  # float32 [N, num_heads] base-2 log-sum-exp
    places: torch.Tensor  # int32 [B] each row's index among the N; -1: none


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A step's decodes as the kernel reads them; int32, on the device."""

    num_rows: int
    pages: torch.Tensor  # of all rows
    shares: dict[int | None, tuple[torch.Tensor, torch.Tensor]]  # by window
    programs: Programs
    queries: int = 1  # tokens a row
    firsts: torch.Tensor | None = None
    """[num_rows] position of each row's first of several tokens, or of one, if there may be keys behind it."""


class DecodeAttention:
    """Plans and runs the leading rows of one query token, and rows of up to `max_queries` alike, which is 1 where
    shared memory has no room for as many as asked for. max_graph_rows and
    max_pages (of a row) bound `plan_for_graph`. per_processor: concurrent programs of a multiprocessor. least_share:
    see `SplitWork.of`. None: what suits this kernel."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_graph_rows: int = 0,
        max_pages: int = 0,
        per_processor: int | None = None,
        least_share: int | None = None,
        max_queries: int = 1,
    ) -> None:
        self._shape = shape
        self._uploader = Uploader(shape.device)
        processors = 1
        if shape.device.type == "cuda":
            processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
        self._tile = _tile(shape)
        self.max_queries = max_queries if has_room(shape, max_queries) else 1
        self._least_share = least_share or _LEAST_SHARE
        self.num_programs = max(1, processors * (per_processor or _PER_PROCESSOR) // shape.num_kv_heads)
        group = shape.num_heads // shape.num_kv_heads
        # A program leaves at most two parts: the end of one row and the beginning of another.
        num_parts = 2 * self.num_programs * shape.num_kv_heads * group * self.max_queries
        self._parts = torch.empty(num_parts * (shape.head_dim + 1), dtype=torch.float32, device=shape.device)
        self._counters = torch.zeros(self.num_programs * shape.num_kv_heads, dtype=torch.int32).to(shape.device)
        num_integers = max_graph_rows * max_pages
        num_integers += len(shape.windows) * (6 * max_graph_rows + 14 * self.num_programs)
        num_integers += MAX_INPUTS * 2 * max_graph_rows * self.max_queries + max_graph_rows
        num_arrays = MAX_INPUTS + 2 + 2 * len(shape.windows)
        self._graph_inputs = torch.zeros(4 * num_integers + ALIGNMENT * num_arrays, dtype=torch.uint8)
        self._graph_inputs = self._graph_inputs.to(shape.device)
        self._graph_plans: dict[tuple[int, int, int], tuple[DecodePlan, list[torch.Tensor]]] = {}
        self._latest: _Arrays | None = None  # of few rows

    def programs(self, num_rows: int, *, of_several: bool = False) -> Programs:
        """That share the keys of so many rows. of_several: of several query tokens each, or as for these. Merging the
        parts of few rows, and the large ones of several tokens, takes longer than reading: fewer programs leave fewer.
        So a decode step of one row of Llama-3.1-8B behind 1,024 and 8,192 tokens takes 4.07 and 4.51 ms on an H200
        instead of 4.15 and 4.93, and attention of a row's 8 tokens 13 and 30 µs instead of 23 and 77."""
        if of_several and num_rows == 1:
            tile = 2 * self._tile if has_room(self._shape, self.max_queries, 2 * self._tile) else self._tile
            return Programs(max(1, self.num_programs // 4), 4 * _WARPS, tile)
        if of_several or num_rows <= _FEW_ROWS:
            return Programs(max(1, self.num_programs // 2), 2 * _WARPS, self._tile)
        return Programs(self.num_programs, _WARPS, self._tile)

    def plan(self, step: AttentionStep, num_rows: int, skipped: Int32Array | None = None) -> DecodePlan:
        """For the first num_rows rows, each without its first `skipped` pages (only without windows)."""
        programs = self.programs(num_rows)
        arrays = self._host(step, num_rows, skipped, programs)
        return self._plan(num_rows, programs, self._uploader.upload(*arrays))

    def plan_for_graph(
        self, step: AttentionStep, inputs: Sequence[Int64Array], skipped: Int32Array | None = None
    ) -> tuple[DecodePlan, list[torch.Tensor]]:
        """`plan` for all rows, at addresses that depend only on their number, with the inputs of
        `GraphAttention.plan_decode`."""
        assert len(inputs) <= MAX_INPUTS, "there is room for so many"
        num_rows = len(step.q_lens)
        programs = self.programs(num_rows)
        arrays: tuple[npt.NDArray[Any], ...] = (*inputs, *self._host(step, num_rows, skipped, programs))
        self._uploader.upload_into(self._graph_inputs, *arrays)
        key = num_rows, len(inputs), 1
        if key not in self._graph_plans:  # pages come last, so all arrays keep their addresses
            placed = views_into(self._graph_inputs, arrays)
            self._graph_plans[key] = self._plan(num_rows, programs, placed[len(inputs) :]), placed[: len(inputs)]
        return self._graph_plans[key]

    def plan_verify(
        self, step: AttentionStep, queries: int, inputs: Sequence[Int64Array]
    ) -> tuple[DecodePlan, list[torch.Tensor]]:
        """See `GraphAttention.plan_verify`."""
        assert len(inputs) <= MAX_INPUTS, "there is room for so many"
        firsts, num_rows = step.kv_lens - step.q_lens, len(step.q_lens)
        programs = self.programs(num_rows, of_several=True)
        arrays: tuple[npt.NDArray[Any], ...]
        arrays = (*inputs, firsts, *self._host(step, num_rows, None, programs, more=queries - 1))
        self._uploader.upload_into(self._graph_inputs, *arrays)
        key = num_rows, len(inputs), queries
        if key not in self._graph_plans:
            views = views_into(self._graph_inputs, arrays)
            plan = self._plan(num_rows, programs, views[len(inputs) + 1 :])
            plan = replace(plan, queries=queries, firsts=views[len(inputs)])
            self._graph_plans[key] = plan, views[: len(inputs) + 1]
        return self._graph_plans[key]

    def run(
        self,
        plan: DecodePlan,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None,
        out: torch.Tensor,
        shared: SharedOutput | None = None,
        *,
        sinks: torch.Tensor | None = None,
        overlaps: bool = False,
    ) -> None:
        """Attend for query [B, num_heads, head_dim], contiguous, into `out` of the same layout. sinks, overlaps: see
        `GraphAttention.run`."""
        # imported only where a Triton kernel runs
        from sgl.kernels.attention import decode_triton

        programs, segments = plan.shares[window]
        decode_triton.attend(
            query,
            key_cache,
            value_cache,
            out,
            None if shared is None else (shared.out, shared.lse, shared.places),
            (self._parts, self._counters),
            (programs, segments, plan.pages),
            self._shape.scale,
            plan.programs.tile,
            softcap=self._shape.softcap,
            sinks=sinks,
            overlaps=overlaps,
            firsts=plan.firsts,
            queries=plan.queries,
            window=window,
            warps=plan.programs.warps,
        )

    def _host(
        self, step: AttentionStep, num_rows: int, skipped: Int32Array | None, programs: Programs, more: int = 0
    ) -> tuple[npt.NDArray[np.int32], ...]:
        """Arrays to copy; those of varying size come last. more: query tokens of a row before its last."""
        if num_rows > _STEADY_ROWS or self._shape.windows != (None,):
            return self._host_anew(step, num_rows, skipped, programs, more)
        kv_lens, page_size = step.kv_lens[:num_rows], self._shape.page_size
        width = -(-int(kv_lens.max()) // page_size)
        first_pages = np.arange(0, num_rows * width, width, dtype=np.int32)
        if skipped is not None:
            kv_lens, first_pages = kv_lens - skipped * page_size, first_pages + skipped
        key = ((kv_lens - 1) // programs.tile).tobytes(), first_pages.tobytes(), programs
        if self._latest is None or self._latest.key != key:
            shares = self.cut(np.zeros_like(kv_lens), kv_lens, first_pages, programs)
            self._latest = _Arrays.of(key, num_rows, *shares)
        return *self._latest.at(kv_lens), step.page_table[:num_rows, :width].reshape(-1)

    def _host_anew(
        self, step: AttentionStep, num_rows: int, skipped: Int32Array | None, programs: Programs, more: int
    ) -> tuple[npt.NDArray[np.int32], ...]:
        rows = RaggedRows.of(step, slice(0, num_rows), self._shape.page_size, skipped)
        arrays: list[Int32Array] = []
        for window in self._shape.windows:
            begins = np.zeros(num_rows, np.int32)
            if window is not None:
                begins = np.maximum(rows.kv_lens - window - more, 0)
            arrays += self.cut(begins, rows.kv_lens, rows.page_starts[:-1], programs)
        return (*arrays, rows.pages)

    def cut(
        self, begins: Int32Array, ends: Int32Array, first_pages: Int32Array, programs: Programs
    ) -> tuple[Int32Array, Int32Array]:
        """What programs read first, and room for all segments: see `SplitWork.of`."""
        shares = SplitWork.of(begins, ends, first_pages, programs.number, programs.tile, self._least_share)
        segments = np.zeros((len(ends) + programs.number, 6), np.int32)
        segments[: len(shares.segments)] = shares.segments
        return shares.programs, segments

    def _plan(self, num_rows: int, programs: Programs, tensors: list[torch.Tensor]) -> DecodePlan:
        *shares, pages = tensors
        pairs = zip(shares[::2], shares[1::2], strict=True)
        return DecodePlan(num_rows, pages, dict(zip(self._shape.windows, pairs, strict=True)), programs)
