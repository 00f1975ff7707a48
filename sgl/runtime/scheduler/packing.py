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
    before: Batch | None,
) -> Batch:
    """The batch of these decodes, then chunks. Advances kv_len and scored_len. before: the last batch, if it was of
    decodes alone; of the same ones, most is the same."""
    if before is not None and before.rows is decode_rows and not chunks:
        kv_lens = table.kv_len[decode_rows] + 1
        table.kv_len[decode_rows] = kv_lens
        return Batch(
            *(decode_rows, before.q_lens, kv_lens, before.token_ids, page_writes),
            *(before.samples, before.score_from, before.top_logprobs, setups),
            token_ids_logprob=before.token_ids_logprob,
            offsets=before.offsets,
        )
    num_decodes, num_rows = len(decodes), len(decodes) + len(chunks)
    integers = np.full((5, num_rows), -1, np.int32)
    rows, q_lens, kv_lens, score_from, top_logprobs = integers
    token_ids = [chunk.token_ids for chunk in chunks]
    if decodes:
        rows[:num_decodes], q_lens[:num_decodes] = decode_rows, 1
        kv_lens[:num_decodes] = table.kv_len[decode_rows] + 1
        token_ids.insert(0, np.full(num_decodes, FROM_DEVICE, np.int32))
    if chunks:
        lens = [(chunk.request.row, chunk.end - chunk.start, chunk.end) for chunk in chunks]
        integers[:3, num_decodes:] = np.array(lens, np.int32).T
    else:
        rows = decode_rows
    table.kv_len[rows] = kv_lens
    batch = Batch(
        rows=rows,
        q_lens=q_lens,
        kv_lens=kv_lens,
        token_ids=token_ids[0] if len(token_ids) == 1 else np.concatenate(token_ids),
        page_writes=page_writes,
        samples=np.ones(num_rows, np.bool_),
        score_from=score_from,
        top_logprobs=top_logprobs,
        setups=setups,
    )
    _place(table, batch, chunks, num_decodes)
    for b, chunk in enumerate(chunks, num_decodes):
        request = chunk.request
        if not (chunk.is_last and (request.max_new_tokens > 0 or request.top_logprobs >= 0)):
            batch.samples[b] = False
        if chunk.is_last and request.drafts:
            batch.drafts[b] = np.array(request.drafts, np.int32)
        if request.logprob_start is not None:
            _score(batch, b, chunk)
        if request.pooling == "mean":
            batch.pool_from[b] = 0
        elif request.pooling == "last" and chunk.is_last:
            batch.pool_from[b] = chunk.end - chunk.start - 1
    for b, request in enumerate(decodes + [chunk.request for chunk in chunks]):
        if request.top_logprobs >= 0:
            top_logprobs[b] = request.top_logprobs
            if request.token_ids_logprob is not None:
                batch.token_ids_logprob[b] = request.token_ids_logprob
    return batch


def assemble_ahead(table: RowTable, batch: Batch, wanted: Int64Array, page_writes: Int32Array) -> Batch:
    """The batch behind one that verifies drafts, as if all stood, with so many new ones a row. Advances kv_len."""
    num_rows, q_lens = len(batch), wanted.astype(np.int32) + 1
    table.kv_len[batch.rows] += q_lens
    return Batch(
        rows=batch.rows,
        q_lens=q_lens,
        kv_lens=table.kv_len[batch.rows],
        token_ids=np.full(q_lens.sum(), FROM_DEVICE, np.int32),
        page_writes=page_writes,
        samples=np.ones(num_rows, np.bool_),
        score_from=np.full(num_rows, -1, np.int32),
        top_logprobs=np.full(num_rows, -1, np.int32),
        drafts={b: np.full(number, FROM_DEVICE, np.int32) for b, number in enumerate(wanted.tolist()) if number},
        is_ahead=True,
    )


def _place(table: RowTable, batch: Batch, chunks: list[Chunk], num_decodes: int) -> None:
    """Images in these chunks, and positions behind images."""
    if not table.has_images:
        return
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
    if first < last:
        batch.score_from[b] = first - chunk.start
        batch.score_targets[b] = request.prompt_ids[first + 1 : last + 1]
        request.scored_len = last
