"""Packs a Batch for the forward pass: token ids, positions and KV slots. All index arithmetic is NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import FROM_DEVICE, Batch, Int64Array


class PackedStep(NamedTuple):
    """Host indices of one step; T = q_lens.sum() tokens."""

    token_ids: Int64Array  # [T], 0 where the device fills in
    positions: Int64Array  # [T] as the layers see them
    slots: Int64Array  # [T] where each token's keys and values go: page * page_size + offset
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


def pack(batch: Batch, pages: npt.NDArray[np.int32], page_size: int) -> PackedStep:
    """Concatenate the batch's rows. pages: the batch's rows of the page table, [B, max_pages]."""
    q_lens = batch.q_lens.astype(np.int64)
    ends = np.cumsum(q_lens)
    of_row = np.repeat(np.arange(len(batch)), q_lens)
    positions = np.arange(ends[-1]) + np.repeat(batch.kv_lens - ends, q_lens)
    slots = pages[of_row, positions // page_size].astype(np.int64) * page_size + positions % page_size
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
