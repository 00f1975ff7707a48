"""CUDA graphs of steps that verify drafts: a few tokens in each row, in one launch, but for the logits of many.

Rows are padded to 2, 4 or 8 tokens each: where reading weights takes the time, a few more cost next to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionStep, GraphAttention
from sgl.runtime.batch import Batch, Int64Array
from sgl.runtime.model.aux_hidden_states import keeping
from sgl.runtime.model.base import Model
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.runner.ahead import Ahead, VerifyInputs
from sgl.runtime.runner.capture import MAX_QUERIES, capturing, recorded, row_buckets
from sgl.runtime.runner.pack import in_parts, padded, slots_of

_QUERIES = 2, 4, MAX_QUERIES
_PARTS = 8  # of steps with longer rows, in all, or
_SMALL_WORK = 1 << 33  # products of so many, 20 µs on an H200
_MOST_READ = 8 << 20  # bytes of a layer, 2 µs on an H200, that they read again
_LOGITS = 32  # tokens, padded, of which all logits take about as long as of some


class Verified(NamedTuple):
    """A replayed step; valid until the next run."""

    sampling: torch.Tensor  # [S, hidden_size] behind the last norm, of the tokens to sample after
    logits: torch.Tensor | None  # float32 [S, len(vocabulary)] of them; None: of too many to replay
    inputs: torch.Tensor  # see `VerifyGraphs._placed`
    num_tokens: int
    moved: VerifyInputs | None = None  # the same, where a batch may be ahead of this one
    ahead: Ahead | None = None  # of a batch that is ahead

    @property
    def places(self) -> torch.Tensor:
        """int64 [T] where the step's tokens lie among the padded ones."""
        return self.inputs[4, : self.num_tokens]

    @property
    def slots(self) -> torch.Tensor:
        """See `PackedStep.slots`; of padded tokens."""
        return self.inputs[5:].squeeze(0)


