"""Turns a Batch into what a forward pass reads: token ids, positions and KV slots, on the device.

All index arithmetic is NumPy on the host; arrays reach a GPU through pinned staging buffers that are reused, so a
step allocates no pinned memory and never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl.runtime.batch import FROM_DEVICE, Batch, Int64Array

_BUFFERS = 8  # a buffer is written again so many uploads later; one event says whether its copy has been read


class Uploader:
    """Copies small host arrays to the device, in stream order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event] | None] = [None] * _BUFFERS
        self._next = 0

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """The arrays as device tensors of the same dtypes and shapes. On a CPU they share memory."""
        arrays = tuple(np.ascontiguousarray(array) for array in arrays)
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
        staging, event = self._buffer(sum(sizes))
        view = staging.numpy()
        offset = 0
        for array, size in zip(arrays, sizes, strict=True):
            view[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
            offset += size
        on_device = torch.empty(offset, dtype=torch.uint8, device=self._device)
        on_device.copy_(staging[:offset], non_blocking=True)
        event.record()
        parts, offset = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            dtype = torch.from_numpy(array[:0].reshape(-1)).dtype
            parts.append(on_device[offset : offset + array.nbytes].view(dtype).view(array.shape))
            offset += size
        return parts

    def _buffer(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        index = self._next
        self._next = (index + 1) % _BUFFERS
        held = self._buffers[index]
        if held is not None:
            held[1].synchronize()  # long past in steady state
        if held is None or len(held[0]) < size:
            staging = torch.empty(max(2 * size, 1 << 16), dtype=torch.uint8, pin_memory=True)
            held = (staging, torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._buffers[index] = held
        return held


@dataclass(slots=True)
class PackedStep:
    """Host indices of one step; T = q_lens.sum() tokens."""

    positions: Int64Array  # [T]
    slots: Int64Array  # [T] where each token's keys and values go: page * page_size + offset
    token_ids: Int64Array  # [T], 0 where the device fills in
    from_device: Int64Array  # indices into T that take the row's last sampled token
    from_rows: Int64Array  # their request rows
    last: Int64Array  # [S] index into T of the last token of each row that samples
    sampling: Int64Array  # [S] the batch's b of those rows


def pack(batch: Batch, pages: npt.NDArray[np.int32], page_size: int) -> PackedStep:
    """Lay the batch's rows one after another. pages: the batch's rows of the page table, [B, max_pages]."""
    q_lens = batch.q_lens.astype(np.int64)
    ends = np.cumsum(q_lens)
    of_row = np.repeat(np.arange(len(batch)), q_lens)
    positions = np.arange(ends[-1]) + np.repeat(batch.kv_lens - ends, q_lens)
    slots = pages[of_row, positions // page_size].astype(np.int64) * page_size + positions % page_size
    token_ids = batch.token_ids.astype(np.int64)
    from_device = np.flatnonzero(token_ids == FROM_DEVICE)
    token_ids[from_device] = 0
    sampling = np.flatnonzero(batch.samples)
    return PackedStep(
        positions=positions,
        slots=slots,
        token_ids=token_ids,
        from_device=from_device,
        from_rows=batch.rows[of_row[from_device]].astype(np.int64),
        last=ends[sampling] - 1,
        sampling=sampling,
    )
