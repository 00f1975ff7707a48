"""Work that would hold an event loop for long goes to threads of its own: not even the loop's shared pool, which reads
bodies and encodes prompts, waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

FEW = 4096
"""Values that are put together, or written as JSON, in a few milliseconds."""
FIELDS = 16
"""Values that each result has beside its tokens and logprobs, about."""
_IN_TURN = 64
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="sgl-aside")  # starts none before the first work


async def aside(work: Callable[[], T], size: int) -> T:
    """What `work` returns, which handles `size` values in small steps, without a lock."""
    if size <= FEW:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, for work on each that has to be done on the event loop: whatever else there is has turns between."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _IN_TURN == 0:
            await asyncio.sleep(0)
