"""GPUs that torch calls cuda: NVIDIA's, and AMD's with torch's ROCm build."""

from __future__ import annotations

import torch

from sgl.kernels.limits import is_nvidia
from sgl.runtime.platform.base import Platform

_TILE_TOKENS = 64  # for each multiprocessor: most products then fill whole waves of tiles
_LARGE_MODEL = 8_000_000_000  # weights; smaller models take more tiles: launching would take as long as the step
_MAX_TILES = 4  # for each multiprocessor


class Cuda(Platform):
    """One GPU a rank."""

    name = "cuda"
    kind = "CUDA device(s)"
    is_gpu = True
    max_rows = 512
    memory_fraction = 0.88

    def is_available(self) -> bool:
        """Whether torch sees one, and its driver is there."""
        return torch.cuda.is_available()

    def names(self) -> list[str]:
        """As their makers call them."""
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]

    def device(self, index: int | None) -> torch.device:
        """By its number, or the current one."""
        return torch.device("cuda") if index is None else torch.device("cuda", index)

    def device_name(self, device: torch.device) -> str:
        """As its maker calls it."""
        return torch.cuda.get_device_name(device)

    def total_memory(self, device: torch.device, sharing: int) -> tuple[int, str]:
        """Of the GPU, which no other rank has."""
        return int(torch.cuda.get_device_properties(device).total_memory), "the device's memory"

    def step_tokens(self, device: torch.device, num_multiplied: int) -> int:
        """So many that products fill whole waves of tiles."""
        processors = int(torch.cuda.get_device_properties(device).multi_processor_count)
        return _TILE_TOKENS * processors * min(_MAX_TILES, max(1, _LARGE_MODEL // num_multiplied))

    def why_no_fp8(self, device: torch.device) -> str | None:
        """e4m3 products are NVIDIA's, from compute capability 8.9 on."""
        if not is_nvidia(device):
            return f"needs an NVIDIA GPU, and this is {self.device_name(device)}"
        if torch.cuda.get_device_capability(device) < (8, 9):
            return "needs a GPU of compute capability 8.9 or above"
        return None
