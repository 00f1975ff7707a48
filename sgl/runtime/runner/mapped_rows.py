"""Pages of a device's memory that engines of one host read from each other, without host memory between.

A row has a page with all its layers. A save gathers pages into rows in the order of the steps, a load scatters rows on
a stream of its own, and a read copies rows of another engine's memory, which this process has opened, to own ones: on a
GPU by its copy engines, over NVLink where there is one.

Behind the rows stands a stamp of each: the number of the save that filled it, written before the row is. Whoever has
copied rows looks at their stamps afterwards: if they are still what it was told, nothing was overwritten meanwhile.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sgl.errors import ConfigError
from sgl.kernels.pages import gather, scatter
from sgl.kernels.shared_memory import SharedMemory, opened
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import Int32Array, PageMoves
from sgl.runtime.runner.shared_rows import publish

_MARK_BYTES = 16
_STAMP_BYTES = 8
_NUM_UPLOADS = 4  # that may be under way before the next one waits
_ENDING_SECONDS = 2.0  # for copies, before memory that they may read is kept
_POLL_SECONDS = 2e-3


@dataclass(slots=True, eq=False)
class DoneMoves:
    """Copies that ended before the call did, on a CPU."""

    number: int
    load_seconds: float

    def is_loaded(self) -> bool:
        """Yes."""
        return True

    def is_saved(self) -> bool:
        """Yes."""
        return True

    def comes_by_layer(self) -> bool:
        """See `batch.PendingMoves`."""
        return False


@dataclass(slots=True, eq=False)
class MappedMoves:
    """Copies that streams work off."""

    number: int
    began: torch.cuda.Event
    loaded: torch.cuda.Event
    saved: torch.cuda.Event

    def is_loaded(self) -> bool:
        """See `batch.PendingMoves`."""
        return bool(self.loaded.query())  # type: ignore[no-untyped-call]

    def is_saved(self) -> bool:
        """See `batch.PendingMoves`."""
        return bool(self.saved.query())  # type: ignore[no-untyped-call]

    def comes_by_layer(self) -> bool:
        """See `batch.PendingMoves`."""
        return False

    @property
    def load_seconds(self) -> float:
        """See `batch.PendingMoves`."""
        return float(self.began.elapsed_time(self.loaded)) / 1e3


@dataclass(slots=True, eq=False)
class OpenedRows:
    """Another engine's rows, uint8 [n, bytes of a page], and their stamps, int64 [n]; None: closed."""

    parts: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(slots=True, eq=False)
class Copying:
    """Rows of another engine on their way to own ones."""

    rows: Int32Array
    stamp: int
    stamps: torch.Tensor  # where the host sees them, once the copies have ended
    num_runs: int
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # begin and end on a GPU

    def has_ended(self) -> bool:
        """Whether nothing is written any more. Raises ConnectionError if it ended, and what was copied is not what was
        meant."""
        try:
            if self.events is not None and not self.events[1].query():  # type: ignore[no-untyped-call]
                return False
        except RuntimeError as error:
            raise _lost(error) from error
        if (self.stamps.numpy()[self.rows] != self.stamp).any():
            raise ConnectionError("the lease ended, and its pages were overwritten before they were copied")
        return True

    @property
    def seconds(self) -> float:
        """What the copies took on a GPU, when they have ended."""
        return 0.0 if self.events is None else float(self.events[0].elapsed_time(self.events[1])) / 1e3


