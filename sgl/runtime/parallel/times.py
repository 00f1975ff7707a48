"""How ranks spend their time. Each counts its own, and rank 0 looks whenever somebody asks.

A rank looks at the clock before and after what it is told, and writes numbers where rank 0 sees them: shared memory on
one host, the heartbeat between several. A step takes some 2 us more for it.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from sgl.runtime.model.ranks import Ranks

NUMBERS: Final = 6  # int64s of each rank
_STEPS, _BUSY, _WAITING, _EXCHANGING, _MEMORY, LOST = range(NUMBERS)
"""The last: the latest of trainers' groups that is of no use to the rank."""
_IDLE_NS: Final = 1_000_000_000  # a longer wait is no part of steps that go on
_LOOK_NS: Final = 1_000_000_000  # between looks at the memory, which take some 50 us


class Numbers(Protocol):
    """What a rank tells of itself, where rank 0 sees it."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Times:
    """Of one rank, in its loop's thread."""

    def __init__(self, numbers: Numbers, ranks: Ranks, device: torch.device) -> None:
        self._numbers, self._ranks, self._device = numbers, ranks, device
        self._since = time.perf_counter_ns()
        self._looked = -_LOOK_NS

    def begin(self) -> None:
        """Something to do has come."""
        now = time.perf_counter_ns()
        waited = now - self._since
        if waited < _IDLE_NS:
            self._numbers[_WAITING] += waited
        self._since = now

    def end(self, steps: int) -> None:
        """It is done; so many steps began with it."""
        now, numbers = time.perf_counter_ns(), self._numbers
        numbers[_BUSY] += now - self._since
        numbers[_STEPS] += steps
        numbers[_EXCHANGING] = self._ranks.waited_ns
        if now - self._looked > _LOOK_NS:
            numbers[_MEMORY] = _memory(self._device)
            self._looked = now
        self._since = now


def told(numbers: Sequence[int]) -> dict[str, Any]:
    """A rank's numbers by name, for users."""
    return {
        "steps": numbers[_STEPS],
        "busy_seconds": numbers[_BUSY] / 1e9,
        "waiting_seconds": numbers[_WAITING] / 1e9,
        "exchange_seconds": numbers[_EXCHANGING] / 1e9,
        "memory_bytes": numbers[_MEMORY],
    }


def since(before: Sequence[int], now: Sequence[int]) -> dict[str, Any]:
    """`told`, of what was counted in between."""
    spent = told([late - early for early, late in zip(before, now, strict=True)])
    del spent["memory_bytes"]
    return spent


def _memory(device: torch.device) -> int:
    """Bytes that this process takes of its device, or of the machine's memory where that is the device."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux: what it has had at most
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
