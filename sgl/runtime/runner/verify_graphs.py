"""CUDA graphs of steps that verify drafts: a few tokens in each row, in one launch but for the logits.

Rows are padded to 2, 4 or 8 tokens each: where reading weights takes the time, a few more cost next to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionStep, GraphAttention
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import Batch, Int64Array
from sgl.runtime.model.aux_hidden_states import keeping
from sgl.runtime.model.base import Model
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.runner.capture import capturing, recorded
from sgl.runtime.runner.pack import padded, slots_of

MAX_QUERIES = 8
"""Tokens of a row that such a step computes at most."""
_QUERIES = 2, 4, MAX_QUERIES
_ROWS = 1, 2, 4, 8, 16, 32, 64


class Verified(NamedTuple):
    """A replayed step; valid until the next run."""

    sampling: torch.Tensor  # [S, hidden_size] behind the last norm, of the tokens to sample after
    places: torch.Tensor  # int64 [T] where the step's tokens lie among the padded ones
    slots: torch.Tensor  # int64, of padded tokens


class VerifyGraphs:
    """Steps of at most 64 rows with at most MAX_QUERIES tokens each. Capture before the first step. next_tokens: as of
    `DecodeGraphs`."""

    def __init__(
        self, model: Model, kv: KVCache, attention: GraphAttention, next_tokens: torch.Tensor, max_rows: int
    ) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._next_tokens = next_tokens
        self._rows = [rows for rows in _ROWS if rows < max_rows] + [max_rows] * (max_rows <= _ROWS[-1])
        self._graphs: dict[tuple[int, int], list[torch.cuda.CUDAGraph]] = {}
        self._uploader = Uploader(model.device)
        most = self._rows[-1] * MAX_QUERIES
        self._ids = torch.zeros(most, dtype=torch.int64, device=model.device)
        self._hidden = torch.zeros(most, model.config.hidden_size, dtype=model.dtype, device=model.device)

    def run(self, batch: Batch, step: AttentionStep) -> Verified | None:
        """Replay the step. None if a row is longer, does not sample or has an adapter, images or scored positions, or
        there are too many rows, or one token in each and nobody observes it. Never waits for the device."""
        num_rows, longest = len(batch), int(batch.q_lens.max())
        is_plain = bool(batch.samples.all()) and not (batch.score_targets or batch.places or batch.pool_from)
        if (
            not (1 if batch.is_observed else 2) <= longest <= MAX_QUERIES
            or num_rows > self._rows[-1]
            or not is_plain
            or batch.adapters is not None
        ):
            return None
        queries = _QUERIES[bisect_left(_QUERIES, longest)]
        bucket = self._rows[bisect_left(self._rows, num_rows)]
        padding = bucket - num_rows
        q_lens, kv_lens = batch.q_lens, batch.kv_lens
        if padding:
            step = padded(step, padding)
        of_row = np.repeat(np.arange(num_rows), q_lens)
        behind = np.repeat(np.cumsum(q_lens, dtype=np.int64), q_lens) - np.arange(len(of_row))
        positions = kv_lens[of_row].astype(np.int64) - behind
        places = of_row * queries + q_lens[of_row] - behind
        inputs = rows, token_ids, positions_there, slots = self._nothing(bucket * queries)
        rows[:] = len(self._next_tokens) - 1
        rows[places], token_ids[places] = batch.rows[of_row], batch.token_ids
        slots[..., places] = slots_of(step, of_row, positions, self._kv.page_size)[..., : len(places)]
        positions_there[places] = positions if batch.offsets is None else positions + batch.offsets[of_row]
        slots_on = self._attention.plan_verify(step, queries, inputs)[3]
        for graph in self._graphs[bucket, queries]:
            graph.replay()
        sampling, after = batch.sampling  # the device is busy by now
        last = sampling * queries + batch.q_lens[sampling] - 1 - after
        last_on, places_on = self._uploader.upload(last.astype(np.int64), places.astype(np.int64))
        return Verified(self._hidden.index_select(0, last_on), places_on, slots_on)

    def drop(self) -> None:
        """Let go of what was recorded, until the next `capture`."""
        self._graphs.clear()

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every bucket, the largest first, whose memory others reuse."""
        what = f"steps that verify drafts of up to {self._rows[-1]} rows"
        with keeping(self._model), capturing(what) as (pool, stream):
            for queries in reversed(_QUERIES):
                for bucket in reversed(self._rows):
                    lens = np.full(bucket, queries, np.int32)
                    step = AttentionStep(lens, lens, np.zeros((bucket, queries), np.int32))
                    if self._kv.windowed is not None:
                        step = replace(step, windowed=step)
                    inputs = self._attention.plan_verify(step, queries, self._nothing(bucket * queries))
                    self._forward(inputs)  # compiles and loads what a capture may not
                    # Collectives in pieces are not measured.
                    is_whole, forward = self._model.collectives is not None, partial(self._forward, inputs)
                    self._graphs[bucket, queries] = recorded(forward, self._kv, pool, stream, is_whole=is_whole)

    def _nothing(self, num_tokens: int) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Rows, token ids, positions and slots, zeros."""
        rows, token_ids, positions, *slots = np.zeros((4 + (self._kv.windowed is not None), num_tokens), np.int64)
        return rows, token_ids, positions, slots[0] if len(slots) == 1 else np.stack(slots)

    def _forward(self, inputs: list[torch.Tensor]) -> None:
        rows, token_ids, positions, slots = inputs
        ids = self._ids[: len(rows)]
        torch.where(token_ids < 0, self._next_tokens.index_select(0, rows), token_ids, out=ids)
        hidden = self._model.forward(Tokens(ids, positions, slots), self._kv, self._attention, captured=True)
        self._hidden[: len(rows)].copy_(hidden)
