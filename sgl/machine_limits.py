"""How much memory and how many processors this process may use: the least that the machine, its container and the
process's own limits leave.

Control groups nest: a limit of any group above counts. Version 1 and 2 of their files are read; whatever is not there,
or says "max", is no limit.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for "none"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, and what sets them."""

    num_bytes: int
    what: str


def memory_limit(root: Path = Path("/")) -> Memory:
    """The memory that this process may have in all. `root`: where /proc and /sys are."""
    limits = [Memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine's memory")]
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            if (number := _number(folder / name)) is not None and number < _UNLIMITED:
                limits.append(Memory(number, f"the container's memory ({name})"))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(Memory(soft, "the process's address space (ulimit -v)"))
    return min(limits, key=lambda limit: limit.num_bytes)


def address_space_left(root: Path = Path("/")) -> int | None:
    """Bytes that may still be mapped under `ulimit -v`; None: there is no such limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        mapped = int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        mapped = 0
    return max(0, int(soft) - mapped)


def num_processors(root: Path = Path("/")) -> int:
    """How many this process may run on at a time: those it is bound to, and no more than its container's share of
    time, rounded up."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [share for folder in _groups(root, "cpu") if (share := _share(folder)) is not None]
    return max(1, min([bound, *(math.ceil(share) for share in shares)]))


def _share(folder: Path) -> float | None:
    """Processors' worth of time that a group may have."""
    both = _words(folder / "cpu.max")  # "max 100000" or "150000 100000"
    if len(both) == 2 and all(word.isdigit() for word in both) and int(both[1]):
        return int(both[0]) / int(both[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's groups for a controller, and of all above them."""
    for line in _lines(root / "proc/self/cgroup"):  # "0::/a/b" or "4:cpu,cpuacct:/a/b"
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if names else "")
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(
            len(parts), -1, -1
        ):  # within a container the path may be the host's, and only the top there
            yield top.joinpath(*parts[:depth])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else None
