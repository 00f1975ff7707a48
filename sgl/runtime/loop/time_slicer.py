"""Long work in slices, so that one caller's large request delays nobody else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator


class TimeSlicer:
    """Iterators that do a bounded piece of work at each `next`, taken in turn. Single-threaded."""

    def __init__(self) -> None:
        self._left: deque[Iterator[None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._left)

    def start(self, work: Iterator[None]) -> None:
        """Do the first slice now and leave the rest to `run_for`."""
        if next(work, work) is None:
            self._left.append(work)

    def run_for(self, seconds: float) -> None:
        """Do slices in turn for that long, at least one."""
        end = time.monotonic() + seconds
        while self._left:
            self.start(self._left.popleft())
            if time.monotonic() >= end:
                return