class VerifyGraphs:
    """Steps of at most 64 rows with at most MAX_QUERIES tokens each, and of few rows with more. Capture before the
    first step. next_tokens: as of `DecodeGraphs`."""

    def __init__(
        self, model: Model, kv: KVCache, attention: GraphAttention, next_tokens: torch.Tensor, max_rows: int
    ) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._next_tokens = next_tokens
        # Where a window ends, or which rank knows what, is not known on the device.
        self._goes_ahead = model.collectives is None and all(its is None for its in model.windows)
        self._rows = row_buckets(max_rows)
        few = max(_PARTS, _SMALL_WORK // max(1, model.weights.num_multiplied) // MAX_QUERIES)
        self._most_parts = min(few, self._rows[-1]) if model.collectives is None else 0  # ranks must agree
        self._key_bytes = 0 if not kv.keys else 2 * kv.keys[0][0].nbytes // kv.page_size  # of a token in a layer
        self._graphs: dict[tuple[int, int], list[torch.cuda.CUDAGraph]] = {}
        most = self._rows[-1] * MAX_QUERIES
        self._ids = torch.zeros(most, dtype=torch.int64, device=model.device)
        self._hidden = torch.zeros(most, model.config.hidden_size, dtype=model.dtype, device=model.device)
        shape = min(most, _LOGITS), len(model.vocabulary)
        self._logits = torch.zeros(shape, dtype=torch.float32, device=model.device)

    def run(
        self, batch: Batch, step: AttentionStep, place: Callable[[VerifyInputs], Ahead] | None = None
    ) -> Verified | None:
        """Replay the step, if it `holds` it, else None. Never waits for the device. place: of an observer, for batches
        that are ahead."""
        if not self.holds(batch):
            assert not batch.is_ahead, "it is like the step before"
            return None
        of_row: Int64Array | slice = slice(None)
        behind: Int64Array | int = 0
        if batch.longest > MAX_QUERIES:
            step, of_row, behind = in_parts(step, MAX_QUERIES)
        num_rows = len(step.q_lens)
        queries = _QUERIES[bisect_left(_QUERIES, min(batch.longest, MAX_QUERIES))]
        bucket = self._rows[bisect_left(self._rows, num_rows)]
        padding = bucket - num_rows
        placed, num_sampled = self._placed(batch, step, of_row, behind, self._nothing(bucket * queries), queries)
        if padding:
            step = padded(step, padding)
        inputs, firsts = self._attention.plan_verify(step, queries, (placed,))
        moved = ahead = None
        if batch.is_observed and self._goes_ahead:
            moved = VerifyInputs(inputs[0], inputs[1], inputs[2], inputs[5], firsts, queries)
        if batch.is_ahead:
            assert place is not None and moved is not None, "somebody knows its drafts"  # noqa: PT018
            ahead = place(moved)
        for graph in self._graphs[bucket, queries]:
            graph.replay()
        logits = self._logits[:num_sampled] if bucket * queries <= _LOGITS else None
        return Verified(self._hidden[:num_sampled], logits, inputs, len(batch.token_ids), moved, ahead)

    def holds(self, batch: Batch) -> bool:
        """Whether the step is replayed: not if a row does not sample or has an adapter, images or scored positions, or
        there are too many rows, or one token in each and nobody observes it. Rows of more than MAX_QUERIES tokens are
        computed as several, where padding and reading the same keys again take the device no longer than the host
        saves."""
        num_rows, longest = len(batch), batch.longest
        if longest > MAX_QUERIES:
            num_rows = int((-(-batch.q_lens // MAX_QUERIES)).sum())
            num_bytes = (num_rows - len(batch)) * int(batch.kv_lens.max()) * self._key_bytes
            if batch.is_observed or num_rows > self._most_parts or num_bytes > _MOST_READ:
                return False
        is_plain = batch.adapters is None and not (batch.score_targets or batch.places or batch.pool_from)
        least = 1 if batch.is_observed else 2
        return is_plain and least <= longest and num_rows <= self._rows[-1] and bool(batch.samples.all())

    def _placed(
        self,
        batch: Batch,
        step: AttentionStep,
        of_row: Int64Array | slice,
        behind: Int64Array | int,
        inputs: Int64Array,
        queries: int,
    ) -> tuple[Int64Array, int]:
        """What graphs read of padded tokens, in rows of one array: request rows, token ids, positions; of which are
        sampled after; which are the step's, if it is observed; and slots. Padding writes to the dummy page. Also how
        many are sampled after. step, of_row, behind: of `in_parts`. inputs: zeros."""
        num_drafts = np.zeros(len(batch), np.int64)
        for b, ids in batch.drafts.items():
            num_drafts[b] = len(ids)
        q_lens, kv_lens = step.q_lens[:, None], step.kv_lens[:, None]
        sampled_from = q_lens - 1 + (behind - num_drafts[of_row])[:, None]
        index = np.arange(queries)
        is_token = index < q_lens
        positions = np.minimum(kv_lens - q_lens + index, kv_lens - 1)
        of_rows = inputs[:, : is_token.size].reshape(len(inputs), *is_token.shape)
        of_rows[0] = batch.rows[of_row][:, None]
        of_rows[1][is_token] = batch.token_ids
        of_rows[5:] = slots_of(step, np.arange(len(q_lens))[:, None], positions, self._kv.page_size) * is_token
        of_rows[2] = positions if batch.offsets is None else positions + batch.offsets[of_row][:, None]
        last = (is_token & (index >= sampled_from)).ravel().nonzero()[0]
        inputs[3, : len(last)] = last
        if batch.is_observed:
            inputs[4, : len(batch.token_ids)] = is_token.ravel().nonzero()[0]
        return inputs, len(last)

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
                    inputs, _ = self._attention.plan_verify(step, queries, (self._nothing(bucket * queries),))
                    self._forward(inputs)  # compiles and loads what a capture may not
                    # Collectives in pieces are not measured.
                    is_whole, forward = self._model.collectives is not None, partial(self._forward, inputs)
                    self._graphs[bucket, queries] = recorded(forward, self._kv, pool, stream, is_whole=is_whole)

    def _nothing(self, num_tokens: int) -> Int64Array:
        return np.zeros((6 + (self._kv.windowed is not None), num_tokens), np.int64)

    def _forward(self, inputs: torch.Tensor) -> None:
        rows, token_ids, positions, last = inputs[:4]
        ids = self._ids[: len(rows)]
        torch.where(token_ids < 0, self._next_tokens.index_select(0, rows), token_ids, out=ids)
        tokens = Tokens(ids, positions, inputs[5:].squeeze(0))
        hidden = self._model.forward(tokens, self._kv, self._attention, captured=True)
        sampling = torch.index_select(hidden, 0, last, out=self._hidden[: len(rows)])
        if len(rows) <= _LOGITS:
            self._model.logits(sampling, out=self._logits[: len(rows)])
