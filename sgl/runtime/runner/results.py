"""A launched step's results and their way to the host: one copy and one event a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sgl.kernels.sampling import ops as sampling
from sgl.kernels.staging import Uploader, numpy_dtype
from sgl.runtime.batch import Batch, Int32Array, Int64Array, Logprobs, StepResult

SCORE_BYTES = 1 << 27
"""Logits of scored positions are computed in chunks of that size, never for a whole prompt."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop) of row b, which wants the top_k likeliest and num_given ids."""

    b: int
    start: int
    stop: int
    top_k: int
    num_given: int


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log-probabilities at N positions of several rows, on the device, for the largest K and G of any row."""

    spans: list[Span]
    columns: dict[str, Any]
    """By the fields of `Logprobs`: chosen float32 [N]; as wanted top_values float32 [N, K], top_ids int32 [N, K],
    given float32 [N, G]."""

    def split(self, copied: Iterator[npt.NDArray[Any]]) -> dict[int, Logprobs]:
        """By row, with its own columns. Consumes arrays of `copied`."""
        arrays = {name: next(copied) for name in self.columns}
        chosen = arrays.pop("chosen")
        parts = {}
        for span in self.spans:
            part = parts[span.b] = Logprobs(chosen[span.start : span.stop].copy())
            for name, array in arrays.items():
                if width := span.num_given if name == "given" else span.top_k:
                    setattr(part, name, array[span.start : span.stop, :width].copy())
        return parts


def spans_of(batch: Batch, lengths: Iterable[tuple[int, int]]) -> tuple[list[Span], Int64Array]:
    """Spans for consecutive (b, number of positions), and each position's given ids: int64 [N, G], padded with
    token 0."""
    spans: list[Span] = []
    start = 0
    for b, length in lengths:
        num_given = len(batch.token_ids_logprob.get(b, ()))
        spans.append(Span(b, start, start + length, max(0, int(batch.top_logprobs[b])), num_given))
        start += length
    given = np.zeros((start, max((span.num_given for span in spans), default=0)), np.int64)
    for span in spans:
        if span.num_given:
            given[span.start : span.stop, : span.num_given] = batch.token_ids_logprob[span.b]
    return spans, given


def scored_positions(batch: Batch) -> tuple[list[Span], Int64Array, Int64Array, Int64Array] | None:
    """Spans of the N scored positions; which of the batch's tokens they are; the tokens that follow, [N]; and their
    given ids, [N, G]. None if none are scored."""
    scored = [(b, len(batch.score_targets[b])) for b in np.flatnonzero(batch.score_from >= 0).tolist()]
    scored = [(b, length) for b, length in scored if length]
    if not scored:
        return None
    spans, given = spans_of(batch, scored)
    starts = np.cumsum(batch.q_lens, dtype=np.int64) - batch.q_lens + batch.score_from
    tokens = np.concatenate([np.arange(starts[b], starts[b] + length) for b, length in scored])
    targets = np.concatenate([batch.score_targets[b] for b, _ in scored]).astype(np.int64)
    return spans, tokens, targets, given


def pooled_spans(batch: Batch) -> list[tuple[int, int]]:
    """Which of the batch's tokens are summed up, [start, stop) in the order of `pool_from`."""
    ends = np.cumsum(batch.q_lens, dtype=np.int64)
    return [(int(ends[b] - batch.q_lens[b]) + start, int(ends[b])) for b, start in batch.pool_from.items()]


