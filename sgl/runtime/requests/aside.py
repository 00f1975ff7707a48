"""Work that would hold an event loop for long goes to threads of its own: not even the loop's shared pool, which reads
bodies and encodes prompts, waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

FEW = 4096
"""Values that are put together, or written as JSON, in a few milliseconds."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="sgl-aside")  # starts none before the first work


async def aside(work: Callable[[], T], size: int) -> T:
    """What `work` returns, which handles `size` values in small steps, without a lock."""
    if size <= FEW:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
