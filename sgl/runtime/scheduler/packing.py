"""Builds the Batch of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sgl.runtime.batch import FROM_DEVICE, Batch, Int32Array, Int64Array, RowSetup
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.rows import RowTable


@dataclass(slots=True)
class Chunk:
    """Known tokens [start, end) of a request, perhaps with its drafts."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether it completes the known tokens."""
        return self.end == self.request.target_len

    @property
    def token_ids(self) -> Int32Array:
        """[end - start]"""
        request, start, end = self.request, self.start, self.end
        if start >= request.prompt_len:  # behind long prompts, too, only a few tokens are touched
            first = start - request.prompt_len
            behind = request.output_ids[first : end - request.prompt_len]
            return np.array([*behind, *request.drafts][: end - start], np.int32)
        ids = request.known_ids()
        return (np.append(ids, np.array(request.drafts, np.int32)) if request.drafts else ids)[start:end]


def share_of(decode_rows: Int32Array, pending: list[Batch], depth: int) -> Int64Array:
    """Which of the decodes one of `depth` steps under way takes: an equal share, of those that wait for no result."""
    busy = np.concatenate([np.empty(0, np.int32), *(batch.rows for batch in pending)])
    ready = np.flatnonzero(~np.isin(decode_rows, busy))
    return ready[: -(-len(decode_rows) // depth)]


def assemble(
    table: RowTable,
    decodes: list[Request],
    decode_rows: Int32Array,
    chunks: list[Chunk],
    setups: list[RowSetup],
    page_writes: Int32Array,
) -> Batch:
    """The batch of these decodes, then chunks. Advances kv_len and scored_len."""
    chunk_rows = np.array([chunk.request.row for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    ends = np.array([chunk.end for chunk in chunks], np.int32)
    table.kv_len[decode_rows] += 1
    table.kv_len[chunk_rows] = ends
    rows = np.concatenate((decode_rows, chunk_rows))
    token_ids = [np.full(len(decodes), FROM_DEVICE, np.int32)]
    token_ids += [chunk.token_ids for chunk in chunks]
    batch = Batch(
        rows=rows,
        q_lens=np.concatenate((np.ones(len(decodes), np.int32), ends - starts)),
        kv_lens=table.kv_len[rows],
        token_ids=np.concatenate(token_ids),
        page_writes=page_writes,
        samples=np.ones(len(rows), np.bool_),
        score_from=np.full(len(rows), -1, np.int32),
        top_logprobs=np.full(len(rows), -1, np.int32),
        setups=setups,
    )
    _place(table, batch, chunks, len(decodes))
    for b, chunk in enumerate(chunks, len(decodes)):
        request = chunk.request
        wants_next = request.max_new_tokens > 0 or request.top_logprobs >= 0
        batch.samples[b] = chunk.is_last and wants_next
        if chunk.is_last and request.drafts:
            batch.drafts[b] = np.array(request.drafts, np.int32)
        _score(batch, b, chunk)
        if request.pooling == "mean":
            batch.pool_from[b] = 0
        elif request.pooling == "last" and chunk.is_last:
            batch.pool_from[b] = chunk.end - chunk.start - 1
    for b, request in enumerate(decodes + [chunk.request for chunk in chunks]):
        if request.top_logprobs >= 0:
            batch.top_logprobs[b] = request.top_logprobs
            if request.token_ids_logprob is not None:
                batch.token_ids_logprob[b] = request.token_ids_logprob
    return batch


def _place(table: RowTable, batch: Batch, chunks: list[Chunk], num_decodes: int) -> None:
    """Images in these chunks, and positions behind images."""
    offsets = table.offset[batch.rows]
    if not offsets.any() and not any(chunk.request.layout is not None for chunk in chunks):
        return
    batch.offsets = offsets
    start = num_decodes
    for b, chunk in enumerate(chunks, num_decodes):
        layout = chunk.request.layout
        if layout is not None and chunk.start < layout.end:
            batch.places[b], runs = layout.part(chunk.start, chunk.end)
            batch.media += [replace(run, start=start + run.start) for run in runs]
        start += chunk.end - chunk.start


def _score(batch: Batch, b: int, chunk: Chunk) -> None:
    request = chunk.request
    first, last = max(chunk.start, request.scored_len), min(chunk.end, request.prompt_len - 1)
    if request.logprob_start is not None and first < last:
        batch.score_from[b] = first - chunk.start
        batch.score_targets[b] = request.prompt_ids[first + 1 : last + 1]
        request.scored_len = last
