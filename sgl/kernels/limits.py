"""What a device gives the programs of Triton kernels: launches choose tiles, stages, warps and options by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a device."""

    shared_memory: int | None  # bytes of a program, at most; None: an interpreter's
    warp: int  # threads that run in step; AMD's wave
    is_nvidia: bool  # has options of its compiler and formats of its tensor cores (tf32)
    overlaps: bool  # a kernel may start while the previous one runs

    def stages(self, most: int, num_bytes: int, beside: int = 0) -> int:
        """Of a loop whose tiles take num_bytes: at most so many, all of which shared memory holds, with so many bytes
        beside them."""
        if self.shared_memory is None:
            return most
        return max(1, min(most, (self.shared_memory - beside) // num_bytes))


_INTERPRETED = Limits(shared_memory=None, warp=32, is_nvidia=False, overlaps=False)


def is_nvidia(device: torch.device) -> bool:
    """Whether it is a GPU of NVIDIA's: torch's ROCm build calls AMD's "cuda", too."""
    return device.type == "cuda" and torch.version.hip is None


def reads_e4m3(device: torch.device) -> bool:
    """Whether Triton's kernels there can read it: NVIDIA's from compute capability 8.9 on, and an interpreter's."""
    return not is_nvidia(device) or torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache
def of(device: torch.device) -> Limits:
    """Of the device that Triton's kernels run on for tensors there."""
    if device.type != "cuda":
        return _INTERPRETED
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return Limits(
        shared_memory=driver.active.utils.get_device_properties(index)["max_shared_mem"],
        warp=driver.active.get_current_target().warp_size,
        is_nvidia=is_nvidia(device),
        overlaps=is_nvidia(device) and torch.cuda.get_device_capability(device) >= (9, 0),
    )
