"""Paged attention with FlashInfer's kernels for NVIDIA GPUs.

The rows at a step's beginning that bring one token each, which are its decodes, go through the fa2 kernels with
tensor cores, whose tiles hold all query heads of a kv head; the others go through fa2 or fa3 as prompts. Planned
from host integers: FlashInfer's planner cuts the work up in C++, writes it to a pinned buffer and copies it
asynchronously. Its wrapper classes are left out, since they walk Python lists and copy from pageable memory.

Keys that many decodes share are attended to once for all of them, and the results are merged (cascade
attention), where that saves more than it costs.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionShape, AttentionStep
from sgl.kernels.attention.merge import merge_attention_
from sgl.kernels.attention.partition import SharedPrefix, shared_prefixes
from sgl.kernels.attention.ragged import Int32Array, RaggedRows, starts
from sgl.kernels.staging import Uploader, carve

PrefillKernel = Literal["fa2", "fa3"]

HEAD_DIMS = (64, 128, 256)
_NON_CAUSAL, _CAUSAL = 0, 1  # mask modes
_NHD = 0  # layout of the caches: tokens before heads
_NO_POSITIONS = 0  # positional encoding is done outside
_INT_WORKSPACE = 8 << 20  # bytes; what the planner writes down
_UNSPLIT_WORKSPACE = 1 << 16  # bytes; a few integers a row
_FLOAT_WORKSPACE = 128 << 20  # bytes at least; partial results of rows that several blocks share
_PINNED = 6  # buffers of the planner's results, written again so many plans later
_SHARED_BANDWIDTH = 7e12  # bytes/s at which rows read keys that others have brought to the L2 cache (H200)
_MERGE_SECONDS = 60e-6  # a layer; what a shared prefix must save to be worth two more kernels
_SHORT_PROMPT = (
    128  # tokens; fa2 packs the query heads of a kv head, which fills its tiles where prompts are shorter
)
_TILE = 128  # query tokens times heads of a kv head in a block, at most


def why_not(shape: AttentionShape) -> str | None:
    """Why FlashInfer cannot serve the shape here, or None if it can."""
    if shape.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, and this is {shape.device}"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed (pip install flashinfer-python)"
    from flashinfer import __version__

    if not (0, 6, 6) <= tuple(int(part) for part in __version__.split(".")[:3]) < (0, 7):
        return f"version {__version__} is installed, and 0.6.6 or a later 0.6 is needed"
    if torch.cuda.get_device_capability(shape.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in HEAD_DIMS:
        return f"it has kernels for heads of {', '.join(map(str, HEAD_DIMS))} numbers, not {shape.head_dim}"
    return None


def has_fa3(shape: AttentionShape) -> bool:
    """Whether the fa3 kernels run there: they are written for Hopper."""
    return torch.cuda.get_device_capability(shape.device)[0] == 9


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a step, as the kernels read them; int32, on the device."""

    query_starts: torch.Tensor  # [B + 1]
    page_starts: torch.Tensor  # [B + 1]
    pages: torch.Tensor  # from page_starts[0] on
    last_page_lens: torch.Tensor  # [B] tokens in the last page


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows, their tokens [start, stop) of the step, and the plan for them."""

    start: int
    stop: int
    rows: _Rows
    kernel: PrefillKernel
    mask_mode: int
    plan: Any  # a vector of integers that only FlashInfer reads
    workspace: torch.Tensor
    shared: _Shared | None = None


@dataclass(frozen=True, slots=True)
class _Shared:
    """Keys that several rows of a part share and that its own plan leaves out."""

    tokens: torch.Tensor  # int64 [N], of the step, group after group
    part: _Part  # a group of N tokens in all is a row of it


class FlashInferAttention:
    """The `GraphAttention` of FlashInfer. `max_graph_rows` bounds the steps of `plan_decode`, and `max_pages` the
    pages of a row in them."""

    def __init__(
        self, shape: AttentionShape, *, prefill: PrefillKernel = "fa2", max_graph_rows: int = 0, max_pages: int = 0
    ) -> None:
        self._shape = shape
        self._prefill: PrefillKernel = prefill
        # A kernel may be set up while the one ahead of it drains: programmatic dependent launch.
        self._launches_early = torch.cuda.get_device_capability(shape.device) >= (9, 0)
        self._uploader = Uploader(shape.device)
        self._modules = {(kernel, window): self._module(kernel, window) for kernel, window in self._variants()}
        self._parts: dict[int | None, list[_Part]] = {}
        num_sms = torch.cuda.get_device_properties(shape.device).multi_processor_count
        blocks = 2 * num_sms // shape.num_kv_heads  # of a kv head; the planner splits rows to make so many
        tiles = -(-max_graph_rows * (shape.num_heads // shape.num_kv_heads) // _TILE)
        partial = shape.num_heads * max(blocks, tiles) * _TILE * (shape.head_dim + 1) * 4
        self._partial = torch.zeros(max(partial, _FLOAT_WORKSPACE), dtype=torch.uint8, device=shape.device)
        self._workspaces: dict[tuple[str, int | None], torch.Tensor] = {}
        self._pinned = [self._pinned_buffer() for _ in range(_PINNED)]
        self._num_plans = 0
        # A step of more rows is never split, so its plan depends on the number of rows alone.
        self._max_split_rows = blocks
        self._max_graph_rows = max_graph_rows
        num_inputs = max_graph_rows * (max_pages + 2) + 1
        self._graph_inputs = torch.zeros(4 * num_inputs + 64, dtype=torch.uint8, device=shape.device)
        self._each = torch.arange(max_graph_rows + 1, dtype=torch.int32, device=shape.device)
        self._graph_parts: dict[tuple[int, int, int | None], _Part] = {}
        self._each_token = self._each.long()
        self._common_inputs = torch.zeros(4 * max_pages + 64, dtype=torch.uint8, device=shape.device)
        self._common_pages: Int32Array = np.zeros(1, np.int32)  # of the first _num_sharing rows
        self._num_sharing = 0
        key_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        self._least_saved = int(_MERGE_SECONDS * _SHARED_BANDWIDTH / key_bytes)  # keys

    def plan(self, step: AttentionStep) -> None:
        """See `AttentionBackend.plan`."""
        q_lens = step.q_lens
        longer = np.flatnonzero(q_lens > 1)
        num_decodes = int(longer[0]) if len(longer) else len(q_lens)
        self._parts_by_window()
        if num_decodes:
            self._plan_decodes(step, num_decodes)
        if num_decodes < len(q_lens):
            host = RaggedRows.of(step, slice(num_decodes, None), self._shape.page_size)
            rows = _Rows(*self._uploader.upload(*host.arrays()))
            num_tokens = int(host.query_starts[-1])
            is_short = num_tokens < _SHORT_PROMPT * len(host.kv_lens)
            kernel: PrefillKernel = "fa2" if is_short else self._prefill
            for window, parts in self._parts.items():
                workspace = self._workspace("prefill", window)
                plan = self._planned(host, kernel, window, workspace, causal=True)
                parts.append(_Part(num_decodes, num_decodes + num_tokens, rows, kernel, _CAUSAL, plan, workspace))

    def _plan_decodes(self, step: AttentionStep, num_rows: int) -> None:
        groups = self._groups(step, num_rows)
        if groups:
            self._parts[None].append(self._cascade(step, num_rows, groups))
        flat = [window for window in self._shape.windows if window is not None or not groups]
        if flat:
            host = RaggedRows.of(step, slice(0, num_rows), self._shape.page_size)
            rows = _Rows(*self._uploader.upload(*host.arrays()))
            for window in flat:
                workspace = self._workspace("decode", window)
                plan = self._planned(host, "fa2", window, workspace, causal=False)
                self._parts[window].append(_Part(0, num_rows, rows, "fa2", _NON_CAUSAL, plan, workspace))

    def _cascade(self, step: AttentionStep, num_rows: int, groups: list[SharedPrefix]) -> _Part:
        """Decodes over what each has for itself, and groups of them over what they share."""
        page_size = self._shape.page_size
        skipped = np.zeros(num_rows, np.int32)
        for group in groups:
            skipped[group.rows] = len(group.pages)
        own = RaggedRows.of(step, slice(0, num_rows), page_size, skipped)
        counts = np.array([len(group.pages) for group in groups], np.int32)
        together = RaggedRows(
            query_starts=starts(np.array([len(group.rows) for group in groups], np.int32)),
            page_starts=starts(counts),
            pages=np.concatenate([group.pages for group in groups]).astype(np.int32),
            last_page_lens=np.full(len(groups), page_size, np.int32),
            kv_lens=counts * page_size,
        )
        tokens = np.concatenate([group.rows for group in groups])
        uploaded = self._uploader.upload(*own.arrays(), *together.arrays(), tokens)
        parts = []
        for name, host, rows in (("common", together, uploaded[4:8]), ("decode", own, uploaded[:4])):
            workspace = self._workspace(name, None)
            plan = self._planned(host, "fa2", None, workspace, causal=False)
            stop = int(host.query_starts[-1])
            parts.append(_Part(0, stop, _Rows(*rows), "fa2", _NON_CAUSAL, plan, workspace))
        return replace(parts[1], shared=_Shared(uploaded[8], parts[0]))

    def _groups(self, step: AttentionStep, num_rows: int) -> list[SharedPrefix]:
        """Rows whose common prefix is worth attending to once for all of them."""
        shape = self._shape
        first_pages = step.page_table[:num_rows, 0]
        if None not in shape.windows or len(np.unique(first_pages)) == num_rows:
            return []
        kv_lens, page_table = step.kv_lens[:num_rows], step.page_table[:num_rows]
        q_lens = step.q_lens[:num_rows]
        return shared_prefixes(q_lens, kv_lens, page_table, shape.page_size, self._least_saved, max_q=1)

    def variants(self, num_rows: int) -> range:
        """See `GraphAttention.variants`: apart, and with keys in common."""
        return range(2 if self._shape.windows == (None,) and num_rows > self._max_split_rows else 1)

    def variant(self, step: AttentionStep) -> int | None:
        """See `GraphAttention.variant`."""
        num_rows = len(step.q_lens)
        past = (int(step.kv_lens.min()) - 1) // self._shape.page_size
        differs = (step.page_table[:, :past] != step.page_table[0, :past]).any(axis=0)
        common = int(differs.argmax()) if differs.any() else past
        if (num_rows - 1) * common * self._shape.page_size >= self._least_saved and len(
            self.variants(num_rows)
        ) > 1:
            self._common_pages = step.page_table[0, :common].copy()
            self._num_sharing = num_rows
            return 1
        return None if self._groups(step, num_rows) else 0

    def plan_decode(self, step: AttentionStep, variant: int) -> None:
        """See `GraphAttention.plan_decode`."""
        num_rows = len(step.q_lens)
        assert num_rows <= self._max_graph_rows, "a step of at most max_graph_rows rows"
        skipped = None
        if variant:
            skipped = np.zeros(num_rows, np.int32)
            skipped[: self._num_sharing] = len(self._common_pages)
        host = RaggedRows.of(step, slice(0, num_rows), self._shape.page_size, skipped)
        arrays = (host.page_starts, host.last_page_lens, host.pages)
        self._uploader.upload_into(self._graph_inputs, *arrays)
        # A plan whose rows are not split depends on their number alone, and is kept.
        is_split = num_rows <= self._max_split_rows
        for window, parts in self._parts_by_window():
            part = self._graph_parts.get((num_rows, variant, window))
            if part is None or is_split:
                workspace = self._graph_workspace(window, is_split)
                plan = self._planned(host, "fa2", window, workspace, causal=False, for_graph=is_split)
                assert part is None or list(part.plan) == list(plan), "captured launches read the plan where it was"
                page_starts, last_page_lens, pages = carve(self._graph_inputs, arrays)
                rows = _Rows(self._each[: num_rows + 1], page_starts, pages, last_page_lens)
                part = _Part(0, num_rows, rows, "fa2", _NON_CAUSAL, plan, workspace)
            if variant:
                part = replace(part, shared=self._plan_common(num_rows, part.shared))
            self._graph_parts[num_rows, variant, window] = part
            parts.append(part)

    def _plan_common(self, num_rows: int, before: _Shared | None) -> _Shared:
        """All rows over the common pages, as one row of many query tokens."""
        num_pages = len(self._common_pages)
        page_size = self._shape.page_size
        host = RaggedRows(
            query_starts=np.array([0, num_rows], np.int32),
            page_starts=np.array([0, num_pages], np.int32),
            pages=self._common_pages,
            last_page_lens=np.array([page_size], np.int32),
            kv_lens=np.array([num_pages * page_size], np.int32),
        )
        arrays = (host.query_starts, host.page_starts, host.last_page_lens, host.pages)
        self._uploader.upload_into(self._common_inputs, *arrays)
        workspace = self._workspace("common", None)
        plan = self._planned(host, "fa2", None, workspace, causal=False, for_graph=True)
        assert before is None or list(before.part.plan) == list(plan), (
            "captured launches read the plan where it was"
        )
        query_starts, page_starts, last_page_lens, pages = carve(self._common_inputs, arrays)
        rows = _Rows(query_starts, page_starts, pages, last_page_lens)
        tokens = self._each_token[:num_rows]
        return _Shared(tokens, _Part(0, num_rows, rows, "fa2", _NON_CAUSAL, plan, workspace))

    def _parts_by_window(self) -> list[tuple[int | None, list[_Part]]]:
        """A fresh list of parts for every window."""
        self._parts = {window: [] for window in self._shape.windows}
        return list(self._parts.items())

    def _graph_workspace(self, window: int | None, is_split: bool) -> torch.Tensor:
        if is_split:
            return self._workspace("graph", window)
        return torch.empty(_UNSPLIT_WORKSPACE, dtype=torch.uint8, device=self._shape.device)

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        out = torch.empty_like(query)
        for part in self._parts[window]:
            some, some_out = query[part.start : part.stop], out[part.start : part.stop]
            shared = part.shared
            if shared is None:
                self._attend(part, some, key_cache, value_cache, window, some_out)
                continue
            lse = torch.empty(some.shape[:2], dtype=torch.float32, device=query.device)
            self._attend(part, some, key_cache, value_cache, window, some_out, lse)
            together = some.index_select(0, shared.tokens)
            together_out = torch.empty_like(together)
            together_lse = torch.empty(together.shape[:2], dtype=torch.float32, device=query.device)
            self._attend(shared.part, together, key_cache, value_cache, window, together_out, together_lse)
            merge_attention_(some_out, lse, together_out, together_lse, shared.tokens)
        return out

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
        rows = part.rows
        self._modules[part.kernel, window is not None].paged_run(
            self._partial,
            part.workspace,
            part.plan,
            query,
            key_cache,
            value_cache,
            rows.query_starts,
            rows.page_starts,
            rows.pages,
            rows.last_page_lens,
            out,
            lse,
            part.mask_mode,
            _NHD,
            _window_left(window),
            self._launches_early,
            *(None,) * 6,  # masks, slopes and items of other variants
            0.0,  # no soft cap
            self._shape.scale,
            *(None,) * 3,  # no fp8 scales
            1.0,  # rotary scale and theta, unused
            1.0,
            0,
            0,
        )

    def _planned(
        self,
        host: RaggedRows,
        kernel: PrefillKernel,
        window: int | None,
        workspace: torch.Tensor,
        *,
        causal: bool,
        for_graph: bool = False,
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
            int(host.query_starts[-1]),
            len(host.kv_lens),
            shape.num_heads,
            shape.num_kv_heads,
            shape.page_size,
            for_graph,
            shape.head_dim,
            shape.head_dim,
            causal,
            _window_left(window),
        ]
        if kernel == "fa2":
            arguments += [-1, False, 0]  # no fixed split size, splits allowed, no other kernel beside it
        plan = self._modules[kernel, window is not None].plan(*arguments)
        event.record()
        return plan

    def _variants(self) -> list[tuple[PrefillKernel, bool]]:
        kernels: list[PrefillKernel] = ["fa2"] if self._prefill == "fa2" else ["fa2", "fa3"]
        windows = dict.fromkeys(window is not None for window in self._shape.windows)
        return [(kernel, window) for kernel in kernels for window in windows]

    def _module(self, kernel: PrefillKernel, has_window: bool) -> Any:
        """Compiled with nvcc on a machine's first use: fa2 takes 13 s, fa3 49 s (16 cores)."""
        from flashinfer.prefill import get_batch_prefill_module

        shape = self._shape
        dtype, head_dim = shape.dtype, shape.head_dim
        return get_batch_prefill_module(
            kernel, dtype, dtype, dtype, torch.int32, head_dim, head_dim, _NO_POSITIONS, has_window, False, False
        )

    def _workspace(self, name: str, window: int | None) -> torch.Tensor:
        if (name, window) not in self._workspaces:
            workspace = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self._shape.device)
            self._workspaces[name, window] = workspace
        return self._workspaces[name, window]

    @staticmethod
    def _pinned_buffer() -> tuple[torch.Tensor, torch.cuda.Event]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return torch.empty(_INT_WORKSPACE, dtype=torch.uint8, pin_memory=True), event


def _window_left(window: int | None) -> int:
    return -1 if window is None else window - 1
