"""Runners of what drafts beside a model: a smaller model, or a head on its hidden states. Their KV lies in arrays of
their own at the same slots as the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionStep
from sgl.kernels.attention.decode import has_room
from sgl.runtime.batch import Batch, Int32Array, Int64Array, RowSetup
from sgl.runtime.batch import PendingStep as AnyStep
from sgl.runtime.model.draft import DraftDecoder
from sgl.runtime.model.eagle.config import NUM_LAYERS_READ
from sgl.runtime.model.eagle.head import EagleHead
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.runner.ahead import Ahead, Verifying, VerifyInputs
from sgl.runtime.runner.capture import MAX_QUERIES
from sgl.runtime.runner.draft_graphs import Chain, DraftGraphs
from sgl.runtime.runner.draft_passes import HeadPasses, ModelPasses, Passes
from sgl.runtime.runner.occupation import Graphs, Occupation
from sgl.runtime.runner.pack import pack
from sgl.runtime.runner.runner import ModelRunner

_NO_HOLES: Int64Array = np.empty(0, np.int64)


class DraftRunner(ModelRunner):
    """Runs a draft model. Its pages are given by `place`, not by batches; it has the threads of the model's step."""

    _draft_graphs: DraftGraphs | None = None

    def __init__(self, *arguments: Any, num_steps: int = 1, max_chain_rows: int = 0, **options: Any) -> None:
        """As `ModelRunner`. max_chain_rows: whose `num_steps` drafts are replayed at once, in place of steps."""
        super().__init__(*arguments, **options)
        self._threads = None
        passes = self._passes(max_chain_rows) if max_chain_rows else None
        if passes is not None and has_room(passes.shape, MAX_QUERIES):
            self._draft_graphs = DraftGraphs(
                passes,
                self._sampler,
                self._downloader,
                max_rows=max_chain_rows,
                max_entries=self._page_table.shape[1] * self._kv.page_size,
                num_passes=num_steps,
            )
            self.occupation = Occupation(self._model, self._kv, self._all_graphs())

    def _passes(self, max_rows: int) -> Passes:
        """What `chain` runs."""
        return ModelPasses(cast(DraftDecoder, self._model), self._kv)

    @property
    def chains(self) -> tuple[int, int]:
        """Rows of a `chain` at most, 0 if there is none, and tokens of one's first pass."""
        return 0 if self._draft_graphs is None else self._draft_graphs.max_rows, MAX_QUERIES

    def holds(self, ends: Sequence[int], num_tokens: int) -> bool:
        """Whether there is a `chain` of these rows: of keys before each end, and tokens of a first pass."""
        return self._draft_graphs is not None and self._draft_graphs.holds(ends, num_tokens)

    @torch.inference_mode()
    def chain(
        self, chunks: Sequence[tuple[int, int, Int32Array, int]], setups: list[RowSetup]
    ) -> Callable[[], Int32Array] | None:
        """Draft for some rows as steps would, but for cut-offs and biases: see `Sampler.draw`. chunks: of each row its
        number, the first token without an entry, the tokens from there on, and how many drafts are wanted. Call the
        result for the drafts [num_steps, rows]. None: too many keys; nothing is launched."""
        assert self._draft_graphs is not None, "there is a chain"
        with self._current:
            self._sampler.setup(setups)
            return self._draft_graphs.run(self._chains_of(chunks), self._page_table)

    @torch.inference_mode()
    def chain_ahead(
        self,
        chunks: Sequence[tuple[int, int, Int32Array, int]],
        behind: Verifying,
        wanted: Int64Array,
        simulated: Int64Array,
    ) -> None:
        """`chain` behind a step whose drafts are being verified: see `DraftGraphs.run_ahead`."""
        assert self._draft_graphs is not None, "there is a chain"
        with self._current:
            chains = self._chains_of(chunks)
            self._draft_graphs.run_ahead(chains, self._page_table, behind, wanted, simulated)

    def place_drafts(self, inputs: VerifyInputs) -> Ahead:
        """Put the drafts of the latest `chain_ahead` into the step that verifies them."""
        assert self._draft_graphs is not None, "there is a chain"
        return self._draft_graphs.place(inputs)

    def _chains_of(self, chunks: Sequence[tuple[int, int, Int32Array, int]]) -> list[Chain]:
        return [Chain(row, start, ids, most, *self._attended(row)) for row, start, ids, most in chunks]

    def _attended(self, row: int) -> tuple[Int32Array, int]:
        """Pages of the entries that a row attends to, and how many before it does not."""
        return self._page_table[row], 0

    def _all_graphs(self) -> list[Graphs]:
        return [*super()._all_graphs(), *([] if self._draft_graphs is None else [self._draft_graphs])]

    def place(self, row: int, first: int, pages: Int32Array) -> None:
        """Pages of a row from index `first` on."""
        self._page_table[row, first : first + len(pages)] = pages

    def close(self) -> None:
        """See `ModelRunner`."""
        super().close()
        if self._draft_graphs is not None:
            self._draft_graphs.close()
            self._draft_graphs = None


