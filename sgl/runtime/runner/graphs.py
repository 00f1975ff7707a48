"""CUDA graphs of decode steps: a whole forward pass in one launch.

Smaller steps are padded to the next bucket with rows that use the dummy page. The attention backend copies rows,
positions and slots to the graphs' fixed addresses with its plan, in stream order.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionStep, GraphAttention
from sgl.kernels.lora.rows import NO_ADAPTER, AdapterRows, block_of, most_tiles, tiled
from sgl.kernels.staging import ALIGNMENT, Uploader, views_into
from sgl.runtime.batch import FROM_DEVICE, Batch, Int32Array, Int64Array
from sgl.runtime.model.aux_hidden_states import keeping
from sgl.runtime.model.base import Model
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.lora import LoraSlots, LoraStep
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.runner.capture import CAPTURE_MODE, capturing
from sgl.runtime.runner.pack import padded, slots_of
from sgl.runtime.runner.states import RowStates


class Replayed(NamedTuple):
    """float32 logits [B, len(vocabulary)]; int64 [B] request rows and positions of the next tokens."""

    logits: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows to capture. Below 160, an H200's step time depends on reading weights, so padding is almost
    free; above, at most 9 % of the products are padding."""
    coarse = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160]
    sizes = [size for size in coarse if size < max_rows] + list(range(176, max_rows, 16))
    return [*sizes, max_rows]


class DecodeGraphs:
    """Decode steps of at most `max_rows` rows. Capture before the first step.

    next_tokens: int64 [request rows + 1], each row's last sampled token, which graphs read; tokens known better by
    the host are written there first. The last row is padding. states: of a RecurrentModel.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        attention: GraphAttention,
        next_tokens: torch.Tensor,
        max_rows: int,
        lora: LoraSlots | None = None,
        states: RowStates | None = None,
    ) -> None:
        """lora: steps with adapters are replayed, too, by graphs of their own."""
        self._model = model
        self._states = states
        self._kv = kv
        self._attention = attention
        self._next_tokens = next_tokens
        self._buckets = buckets(max_rows)
        # by rows, attention variant, and whether there are adapters
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._replayed: dict[int, Replayed] = {}  # by rows
        self._uploader = Uploader(model.device)
        self._lora = lora
        self._aside: torch.cuda.Stream | None = None
        if lora is not None:
            self._aside = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]  # torch leaves it so
            most = max(self._num_tiles(bucket, lora) for bucket in self._buckets)
            num_bytes = 8 * max_rows + 12 * most + 3 * ALIGNMENT
            self._adapters = torch.zeros(num_bytes, dtype=torch.uint8, device=model.device)
        self._logits = torch.empty(max_rows, len(model.vocabulary), dtype=torch.float32, device=model.device)

    def run(self, batch: Batch, step: AttentionStep) -> Replayed | None:
        """Replay the step; results are valid until the next run. None if it has several tokens in a row, scored
        positions, images, or too many rows, or is observed: these graphs keep no hidden states. Never waits for the
        device. step: the batch's rows, with their pages."""
        num_rows = len(batch)
        is_plain = num_rows == len(batch.token_ids) and bool(batch.samples.all())
        is_plain = is_plain and not (batch.score_targets or batch.places or batch.is_observed)
        if num_rows > self._buckets[-1] or not is_plain:
            return None
        variant = self._attention.variant(step)
        bucket = self._buckets[bisect_left(self._buckets, num_rows)]
        padding = bucket - num_rows
        if padding:
            step = padded(step, padding)
        given = np.flatnonzero(batch.token_ids != FROM_DEVICE)
        if len(given):
            index, ids = self._uploader.upload(
                *(each[given].astype(np.int64) for each in (batch.rows, batch.token_ids))
            )
            self._next_tokens.index_copy_(0, index, ids)
        inputs = self._nothing(bucket)
        inputs[0, :num_rows] = batch.rows
        inputs[1, :bucket] = positions = step.kv_lens.astype(np.int64) - 1
        if batch.offsets is not None:
            inputs[1, :num_rows] += batch.offsets
        inputs[2, :bucket] = step.kv_lens
        inputs[3:, :bucket] = slots_of(step, np.arange(bucket), positions, self._kv.page_size)
        (placed,) = self._attention.plan_decode(step, variant, (inputs,))
        if batch.adapters is not None:
            self._place_adapters(np.concatenate((batch.adapters, np.full(padding, NO_ADAPTER, np.int32))))
        self._graphs[bucket, variant, batch.adapters is not None].replay()
        if num_rows not in self._replayed:  # the inputs' address depends only on the bucket
            its = placed[:, :num_rows]
            self._replayed[num_rows] = Replayed(self._logits[:num_rows], its[0], its[2])
        return self._replayed[num_rows]

    def drop(self) -> None:
        """Let go of what was recorded, until the next `capture`."""
        self._graphs.clear()

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every bucket, the largest first, whose memory others reuse."""
        what = f"decode steps of up to {self._buckets[-1]} rows"
        with keeping(self._model, is_on=False), capturing(what) as (pool, stream):
            for bucket in reversed(self._buckets):
                ones = np.ones(bucket, np.int32)
                step = AttentionStep(ones, ones, np.zeros((bucket, 1), np.int32))
                if self._kv.windowed is not None:
                    step = replace(step, windowed=step)
                for variant in self._attention.variants(bucket):
                    (placed,) = self._attention.plan_decode(step, variant, (self._nothing(bucket),))
                    inputs = placed[:, :bucket]
                    for with_adapters in (False, True)[: 1 + (self._lora is not None)]:
                        lora = self._place_adapters(np.zeros(bucket, np.int32)) if with_adapters else None
                        self._forward(inputs, lora)  # compiles and loads what a capture may not
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=CAPTURE_MODE):
                            self._forward(inputs, lora)
                        self._graphs[bucket, variant, with_adapters] = graph

    def _nothing(self, bucket: int) -> Int64Array:
        """Inputs of rows of padding: request rows, positions, tokens after them, and slots, of one or two pools. They
        are an even number, since kernels like addresses that 16 divides."""
        inputs = np.zeros((4 + (self._kv.windowed is not None), bucket + bucket % 2), np.int64)
        inputs[0] = len(self._next_tokens) - 1
        return inputs

    def _forward(self, inputs: torch.Tensor, lora: LoraStep | None) -> None:
        rows, positions, slots = inputs[0], inputs[1], inputs[3:].squeeze(0)
        token_ids = self._next_tokens.index_select(0, rows)
        states = None if self._states is None else self._states.decodes(rows)
        tokens = Tokens(token_ids, positions, slots, lora=lora, states=states)
        hidden = self._model.forward(tokens, self._kv, self._attention, captured=True)
        self._model.logits(hidden, out=self._logits[: len(hidden)])

    def _place_adapters(self, slots: Int32Array) -> LoraStep:
        """Copy which rows use which adapter to where graphs read it. slots: int32 [bucket]."""
        assert self._lora is not None, "there are adapters"
        num_rows = len(slots)
        block = block_of(num_rows)
        arrays = *tiled(slots, block, self._num_tiles(num_rows, self._lora)), slots
        self._uploader.upload_into(self._adapters, *arrays)
        order, tiles, of_rows = views_into(self._adapters, arrays)
        return LoraStep(self._lora, AdapterRows(order, tiles, block, of_rows), aside=self._aside)

    @staticmethod
    def _num_tiles(num_rows: int, lora: LoraSlots) -> int:
        return most_tiles(num_rows, lora.num_slots, block_of(num_rows))
