"""A memory pool, a stream and quiet surroundings for capturing CUDA graphs."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgl.runtime.model.kv_cache import KVCache

logger = logging.getLogger(__name__)

MAX_QUERIES = 8
"""Tokens of a row, at most, that captured steps with drafts compute."""
_ROWS = 1, 2, 4, 8, 16, 32, 64  # that these have
CAPTURE_MODE = "thread_local"  # other threads' driver calls spoil no capture
_HEAD_START = 4
"""Layers of a graph's first piece: while they are computed, the rest is launched. A graph of 32 layers takes 0.4 ms to
launch on an H200's host, and begins only then."""
_one_at_a_time = threading.Lock()  # the GC's switch is global to the process


def row_buckets(max_rows: int) -> list[int]:
    """Numbers of rows that captured steps with drafts are padded to."""
    return [rows for rows in _ROWS if rows < max_rows] + [max_rows] * (max_rows <= _ROWS[-1])


@contextmanager
def capturing(what: str) -> Iterator[tuple[Any, torch.cuda.Stream]]:
    """A memory pool and a stream to capture with; logs time and memory. The GC is off: destroying an old graph
    would spoil the capture."""
    with _one_at_a_time, _uncollected():
        began = time.monotonic()
        free_before = torch.cuda.mem_get_info()[0]
        # torch's own capture stream belongs to the first GPU that captured
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so
        yield torch.cuda.graph_pool_handle(), stream
        torch.cuda.synchronize()
        seconds, num_bytes = time.monotonic() - began, free_before - torch.cuda.mem_get_info()[0]
    logger.info("captured %s as CUDA graphs: %.1f s, %.2f GiB", what, seconds, num_bytes / 2**30)


def recorded(
    forward: Callable[[], None], kv: KVCache, pool: Any, stream: torch.cuda.Stream, *, is_whole: bool
) -> list[torch.cuda.CUDAGraph]:
    """A forward pass as graphs to replay one after the other: the first one is short, so that the device need not wait
    until all is launched. pool, stream: of `capturing`. is_whole: one graph."""
    pieces = _Pieces(pool, 0 if is_whole else len(kv.keys))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        pieces.begin()
        try:
            with kv.arriving(pieces):
                forward()
        finally:
            pieces.graphs[-1].capture_end()
    return pieces.graphs


class _Pieces:
    """Begins a new graph behind the first layers. An `Arrivals`, which hears of each layer."""

    def __init__(self, pool: Any, num_layers: int) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = pool
        self._left = _HEAD_START if num_layers > 2 * _HEAD_START else -1  # layers

    def begin(self) -> None:
        """Record from here on."""
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._pool, capture_error_mode=CAPTURE_MODE)

    def wait(self, num_fragments: int) -> None:
        """A layer's keys and values are reached."""
        if self._left == 0:
            self.graphs[-1].capture_end()
            self.begin()
        self._left -= 1


@contextmanager
def _uncollected() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
