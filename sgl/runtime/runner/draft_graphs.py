"""CUDA graphs of drafts: all passes of a step, over a draft model or a head, and the draws between them in one launch.

All that differs between passes is known before, but for the tokens drawn: it is uploaded at once, and so is one plan of
attention over the keys of the last pass. Earlier passes do not see the later keys, by their positions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sgl.kernels.attention.base import PlannedAttention
from sgl.kernels.attention.decode import DecodeAttention, DecodePlan
from sgl.kernels.staging import ALIGNMENT, Uploader, views_into
from sgl.runtime.batch import Int32Array, Int64Array
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.runner.ahead import Ahead, PassInputs, Shift, Verifying, VerifyInputs
from sgl.runtime.runner.capture import CAPTURE_MODE, MAX_QUERIES, capturing, row_buckets
from sgl.runtime.runner.draft_passes import Passes
from sgl.runtime.runner.results import Downloader
from sgl.runtime.runner.sampler import Sampler

_QUERIES = 1, 2, 4, MAX_QUERIES  # entries of a row that the first pass computes
_KEYS = 64  # by which a row's keys are padded, at least, so that most steps share them out like the one before


class Chain(NamedTuple):
    """What to draft for a row."""

    row: int
    start: int  # its first pass computes the entries of tokens [start, end)
    token_ids: Int32Array  # theirs
    most: int  # drafts
    pages: Int32Array  # of all entries that are attended to, in order
    num_holes: int  # entries before `start` that are not


class _Inputs(NamedTuple):
    """int64, of R rows, Q entries of each in the first pass, and k passes; NumPy's or torch's."""

    token_ids: Any  # [R * Q] of the first pass, as are
    positions: Any
    slots: Any
    previous: Any  # slots of the tokens before
    last: Any  # [R] indices of each row's last entry
    rows: Any  # [R]
    seen: Any  # [k, R] the place among a row's keys of the first entry of a pass
    places: Any  # [k, R] positions of the tokens drawn
    later_positions: Any  # [k - 1, R] of the passes behind the first
    later_slots: Any

    @staticmethod
    def size(num_rows: int, queries: int, passes: int) -> int:
        """Numbers in all. Kernels like addresses that 16 divides."""
        return 4 * _even(num_rows * queries) + 4 * passes * _even(num_rows)

    @staticmethod
    def of(flat: Any, num_rows: int, queries: int, passes: int) -> _Inputs:
        """Views of so many numbers."""
        wide, narrow = _even(num_rows * queries), _even(num_rows)
        firsts = flat[: 4 * wide].reshape(4, wide)[:, : num_rows * queries]
        each = flat[4 * wide :].reshape(4 * passes, narrow)[:, :num_rows]
        seen, places, positions = 2 + passes, 2 + 2 * passes, 1 + 3 * passes
        parts = each[2:seen], each[seen:places], each[places:positions], each[positions:]
        return _Inputs(*[*firsts, *each[:2], *parts])


class _Keys(NamedTuple):
    """Those of all rows that the last pass attends to, each row's padded with the dummy page."""

    begins: list[list[int]]  # by window and row: before which no pass sees any of a row's
    lengths: list[int]
    pages: Int32Array


