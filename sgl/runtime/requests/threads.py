"""Runs long work in threads of its own: event loops must not block, and their shared pool reads bodies and encodes
prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

FEW = 4096
"""Values that can be assembled or written as JSON in a few milliseconds."""
FIELDS = 16
"""Values of a result beside its tokens and logprobs, roughly."""
_IN_TURN = 64
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="sgl-results")  # starts threads on first use


async def in_thread(work: Callable[[], T], size: int) -> T:
    """Run `work`, which handles `size` values in small steps without locks."""
    if size <= FEW:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, for work on the event loop; other tasks run in between."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _IN_TURN == 0:
            await asyncio.sleep(0)
