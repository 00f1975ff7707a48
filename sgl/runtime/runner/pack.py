"""Packs a Batch for the forward pass: token ids, positions and KV slots. All index arithmetic is NumPy."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sgl.kernels.attention.base import AttentionStep
from sgl.runtime.batch import FROM_DEVICE, Batch, Int32Array, Int64Array


class PackedStep(NamedTuple):
    """Host indices of one step; T = q_lens.sum() tokens."""

    token_ids: Int64Array  # [T], 0 where the device fills in
    positions: Int64Array  # [T] as the layers see them
    slots: Int64Array
    """[T] where each token's keys and values go: page * page_size + offset; [2, >= T] of full and windowed pages."""
    from_device: Int64Array  # indices into T of each row's last sampled token
    from_rows: Int64Array  # their request rows
    last: Int64Array  # [S] index into T of each token to sample after


def pack_places(batch: Batch, positions: Int64Array) -> Int64Array:
    """int64 [3, T]: positions in time, height and width of a step with images. positions: of `pack`."""
    places = np.tile(positions, (3, 1))
    ends = np.cumsum(batch.q_lens)
    for b, its in batch.places.items():
        places[:, ends[b] - batch.q_lens[b] : ends[b]] = its
    return places


def windowed_step(batch: Batch, table: Int32Array, window: int, page_size: int, multiple: int = 1) -> AttentionStep:
    """The step in layers with a window, without pages that it hides from all of a row's query tokens. table: int32
    [max_rows, max_pages], of all request rows. multiple: of tokens that are left out, at least, besides pages."""
    unit = math.lcm(page_size, multiple)
    first_seen = np.maximum(batch.kv_lens - batch.q_lens - window + 1, 0) // unit * (unit // page_size)
    kv_lens = batch.kv_lens - first_seen * page_size
    columns = first_seen[:, None] + np.arange(-(-int(kv_lens.max()) // page_size))
    pages = table[batch.rows[:, None], np.minimum(columns, table.shape[1] - 1)]
    return AttentionStep(batch.q_lens, kv_lens, pages)


def padded(step: AttentionStep, num_rows: int) -> AttentionStep:
    """A step with so many more rows of one token on the dummy page."""
    ones, pages = np.ones(num_rows, np.int32), np.zeros((num_rows, step.page_table.shape[1]), np.int32)
    return AttentionStep(
        np.concatenate((step.q_lens, ones)),
        np.concatenate((step.kv_lens, ones)),
        np.concatenate((step.page_table, pages)),
        None if step.windowed is None else padded(step.windowed, num_rows),
    )


def in_parts(step: AttentionStep, most: int) -> tuple[AttentionStep, Int64Array, Int64Array]:
    """A step whose rows have at most so many tokens: each longer one is several, which see what stands before them.
    Also each one's former row, and how many more of its tokens follow."""
    counts = -(-step.q_lens // most)
    of_row = np.arange(len(counts)).repeat(counts)
    until = (np.arange(len(of_row)) - (counts.cumsum() - counts)[of_row] + 1) * most
    behind = np.maximum(step.q_lens[of_row] - until, 0)
    q_lens = np.minimum(step.q_lens[of_row] - until + most, most).astype(np.int32)
    return _cut(step, q_lens, of_row, behind), of_row, behind


def _cut(step: AttentionStep, q_lens: Int32Array, of_row: Int64Array, behind: Int64Array) -> AttentionStep:
    windowed = None if step.windowed is None else _cut(step.windowed, q_lens, of_row, behind)
    return AttentionStep(
        q_lens, (step.kv_lens[of_row] - behind).astype(np.int32), step.page_table[of_row], windowed
    )


def slots_of(step: AttentionStep, of_row: Int64Array, places: Int64Array, page_size: int) -> Int64Array:
    """Where keys and values go of tokens at these places in rows of a step: page * page_size + offset; behind a first
    dimension of full and windowed pages, if there are those."""
    slots = _slots(step.page_table, of_row, places, page_size)
    if step.windowed is None:
        return slots
    places = places - (step.kv_lens - step.windowed.kv_lens)[of_row]
    return np.stack((slots, _slots(step.windowed.page_table, of_row, places, page_size)))


def _slots(pages: Int32Array, of_row: Int64Array, places: Int64Array, page_size: int) -> Int64Array:
    index = places // page_size
    return (pages[of_row, index] - index) * page_size + places


def pack(batch: Batch, step: AttentionStep, page_size: int) -> PackedStep:
    """Concatenate the batch's rows. step: their pages."""
    q_lens = batch.q_lens.astype(np.int64)
    ends = np.cumsum(q_lens)
    of_row = np.repeat(np.arange(len(batch)), q_lens)
    positions = np.arange(ends[-1]) + np.repeat(batch.kv_lens - ends, q_lens)
    slots = slots_of(step, of_row, positions, page_size)
    if slots.ndim > 1 and len(positions) % 2:  # kernels like addresses that 16 divides
        slots = np.pad(slots, ((0, 0), (0, 1)))
    if batch.offsets is not None:
        positions += batch.offsets[of_row]
    token_ids = batch.token_ids.astype(np.int64)
    from_device = np.flatnonzero(token_ids == FROM_DEVICE)
    token_ids[from_device] = 0
    sampling, behind = batch.sampling
    return PackedStep(
        positions=positions,
        slots=slots,
        token_ids=token_ids,
        from_device=from_device,
        from_rows=batch.rows[of_row[from_device]].astype(np.int64),
        last=ends[sampling] - 1 - behind,
    )
