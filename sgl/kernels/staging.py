"""Copies small host arrays to the device through reused pinned buffers.

A step allocates no pinned memory and never waits for the device. Everything is in stream order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_BUFFERS = 16  # a step makes up to 9 uploads, so a buffer is long read when its turn comes
ALIGNMENT = 16  # bytes, of every array in a copy
_KERNEL_BYTES = 1 << 18  # below, a kernel copies faster than a copy engine

_Staging = tuple[torch.Tensor, npt.NDArray[np.uint8], torch.cuda.Event]
"""A `pinned_buffer`, as int64 and as an array."""


class Uploader:
    """Copies the arrays of a call to the device at once. Buffers for copies of up to `most` bytes are made now:
    pinning memory takes milliseconds."""

    def __init__(self, device: torch.device, most: int = 0, num_buffers: int = _BUFFERS) -> None:
        self._device = device
        self._is_host = device.type == "cpu"
        self._buffers: list[_Staging | None] = [None] * num_buffers
        if most and device.type == "cuda":
            self._buffers = [_staging(most) for _ in range(num_buffers)]
        self._next = 0

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """The arrays as device tensors of the same dtypes and shapes. On a CPU they share memory."""
        arrays = tuple([np.ascontiguousarray(array) for array in arrays])
        if self._is_host:
            return [torch.from_numpy(array) for array in arrays]
        size = sum([_aligned(array.nbytes) for array in arrays])
        on_device = torch.empty(size // 8, dtype=torch.int64, device=self._device)
        self._copy(on_device, size, arrays)
        return views_into(on_device, arrays)

    def upload_into(self, target: torch.Tensor, *arrays: npt.NDArray[Any]) -> None:
        """Overwrite the beginning of target, uint8 [n] on the device, in the layout of `views_into`."""
        if self._is_host:
            for part, array in zip(views_into(target, arrays), arrays, strict=True):
                part.copy_(torch.from_numpy(array))
            return
        arrays = tuple([np.ascontiguousarray(array) for array in arrays])
        size = sum([_aligned(array.nbytes) for array in arrays])
        self._copy(target[:size].view(torch.int64), size, arrays)

    def _copy(self, target: torch.Tensor, size: int, arrays: tuple[npt.NDArray[Any], ...]) -> None:
        """To int64 [size / 8]; size is in bytes."""
        if not size:
            return
        staging, view, event = self._buffer(size)
        offset = 0
        for array in arrays:
            view[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
            offset += _aligned(array.nbytes)
        if size > _KERNEL_BYTES:
            target.copy_(staging[: size // 8], non_blocking=True)
        else:
            # imported only where a Triton kernel runs
            from sgl.kernels import staging_triton

            staging_triton.copy_(target, staging)
        event.record()

    def _buffer(self, size: int) -> _Staging:
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        held = self._buffers[index]
        if held is not None:
            held[2].synchronize()  # waits until its copy was read: long past in steady state
        if held is None or len(held[1]) < size:
            self._buffers[index] = held = _staging(max(2 * size, 1 << 16))
        return held


def _staging(num_bytes: int) -> _Staging:
    memory, event = pinned_buffer(_aligned(num_bytes))
    return memory.view(torch.int64), memory.numpy(), event


def pinned_buffer(num_bytes: int) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Host memory for asynchronous copies, and the event that tells when it was read."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), event


def views_into(buffer: torch.Tensor, arrays: tuple[npt.NDArray[Any], ...]) -> list[torch.Tensor]:
    """Views of buffer, uint8 or int64 [n], where an upload of the arrays puts them, with their dtypes and shapes."""
    parts, offset = [], 0
    wholes = {buffer.dtype: buffer} if buffer.dtype is torch.int64 else None
    for array in arrays:
        dtype = _torch_dtype(array.dtype)
        if wholes is None:
            part = buffer[offset : offset + array.nbytes].view(dtype)
        else:  # one view for all of a dtype
            if dtype not in wholes:
                wholes[dtype] = buffer.view(dtype)
            start = offset // array.itemsize
            part = wholes[dtype][start : start + array.size]
        parts.append(part if array.ndim == 1 else part.view(array.shape))
        offset += _aligned(array.nbytes)
    return parts


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy equivalent of a dtype."""
    return torch.empty(0, dtype=dtype).numpy().dtype


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
