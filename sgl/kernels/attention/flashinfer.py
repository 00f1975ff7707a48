"""Paged attention for NVIDIA GPUs: prompts by FlashInfer's kernels, decodes by decode.py's.

A step's leading rows of one token are its decodes; others use fa2 or fa3. FlashInfer's planner splits the work in
C++ from host integers and copies it asynchronously; its Python wrappers walk lists and copy from pageable memory,
so they are bypassed.

Keys shared by many decodes, or by all prompts, are attended to once for all and the results merged (cascade
attention), if that saves more than it costs. Attention sinks are merged likewise: FlashInfer's own kernels with sinks
are compiled of text for each model, and the log-sum-exp that all return is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sgl.kernels import flashinfer_version, limits
from sgl.kernels.attention import flashinfer_modules
from sgl.kernels.attention.base import AttentionShape, AttentionStep, GraphAttention
from sgl.kernels.attention.decode import DecodeAttention, DecodePlan, SharedOutput
from sgl.kernels.attention.flashinfer_modules import PrefillKernel
from sgl.kernels.attention.prefixes import SharedPrefix, shared_prefixes
from sgl.kernels.attention.ragged import Int32Array, Int64Array, RaggedRows
from sgl.kernels.staging import Uploader, pinned_buffer, views_into

_UNIFORM_ROWS: flashinfer_version.Version = (0, 6, 16)
"""From here on fa2's planner asks whether all rows have the same number of tokens."""
HEAD_DIMS = (64, 128, 256)
_NON_CAUSAL, _CAUSAL = 0, 1  # mask modes
_NHD = 0  # layout of the caches: tokens before heads
_INT_WORKSPACE = 8 << 20  # bytes, for the planner's results
_FLOAT_WORKSPACE = 128 << 20  # least bytes for partial results of split rows
_PROMPTS, _DECODES_SHARED, _PROMPTS_SHARED = "prompts", "shared by decodes", "shared by prompts"  # workspaces
_PINNED = 6  # buffers for the planner's results, reused in turn
_SHARED_BANDWIDTH = 7e12  # bytes/s at which rows read keys that others brought to the L2 cache (H200)
_SHARED_SECONDS = 40e-6  # a layer; shared prefixes must save that much to be worth two more kernels
_SHARED_WORK = 1 << 23
"""Tokens of short prompts times shared keys, above which fa3 gains more than the merge costs."""
_MAX_GROUPS = 16  # of rows with a shared prefix; captured launches have room for so many
_SHORT_PROMPT = 128
"""Average tokens of a step's prompts, below which fa2 is used: it packs the query heads of a kv head into its
tiles, 1.31 times as fast for 64 prompts of 64 tokens behind 1,024. fa3 is 1.51 times as fast for 4 of 2,048 (H200)."""
_TILE = 128  # most query tokens of a block (fa3), or tokens times heads of a kv head (fa2)


