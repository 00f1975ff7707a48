"""Memory of tensors that is given back to the machine for a while. The tensors, and all views of them, stay."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class _Given:
    storage: torch.UntypedStorage
    num_bytes: int
    device: torch.device
    copy: torch.Tensor | None = None

    def bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)


class Occupied:
    """The memory that some tensors lie in. Torch's own moves when it comes back, so that addresses change; NumPy's, of
    which a process has pages only where it wrote, stays where it is, and is zero then."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, keeps: bool) -> None:
        """keeps: numbers come back, too, from host memory; else they are zero."""
        self._keeps = keeps
        storages = {its.untyped_storage().data_ptr(): (its.untyped_storage(), its.device) for its in tensors}
        self._all = [_Given(storage, storage.nbytes(), device) for storage, device in storages.values()]

    @property
    def why_not(self) -> str | None:
        """What keeps it from being given back."""
        is_torchs = all(its.storage.resizable() for its in self._all)
        return None if is_torchs or sys.platform == "linux" else f"{sys.platform} takes no memory back in place"

    @torch.inference_mode()
    def release(self) -> int:
        """Give it back; nothing may use the tensors until `restore`. Returns how many bytes."""
        for its in self._all:
            its.copy = its.bytes().to("cpu", copy=True) if self._keeps else None
        for its in self._all:
            if its.storage.resizable():
                its.storage.resize_(0)
            else:
                _drop_pages(its.storage.data_ptr(), its.num_bytes)
        return sum(its.num_bytes for its in self._all)

    @torch.inference_mode()
    def restore(self) -> None:
        """Take it again. Where the device has none left, this can be tried again."""
        for its in self._all:
            if its.storage.resizable() and its.storage.nbytes() < its.num_bytes:
                its.storage.resize_(its.num_bytes)
                if its.copy is None:
                    its.bytes().zero_()
            if its.copy is not None:
                its.bytes().copy_(its.copy)
                its.copy = None


def _drop_pages(address: int, num_bytes: int) -> None:
    """Give a process's own memory back as far as it is whole pages; all of it reads as zeros from then on."""
    page, stop = mmap.PAGESIZE, address + num_bytes
    first = min(-(-address // page) * page, stop)
    end = max(first, stop // page * page)
    ctypes.memset(address, 0, first - address)
    ctypes.memset(end, 0, stop - end)
    if end > first:
        library = ctypes.CDLL(None, use_errno=True)
        if library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
