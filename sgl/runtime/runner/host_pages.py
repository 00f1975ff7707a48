"""Copies of KV pages in host memory: page after page, each with all its layers.

On a GPU, a save gathers pages into a buffer in the order of the steps, in some microseconds, and a copy engine takes
the buffer to pinned memory while steps go on. A load takes the other way on a stream of its own, a long one some layers
after others. A step waits for the loads that it needs, with prompts each layer for its own, and a save for those of its
pages: steps come that early that they have to, and on ranks other than 0, whose copies may end later than rank 0's.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl.errors import ConfigError
from sgl.kernels.columns import copy_columns
from sgl.kernels.pages import gather, scatter
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import Int32Array, PageMoves, PendingMoves, no_pairs
from sgl.runtime.model.kv_cache import Arrivals
from sgl.runtime.runner.mapped_rows import DoneMoves, MappedMoves, MappedRows, runs
from sgl.runtime.runner.shared_rows import SharedRows

_BUFFER_BYTES = 256 << 20
_BUFFER_SHARE = 0.002  # of the device's memory, at most
_NUM_BUFFERS = 4
_LONG_BYTES = 32 << 20  # of loads whose layers come one after another: half a millisecond and more
_NUM_GROUPS = 8  # of layers
_MEASURED_PAGES = 64
_MEASUREMENTS = 3

Memory = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class DeviceMoves(MappedMoves):
    """Copies by way of buffers, in parts; `began`: the first part's copy."""

    copied: torch.cuda.Event  # the first part is in its buffer
    parts: float  # of the loads, as multiples of the first
    groups: list[tuple[int, torch.cuda.Event]]
    """Of a long load: the first so many fragments of all its pages are there."""

    @property
    def load_seconds(self) -> float:
        """See `batch.PendingMoves`."""
        return float(self.began.elapsed_time(self.copied)) / 1e3 * self.parts

    def comes_by_layer(self) -> bool:
        """See `batch.PendingMoves`."""
        return bool(self.groups)


class LoadedGroups:
    """What a step waits for before each layer; see `kv_cache.Arrivals`."""

    def __init__(self, moves: list[DeviceMoves]) -> None:
        self._moves = [iter(its.groups) for its in moves]
        self._ends = [0] * len(moves)

    def wait(self, num_fragments: int) -> None:
        """See `kv_cache.Arrivals`."""
        for which, groups in enumerate(self._moves):
            while self._ends[which] < num_fragments:
                self._ends[which], event = next(groups)
                torch.cuda.current_stream().wait_event(event)


def most_saves(page_bytes: int, device: torch.device) -> int:
    """Pages that may be saved between two steps: as many as the buffers hold."""
    return 1 << 20 if device.type == "cpu" else _NUM_BUFFERS * _buffer_pages(page_bytes, device)


