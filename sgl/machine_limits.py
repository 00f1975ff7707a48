"""Memory and processors for this process: the least of what machine, container and its own limits allow.

Any group above counts, in version 1 and 2 of control groups. Missing files and "max" mean no limit."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOST_FILES = 1 << 20
_UNLIMITED = 1 << 60  # version 1's "none" is near 2^63


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, and what limits them."""

    num_bytes: int
    what: str


def memory_limit(root: Path = Path("/")) -> Memory:
    """Memory for this process. `root`: of /proc and /sys."""
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
    """Bytes left under `ulimit -v`; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(0, int(soft) - address_space(root))


def limit_address_space(more: int) -> int:
    """Let this process map so many more bytes, and no more ever, if it is known what it has mapped: gigabytes, for
    threads' stacks alone, where there are many processors. Returns the limit of both."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = address_space() + more
    if most == more:
        return most
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return most


def address_space(root: Path = Path("/")) -> int:
    """Bytes that this process has mapped; 0 if unknown."""
    try:
        return int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def num_processors(root: Path = Path("/")) -> int:
    """Processors: those it is bound to, at most the container's share of time, rounded up."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [share for folder in _groups(root, "cpu") if (share := _share(folder)) is not None]
    return max(1, min([bound, *(math.ceil(share) for share in shares)]))


def _share(folder: Path) -> float | None:
    """Processors' worth of a group's time."""
    both = _words(folder / "cpu.max")  # "max 100000" or "150000 100000"
    if len(both) == 2 and all(word.isdigit() for word in both) and int(both[1]):
        return int(both[0]) / int(both[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """A controller's folders of this process's groups and all above."""
    for line in _lines(root / "proc/self/cgroup"):  # "0::/a/b" or "4:cpu,cpuacct:/a/b"
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if names else "")
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):  # a container may show the host's path, with only the top there
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


def allow_open_files() -> None:
    """Let this process have as many files open as it may, up to a million: the usual first limit, 1,024, is for
    programs that use select(), and is 500 requests that are passed on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
