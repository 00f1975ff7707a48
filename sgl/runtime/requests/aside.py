"""Work that would hold an event loop for long is done beside it, in threads of its own.

What one caller's answer takes must not wait for, or halt, what others do: neither the loop nor the loop's shared pool
of threads, in which bodies are read and prompts encoded.
"""

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
    """What `work` returns, which handles `size` values. It must hold no lock and be done in small steps: threads take
    turns between instructions of Python, never within a call of C."""
    if size <= FEW:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