def _buffer_pages(page_bytes: int, device: torch.device) -> int:
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return max(1, min(_BUFFER_BYTES, int(_BUFFER_SHARE * total)) // page_bytes)


class HostPages:
    """`num_pages` pages of host memory beside a KV cache, or states beside others. Raises ConfigError if there is not
    so much."""

    def __init__(
        self,
        cache: torch.Tensor,
        num_pages: int,
        device: torch.device,
        shared: SharedRows | None = None,
        num_mapped: int = 0,
        *,
        by_layer: bool = False,
    ) -> None:
        """cache: [F, pages, bytes], see `KVCache.fragments`. shared: has this rank's pages, and is told what is
        done. num_mapped: pages of the device's memory behind those. by_layer: whether steps wait for layers."""
        self._cache, self.by_layer = cache, by_layer
        page_bytes = self._cache.shape[0] * self._cache.shape[2]
        self.shared = shared
        try:
            self.memory: Memory = np.empty((num_pages, page_bytes), np.uint8) if shared is None else shared.own
            """uint8 [num_pages, bytes of a page], of host memory."""
        except MemoryError as error:
            raise _too_much(num_pages * page_bytes) from error
        assert self.memory.shape == (num_pages, page_bytes), "ranks share as much as they hold"
        self._host = torch.from_numpy(self.memory)
        self._number = 0
        self._current: AbstractContextManager[Any] = nullcontext()
        self._streams: _Streams | None = None
        self.mapped = MappedRows(cache, num_pages, num_mapped, device) if num_mapped else None
        if device.type == "cuda" and num_pages:
            self._current = torch.cuda.device(device)
            _pin(self.memory if shared is None else shared.mapped)
            done = None if shared is None else torch.from_numpy(shared.done)
            self._streams = _Streams(self._cache, self._host, device, done)
            self._streams.num_groups = _NUM_GROUPS if by_layer else 1

    @property
    def whole(self) -> Memory:
        """`memory`, of all ranks where they share it."""
        return self.memory if self.shared is None else self.shared.whole

    def fill(self, page: int) -> None:
        """`whole` has been written to: let all ranks have their parts."""
        if self.shared is not None:
            self.shared.fill(page)

    @torch.inference_mode()
    def move(self, moves: PageMoves) -> PendingMoves:
        """See `batch.Mover`."""
        self._number += 1
        if self.mapped is not None and self.mapped.has(moves):
            if self._streams is not None:  # which may load to these pages still
                self._streams.wait_for(np.concatenate((moves.saves[:, 0], moves.loads[:, 1])))
            return self.mapped.move(self._number, moves)
        if self._streams is not None:
            with self._current:
                return self._streams.move(self._number, moves)
        saves, loads = (torch.from_numpy(each.astype(np.int64)) for each in (moves.saves, moves.loads))
        began = time.perf_counter()
        if len(saves):
            pages = torch.empty(len(saves), self.memory.shape[1], dtype=torch.uint8)
            gather(self._cache, saves[:, 0], self._as_pages(pages))
            self._host[saves[:, 1]] = pages
            began = time.perf_counter()
        if len(loads):
            scatter(self._cache, loads[:, 1], self._as_pages(self._host[loads[:, 0]]))
        if self.shared is not None:
            self.shared.tell(self._number)
        return DoneMoves(self._number, time.perf_counter() - began)

    def wait(self, number: int) -> None:
        """Let later steps wait, on the device, for the loads of a move."""
        if self._streams is not None:
            self._streams.wait(number)

    def arrivals(self, number: int, *, by_layer: bool) -> Arrivals | None:
        """What a step waits for before each layer, of the loads up to a move, if it waits by_layer; the rest is waited
        for as `wait` does. None: nothing."""
        if by_layer and self._streams is not None:
            return self._streams.arrivals(number)
        self.wait(number)
        return None

    def page_seconds(self, most: int = _MEASURED_PAGES) -> float:
        """Seconds that loading a page takes, of several; measured with the dummy page's, before any other move."""
        num_pages = min(most, len(self.memory) - 1)
        host, dummy = np.arange(1, num_pages + 1, dtype=np.int32), np.zeros(num_pages, np.int32)
        nothing = no_pairs()
        saves, loads = (np.stack(pair, axis=1) for pair in ((dummy, host), (host, dummy)))
        _wait(self.move(PageMoves(saves, nothing)))
        seconds = []
        for _ in range(_MEASUREMENTS):
            began = time.perf_counter()
            _wait(self.move(PageMoves(nothing, loads)))
            seconds.append(time.perf_counter() - began)
        self._number = 0  # other ranks measure nothing, and are told moves by their numbers
        return min(seconds) / num_pages

    def _as_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return pages.view(len(pages), self._cache.shape[0], self._cache.shape[2])


class _Streams:
    """Copies on a GPU: one stream saves, another one loads, and the present one gathers."""

    def __init__(
        self, cache: torch.Tensor, host: torch.Tensor, device: torch.device, done: torch.Tensor | None
    ) -> None:
        """done: int64 [2] of pinned memory, for the numbers of moves that have saved, and that have loaded."""
        self._cache, self._host, self.num_groups = cache, host, 1  # of layers, that long loads have
        page_bytes = host.shape[1]
        self._pages = _buffer_pages(page_bytes, device)
        shape = (self._pages, cache.shape[0], cache.shape[2])
        self._out = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(_NUM_BUFFERS)]
        self._is_free = [torch.cuda.Event() for _ in self._out]  # type: ignore[no-untyped-call]
        self._in = [torch.empty(shape, dtype=torch.uint8, device=device).view(-1) for _ in range(2)]
        self._next = 0
        self._saving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._loading = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._uploader = Uploader(device)
        self._saved_by = np.zeros(len(host), np.int64)  # the last move that saves to each host page
        self._loaded_from = np.zeros(len(host), np.int64)  # the last move that loads each host page
        self._loaded_to = np.zeros(cache.shape[1], np.int64)  # likewise to each of the device's
        self._under_way: deque[DeviceMoves] = deque()
        self._done, self._counts = done, torch.zeros(2, dtype=torch.int64, device=device)
        for stream in (self._saving, self._loading):
            stream.wait_stream(torch.cuda.current_stream())

    def move(self, number: int, moves: PageMoves) -> DeviceMoves:
        """See `HostPages.move`."""
        while self._under_way and self._under_way[0].is_loaded() and self._under_way[0].is_saved():
            self._under_way.popleft()
        began, copied, loaded, saved = (
            torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
            for timed in (True, True, False, False)
        )
        moved = DeviceMoves(number, began, loaded, saved, copied, 0.0, [])
        self._under_way.append(moved)
        for part in _parts(moves.saves, self._pages):
            self._save(part)
        moved.saved.record(self._saving)
        self._saved_by[moves.saves[:, 1]] = number
        if len(moves.loads):
            self._load(moved, moves.loads)
        moved.loaded.record(self._loading)
        if self._done is not None:  # copied behind what it counts
            for which, stream in enumerate((self._saving, self._loading)):
                with torch.cuda.stream(stream):
                    self._counts[which].add_(1)
                    self._done[which].copy_(self._counts[which], non_blocking=True)
        return moved

    def wait(self, number: int) -> None:
        """See `HostPages.wait`."""
        for moved in self._under_way:
            if moved.number <= number and not moved.is_loaded():
                torch.cuda.current_stream().wait_event(moved.loaded)

    def arrivals(self, number: int) -> LoadedGroups | None:
        """See `HostPages.arrivals`."""
        late = [its for its in self._under_way if its.number <= number and not its.is_loaded()]
        self.wait(max((its.number for its in late if not its.groups), default=0))
        late = [its for its in late if its.groups and not its.is_loaded()]
        return LoadedGroups(late) if late else None

    def wait_for(self, pages: Int32Array) -> None:
        """Let what follows wait for all loads to some of the device's pages."""
        if len(pages):
            self.wait(int(self._loaded_to[pages].max()))

    def _save(self, part: Int32Array) -> None:
        # Rank 0 gives pages to others when it has loaded them; another rank may be loading them still.
        self.wait(int(max(self._loaded_from[part[:, 1]].max(), self._loaded_to[part[:, 0]].max())))
        steps = torch.cuda.current_stream()
        buffer, is_free = self._out[self._next][: len(part)], self._is_free[self._next]
        self._next = (self._next + 1) % len(self._out)
        pages = self._uploader.upload(part[:, 0].astype(np.int64))[0]
        steps.wait_event(is_free)
        gather(self._cache, pages, buffer)
        self._saving.wait_stream(steps)
        flat = buffer.view(len(part), -1)
        with torch.cuda.stream(self._saving):
            for first, count, host in self._runs(part[:, 1]):
                self._host[host : host + count].copy_(flat[first : first + count], non_blocking=True)
        is_free.record(self._saving)

    def _load(self, moved: DeviceMoves, loads: Int32Array) -> None:
        """Copies begin at once. Pages are written behind all steps and gathers so far, which may use them."""
        self._loaded_from[loads[:, 0]] = self._loaded_to[loads[:, 1]] = moved.number
        pages = self._uploader.upload(loads[:, 1].astype(np.int64))[0]
        pages.record_stream(self._loading)
        steps_are_done = torch.cuda.current_stream().record_event()
        last = int(self._saved_by[loads[:, 0]].max())
        for each in self._under_way:
            if each.number == last:
                self._loading.wait_event(each.saved)
        moved.began.record(self._loading)
        num_fragments, turn, bounds = self._cache.shape[0], 0, self._bounds(len(loads))
        with torch.cuda.stream(self._loading):
            for begin, end in pairwise(bounds):
                size = max(1, self._pages * num_fragments // (end - begin))
                for start in range(0, len(loads), size):
                    part = loads[start : start + size]
                    buffer = self._copied(turn, part[:, 0], begin, end)
                    if not turn:
                        moved.parts = len(loads) * num_fragments / (len(part) * (end - begin))
                        moved.copied.record(self._loading)
                        self._loading.wait_event(steps_are_done)
                    scatter(self._cache[begin:end], pages[start : start + len(part)], buffer)
                    turn += 1
                if len(bounds) > 2:
                    moved.groups.append((end, self._loading.record_event()))

    def _bounds(self, num_pages: int) -> list[int]:
        """Of the groups of fragments that so many pages are loaded in, one after another."""
        num_fragments = self._cache.shape[0]
        if num_pages * self._host.shape[1] < _LONG_BYTES:
            return [0, num_fragments]
        return sorted({num_fragments * group // self.num_groups for group in range(self.num_groups + 1)})

    def _copied(self, turn: int, copies: Int32Array, begin: int, end: int) -> torch.Tensor:
        """Some fragments of host pages, in one of two buffers: [n, end - begin, bytes]."""
        num_bytes = self._cache.shape[2]
        width = (end - begin) * num_bytes
        buffer = self._in[turn % 2][: len(copies) * width].view(len(copies), width)
        for first, count, host in self._runs(copies):
            target, source = buffer[first : first + count], self._host[host : host + count]
            if width == source.shape[1]:
                target.copy_(source, non_blocking=True)
            else:
                copy_columns(target, source[:, begin * num_bytes : end * num_bytes])
        return buffer.view(len(copies), end - begin, num_bytes)

    def _runs(self, pages: Int32Array) -> Iterator[tuple[int, int, int]]:
        """What one copy takes: its first index, how many pages, and the first page."""
        if self._host.is_contiguous():
            return runs(pages)
        return ((index, 1, page) for index, page in enumerate(pages.tolist()))


def _wait(moved: PendingMoves) -> None:
    while not (moved.is_loaded() and moved.is_saved()):
        time.sleep(1e-5)


def _parts(pairs: Int32Array, size: int) -> Iterator[Int32Array]:
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


def _pin(memory: Memory) -> None:
    """Lock memory in place, for copy engines, until it is freed. Not torch's own, which comes in powers of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)):
        raise _too_much(memory.nbytes)
    weakref.finalize(memory, _unpin, runtime, memory.ctypes.data).atexit = False


def _unpin(runtime: Any, address: int) -> None:
    torch.cuda.synchronize()  # copies may be under way
    runtime.cudaHostUnregister(address)


def _too_much(num_bytes: int) -> ConfigError:
    return ConfigError(
        f"{num_bytes / 2**30:.2f} GiB of host memory for copies of KV pages cannot be had, or not be pinned: set a "
        "lower hicache_size",
        option="hicache_size",
    )