class MappedRows:
    """`num_rows` rows beside a KV cache, with numbers from `first` on; the first one is not used for pages. Raises
    ConfigError where processes cannot share memory."""

    def __init__(self, cache: torch.Tensor, first: int, num_rows: int, device: torch.device) -> None:
        """cache: [F, pages, bytes], see `KVCache.fragments`."""
        self.page_bytes = cache.shape[0] * cache.shape[2]
        try:
            in_stamps = -(-num_rows * self.page_bytes // _STAMP_BYTES) + num_rows  # where they end
            self._memory = SharedMemory(in_stamps * _STAMP_BYTES, device)
        except OSError as error:
            option = "disaggregation_transport"
            raise ConfigError(
                f"{option}='cuda_ipc': {device.type} memory cannot be shared with other processes here ({error}): "
                "'tcp' and 'nixl' go through host memory",
                option=option,
            ) from error
        self.mark = secrets.token_bytes(min(_MARK_BYTES, self.page_bytes))
        """What the first row begins with, by which whoever opens the memory knows that it is this."""
        self._cache, self._first, self._device = cache, first, device
        self._rows, self._stamps = self._parts(self._memory.memory)
        self._stamped = np.zeros(num_rows, np.int64)  # the same, on the host
        self._as_pages = self._rows.view(num_rows, cache.shape[0], cache.shape[2])
        self._uploader = Uploader(device, 16 * num_rows + 64, _NUM_UPLOADS)
        self._kept: list[OpenedRows] = []
        self._loading: torch.cuda.Stream | None = None
        self._reading: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._loading, self._reading = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            [page] = self._uploader.upload(np.zeros(1, np.int64))
            self._stamps.index_fill_(0, page, 0)  # compiled or loaded: what the first save would wait for
            gather(cache, page, self._as_pages, page)
            scatter(cache, page, self._as_pages, page)
        self._rows[0, : len(self.mark)] = self._as_tensor(self.mark)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @property
    def handle(self) -> list[Any]:
        """By which other processes open the rows."""
        return self._memory.handle

    @torch.inference_mode()
    def close(self) -> None:
        """Nobody opens the rows any more, and what is being copied does not count. Idempotent."""
        with suppress(RuntimeError):  # a device that has failed: whoever copies fails, too
            self._stamps.fill_(-1)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # another one's copy may never end
        self._memory.close()

    # ── between the KV cache and the rows: the thread of the steps ──────────────────────────────────────────────

    def has(self, moves: PageMoves) -> bool:
        """Whether moves are of these rows, all or none."""
        return any(len(rows) and rows[0] >= self._first for rows in (moves.saves[:, 1], moves.loads[:, 0]))

    def move(self, number: int, moves: PageMoves) -> DoneMoves | MappedMoves:
        """See `batch.Mover`."""
        saves, loads = moves.saves.astype(np.int64), moves.loads.astype(np.int64)
        given = saves[:, 0], saves[:, 1] - self._first, loads[:, 1], loads[:, 0] - self._first
        self._stamped[given[1]] = number
        if self._loading is None:
            saved, rows, loaded, from_rows = self._uploader.upload(*given)
            self._stamps.index_fill_(0, rows, number)
            publish()
            gather(self._cache, saved, self._as_pages, rows)
            start = time.perf_counter()
            scatter(self._cache, loaded, self._as_pages, from_rows)
            return DoneMoves(number, time.perf_counter() - start)
        with torch.cuda.device(self._device):
            began, after, before = (torch.cuda.Event(enable_timing=timed) for timed in (True, True, False))  # type: ignore[no-untyped-call]
            saved, rows, loaded, from_rows = self._uploader.upload(*given)
            self._stamps.index_fill_(0, rows, number)
            gather(self._cache, saved, self._as_pages, rows)
            before.record()
            loaded.record_stream(self._loading)
            self._loading.wait_event(before)  # steps so far may use the pages
            with torch.cuda.stream(self._loading):
                began.record()
                scatter(self._cache, loaded, self._as_pages, from_rows)
                after.record()
            return MappedMoves(number, began, after, before)

    # ── between engines: the threads of the reads ───────────────────────────────────────────────────────────────

    def number(self, pages: list[int]) -> tuple[list[int], int]:
        """Saved rows as others count them, and their stamp."""
        rows = np.array(pages, np.int32) - self._first
        stamps = set(self._stamped[rows].tolist())
        assert len(stamps) <= 1, "one save fills all of an offer"
        return rows.tolist(), max(stamps, default=0)

    def open(self, handle: list[Any], mark: bytes) -> OpenedRows:
        """Another engine's rows. Raises ConnectionError."""
        try:
            with self._apart():
                storage = opened(handle, self._device)
                whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                rows, stamps = self._parts(whole)
                if not torch.equal(rows[0, : len(mark)].cpu(), self._as_tensor(mark)):
                    raise ConnectionError("its memory is not on this host")
                self._in_host(stamps)  # the first pinned memory takes milliseconds
                return OpenedRows((rows, stamps))
        except ConnectionError:
            raise
        except (OSError, RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise ConnectionError(f"its memory cannot be opened: {type(error).__name__}: {error}") from error

    def forget(self, theirs: OpenedRows) -> None:
        """Close them, when nothing reads them any more; or after some time keep them."""
        end = time.monotonic() + _ENDING_SECONDS
        while (
            self._reading is not None and not self._reading.query()
        ):  # torch would wait, and let no other thread run
            if time.monotonic() > end:
                self._kept.append(theirs)
                return
            time.sleep(_POLL_SECONDS)
        with self._apart():
            theirs.parts = None

    @torch.inference_mode()
    def read(self, theirs: OpenedRows, rows: list[int], stamp: int, own: list[int]) -> Copying:
        """Start to copy their rows, which have this stamp, to own ones. Raises ConnectionError."""
        assert theirs.parts is not None, "they are open"
        there, stamps = theirs.parts
        source, target = np.array(rows, np.int32), np.array(own, np.int32) - self._first
        if source.min() < 1 or source.max() >= len(there):
            raise ConnectionError("it has no such rows")
        copied = list(runs(source, target))
        try:
            with self._apart():
                began = None if self._reading is None else self._event()
                for at, count, row in copied:
                    first = int(target[at])
                    self._rows[first : first + count].copy_(there[row : row + count], non_blocking=True)
                publish()
                seen = self._in_host(stamps)
                return Copying(source, stamp, seen, len(copied), None if began is None else (began, self._event()))
        except RuntimeError as error:
            if self._reading is not None:
                with suppress(RuntimeError):
                    self._reading.synchronize()  # what was begun
            raise _lost(error) from error

    def _in_host(self, stamps: torch.Tensor) -> torch.Tensor:
        """Where the host can look at them when the copies so far have ended."""
        if self._reading is None:
            return stamps
        return torch.empty(stamps.shape, dtype=stamps.dtype, pin_memory=True).copy_(stamps, non_blocking=True)

    def _event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _parts(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and stamps of shared memory."""
        num_rows = len(whole) // (self.page_bytes + _STAMP_BYTES)
        rows = whole[: num_rows * self.page_bytes].view(num_rows, self.page_bytes)
        return rows, whole[len(whole) - num_rows * _STAMP_BYTES :].view(torch.int64)

    def _apart(self) -> AbstractContextManager[Any]:
        if self._reading is None:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(torch.cuda.device(self._device))
        stack.enter_context(torch.cuda.stream(self._reading))
        return stack

    def _as_tensor(self, mark: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(mark), dtype=torch.uint8)


def _lost(error: RuntimeError) -> ConnectionError:
    return ConnectionError(f"its memory cannot be read: {error}")


def runs(rows: Int32Array, beside: Int32Array | None = None) -> Iterator[tuple[int, int, int]]:
    """Neighbours among rows, which are neighbours beside, too: the first one's index, how many, and the first row."""
    breaks = np.diff(rows) != 1
    if beside is not None:
        breaks |= np.diff(beside) != 1
    if len(rows):
        for at, end in pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(rows)]):
            yield at, end - at, int(rows[at])
