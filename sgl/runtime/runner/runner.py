"""Executes batches on one device: packs them, runs the model over the paged KV cache, samples.

The runner decides nothing: it keeps the device's twin of the page table and does what a Batch says. On a GPU
`launch` only enqueues; nothing in it waits for the device.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionStep
from sgl.runtime.batch import Batch, Int32Array
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.runner.pack import PackedStep, Uploader, pack
from sgl.runtime.runner.results import DeviceLogprobs, Downloader, PendingStep, score_inputs
from sgl.runtime.runner.sampler import Sampler
from sgl.runtime.runner.threads import StepThreads


class ModelRunner:
    """Runs `model` for at most `max_rows` request rows of at most `max_pages` pages each."""

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        attention: AttentionBackend,
        *,
        max_rows: int,
        max_pages: int,
        device: torch.device,
        eos_ids: Collection[int] = (),
    ) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._page_table: Int32Array = np.zeros((max_rows, max_pages), np.int32)
        self._page_table_device = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device)
        self._uploader = Uploader(device)
        self._downloader = Downloader(device)
        self._sampler = Sampler(max_rows, model.config.vocab_size, device, eos_ids)
        self._threads = StepThreads(model.num_weights) if device.type == "cpu" else None

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Start a step; see `batch.Runner`."""
        if self._threads is not None:
            self._threads.choose(int(batch.q_lens.sum()))
        self._sampler.setup(batch.setups)
        hidden, packed = self._forward(batch)
        ids, output = self._sample(batch, hidden, packed)
        vocab_size = self._model.config.vocab_size
        inputs = score_inputs(batch, hidden, self._model.logits, vocab_size, self._uploader)
        return PendingStep(batch, ids, output, inputs, self._downloader)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, PackedStep]:
        """Hidden states [T, hidden_size] of the batch's tokens, after the last norm."""
        writes = batch.page_writes.astype(np.int64)
        self._page_table[writes[:, 0], writes[:, 1]] = writes[:, 2]
        num_pages = -(-int(batch.kv_lens.max()) // self._kv.page_size)
        pages = self._page_table[batch.rows, :num_pages]
        packed = pack(batch, pages, self._kv.page_size)
        flat = writes[:, 0] * self._page_table.shape[1] + writes[:, 1]
        on_device = self._uploader.upload(
            flat,
            batch.page_writes[:, 2],
            batch.rows.astype(np.int64),
            packed.token_ids,
            packed.positions,
            packed.slots,
            packed.from_device,
            packed.from_rows,
        )
        places, new_pages, rows, token_ids, positions, slots, from_device, from_rows = on_device
        if len(writes):
            self._page_table_device.view(-1).index_copy_(0, places, new_pages)
        if len(packed.from_device):
            sampled = self._sampler.next_tokens.index_select(0, from_rows)
            token_ids = token_ids.index_copy(0, from_device, sampled)
        pages_device = self._page_table_device.index_select(0, rows)[:, :num_pages]
        self._attention.plan(AttentionStep(batch.q_lens, batch.kv_lens, pages, pages_device))
        return self._model.forward(token_ids, positions, self._kv, slots, self._attention), packed

    def _sample(
        self, batch: Batch, hidden: torch.Tensor, packed: PackedStep
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:
        """One token for each row that samples, int64 [S], and the logprobs that were asked for."""
        if not len(packed.last):
            return torch.empty(0, dtype=torch.int64, device=hidden.device), None
        if len(packed.last) < len(hidden):
            (last,) = self._uploader.upload(packed.last)
            hidden = hidden.index_select(0, last)
        sampled = self._sampler(self._model.logits(hidden), batch)
        return sampled.ids, sampled.logprobs