def why_not(shape: AttentionShape) -> str | None:
    """Why FlashInfer cannot serve the shape here; None: it can."""
    if not limits.is_nvidia(shape.device):
        return f"it needs an NVIDIA GPU, and this is {shape.device}"
    obstacle = flashinfer_version.why_not()
    if obstacle is not None:
        return obstacle
    if torch.cuda.get_device_capability(shape.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not {str(shape.dtype).removeprefix('torch.')}"
    if not shape.latent_dim and shape.head_dim not in HEAD_DIMS:
        return f"it has kernels for heads of {', '.join(map(str, HEAD_DIMS))} numbers, not {shape.head_dim}"
    return None


def has_fa3(shape: AttentionShape) -> bool:
    """Whether fa3 runs there: it needs Hopper."""
    return torch.cuda.get_device_capability(shape.device)[0] == 9


@dataclass(frozen=True, slots=True)
class _Part:
    """Planned rows as the kernels read them, int32 on the device."""

    kernel: PrefillKernel
    mask_mode: int
    plan: Any  # integers that only FlashInfer reads
    workspace: torch.Tensor
    query_starts: torch.Tensor  # [B + 1]
    page_starts: torch.Tensor  # [B + 1]
    pages: torch.Tensor  # from page_starts[0] on
    last_page_lens: torch.Tensor  # [B] tokens in the last page


@dataclass(frozen=True, slots=True)
class _Shared:
    """Keys that several decodes share and that their own plan omits."""

    tokens: torch.Tensor  # int32 [N], of the step, group by group
    places: torch.Tensor  # int32 [B], each decode's index among the tokens; -1: it shares nothing
    part: _Part  # each group is a row of many query tokens


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step: its decodes, and its prompts by window."""

    decodes: DecodePlan | None
    decodes_shared: _Shared | None
    prompts: dict[int | None, _Part]
    prompts_shared: _Part | None  # keys that all prompts share and that their own parts omit


class FlashInferAttention(GraphAttention):
    """The `GraphAttention` of FlashInfer. `max_graph_rows` and `max_pages` (of a row) bound `plan_decode`. prefill:
    the kernels for prompts; fa3 is loaded only for "fa3". Raises CannotCompile."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        prefill: PrefillKernel = "fa2",
        max_graph_rows: int = 0,
        max_pages: int = 0,
        max_queries: int = 1,
    ) -> None:
        self._shape = shape
        self._version = flashinfer_version.installed()
        self.prefill: PrefillKernel = prefill  # for long prompts
        self.short_prefill: PrefillKernel = "fa2"  # for short prompts, on average
        # programmatic dependent launch: a kernel starts while the previous one drains
        self._launches_early = torch.cuda.get_device_capability(shape.device) >= (9, 0)
        self._uploader = Uploader(shape.device)
        self._modules = flashinfer_modules.load(shape, prefill)
        self._num_sms = torch.cuda.get_device_properties(shape.device).multi_processor_count
        blocks = 2 * self._num_sms // shape.num_kv_heads  # of a kv head; the planner splits rows to make so many
        tiles = -(-max_graph_rows * (shape.num_heads // shape.num_kv_heads) // _TILE) + _MAX_GROUPS
        partial = shape.num_heads * max(blocks, tiles) * _TILE * (shape.head_dim + 1) * 4
        self._partial = torch.zeros(max(partial, _FLOAT_WORKSPACE), dtype=torch.uint8, device=shape.device)
        self._workspaces: dict[tuple[str, int | None], torch.Tensor] = {}
        self._pinned = [self._pinned_buffer() for _ in range(_PINNED)]
        self._num_plans = 0
        bounds = {"max_graph_rows": max_graph_rows, "max_pages": max_pages, "max_queries": max_queries}
        self._decode = DecodeAttention(shape, **bounds)
        self.max_queries = self._decode.max_queries
        num_inputs = _MAX_GROUPS * (max_pages + 3) + 2 + 2 * max_graph_rows
        self._shared_inputs = torch.zeros(4 * num_inputs + 96, dtype=torch.uint8, device=shape.device)
        self._graph_plans: dict[int, list[int]] = {}  # of shared keys, by the number of rows
        self._groups: list[SharedPrefix] = []  # of the last step passed to `variant`
        self._planned_step: _Planned | None = None
        key_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.cache_dtype.itemsize
        self._least_saved = int(_SHARED_SECONDS * _SHARED_BANDWIDTH / key_bytes)  # keys
        self._least_work = _SHARED_WORK
        if prefill != self.short_prefill:  # allocate and compile for shared keys before the first step
            self._workspace(_PROMPTS_SHARED, None)
            some = torch.zeros(1, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
            sinks = some[0, :, 0] if shape.has_sinks else None
            self._merge(some, torch.zeros(2, 1, shape.num_heads, device=shape.device), some, sinks)

    def plan(self, step: AttentionStep) -> None:
        longer = np.flatnonzero(step.q_lens > 1)
        num_decodes = int(longer[0]) if len(longer) else len(step.q_lens)
        decodes = decodes_shared = None
        if num_decodes:
            groups = self._find_groups(step, num_decodes)
            decodes = self._decode.plan(step, num_decodes, self._skipped(num_decodes, groups))
            if groups:
                host, *indices = self._shared_rows(num_decodes, groups)
                *uploaded, tokens, places = self._uploader.upload(*host.arrays(), *indices)
                part = self._shared_part(host, num_decodes, uploaded, _DECODES_SHARED, for_graph=False)
                decodes_shared = _Shared(tokens, places, part)
        prompts, prompts_shared = {}, None
        if num_decodes < len(step.q_lens):
            rows = slice(num_decodes, None)
            num_tokens = int(step.q_lens[rows].sum())
            is_short = num_tokens < _SHORT_PROMPT * (len(step.q_lens) - num_decodes)
            kernel = self.short_prefill if is_short else self.prefill
            # Short prompts take fa2, and fa3 is faster for what they share. One kernel for both would save nothing.
            num_shared = 0 if kernel == self.prefill else self._pages_shared_by_prompts(step, rows)
            if num_shared:
                pages = step.page_table[num_decodes, :num_shared]
                host = RaggedRows.over_full_pages([num_tokens], [pages], self._shape.page_size)
                uploaded = self._uploader.upload(*host.arrays())
                prompts_shared = self._shared_part(host, num_tokens, uploaded, _PROMPTS_SHARED, for_graph=False)
            skipped = np.full(len(step.q_lens) - num_decodes, num_shared, np.int32) if num_shared else None
            host = RaggedRows.of(step, rows, self._shape.page_size, skipped)
            uploaded = self._uploader.upload(*host.arrays())
            for window in self._shape.windows:
                workspace = self._workspace(_PROMPTS, window)
                plan = self._plan_rows(host, kernel, window, workspace, causal=True)
                prompts[window] = _Part(kernel, _CAUSAL, plan, workspace, *uploaded)
        self._planned_step = _Planned(decodes, decodes_shared, prompts, prompts_shared)

    def variants(self, num_rows: int) -> range:
        """See `GraphAttention.variants`: without and with shared keys."""
        return range(2 if self._shape.windows == (None,) and num_rows >= _MAX_GROUPS else 1)

    def variant(self, step: AttentionStep) -> int:
        num_rows = len(step.q_lens)
        self._groups = self._find_groups(step, num_rows) if len(self.variants(num_rows)) > 1 else []
        return 1 if self._groups else 0

    def plan_decode(self, step: AttentionStep, variant: int, inputs: Sequence[Int64Array]) -> list[torch.Tensor]:
        num_rows = len(step.q_lens)
        groups = self._groups if variant else []
        shared = None
        if variant:
            host, *indices = self._shared_rows(num_rows, groups)
            arrays = (host.query_starts, host.page_starts, host.last_page_lens, *indices, host.pages)
            self._uploader.upload_into(self._shared_inputs, *arrays)
            begins, page_begins, last_lens, tokens, places, pages = views_into(self._shared_inputs, arrays)
            uploaded = [begins, page_begins, pages, last_lens]
            part = self._shared_part(host, num_rows, uploaded, _DECODES_SHARED, for_graph=True)
            before = self._graph_plans.setdefault(num_rows, list(part.plan))
            assert before == list(part.plan), "captured launches read the plan where it was"
            shared = _Shared(tokens, places, part)
        decodes, placed = self._decode.plan_for_graph(step, inputs, self._skipped(num_rows, groups))
        self._planned_step = _Planned(decodes, shared, {}, None)
        return placed

    def plan_verify(self, step: AttentionStep, queries: int, inputs: Sequence[Int64Array]) -> list[torch.Tensor]:
        decodes, placed = self._decode.plan_verify(step, queries, inputs)
        self._planned_step = _Planned(decodes, None, {}, None)
        return placed

    def _find_groups(self, step: AttentionStep, num_rows: int) -> list[SharedPrefix]:
        """Groups of decodes whose shared prefix is worth attending to once."""
        page_size = self._shape.page_size
        kv_lens, page_table = step.kv_lens[:num_rows], step.page_table[:num_rows]
        if self._shape.windows != (None,) or len(set(page_table[:, 0].tolist())) == num_rows:
            return []
        num_shared = _num_shared(page_table[:, : (int(kv_lens.min()) - 1) // page_size])
        if (num_rows - 1) * num_shared * page_size >= self._least_saved:
            return [SharedPrefix(np.arange(num_rows), page_table[0, :num_shared].astype(np.int64))]
        q_lens = step.q_lens[:num_rows]
        groups = shared_prefixes(q_lens, kv_lens, page_table, page_size, self._least_saved, max_q=1)
        return sorted(groups, key=lambda group: -(len(group.rows) - 1) * len(group.pages))[:_MAX_GROUPS]

    def _pages_shared_by_prompts(self, step: AttentionStep, rows: slice) -> int:
        """Leading pages that short prompts should attend to together."""
        q_lens, page_size = step.q_lens[rows], self._shape.page_size
        if self._shape.windows != (None,) or len(q_lens) == 1:
            return 0
        past = int((step.kv_lens[rows] - q_lens).min()) // page_size
        num_pages = _num_shared(step.page_table[rows, :past])
        return num_pages if num_pages * page_size * int(q_lens.sum()) >= self._least_work else 0

    def _skipped(self, num_rows: int, groups: list[SharedPrefix]) -> Int32Array | None:
        """Leading pages of each row that its group attends to; None: there are no groups."""
        if not groups:
            return None
        skipped = np.zeros(num_rows, np.int32)
        for group in groups:
            skipped[group.rows] = len(group.pages)
        return skipped

    def _shared_rows(self, num_rows: int, groups: list[SharedPrefix]) -> tuple[RaggedRows, Int32Array, Int32Array]:
        """Groups as rows of many query tokens, padded to a fixed number; and `_Shared`'s tokens (as many as rows)
        and places."""
        nothing = np.empty(0, np.int64)
        missing = [SharedPrefix(nothing, nothing)] * (_MAX_GROUPS - len(groups))
        members = np.concatenate([nothing, *(group.rows for group in groups)])
        tokens, places = np.zeros(num_rows, np.int32), np.full(num_rows, -1, np.int32)
        tokens[: len(members)] = members
        places[members] = np.arange(len(members))
        sizes = [len(group.rows) for group in (*groups, *missing)]
        pages = [group.pages for group in (*groups, *missing)]
        return RaggedRows.over_full_pages(sizes, pages, self._shape.page_size), tokens, places

    def _shared_part(
        self, host: RaggedRows, num_rows: int, uploaded: list[torch.Tensor], name: str, *, for_graph: bool
    ) -> _Part:
        # fa3 does not split keys: it is faster if its blocks occupy the GPU.
        num_blocks = -(-num_rows // _TILE) * self._shape.num_heads
        kernel: PrefillKernel = self.prefill if 5 * num_blocks >= 2 * self._num_sms else "fa2"
        workspace = self._workspace(name, None)
        most = num_rows if for_graph else None
        plan = self._plan_rows(host, kernel, None, workspace, causal=False, most_tokens=most)
        return _Part(kernel, _NON_CAUSAL, plan, workspace, *uploaded)

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
        step = self._planned_step
        assert step is not None, "planned before it is run"
        out = torch.empty_like(query) if out is None else out
        num_decodes = 0
        if step.decodes is not None:
            num_decodes = step.decodes.num_rows * step.decodes.queries
            some, some_out = query[:num_decodes], out[:num_decodes]
            shared = None
            if step.decodes_shared is not None:
                together = some.index_select(0, step.decodes_shared.tokens)
                shared_out = torch.empty_like(together)
                lse = torch.empty(together.shape[:2], dtype=torch.float32, device=query.device)
                self._attend(step.decodes_shared.part, together, key_cache, value_cache, None, shared_out, lse)
                shared = SharedOutput(shared_out, lse, step.decodes_shared.places)
            caches = key_cache, value_cache
            self._decode.run(step.decodes, some, *caches, window, some_out, shared, sinks=sinks, overlaps=overlaps)
        if step.prompts:
            part, some, some_out = step.prompts[window], query, out
            if num_decodes:
                some, some_out = query[num_decodes:], out[num_decodes:]
            if step.prompts_shared is None and sinks is None:
                self._attend(part, some, key_cache, value_cache, window, some_out)
            else:
                lses = torch.empty(2, *some.shape[:2], dtype=torch.float32, device=query.device)
                self._attend(part, some, key_cache, value_cache, window, some_out, lses[0])
                other = None
                if step.prompts_shared is not None:
                    other = torch.empty_like(some)
                    self._attend(step.prompts_shared, some, key_cache, value_cache, None, other, lses[1])
                self._merge(some_out, lses, other, sinks)
        return out

    @staticmethod
    def _merge(
        out: torch.Tensor, lses: torch.Tensor, other: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> None:
        from sgl.kernels.attention.merge_triton import merge_

        merge_(out, lses[0], other, None if other is None else lses[1], sinks)

    def _attend(
        self,
        part: _Part,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        self._modules[part.kernel, window is not None].paged_run(
            self._partial,
            part.workspace,
            part.plan,
            query,
            key_cache,
            value_cache,
            part.query_starts,
            part.page_starts,
            part.pages,
            part.last_page_lens,
            out,
            lse,
            part.mask_mode,
            _NHD,
            _window_left(window),
            self._launches_early,
            *(None,) * 6,  # masks, slopes and items of other variants
            self._shape.softcap or 0.0,
            self._shape.scale,
            *(None,) * 3,  # no fp8 scales
            1.0,  # rotary scale and theta, unused
            1.0,
            0,
            0,
        )

    def _plan_rows(
        self,
        host: RaggedRows,
        kernel: PrefillKernel,
        window: int | None,
        workspace: torch.Tensor,
        *,
        causal: bool,
        most_tokens: int | None = None,  # in a graph; None: in no graph, and just those there are
    ) -> Any:
        shape = self._shape
        pinned, event = self._pinned[self._num_plans % _PINNED]
        self._num_plans += 1
        event.synchronize()  # long past in steady state
        arguments = [
            self._partial,
            workspace,
            pinned[: len(workspace)],
            torch.from_numpy(host.query_starts),
            torch.from_numpy(host.page_starts),
            torch.from_numpy(host.kv_lens),
            int(host.query_starts[-1]) if most_tokens is None else most_tokens,
            len(host.kv_lens),
            shape.num_heads,
            shape.num_kv_heads,
            shape.page_size,
            most_tokens is not None,
            *(shape.head_dim,) * 2,  # of keys, and of values
            causal,
            _window_left(window),
        ]
        if kernel == "fa2":
            arguments += [-1, False, 0]  # no fixed split size, splits allowed, no concurrent kernel
            if self._version >= _UNIFORM_ROWS:
                arguments.append(0)  # rows of any number of tokens
        plan = self._modules[kernel, window is not None].plan(*arguments)
        event.record()
        return plan

    def _workspace(self, name: str, window: int | None) -> torch.Tensor:
        if (name, window) not in self._workspaces:
            workspace = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self._shape.device)
            self._workspaces[name, window] = workspace
        return self._workspaces[name, window]

    @staticmethod
    def _pinned_buffer() -> tuple[torch.Tensor, torch.cuda.Event]:
        return pinned_buffer(_INT_WORKSPACE)


def _num_shared(pages: Int32Array) -> int:
    """Leading columns of pages [B, n] that all rows share."""
    differs = (pages != pages[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else pages.shape[1]


def _window_left(window: int | None) -> int:
    return -1 if window is None else window - 1
