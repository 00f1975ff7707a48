"""A memory pool, a stream and quiet surroundings for capturing CUDA graphs."""

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

CAPTURE_MODE = "thread_local"  # other threads' driver calls spoil no capture
_one_at_a_time = threading.Lock()  # the GC's switch is global to the process


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


@contextmanager
def _uncollected() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
