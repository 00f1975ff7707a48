"""Copies of some columns of pinned host memory to a device, by its copy engine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_HOST_TO_DEVICE = 1


def copy_columns(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy uint8 [m, n] of pinned memory, each row contiguous, to such rows of a device, in the order of its current
    stream. The host does not wait. torch would first copy rows that lie apart to others that do not, on the host."""
    stream = torch.cuda.current_stream(target.device).cuda_stream
    rows = target.data_ptr(), target.stride(0), source.data_ptr(), source.stride(0)
    error = _copy()(*rows, target.shape[1], target.shape[0], _HOST_TO_DEVICE, stream)
    if error:
        raise RuntimeError(
            f"copying columns of host memory to {target.device} failed: error {error} of its runtime"
        )


@cache
def _copy() -> Callable[..., int]:
    """cudaMemcpy2DAsync, or HIP's, of the library that torch has loaded."""
    if torch.version.hip:
        library, name = "libamdhip64.so", "hipMemcpy2DAsync"
    else:
        library, name = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}", "cudaMemcpy2DAsync"
    copy: Any = getattr(ctypes.CDLL(library), name)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    copy.argtypes = pointer, size, pointer, size, size, size, ctypes.c_int, pointer
    copy.restype = ctypes.c_int
    return copy  # type: ignore[no-any-return]