class HeadRunner(DraftRunner):
    """Runs an EAGLE-3 head, whose entries attend to one less than there are tokens: pages hold one slot each."""

    def __init__(
        self,
        head: EagleHead,
        num_slots: int,
        page_size: int,
        attention: AttentionBackend,
        *,
        kv_dtype: torch.dtype,
        max_rows: int,
        max_pages: int,
        max_chain_rows: int = 0,
        num_steps: int = 1,
    ) -> None:
        """attention: of pages of one slot. page_size, max_pages: of the pages given to `place`."""
        self._head = head
        self._offsets = np.arange(page_size, dtype=np.int32)
        self._holes: dict[int, tuple[Int64Array, Int32Array]] = {}  # by row, and the slots of its other entries
        self._features = torch.zeros(num_slots, head.config.hidden_size, dtype=head.dtype, device=head.device)
        super().__init__(
            head,
            KVCache(head.config, num_slots, 1, kv_dtype, head.device),
            attention,
            max_rows=max_rows,
            max_pages=max_pages * page_size,
            device=head.device,
            max_chain_rows=max_chain_rows,
            num_steps=num_steps,
        )

    def _passes(self, max_rows: int) -> Passes:
        return HeadPasses(self._head, self._kv, self._features, max_rows)

    def _attended(self, row: int) -> tuple[Int32Array, int]:
        holes, slots = self._holes.get(row, (_NO_HOLES, self._page_table[row, 1:]))
        return slots, len(holes)

    def place(self, row: int, first: int, pages: Int32Array) -> None:
        """Pages of a row from index `first` on."""
        slots = (pages[:, None] * len(self._offsets) + self._offsets).reshape(-1)
        super().place(row, first * len(self._offsets), slots)

    def skip(self, row: int, holes: Int64Array, end: int) -> None:
        """Nothing attends to these of a row's entries: ascending. end: entries that have pages, whose pages stay until
        the next `skip`."""
        self._holes.pop(row, None)
        if len(holes):
            self._holes[row] = holes, np.delete(self._page_table[row, 1:end], holes - 1)

    def close(self) -> None:
        """See `ModelRunner`."""
        super().close()
        self._features = self._features.new_empty(0)

    @torch.inference_mode()
    def read(self, hidden: tuple[torch.Tensor, ...], slots: torch.Tensor) -> None:
        """Keep the features of T tokens that the model has computed. slots: int64 [T]."""
        with self._current:
            self._features.index_copy_(0, slots, self._head.fused(hidden))

    def warm_up(self, num_tokens: int, launch: Callable[[Batch], AnyStep] | None = None) -> None:
        """See `ModelRunner`."""
        super().warm_up(num_tokens, launch or (lambda batch: self.launch(self._behind_first(batch))))
        for size in (num_tokens, 1):
            shape = size, self._head.config.target_hidden_size
            hidden = torch.zeros(shape, dtype=self._head.dtype, device=self._head.device)
            slots = torch.zeros(size, dtype=torch.int64, device=self._head.device)  # of the dummy page
            self.read((hidden,) * NUM_LAYERS_READ, slots)

    def _behind_first(self, batch: Batch) -> Batch:
        """Rows of prompts without their first tokens."""
        width = self._page_table.shape[1]
        assert width > 1, "there are drafts only behind a second token"
        batch.kv_lens = np.minimum(batch.kv_lens + 1, width)
        batch.q_lens = np.minimum(batch.q_lens, batch.kv_lens - 1)
        batch.token_ids = batch.token_ids[: batch.q_lens.sum()]
        return batch

    def _forward(self, batch: Batch, step: AttentionStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows begin behind their first token. Tokens that are sampled after get the head's own features."""
        packed, pages = pack(batch, step, 1), step.page_table
        of_row = np.repeat(np.arange(len(batch)), batch.q_lens)
        entries = packed.positions - 1
        before = pages[of_row, entries].astype(np.int64)
        token_ids, positions, slots, previous, from_device, from_rows, last = self._uploader.upload(
            packed.token_ids, entries, packed.slots, before, packed.from_device, packed.from_rows, packed.last
        )
        if len(packed.from_device):
            token_ids.index_copy_(0, from_device, self._sampler.next_tokens.index_select(0, from_rows))
        entry_lens, there = batch.kv_lens - 1, np.ascontiguousarray(pages[:, 1:])
        for b, row in enumerate(batch.rows.tolist() if self._holes else ()):
            if row in self._holes:
                holes, others = self._holes[row]
                entry_lens[b] -= np.searchsorted(holes, batch.kv_lens[b])
                there[b, : entry_lens[b]] = others[: entry_lens[b]]
        self._attention.plan(AttentionStep(batch.q_lens, entry_lens, there))
        features = self._features.index_select(0, previous)
        tokens = Tokens(token_ids, positions, slots, last)
        hidden, unnormed = self._head.forward(tokens, features, self._kv, self._attention)
        if len(packed.last):
            self._features.index_copy_(0, slots.index_select(0, last), unnormed)
        return hidden, hidden
