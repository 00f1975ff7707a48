"""What CUDA graphs are captured with: a pool of memory, a stream, and peace from other threads and from the collector
of garbage."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

CAPTURE_MODE = "thread_local"  # what other threads ask of the driver meanwhile spoils no capture
_one_at_a_time = threading.Lock()  # the collector's switch is the whole process's


@contextmanager
def capturing(what: str) -> Iterator[tuple[Any, torch.cuda.Stream]]:
    """A pool of memory and a stream to capture with; says what it took. Garbage is not collected meanwhile: were a
    graph among it, of an engine that is gone, destroying it would spoil the capture."""
    with _one_at_a_time, _uncollected():
        began = time.monotonic()
        free_before = torch.cuda.mem_get_info()[0]
        # A stream of this GPU: torch's own for captures is of the first that captured anything
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so
        yield torch.cuda.graph_pool_handle(), stream
        torch.cuda.synchronize()
        seconds, num_bytes = time.monotonic() - began, free_before - torch.cuda.mem_get_info()[0]
    logger.info("captured %s as CUDA graphs: %.1f s, %.2f GiB", what, seconds, num_bytes / 2**30)


@contextmanager
def _uncollected() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
