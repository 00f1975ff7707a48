"""Memory of one process that others of its host open: of a GPU by CUDA's handles, of a CPU as a file without a name.

Whatever becomes of a process, no memory is left behind. What another process has opened stays until that closes it,
also when its owner is gone; what it holds, once the owner has closed it, may be something else.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import weakref
from typing import Any, cast

import torch


class SharedMemory:
    """`memory`, uint8 [num_bytes], which others open by its `handle`: numbers and bytes."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises OSError where processes cannot share memory, or there is not so much."""
        if device.type == "cuda":
            self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            try:
                self.handle = handle_of(self.memory)
            except RuntimeError as error:
                raise OSError(str(error)) from error
            self._release: Any = weakref.finalize(self, _release, *self.handle[3:5])
            self._release.atexit = False
            # torch counts down whenever the memory is closed, from one: after any other number it would keep it. So
            # others are told of a count that there is not, and this process alone counts.
            self.handle[3] = b"/" + secrets.token_hex().encode()
            return
        if device.type != "cpu" or not hasattr(os, "memfd_create"):
            raise OSError("there is no memory here that other processes could open")
        file = os.memfd_create("sgl")
        self._release = weakref.finalize(self, os.close, file)
        os.truncate(file, num_bytes)
        self.memory = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        self.handle = [os.getpid(), file, num_bytes]

    def close(self) -> None:
        """Nobody opens it any more. Idempotent."""
        self._release()
        self.handle = []


def _release(name: bytes, offset: int) -> None:
    """Let torch free a GPU's memory, whoever has it open."""
    released: Any = torch.UntypedStorage._release_ipc_counter_cuda
    released(name, offset)


def handle_of(tensor: torch.Tensor) -> list[Any]:
    """What another process needs to open the memory of a GPU's tensor, which nothing may be writing to. Raises
    RuntimeError."""
    torch.cuda.synchronize(tensor.device)
    *handle, _ = cast(Any, tensor.untyped_storage())._share_cuda_()[1:]
    return [*handle, False]  # no event to wait for: it is of a GPU that the other process may not see


def opened(handle: list[Any], device: torch.device) -> torch.UntypedStorage:
    """Another process's memory as this device sees it. Raises OSError, RuntimeError, TypeError and ValueError."""
    if device.type == "cuda":
        unshared: Any = torch.UntypedStorage._new_shared_cuda
        index = torch.cuda.current_device() if device.index is None else device.index
        storage: torch.UntypedStorage = unshared(index, *handle)
        return storage
    owner, number, num_bytes = handle
    file = os.open(f"/proc/{owner:d}/fd/{number:d}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("it is no memory")
        mapped = mmap.mmap(file, num_bytes)
    finally:
        os.close(file)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
