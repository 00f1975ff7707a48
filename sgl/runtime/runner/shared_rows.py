"""Rows of host memory that the ranks of one host share, so that rank 0 sends and fills the pages of all.

A row has a page of each rank. Pages of ranks with other layers or heads come first, in their order: together they are
the model's, which a row begins with however many ranks there are. Ranks that hold the same heads again follow.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from sgl.errors import ConfigError

Memory = npt.NDArray[np.uint8]
_HEADER = 4096  # bytes of counters, at least: rows begin at a page of memory
_SAVED, _LOADED = 0, 1
_fence = threading.Lock()


class SharedRows:
    """One rank's view. Rank 0's comes first."""

    def __init__(
        self,
        path: Path,
        num_rows: int,
        row_bytes: int,
        whole_bytes: int,
        place: slice,
        rank: int,
        size: int,
        option: str = "disaggregation_buffer_mb",
    ) -> None:
        """whole_bytes: of the model's page. place: of this rank's page in a row. size: number of ranks. option: makes
        it smaller. Raises ConfigError if there is not so much shared memory."""
        header = -(-16 * size // _HEADER) * _HEADER
        num_bytes = header + num_rows * row_bytes
        with open(path, "r+b" if rank else "w+b") as file:
            if not rank:
                _reserve(file.fileno(), num_bytes, path, option)
            mapped = mmap.mmap(file.fileno(), num_bytes)
        self.mapped: Memory = np.frombuffer(mapped, np.uint8)
        self.rows = self.mapped[header:].reshape(num_rows, row_bytes)
        """Each with all pages."""
        self.whole = self.rows[:, :whole_bytes]
        """The model's pages."""
        self.own = self.rows[:, place]
        """This rank's pages."""
        self._counts = np.frombuffer(mapped, np.int64, 2 * size).reshape(size, 2)
        self.done = self._counts[rank]
        """Of this rank's moves, how many have saved, and how many have loaded."""

    def fill(self, row: int) -> None:
        """Give ranks that hold the same heads again what the model's page has of them."""
        page = self.whole[row]
        for start in range(len(page), self.rows.shape[1], len(page)):
            self.rows[row, start : start + len(page)] = page

    def tell(self, number: int) -> None:
        """So many of this rank's moves are done."""
        publish()
        self.done[:] = number

    def all_have(self, what: Literal["saved", "loaded"], number: int) -> bool:
        """Whether all other ranks have done this in so many moves."""
        least = int(self._counts[1:, _SAVED if what == "saved" else _LOADED].min())
        publish()
        return least >= number


@dataclass(frozen=True, slots=True)
class SharedHost:
    """All that the ranks of an engine share."""

    pages: SharedRows
    windowed: SharedRows | None  # pages of layers with a window of their own
    states: list[SharedRows]  # recurrent ones, in parts


def _reserve(file: int, num_bytes: int, path: Path, option: str) -> None:
    """Take the memory now: a write to what is not there would end the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:
            os.truncate(file, num_bytes)
    except OSError as error:
        raise ConfigError(
            f"{num_bytes / 2**30:.2f} GiB of memory that ranks share cannot be had in {path.parent.parent} "
            f"({error.strerror}): make it larger (containers have 64 MB by default), or set a lower {option}",
            option=option,
        ) from error


def publish() -> None:
    """Order memory accesses before against those after, also where processors do not (Arm)."""
    with _fence:
        pass
