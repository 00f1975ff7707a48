"""How long a request may take: its `timeout` counts from when it arrived, wherever it waits then."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from sgl.errors import RequestTimeout
from sgl.runtime.sampling_params import checked_seconds

_LEAST = 1e-3  # seconds that the engine is given: it says best what there was until then
_GRACE = 0.1  # by which it may be late with that
_GRACE_OF_LISTS = 2.0  # whose results are told one by one: those that were ready, and those that were not


class Deadline:
    """That of one request, from its arrival on. Event loops read the same clock as it."""

    def __init__(self) -> None:
        self._arrived = time.monotonic()
        self._seconds = math.inf
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Within it the present task is cancelled at the deadline, and RequestTimeout comes of that."""
        try:
            async with asyncio.timeout(None) as self._limit:
                yield
        except TimeoutError:
            if not self._limit or not self._limit.expired():
                raise
            raise self._late() from None

    def set(self, timeout: Any) -> None:
        """It is so many seconds after the arrival; None: there is none. Raises InvalidRequest."""
        if timeout is not None:
            self._seconds = checked_seconds("timeout", timeout)
            self._reschedule(_GRACE)

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return self._seconds < math.inf

    def left(self, *, is_list: bool = False) -> float | None:
        """Seconds for the engine; None without a deadline. Raises RequestTimeout if there are none."""
        left = self._arrived + self._seconds - time.monotonic()
        if left <= 0:
            raise self._late()
        if is_list:
            self._reschedule(_GRACE_OF_LISTS)
        return max(left, _LEAST) if self.is_set else None

    async def each(self, events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream, each in time, where there is a deadline: it is raised to whoever reads them."""
        if self._limit is not None:
            self._limit.reschedule(None)
        while True:
            try:
                async with asyncio.timeout_at(self._arrived + self._seconds + _GRACE):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise self._late() from None
            yield event

    def _reschedule(self, grace: float) -> None:
        if self._limit is not None and self.is_set:
            self._limit.reschedule(self._arrived + self._seconds + grace)

    def _late(self) -> RequestTimeout:
        return RequestTimeout(f"the request took longer than its {self._seconds:g} s", seconds=self._seconds)


deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)
"""That of the request that the present task works for."""
