"""A ring of bytes in shared memory: one writer, several readers, each of which gets every frame in order.

The counters of written and read bytes only grow. A reader polls: it answers within microseconds while frames come, and
sleeps milliseconds when none has come for long.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

CAPACITY = 1 << 22  # bytes; longer frames pass through in pieces
_LINE = 8  # int64s of a cache line: each counter has its own
_LENGTH = 8  # bytes before a frame
_SPINS = 50
_SHORTEST, _LONGEST = 2e-5, 2e-3  # seconds of sleep
_fence = threading.Lock()


class Ring:
    """One end, over a file. Create it before the others open it."""

    def __init__(self, path: Path, num_readers: int, reader: int | None = None, capacity: int = CAPACITY) -> None:
        """reader: which one this is; None: the writer."""
        counters = (2 * num_readers + 1) * _LINE * 8
        with open(path, "r+b" if reader is not None else "w+b") as file:
            if reader is None:
                os.truncate(file.fileno(), counters + capacity)
            self._map = mmap.mmap(file.fileno(), counters + capacity)
        whole = np.frombuffer(self._map, np.int64, counters // 8).reshape(-1, _LINE)
        lines = whole[:, 0]
        self._written = lines[:1]
        self._read = lines[1 : num_readers + 1]
        self._beats = lines[num_readers + 1 :]
        self._numbers = whole[num_readers + 1 :, 1:]
        """What readers tell of themselves, beside their beats."""
        self._data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, capacity, counters)
        self._capacity = capacity
        self._reader = reader

    def put(self, frame: bytes, check: Callable[[], None]) -> None:
        """Write a frame. While readers leave no room, `check` is called, which may raise."""
        self._write(len(frame).to_bytes(_LENGTH, "little"), check)
        self._write(frame, check)

    def get(self) -> bytes:
        """Wait for the next frame."""
        length = int.from_bytes(self._taken(_LENGTH), "little")
        return self._taken(length)

    def beat(self) -> None:
        """Tell that this reader lives."""
        self._beats[self._reader] += 1

    def beats(self, reader: int) -> int:
        """How often a reader has told so."""
        return int(self._beats[reader])

    @property
    def own_numbers(self) -> memoryview[int]:
        """What this reader tells of itself, as int64s; faster than an array."""
        assert self._reader is not None
        row = len(self._read) + 1 + self._reader
        return memoryview(self._map)[(row * _LINE + 1) * 8 : (row + 1) * _LINE * 8].cast("q")

    def numbers(self, reader: int) -> list[int]:
        """What a reader tells of itself."""
        return [int(number) for number in self._numbers[reader]]

    def _write(self, data: bytes, check: Callable[[], None]) -> None:
        source = np.frombuffer(data, np.uint8)
        while len(source):
            written = int(self._written[0])
            room = self._capacity - (written - int(self._read.min()))
            if not room:
                check()
                time.sleep(_SHORTEST)
                continue
            start = written % self._capacity
            size = min(len(source), room, self._capacity - start)
            self._data[start : start + size] = source[:size]
            _publish()
            self._written[0] = written + size
            source = source[size:]

    def _taken(self, length: int) -> bytes:
        assert self._reader is not None
        parts = []
        while length:
            read = int(self._read[self._reader])
            ready = self._wait(read)
            start = read % self._capacity
            size = min(length, ready, self._capacity - start)
            parts.append(self._data[start : start + size].tobytes())
            _publish()
            self._read[self._reader] = read + size
            length -= size
        return b"".join(parts)

    def _wait(self, read: int) -> int:
        """The number of unread bytes, at least one."""
        polls, pause = 0, _SHORTEST
        while True:
            ready = int(self._written[0]) - read
            if ready:
                _publish()
                return ready
            polls += 1
            if polls > _SPINS:
                time.sleep(pause)
                pause = min(pause * 1.1, _LONGEST)


def _publish() -> None:
    """Order memory accesses before against those after, also where processors do not (Arm)."""
    with _fence:
        pass
