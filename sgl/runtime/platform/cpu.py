"""The machine's processors."""

from __future__ import annotations

import contextlib
import platform
import re
from pathlib import Path

import torch

from sgl.machine_limits import address_space_left, memory_limit, num_processors
from sgl.runtime.platform.base import Platform

_ADDRESS_FRACTION = 0.5  # of what `ulimit -v` leaves after loading weights, for KV


class Cpu(Platform):
    """One device, whose ranks share the cores."""

    name = "cpu"
    is_shared = True
    runs_ahead = False
    page_size = 8
    memory_fraction = 0.3

    def names(self) -> list[str]:
        """The processor's name with our number of cores."""
        name = platform.processor() or platform.machine()
        with contextlib.suppress(OSError):
            named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
            name = named[1] if named else name
        return [f"{name}, {num_processors()} cores"]

    def device(self, index: int | None) -> torch.device:
        """One, whatever its number."""
        return torch.device("cpu") if index is None else torch.device("cpu", index)

    def total_memory(self, device: torch.device, sharing: int) -> tuple[int, str]:
        """Of the machine, or of the container."""
        limit = memory_limit()
        what = limit.what if sharing == 1 else f"{limit.what}, shared by {sharing} processes"
        return limit.num_bytes // sharing, what

    def memory_left(self, device: torch.device) -> int | None:
        """Threads and compilers need some, too."""
        left = address_space_left()
        return None if left is None else int(left * _ADDRESS_FRACTION)
