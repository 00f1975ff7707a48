"""Samples one token for every row that wants one, in JAX; see `sgl.runtime.runner.sampler`, which does so in torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from sgl.runtime.batch import Batch, Int32Array, Int64Array, RowSetup, TokenMasks
from sgl.runtime.jax.attention import rounded
from sgl.runtime.jax.mesh import Devices
from sgl.runtime.jax.sampling import Drawn, choose, logprobs
from sgl.runtime.runner.mask_table import KnownMasks
from sgl.runtime.runner.results import DeviceLogprobs, Span, spans_of
from sgl.runtime.runner.row_settings import SEED, TOP_K, RowSettings

_NUM_MASKS = 2048
_COLUMNS = "chosen", "top_values", "top_ids", "given"


class JaxSampler:
    """Sampling parameters on the host; penalty counts, token masks and the last sampled token of every row on the
    device. `next_tokens`: int32 [max_rows + 1], the last of padding."""

    def __init__(self, max_rows: int, vocab_size: int, devices: Devices, eos_ids: Collection[int]) -> None:
        self._devices = devices
        self._vocab_size = vocab_size
        self._settings = RowSettings(max_rows, vocab_size, eos_ids)
        self._padding = max_rows
        self.next_tokens = devices.put(np.zeros(max_rows + 1, np.int32))
        self._num_masks = max(_NUM_MASKS, max_rows)
        self._known = KnownMasks(self._num_masks)
        self._masks: jax.Array | None = None  # int32 [masks, words] once a request has a constraint
        self._occurrences: jax.Array | None = None  # int32 [max_rows + 1, V] once a request has penalties
        self._replaced = jax.jit(_replaced, donate_argnums=0)
        self._choose = jax.jit(
            self._chosen, static_argnames=("draws", "cuts"), donate_argnames=("next_tokens", "occurrences")
        )
        self._logprobs = jax.jit(_picked_logprobs, static_argnames="top_k")

    def setup(self, setups: list[RowSetup]) -> None:
        """Replace the rows' requests, before their first step."""
        self._settings.setup(setups)
        penalised = [setup for setup in setups if setup.params.has_penalties]
        if not penalised:
            return
        if self._occurrences is None:
            self._occurrences = self._devices.put(np.zeros((self._padding + 1, self._vocab_size), np.int32))
        counts = np.zeros((len(penalised), self._vocab_size), np.int32)
        for its, setup in zip(counts, penalised, strict=True):
            its[setup.prompt_ids] = 1
            its += 2 * np.bincount(setup.output_ids, minlength=self._vocab_size).astype(np.int32)
        rows = np.array([setup.row for setup in penalised], np.int32)
        self._occurrences = self._replace(self._occurrences, rows, counts, self._padding)

    def sample(
        self, logits: jax.Array, batch: Batch, masks: TokenMasks | None
    ) -> tuple[jax.Array, DeviceLogprobs | None]:
        """int32 [>= S] of float32 logits [>= S, V] at the batch's S positions, and what logprobs it wants. Never waits
        for the device."""
        sampling_rows, _ = batch.sampling
        rows = batch.rows[sampling_rows].astype(np.int64)
        positions = batch.kv_lens[sampling_rows].astype(np.int64)
        size, settings = len(logits), self._settings
        forced, found = self._constrain(masks, size)
        penalised = bool(settings.has_penalties[rows].any())
        edits = settings.edits(rows, positions) if settings.has_edits else settings.edits(rows[:0], positions[:0])
        num_edits = rounded(len(edits[0])) if len(edits[0]) else 0
        padded_rows = _filled(rows, size, self._padding)
        ints = settings.ints[padded_rows]
        seeds = np.stack((ints[:, SEED] & 0xFFFFFFFF, ints[:, SEED] >> 32), 1).astype(np.uint32)
        its = Drawn(
            *(padded_rows, _filled(positions, size), settings.floats[padded_rows], seeds),
            *(ints[:, TOP_K].astype(np.int32), forced, found),
            (
                _filled(edits[0], num_edits),
                _filled(edits[1], num_edits),
                np.concatenate((edits[2], np.zeros(num_edits - len(edits[2]), np.float32))),
            ),
        )
        draws = bool(settings.is_drawn[rows].any())
        self.next_tokens, occurrences, ids = self._choose(
            logits,
            its,
            None if (found < 0).all() else self._masks,
            next_tokens=self.next_tokens,
            occurrences=self._occurrences if penalised else None,
            draws=draws,
            cuts=draws and bool(settings.cuts(rows).any()),
        )
        if penalised:
            self._occurrences = occurrences
        return ids, self._wanted(logits, ids, batch, sampling_rows)

    def _chosen(
        self,
        logits: jax.Array,
        its: Drawn,
        masks: jax.Array | None,
        next_tokens: jax.Array,
        occurrences: jax.Array | None,
        draws: bool,
        cuts: bool,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        ids = self._devices.keep(choose(logits, its, masks, occurrences, draws=draws, cuts=cuts))
        if occurrences is not None:
            occurrences = self._devices.keep(occurrences.at[its.rows, ids].add(2))
        return self._devices.keep(next_tokens.at[its.rows].set(ids)), occurrences, ids

    def _constrain(self, masks: TokenMasks | None, size: int) -> tuple[Int32Array, Int32Array]:
        """The only token possible and the row of the mask at each position, int32 [size], or -1."""
        forced, found = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        if masks is None:
            return forced, found
        for i, mask in enumerate(masks):
            if isinstance(mask, int):
                forced[i] = mask
        where = self._known.find(masks)
        found[: len(masks)] = where.found
        assert not where.places, "the host works masks out"
        if where.arrays:
            if self._masks is None:
                words = -(-self._vocab_size // 32)
                self._masks = self._devices.put(np.zeros((self._num_masks + 1, words), np.int32))
            rows = where.array_rows.astype(np.int32)
            self._masks = self._replace(self._masks, rows, np.stack(where.arrays), self._num_masks)
        return forced, found

    def _replace(self, table: jax.Array, rows: Int32Array, new: Int32Array, padding: int) -> jax.Array:
        """A table with new rows; `padding` is one that nobody reads."""
        size = rounded(len(rows))
        padded = np.concatenate((new, np.zeros((size - len(new), new.shape[1]), np.int32)))
        replaced: jax.Array = self._replaced(table, _filled(rows, size, padding), padded)
        return replaced

    def _wanted(
        self, logits: jax.Array, ids: jax.Array, batch: Batch, sampling_rows: Int64Array
    ) -> DeviceLogprobs | None:
        wanted = np.flatnonzero(batch.top_logprobs[sampling_rows] >= 0)
        spans, given = spans_of(batch, Counter(sampling_rows[wanted].tolist()).items())
        if not spans:
            return None
        return self.logprobs(spans, logits, ids, wanted, given)

    def logprobs(
        self, spans: list[Span], logits: jax.Array, ids: Any, index: Int64Array, given: Int64Array
    ) -> DeviceLogprobs:
        """For spans at N positions, of which index [N] says where they are in logits and ids. given: [N, G]."""
        size, top_k = rounded(len(index)), max(span.top_k for span in spans)
        width = rounded(given.shape[1]) if given.shape[1] else 0
        padded = np.zeros((size, width), np.int32)
        padded[: len(given), : given.shape[1]] = given
        top_k = rounded(top_k) if top_k else 0
        columns = self._logprobs(logits, ids, _filled(index, size), padded, top_k=top_k)
        named = zip(_COLUMNS, columns, strict=True)
        return DeviceLogprobs(spans, {name: column for name, column in named if column is not None})


def _picked_logprobs(
    logits: jax.Array, ids: jax.Array, index: jax.Array, given: jax.Array, top_k: int
) -> tuple[jax.Array | None, ...]:
    return logprobs(logits[index], ids[index], given, top_k=top_k)


def _replaced(table: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    return table.at[rows].set(new)


def _filled(array: Int64Array | Int32Array, size: int, filler: int = 0) -> Int32Array:
    """int32 [size] of [<= size]."""
    filled = np.full(size, filler, np.int32)
    filled[: len(array)] = array
    return filled