class DraftGraphs:
    """Drafts for at most 64 rows. Capture before the first step."""

    def __init__(
        self,
        passes: Passes,
        sampler: Sampler,
        downloader: Downloader,
        *,
        max_rows: int,
        max_entries: int,
        num_passes: int,
    ) -> None:
        """max_entries: of a row. num_passes: drafts of a row."""
        self._passes = passes
        self._sampler = sampler
        self._downloader = downloader
        self._num_passes = num_passes
        self._rows = row_buckets(max_rows)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by rows and entries of the first pass
        self._hosts: dict[tuple[int, int], tuple[Int64Array, _Inputs]] = {}  # likewise
        self._placed: dict[tuple[int, int], list[torch.Tensor]] = {}
        shape = passes.shape
        self._page_size = shape.page_size
        self._width = math.lcm(_KEYS, shape.page_size)  # by which keys are padded
        self._attention = _Attention(DecodeAttention(shape, max_queries=MAX_QUERIES))
        self._shares: tuple[list[list[int]], list[Int32Array]] | None = None  # of the latest keys
        self._count = np.arange(max_entries + MAX_QUERIES + num_passes + 1)
        most = self._rows[-1]
        # Rows share prefixes; more keys than twice all that there are would be rare.
        self._max_keys = min(most * self._padded(max_entries), 2 * passes.num_slots) + most * self._width
        num_bytes = 8 * _Inputs.size(most, MAX_QUERIES, num_passes) + 4 * self._max_keys // shape.page_size
        num_bytes += 4 * len(shape.windows) * (6 * most + 14 * self._attention.decode.num_programs)
        num_bytes += (2 + 2 * len(shape.windows)) * ALIGNMENT
        device = shape.device
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._uploader = Uploader(device, num_buffers=8)
        self._drafts = torch.zeros(num_passes * most, dtype=torch.int64, device=device)
        self._shift = Shift(most, MAX_QUERIES, device)
        self._latest_bucket = 0

    @property
    def max_rows(self) -> int:
        """Rows of the largest graph; 0: none is recorded."""
        return self._rows[-1] if self._graphs else 0

    def holds(self, ends: Sequence[int], num_tokens: int) -> bool:
        """Whether there is a graph of these rows: of keys before each end, and tokens of a first pass."""
        num_keys = sum(map(self._padded, ends)) + self._rows[-1] * self._width
        return len(ends) <= self.max_rows and num_tokens <= MAX_QUERIES and num_keys <= self._max_keys

    def run(self, chains: Sequence[Chain], table: Int32Array) -> Callable[[], Int32Array] | None:
        """Replay the passes; call the result for the drafts [passes, rows], of which a row's later ones than it wants
        mean nothing. None: there are more keys than fit. Never waits for the device. table: pages by row."""
        if (placed := self._placed_for(chains, table)) is None:
            return None
        num_rows, (bucket, queries) = len(chains), placed[0]
        self._graphs[bucket, queries].replay()
        wait = self._downloader.start([self._drafts[: self._num_passes * bucket]])
        return lambda: wait()[0].reshape(self._num_passes, bucket)[:, :num_rows]

    def run_ahead(
        self,
        chains: Sequence[Chain],
        table: Int32Array,
        behind: Verifying,
        wanted: Int64Array,
        simulated: Int64Array,
    ) -> None:
        """`run` behind a step whose drafts are being verified, without a result: each chain begins at its first draft,
        with token ids of no meaning. There is room. wanted, simulated: see `Shift.accept`."""
        placed = self._placed_for(chains, table)
        assert placed is not None, "there is room"
        (bucket, queries), slots = placed
        slots = slots[:, 1 : 2 + int((behind.num_drafts + wanted).max())]
        self._shift.accept(behind, wanted, simulated, slots, self._inputs_of(bucket, queries), self._uploader)
        self._graphs[bucket, queries].replay()
        self._latest_bucket = bucket

    def place(self, inputs: VerifyInputs) -> Ahead:
        """Put the drafts of the latest `run_ahead` into the step that verifies them: see `Shift.place`."""
        bucket = self._latest_bucket
        return self._shift.place(self._drafts[: self._num_passes * bucket].view(self._num_passes, bucket), inputs)

    def _inputs_of(self, bucket: int, queries: int) -> PassInputs:
        """What a graph reads that stands behind drafts being verified."""
        its = _Inputs.of(self._placed[bucket, queries][0], bucket, queries, self._num_passes)
        later = its.seen, its.places, its.later_positions, its.later_slots
        return PassInputs((its.token_ids, queries, its.last), later)

    def _placed_for(self, chains: Sequence[Chain], table: Int32Array) -> tuple[tuple[int, int], Int64Array] | None:
        """Upload the inputs of a graph. Returns which it is, and `_slots` up to the last draft's; None: there are more
        keys than fit."""
        keys = self._keys_of(chains)
        if len(keys.pages) * self._page_size + self._rows[-1] * self._width > self._max_keys:
            return None
        num_rows, passes, skipped = len(chains), self._num_passes, self._passes.first
        bucket = self._rows[bisect_left(self._rows, num_rows)]
        longest = max(len(its.token_ids) for its in chains)
        queries = _QUERIES[bisect_left(_QUERIES, longest)]
        slots = self._slots(chains, table, longest + passes)
        flat, its = self._host(bucket, queries)
        flat[:] = 0  # passes that a row does not want use the dummy page
        its.rows[num_rows:] = len(self._sampler.next_tokens) - 1
        count = self._count
        for b, (row, start, token_ids, most, _, num_holes) in enumerate(chains):
            size, at, own = len(token_ids), b * queries, slots[b]
            first, later = slice(at, at + size), slice(most - 1)
            place, seen = start + size, start + size - skipped - num_holes
            its.token_ids[first] = token_ids
            its.positions[first] = count[start - skipped : place - skipped]
            its.slots[first] = own[1 : 1 + size]
            its.previous[first] = own[:size]
            its.last[b], its.rows[b], its.seen[0, b] = first.stop - 1, row, seen - size
            its.seen[1:, b] = count[seen : seen + passes - 1]
            its.places[:, b] = count[place : place + passes]
            its.later_positions[later, b] = count[place - skipped : place - skipped + most - 1]
            its.later_slots[later, b] = own[1 + size : size + most]
        self._place(bucket, queries, keys)
        return (bucket, queries), slots

    def _keys_of(self, chains: Sequence[Chain]) -> _Keys:
        width, page_size, skipped = self._width, self._page_size, self._passes.first
        ends = [its.start + len(its.token_ids) + its.most - 1 - skipped - its.num_holes for its in chains]
        lengths, begins = list(map(self._padded, ends)), []
        for window in self._passes.shape.windows:
            starts = [its.start - skipped - its.num_holes for its in chains]
            begins.append([0 if window is None else max(it + 1 - window, 0) // width * width for it in starts])
        pages, at = np.zeros(sum(lengths) // page_size, np.int32), 0
        for chain, end, length in zip(chains, ends, lengths, strict=True):
            num_pages = -(-end // page_size)
            pages[at : at + num_pages] = chain.pages[:num_pages]
            at += length // page_size
        return _Keys(begins, lengths, pages)

    def _slots(self, chains: Sequence[Chain], table: Int32Array, width: int) -> Int64Array:
        """[R, 1 + width] those of each row's tokens from the one before its start on, if it has pages there."""
        rows, starts = np.array([(its.row, its.start) for its in chains]).T[:, :, None]
        index = np.clip(starts + self._count[: 1 + width] - 1, 0, table.shape[1] * self._page_size - 1)
        index, offset = np.divmod(index, self._page_size)
        slots: Int64Array = table[rows, index].astype(np.int64) * self._page_size + offset
        return slots

    def _padded(self, length: int) -> int:
        return -(-length // self._width) * self._width

    def drop(self) -> None:
        """Let go of what was recorded, until the next `capture`."""
        self._graphs.clear()

    def close(self) -> None:
        """Let go of everything, after `drop`."""
        self._inputs = self._drafts = self._inputs.new_empty(0)
        self._passes.close()
        self._placed.clear()
        self._attention.close()

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every bucket, the largest first, whose memory others reuse."""
        what = f"{self._num_passes} drafts of {self._passes.name} for up to {self._rows[-1]} rows"
        with capturing(what) as (pool, stream):
            for queries in reversed(_QUERIES):
                for bucket in reversed(self._rows):
                    self._host(bucket, queries)[0][:] = 0
                    self._place(bucket, queries, self._keys_of([]))
                    self._compute(bucket, queries)  # compiles and loads what a capture may not
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=CAPTURE_MODE):
                        self._compute(bucket, queries)
                    self._graphs[bucket, queries] = graph
        self._shift.warm_up(self._inputs_of(1, 1), self._uploader)

    def _host(self, bucket: int, queries: int) -> tuple[Int64Array, _Inputs]:
        """Where inputs are made, all of them and by name."""
        if (bucket, queries) not in self._hosts:
            flat = np.zeros(_Inputs.size(bucket, queries, self._num_passes), np.int64)
            self._hosts[bucket, queries] = flat, _Inputs.of(flat, bucket, queries, self._num_passes)
        return self._hosts[bucket, queries]

    def _place(self, bucket: int, queries: int, keys: _Keys) -> None:
        """Upload what was made in `_host`."""
        num_padding = bucket - len(keys.lengths)
        padding, width = [0] * num_padding, self._width
        spans = [*([*its, *padding] for its in keys.begins), [*keys.lengths, *[width] * num_padding]]
        if self._shares is None or self._shares[0] != spans:
            *begins, lengths = np.array(spans, np.int32)
            first_pages = (lengths.cumsum(dtype=np.int32) - lengths) // np.int32(self._page_size)
            decode = self._attention.decode
            programs = decode.programs(bucket, of_several=True)
            shares = [array for its in begins for array in decode.cut(its, lengths, first_pages, programs)]
            self._shares = spans, shares
        pages = keys.pages
        if num_padding:
            pages = np.concatenate((pages, np.zeros(num_padding * width // self._page_size, np.int32)))
        arrays: tuple[npt.NDArray[Any], ...] = (self._host(bucket, queries)[0], *self._shares[1], pages)
        self._uploader.upload_into(self._inputs, *arrays)
        if (bucket, queries) not in self._placed:  # pages come last, so all arrays keep their addresses
            self._placed[bucket, queries] = views_into(self._inputs, arrays)

    def _compute(self, bucket: int, queries: int) -> None:
        """All passes, from `_inputs` into `_drafts`."""
        flat, *arrays, pages = self._placed[bucket, queries]
        its = _Inputs.of(flat, bucket, queries, self._num_passes)
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        shares = dict(zip(self._passes.shape.windows, pairs, strict=True))
        programs = self._attention.decode.programs(bucket, of_several=True)
        drafts: list[torch.Tensor] = []
        left: torch.Tensor | None = None
        tokens = Tokens(its.token_ids, its.positions, its.slots, its.last if queries > 1 else None)
        for turn, (seen, places) in enumerate(zip(its.seen, its.places, strict=True)):
            self._attention.plan_of = DecodePlan(bucket, pages, shares, programs, 1 if turn else queries, seen)
            if turn:
                tokens = Tokens(drafts[-1], its.later_positions[turn - 1], its.later_slots[turn - 1])
            hidden, left = self._passes.run(tokens, its.previous, left, self._attention)
            drafts.append(self._sampler.draw(self._passes.logits(hidden), its.rows, places))
        torch.cat(drafts, out=self._drafts[: self._num_passes * bucket])


class _Attention(PlannedAttention):
    """Attention of the pass that is computed or captured."""

    def __init__(self, decode: DecodeAttention) -> None:
        self.decode = decode
        self.plan_of: DecodePlan | None = None

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
        assert self.plan_of is not None, "planned before it is run"
        out = torch.empty_like(query) if out is None else out
        caches = key_cache, value_cache
        self.decode.run(self.plan_of, query, *caches, window, out, sinks=sinks, overlaps=overlaps)
        return out

    def close(self) -> None:
        """Let go of the plan."""
        self.plan_of = None


def _even(number: int) -> int:
    return number + number % 2
