"""Samples one token for every row that wants one, without waiting for the host.

Sampling parameters lie in device tables by request row. A host mirror decides what a step can skip: the draw if all
rows are greedy, bisection without cut-offs, penalty tables without penalties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.kernels.mask.ops import apply_token_mask_
from sgl.kernels.sampling import ops as sampling
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import BROADCAST, Batch, Int32Array, Int64Array, RowSetup, TokenMasks
from sgl.runtime.runner.cut_vocabulary import CutVocabulary
from sgl.runtime.runner.device_masks import DeviceMasks
from sgl.runtime.runner.mask_table import MaskTable
from sgl.runtime.runner.results import DeviceLogprobs, Downloader, Landing, Span, position_logprobs, spans_of
from sgl.runtime.runner.row_settings import (
    FREQUENCY,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    RowSettings,
)

_NUM_MASKS = 2048
_MASKS_A_ROW = 16
_NEAR = 128  # programs that read inputs in the host's memory, at most: they wait for it together
_GROUP = 16  # rows that a GPU draws from at once, where their number may not matter
"""Cached token masks, at least, and for each request row; 16 KB each for 128,000 tokens. Real schemas have about
twenty."""


_NONE: Int64Array = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One token for each of the S sampled positions."""

    ids: torch.Tensor | Landing  # int64 [S] on the device
    logprobs: DeviceLogprobs | None  # of the rows that want them


