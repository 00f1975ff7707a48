"""Executes batches in JAX, in the two phases of `batch.Runner`: packs them, runs the compiled decoder over its pages,
samples. Nothing waits for the device before `wait`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from sgl.kernels.attention.base import AttentionStep
from sgl.runtime.batch import Batch, Int32Array, StepResult, TokenMasks
from sgl.runtime.jax.attention import blocks_of, rounded
from sgl.runtime.jax.decoder import KV, Decoder, Inputs
from sgl.runtime.jax.mesh import Devices
from sgl.runtime.jax.sampler import JaxSampler
from sgl.runtime.jax.weights import JaxWeights
from sgl.runtime.runner.idle import idle_batch
from sgl.runtime.runner.own import PlainRunner
from sgl.runtime.runner.pack import pack
from sgl.runtime.runner.results import SCORE_BYTES, DeviceLogprobs, pooled_spans, scored_positions, step_result


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched forward pass."""

    batch: Batch
    logits: jax.Array | None  # float32 [>= S, V]; None if nothing is sampled
    inputs: DeviceLogprobs | None  # of scored input tokens
    pooled: jax.Array | None  # float32 [>= P, hidden]


class JaxRunner(PlainRunner):
    """Runs a decoder for `max_rows` request rows of at most `max_pages` pages, the first of which is the dummy page."""

    def __init__(
        self,
        decoder: Decoder,
        weights: JaxWeights,
        devices: Devices,
        *,
        page_shape: tuple[int, ...],
        num_layers: int,
        dtype: Any,
        vocab_size: int,
        max_rows: int,
        max_pages: int,
        eos_ids: Collection[int],
    ) -> None:
        """page_shape: num_pages, page_size, num_kv, head_dim of a layer's keys, and of its values."""
        self._arrays = weights.arrays
        self._page_size = page_shape[1]
        self._max_pages = max_pages
        self._is_paged = decoder.is_paged
        self._vocab_size = vocab_size
        self._page_table: Int32Array = np.zeros((max_rows, max_pages), np.int32)
        zeros = jax.jit(lambda: jnp.zeros(page_shape, dtype), out_shardings=devices.cut(2))
        self._kv: KV = [(zeros(), zeros()) for _ in range(num_layers)]
        self._sampler = JaxSampler(max_rows, vocab_size, devices, eos_ids)
        self._step = jax.jit(decoder.step, static_argnames="is_whole", donate_argnames="kv")
        self._logits = jax.jit(decoder.logits)
        self._pool = jax.jit(_pooled)

    def forward(self, batch: Batch) -> Launched:
        """Start the forward pass of a step; see `batch.Runner`."""
        self._sampler.setup(batch.setups)
        writes = batch.page_writes
        self._page_table[writes[:, 0], writes[:, 1]] = writes[:, 2]
        num_pages = -(-int(batch.kv_lens.max()) // self._page_size)
        step = AttentionStep(batch.q_lens, batch.kv_lens, self._page_table[batch.rows, :num_pages])
        is_whole = bool(batch.score_targets or batch.pool_from)
        inputs = self._inputs(batch, step)
        self._kv, logits, hidden = self._step(
            self._arrays, self._kv, self._sampler.next_tokens, inputs, is_whole=is_whole
        )
        scored = pooled = None
        if hidden is not None:
            scored = self._scored(batch, hidden)
            if batch.pool_from:
                spans = np.zeros((rounded(len(batch.pool_from)), 2), np.int32)
                spans[: len(batch.pool_from)] = pooled_spans(batch)
                pooled = self._pool(hidden, spans)
        return Launched(batch, logits if batch.samples.any() else None, scored, pooled)

    def sample(self, launched: Launched, masks: TokenMasks | None = None) -> PendingJaxStep:
        """Sample after a forward pass; see `batch.Runner`."""
        ids, output = None, None
        if launched.logits is not None:
            ids, output = self._sampler.sample(launched.logits, launched.batch, masks)
        return PendingJaxStep(launched, ids, output)

    def launch(self, batch: Batch, masks: TokenMasks | None = None) -> PendingJaxStep:
        """Both phases of a step at once."""
        return self.sample(self.forward(batch), masks)

    def warm_up(self, num_tokens: int) -> None:
        """Compile the steps that every engine has: decodes of all rows and of few, and a prompt of num_tokens."""
        num_rows, most = self._page_table.shape[0], self._max_pages * self._page_size
        for q_lens in ([1] * num_rows, [1], [min(num_tokens, most)]):
            for temperature in (0.0, 1.0):
                self.launch(idle_batch(q_lens, temperature)).wait()

    def close(self) -> None:
        """Let go of the device's memory, after the last step."""
        self._kv, self._arrays = [], {}

    def _inputs(self, batch: Batch, step: AttentionStep) -> Inputs:
        packed = pack(batch, step, self._page_size)
        size = rounded(len(packed.token_ids))

        def padded(array: npt.NDArray[np.int64], size: int = size) -> Int32Array:
            its = np.zeros(size, np.int32)
            its[: len(array)] = array
            return its

        from_rows = np.full(size, -1, np.int32)
        from_rows[packed.from_device] = packed.from_rows
        return Inputs(
            padded(packed.token_ids),
            from_rows,
            padded(packed.positions),
            padded(packed.slots),
            padded(packed.last, min(size, rounded(len(packed.last)))),
            blocks_of(step, size, self._page_size, self._max_pages, is_paged=self._is_paged),
        )

    def _scored(self, batch: Batch, hidden: jax.Array) -> DeviceLogprobs | None:
        """Log-probabilities of input tokens after scored positions, of at most SCORE_BYTES of logits at a time."""
        wanted = scored_positions(batch)
        if wanted is None:
            return None
        spans, tokens, targets, given = wanted
        step = 1 << max(3, (SCORE_BYTES // (4 * self._vocab_size)).bit_length() - 1)
        parts = []
        for start in range(0, len(tokens), step):
            part = slice(start, start + step)
            its = tokens[part]
            size = rounded(len(its))
            index, following = np.zeros(size, np.int32), np.zeros(size, np.int32)
            index[: len(its)], following[: len(its)] = its, targets[part]
            logits = self._logits(self._arrays, hidden, index)
            parts.append(self._sampler.logprobs(spans, logits, following, np.arange(len(its)), given[part]))
        joined = {
            name: column if len(parts) == 1 else jnp.concatenate([part.columns[name] for part in parts])
            for name, column in parts[0].columns.items()
        }
        return DeviceLogprobs(spans, joined)


class PendingJaxStep:
    """A launched step, whose results are being copied to the host."""

    def __init__(self, launched: Launched, ids: jax.Array | None, output: DeviceLogprobs | None) -> None:
        """Starts the copy. ids: of the batch's `sampling`, int32 [>= S]; None: there are none."""
        self._batch, self._inputs, self._output = launched.batch, launched.inputs, output
        parts = [part.columns.values() for part in (output, launched.inputs) if part is not None]
        self._ids = ids
        self._arrays: list[jax.Array] = [column for columns in parts for column in columns]
        self._pools = launched.pooled is not None
        if launched.pooled is not None:
            self._arrays.append(launched.pooled)
        for array in self._arrays if ids is None else (ids, *self._arrays):
            array.copy_to_host_async()

    def wait(self) -> StepResult:
        """Block until the results are on the host. Call it once."""
        number = int(self._batch.samples.sum())
        ids = np.empty(0, np.int32) if self._ids is None else np.asarray(self._ids)[:number]
        arrays = [ids, *map(np.asarray, self._arrays)]
        if self._pools:
            arrays[-1] = arrays[-1][: len(self._batch.pool_from)]
        return step_result(
            self._batch, self._batch.sampling, iter(arrays), self._output, self._inputs, pools=self._pools
        )


def _pooled(hidden: jax.Array, spans: jax.Array) -> jax.Array:
    """float32 [P, hidden]: sums of hidden states [T, hidden] over spans [P, 2]."""
    at = jnp.arange(len(hidden))
    within = ((at >= spans[:, :1]) & (at < spans[:, 1:])).astype(jnp.float32)
    return jnp.matmul(within, hidden.astype(jnp.float32), precision="highest")