def score_inputs(
    batch: Batch,
    hidden: torch.Tensor,
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    uploader: Uploader,
) -> DeviceLogprobs | None:
    """Log-probabilities of input tokens after scored positions; None if none are scored.

    hidden: [T, H], the batch's tokens after the last norm. lm_head: [n, H] → float32 [n, vocab_size] logits, called
    for at most SCORE_BYTES of logits at a time.
    """
    wanted = scored_positions(batch)
    if wanted is None:
        return None
    spans, *arrays = wanted
    index, following, given = uploader.upload(*arrays)
    step = max(1, SCORE_BYTES // (4 * vocab_size))
    parts = [
        position_logprobs(spans, lm_head(hidden.index_select(0, index[rows])), following[rows], given[rows])
        for rows in (slice(start, start + step) for start in range(0, len(index), step))
    ]
    if len(parts) == 1:
        return parts[0]
    joined = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
    return DeviceLogprobs(spans, joined)


def position_logprobs(
    spans: list[Span], logits: torch.Tensor, token_ids: torch.Tensor, given: torch.Tensor
) -> DeviceLogprobs:
    """The log-probabilities for spans at N positions. logits: float32 [N, V]. token_ids: int64 [N]. given: int64
    [N, G]."""
    top_k = max(span.top_k for span in spans)
    columns = sampling.logprobs(logits, token_ids, top_k, given if given.shape[1] else None)
    named = zip(("chosen", "top_values", "top_ids", "given"), columns, strict=True)
    return DeviceLogprobs(spans, {name: column for name, column in named if column is not None})


def pool(batch: Batch, hidden: torch.Tensor) -> torch.Tensor | None:
    """Sums of hidden states, float32 [P, H], in the order of the batch's `pool_from`; None if none are wanted.

    hidden: [T, H], the batch's tokens after the last norm. One row after another, so that a row's sum does not depend
    on the others.
    """
    if not batch.pool_from:
        return None
    spans = pooled_spans(batch)
    return torch.stack([hidden[start:stop].sum(0, dtype=torch.float32) for start, stop in spans])


class Landing(NamedTuple):
    """Pinned memory that results are copied to, or that kernels write them to."""

    memory: torch.Tensor  # int32
    array: Int32Array  # the same
    event: torch.cuda.Event  # when they are there


class Downloader:
    """Copies results to the host in stream order, through reused pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Landing] = []

    def start(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[npt.NDArray[Any]]]:
        """Start copying 32-bit tensors, or int64 ones whose values fit, without waiting. Call the result once: it
        waits and returns 32-bit arrays, which on a CPU may share the tensors' memory."""
        tensors = [tensor.contiguous() for tensor in tensors]
        if self._device.type == "cpu":
            arrays = [tensor.to(_landing(tensor)).numpy() for tensor in tensors]
            return lambda: arrays
        # imported only where a Triton kernel runs
        from sgl.kernels import staging_triton

        landing = self.landing(sum(tensor.numel() for tensor in tensors))
        start = 0
        for tensor in tensors:
            flat = tensor.view(-1) if tensor.dtype == torch.int64 else tensor.view(-1).view(torch.int32)
            if len(flat):
                staging_triton.copy_(landing.memory[start : start + len(flat)], flat)
            start += len(flat)
        wait = self.landed(landing, start)
        layout = [(tensor.shape, numpy_dtype(_landing(tensor))) for tensor in tensors]

        def wait_for_all() -> list[npt.NDArray[Any]]:
            (landed,) = wait()
            arrays, start = [], 0
            for shape, dtype in layout:
                stop = start + shape.numel()
                arrays.append(landed[start:stop].view(dtype).reshape(shape))
                start = stop
            return arrays

        return wait_for_all

    def landing(self, size: int) -> Landing:
        """Of at least so many numbers. Kernels may read there what the host has written, until they are all launched
        and it has `landed`."""
        if self._free:
            landing = self._free.pop()
            if len(landing.array) >= size:
                return landing
        memory = torch.empty(max(2 * size, 1 << 14), dtype=torch.int32, pin_memory=True)
        return Landing(memory, memory.numpy(), torch.cuda.Event())  # type: ignore[no-untyped-call]  # torch leaves it so

    def landed(self, landing: Landing, size: int) -> Callable[[], list[npt.NDArray[Any]]]:
        """Behind the kernels that write a landing's first `size` numbers. Call the result once: it waits and returns
        them."""
        landing.event.record()

        def wait() -> list[npt.NDArray[Any]]:
            landing.event.synchronize()
            landed = landing.array[:size].copy()
            self._free.append(landing)
            return [landed]

        return wait


class PendingStep:
    """A launched step, whose results are being copied to the host."""

    def __init__(
        self,
        batch: Batch,
        ids: torch.Tensor | Landing,
        output: DeviceLogprobs | None,
        inputs: DeviceLogprobs | None,
        downloader: Downloader,
        pooled: torch.Tensor | None = None,
        computed: torch.Tensor | None = None,
    ) -> None:
        """Starts the copy, also of the ids of the batch's `sampling`, int64 [S], or of those alone where they land;
        later work on the stream is not waited for. computed: of a batch that is ahead, `Ahead.tokens`."""
        self._batch = batch
        self._output = output
        self._inputs = inputs
        self._pools = pooled is not None
        if isinstance(ids, Landing):
            self._wait = downloader.landed(ids, len(batch.sampling[0]))
            return
        parts = [part.columns.values() for part in (output, inputs) if part is not None]
        beside = [its for its in (pooled, computed) if its is not None]
        self._wait = downloader.start([ids, *itertools.chain(*parts), *beside])

    def wait(self) -> StepResult:
        """Block until the results are on the host. Call it once."""
        arrays = iter(self._wait())
        batch = self._batch
        result = step_result(batch, batch.sampling, arrays, self._output, self._inputs, pools=self._pools)
        if batch.is_ahead:
            computed, ends = next(arrays), np.cumsum(batch.q_lens)
            result.drafts = {b: computed[ends[b] - len(its) : ends[b]] for b, its in batch.drafts.items()}
        return result


def step_result(
    batch: Batch,
    sampling: tuple[Int64Array, Int64Array],
    arrays: Iterator[npt.NDArray[Any]],
    output: DeviceLogprobs | None,
    inputs: DeviceLogprobs | None,
    *,
    pools: bool,
) -> StepResult:
    """Of arrays on the host: the ids of the batch's `sampling`, int32 [S], the columns of both logprobs, and if
    `pools` the sums of hidden states."""
    next_tokens: Int32Array = np.full(len(batch), -1, np.int32)
    sampled = next(arrays)
    rows, _ = sampling
    next_tokens[rows] = sampled  # of a row's tokens, the last one stays
    result = StepResult(next_tokens)
    for b in batch.drafts:
        start = int(rows.searchsorted(b))
        result.checks[b] = sampled[start : start + len(batch.drafts[b])].copy()
    if output is not None:
        result.output_logprobs = output.split(arrays)
    if inputs is not None:
        result.input_logprobs = inputs.split(arrays)
    if pools:
        result.pooled = dict(zip(batch.pool_from, next(arrays), strict=True))
    return result


def _landing(tensor: torch.Tensor) -> torch.dtype:
    return torch.int32 if tensor.dtype == torch.int64 else tensor.dtype