class Sampler:
    """Sampling parameters, penalty counts and the last sampled token of every request row.

    `next_tokens` int64 [max_rows + 1] is on the device: the next step reads its decode tokens there, before the
    host knows them. The last row is padding. A row's draws depend only on its seed, the token's position and its
    logits.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        eos_ids: Collection[int] = (),
        cut: CutVocabulary | None = None,
        *,
        one_by_one: bool = False,
    ) -> None:
        """eos_ids: not sampled before min_new_tokens, unless a request ignores them. cut: if this rank sees only the
        logits of a part of the vocabulary. one_by_one: on a CPU row by row, since torch rounds a tensor's last
        numbers differently, on a GPU always as many rows at once, since torch sums by their number."""
        self._one_by_one = one_by_one and device.type == "cpu"
        self._group = _GROUP if one_by_one and not self._one_by_one else 1 if one_by_one else 0
        self._cut = cut
        self._own = range(vocab_size) if cut is None else cut.own
        self.next_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self._device = device
        self._uploader = Uploader(device)
        self._takes_one_pass = device.type == "cuda"
        self._floats = torch.zeros(max_rows + 1, 6, dtype=torch.float32, device=device)
        self._ints = torch.zeros(max_rows + 1, 2, dtype=torch.int64, device=device)
        self._temperature, self._seeds = self._floats[:, TEMPERATURE], self._ints[:, SEED]
        self._masks: MaskTable | None = None  # once a request has a constraint
        self._occurrences: torch.Tensor | None = None  # int32 [max_rows + 1, V] once a request has penalties
        self._settings = RowSettings(max_rows, vocab_size, eos_ids)

    def enable_device_masks(self, vocabulary: Vocabulary) -> None:
        """Accept places in finished automata as token masks. Call it before the first step."""
        self._masks = self._mask_table(DeviceMasks(vocabulary, len(self.next_tokens), self._device))

    def setup(self, setups: list[RowSetup]) -> None:
        """Replace the rows' requests, before their first step."""
        if not setups:
            return
        rows = self._settings.setup(setups)
        floats, ints = self._settings.floats[rows], self._settings.ints[rows]
        index, new_floats, new_ints = self._uploader.upload(rows, floats, ints)
        self._floats.index_copy_(0, index, new_floats)
        self._ints.index_copy_(0, index, new_ints)
        self._set_occurrences([setup for setup in setups if setup.params.has_penalties])

    def sample(
        self,
        logits: torch.Tensor,
        batch: Batch,
        token_masks: TokenMasks | None = None,
        placed: Sequence[torch.Tensor] | None = None,
        lands: Downloader | None = None,
    ) -> SampleOutput:
        """Sample at the batch's S positions, in order, into `next_tokens`; entries of rows with drafts are
        unspecified. Never waits for the device.

        logits: float32 [S, V], or of the own part, contiguous, modified in place. placed: int64 [S] each, request
        rows and positions of the tokens to sample, if on the device already. lands: gives the memory for tokens that
        a kernel can write to the host itself.
        """
        sampling_rows, behind = batch.sampling
        assert logits.shape == (len(sampling_rows), len(self._own)), "a row of logits for each position"
        rows = batch.rows[sampling_rows].astype(np.int64)
        positions = batch.kv_lens[sampling_rows] - behind  # of the tokens being sampled
        wants_logprobs = (batch.top_logprobs[sampling_rows] >= 0).nonzero()[0]
        penalised = (
            np.flatnonzero(self._settings.has_penalties[rows]) if self._settings.has_any_penalties else _NONE
        )
        if lands is not None and (
            len(wants_logprobs) or (batch.drafts and len(penalised)) or not self._lands(rows)
        ):
            lands = None
        if lands is None:
            index, places = placed or self._uploader.upload(rows, positions)
        spans: list[Span] = []
        if len(wants_logprobs):
            spans, given_ids = spans_of(batch, Counter(sampling_rows[wants_logprobs].tolist()).items())
            logprob_index, given = self._uploader.upload(wants_logprobs, given_ids)
            raw = self._whole(logits.index_select(0, logprob_index))
        if len(penalised):
            penalised_index, penalised_rows = self._uploader.upload(penalised, rows[penalised])
            self._penalize(logits, penalised_index, penalised_rows)
        if self._settings.has_edits:
            self._edit(logits, rows, positions)
        if lands is not None:
            landing = self._choose_and_land(logits, rows, positions, token_masks, lands)
            if len(penalised):
                self._count(penalised_rows, self.next_tokens.index_select(0, penalised_rows))
            return SampleOutput(landing, None)
        masks = None if token_masks is None else self._placed_masks(token_masks)
        known = [] if token_masks is None else _known(token_masks)
        is_noted = self._takes_one_pass and self._cut is None and not known
        if self._cut is not None:
            ids = self._choose_among_parts(self._cut, logits, rows, index, places, masks)
        elif self._takes_one_pass:
            ids, are_final = self._choose_in_one_pass(logits, rows, index, places, masks)
            is_noted &= are_final
        else:
            if masks is not None:
                apply_token_mask_(logits, *masks)
            ids = self._choose(logits, rows, index, places)
        if known:
            known_index, known_ids = self._uploader.upload(*np.array(known, np.int64).T)
            ids.index_copy_(0, known_index, known_ids)
        if not is_noted:
            self.next_tokens.index_copy_(0, index, ids)
        if len(penalised):
            self._count(penalised_rows, ids.index_select(0, penalised_index))
        if not spans:
            return SampleOutput(ids, None)
        return SampleOutput(ids, position_logprobs(spans, raw, ids.index_select(0, logprob_index), given))

    def _lands(self, rows: Int64Array) -> bool:
        """Whether all of these rows are drawn from in one pass, which reads its inputs in the host's memory."""
        if not self._takes_one_pass or self._cut is not None:
            return False
        if self._settings.has_any_cuts and self._settings.cuts(rows).any():
            return False
        from sgl.kernels.sampling import triton as sampling_triton

        return sampling_triton.num_programs(len(rows), self._vocab_size) <= _NEAR

    def _choose_and_land(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        token_masks: TokenMasks | None,
        lands: Downloader,
    ) -> Landing:
        """Draw without an upload before and a download after: launching them takes a host far longer than a GPU takes
        to read and write its memory."""
        from sgl.kernels.sampling import triton as sampling_triton

        size = len(rows)
        landing = lands.landing(4 * size)
        inputs = landing.array[size : 4 * size].reshape(3, size)
        masks = None
        if token_masks is not None:
            table = self._table()
            masks, inputs[0] = table.rows, table.ensure_rows(token_masks)
            for i, token in _known(token_masks):
                inputs[0, i] = -2 - token
        inputs[1], inputs[2] = rows, positions
        of_rows = self._temperature, self._seeds, None, None, self.next_tokens
        sampling_triton.draw(logits, *of_rows, masks, None, landing.memory)
        return landing

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._cut is None else self._cut.whole(logits)

    def _placed_masks(self, token_masks: TokenMasks) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed masks of the own tokens, and the row of them that each position has, -1 for none."""
        if self._cut is None:
            table = self._table()
            packed, found = table.rows, table.ensure_rows(token_masks)
        else:
            table_of_first = self._table() if self._cut.decides else None
            packed, found = self._cut.masks(token_masks, table_of_first, self._device)
        (mask_rows,) = self._uploader.upload(found)
        return packed, mask_rows

    def _table(self) -> MaskTable:
        if self._masks is None:
            self._masks = self._mask_table()
        return self._masks

    def _mask_table(self, walker: DeviceMasks | None = None) -> MaskTable:
        num_masks = max(_NUM_MASKS, _MASKS_A_ROW * len(self.next_tokens))
        return MaskTable(num_masks, self._vocab_size, self._device, walker)

    def _choose_among_parts(
        self,
        cut: CutVocabulary,
        logits: torch.Tensor,
        rows: Int64Array,
        index: torch.Tensor,
        positions: torch.Tensor,
        masks: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Draw among all ranks' tokens; rows with top-k, top-p or min-p gather their logits."""
        if self._takes_one_pass:
            from sgl.kernels.sampling import triton as sampling_triton

            parameters = self._temperature, self._seeds, index, positions, cut.own.start
            keys = sampling_triton.draw_keys(logits, *parameters, *(masks or (None, None)))
        else:
            if masks is not None:
                apply_token_mask_(logits, *masks)
                masks = None
            temperature, seeds = self._temperature.index_select(0, index), None
            if self._settings.is_drawn[rows].any():
                seeds = self._seeds.index_select(0, index)
            keys = self._keys(logits, temperature, seeds, positions, cut.own.start)
        whole = np.flatnonzero(self._settings.cuts(rows))
        some = ids = None
        if len(whole):
            (some,) = self._uploader.upload(whole)
            logits = logits.index_select(0, some)
            if masks is not None:
                apply_token_mask_(logits, masks[0], masks[1].index_select(0, some))
            places = index.index_select(0, some), positions.index_select(0, some)
            ids = self._choose(cut.whole(logits), rows[whole], *places)
        return cut.decided(keys, some, ids)

    def _keys(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor | None,
        positions: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        if not self._one_by_one or len(logits) == 1:
            return sampling.draw_keys(logits, temperature, seeds, positions, first)
        each = (slice(i, i + 1) for i in range(len(logits)))
        return torch.cat(
            [
                self._keys(logits[i], temperature[i], seeds if seeds is None else seeds[i], positions[i], first)
                for i in each
            ]
        )

    def _choose(
        self, logits: torch.Tensor, rows: Int64Array, index: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        if not self._settings.is_drawn[rows].any():
            return sampling.greedy(logits)
        if self._group and len(rows) != self._group:
            return self._choose_in_groups(logits, rows, index, positions)
        floats = self._floats.index_select(0, index)
        ints = self._ints.index_select(0, index)
        max_top_k = int(self._settings.top_k[rows].max())
        return sampling.sample(
            logits,
            floats[:, TEMPERATURE],
            ints[:, SEED],
            positions,
            top_k=ints[:, TOP_K] if max_top_k else None,
            top_p=floats[:, TOP_P] if self._settings.has_top_p[rows].any() else None,
            min_p=floats[:, MIN_P] if self._settings.has_min_p[rows].any() else None,
            max_top_k=max_top_k,
        )

    def _choose_in_groups(
        self, logits: torch.Tensor, rows: Int64Array, index: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """`_choose` for so many rows at a time, the last one repeated where there are fewer."""
        chosen, size = [], self._group
        for start in range(0, len(rows), size):
            some = np.minimum(np.arange(start, start + size), len(rows) - 1)
            (at,) = self._uploader.upload(some)
            group = (its.index_select(0, at) for its in (logits, index, positions))
            some_logits, some_index, places = group
            chosen.append(self._choose(some_logits, rows[some], some_index, places))
        return torch.cat(chosen)[: len(rows)]

    def _choose_in_one_pass(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        index: torch.Tensor,
        positions: torch.Tensor,
        masks: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, bool]:
        """Draw in one pass over the logits, into `next_tokens`; rows with top-k, top-p or min-p take several passes.
        Returns the tokens, and whether `next_tokens` has them all. GPU only. masks: allowed tokens, and which row of
        them each of the S has."""
        from sgl.kernels.sampling import triton as sampling_triton

        cut = np.flatnonzero(self._settings.cuts(rows)) if self._settings.has_any_cuts else _NONE
        if len(cut) == len(rows):
            if masks is not None:
                apply_token_mask_(logits, *masks)
            return self._choose(logits, rows, index, positions), False
        parameters = self._temperature, self._seeds, index
        ids = sampling_triton.draw(logits, *parameters, positions, self.next_tokens, *(masks or (None, None)))
        if len(cut):
            (some,) = self._uploader.upload(cut)
            cut_logits = logits.index_select(0, some)
            if masks is not None:
                apply_token_mask_(cut_logits, masks[0], masks[1].index_select(0, some))
            chosen = self._choose(
                cut_logits, rows[cut], index.index_select(0, some), positions.index_select(0, some)
            )
            ids.index_copy_(0, some, chosen)
        return ids, not len(cut)

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens int64 [B] drawn from float32 [B, V] by temperature and seed alone, also into `next_tokens`: of drafts,
        which need not be what a row's cut-offs would let stand. Can be captured. rows, positions: int64 [B]."""
        temperature, seeds = self._temperature, self._seeds
        if self._takes_one_pass:
            from sgl.kernels.sampling import triton as sampling_triton

            return sampling_triton.draw(logits, temperature, seeds, rows, positions, self.next_tokens)
        ids = sampling.sample(logits, temperature.index_select(0, rows), seeds.index_select(0, rows), positions)
        self.next_tokens.index_copy_(0, rows, ids)
        return ids

    def _edit(self, logits: torch.Tensor, rows: Int64Array, positions: Int64Array) -> None:
        """Add `RowSettings.edits` of the own tokens."""
        index, ids, values = self._settings.edits(rows, positions)
        if self._cut is not None:
            own = (ids >= self._own.start) & (ids < self._own.stop)
            index, ids, values = index[own], ids[own] - self._own.start, values[own]
        if len(index):
            sampling.add_edits_(logits, *self._uploader.upload(index, ids, values))

    def _set_occurrences(self, setups: list[RowSetup]) -> None:
        """Count tokens for penalties: 2 for each output token, plus 1 if in the prompt."""
        if not setups:
            return
        if self._occurrences is None:
            shape = len(self.next_tokens), len(self._own)
            self._occurrences = torch.zeros(shape, dtype=torch.int32, device=self._device)
        prompts = [self._places(setup.row, setup.prompt_ids) for setup in setups]
        outputs = [self._places(setup.row, setup.output_ids) for setup in setups]
        rows, prompt, output = self._uploader.upload(
            np.array([setup.row for setup in setups], np.int64), np.concatenate(prompts), np.concatenate(outputs)
        )
        self._occurrences.index_fill_(0, rows, 0)
        flat = self._occurrences.view(-1)
        flat.index_fill_(0, prompt, 1)
        flat.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))

    def _places(self, row: int, ids: Int32Array) -> Int64Array:
        """Where own tokens are counted, in the flat table."""
        if self._cut is not None:
            ids = ids[(ids >= self._own.start) & (ids < self._own.stop)]
        return ids.astype(np.int64) + (row * len(self._own) - self._own.start)

    def _penalize(self, logits: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Penalise logits[index] of request rows `rows`; both int64 [M]."""
        assert self._occurrences is not None, "a row with penalties has been set up"
        if self._one_by_one and len(rows) > 1:
            for i in range(len(rows)):
                self._penalize(logits, index[i : i + 1], rows[i : i + 1])
            return
        floats = self._floats.index_select(0, rows)
        everywhere = len(index) == len(logits)
        some = logits if everywhere else logits.index_select(0, index)
        sampling.penalize_(
            some,
            self._occurrences.index_select(0, rows),
            floats[:, FREQUENCY],
            floats[:, PRESENCE],
            floats[:, REPETITION],
        )
        if not everywhere:
            logits.index_copy_(0, index, some)

    def _count(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        assert self._occurrences is not None, "a row with penalties has been set up"
        flat, twice = self._occurrences.view(-1), torch.full_like(ids, 2, dtype=torch.int32)
        if self._cut is not None:
            ids = ids - self._own.start
            twice.mul_((ids >= 0) & (ids < len(self._own)))
            ids.clamp_(0, len(self._own) - 1)
        flat.index_add_(0, rows * len(self._own) + ids, twice)


def _known(masks: TokenMasks) -> list[tuple[int, int]]:
    """The positions with a single token possible, and the token."""
    return [(i, mask) for i, mask in enumerate(masks) if isinstance(mask, int) and mask != BROADCAST]
