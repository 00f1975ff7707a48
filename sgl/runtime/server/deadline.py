"""A request's deadline: its `timeout` counts from arrival, wherever it waits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from sgl.errors import InvalidRequest, RequestTimeout
from sgl.numerals import decimal
from sgl.runtime.sampling_params import checked_seconds

DEADLINE_HEADER = "X-Sgl-Deadline-S"
"""Seconds that are left for a request, from a gateway."""

_LEAST = 1e-3  # seconds: the engine reports best what was there in time
_GRACE = 0.1  # lateness allowed to the engine
_GRACE_OF_LISTS = 2.0  # lists report results one by one


def header_seconds(text: str) -> float:
    """What a DEADLINE_HEADER says. Raises InvalidRequest."""
    if (seconds := decimal(text)) is None:
        raise InvalidRequest(f"{DEADLINE_HEADER} is a number of seconds, not {text[:99]!r}", param=DEADLINE_HEADER)
    return checked_seconds(DEADLINE_HEADER, seconds)


class Deadline:
    """The deadline of one request, on the event loop's clock."""

    def __init__(self) -> None:
        self._arrived = time.monotonic()
        self._seconds = self._most = math.inf
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancel the current task at the deadline and raise RequestTimeout."""
        try:
            async with asyncio.timeout(None) as self._limit:
                yield
        except TimeoutError:
            if not self._limit or not self._limit.expired():
                raise
            raise self._late() from None

    def set(self, timeout: Any) -> None:
        """Set it to `timeout` seconds after arrival; None: no deadline. Raises InvalidRequest."""
        if timeout is not None:
            self._seconds = min(checked_seconds("timeout", timeout), self._most)
            self._reschedule(_GRACE)

    def bound(self, text: str) -> None:
        """What whoever passed the request on has left for it, in seconds. Raises InvalidRequest."""
        self._most = max(_LEAST, header_seconds(text))
        self.set(self._most)

    @property
    def is_set(self) -> bool:
        """Whether there is a deadline."""
        return self._seconds < math.inf

    def left(self, *, is_list: bool = False) -> float | None:
        """Seconds left for the engine, or None. Raises RequestTimeout when late."""
        left = self._arrived + self._seconds - time.monotonic()
        if left <= 0:
            raise self._late()
        if is_list:
            self._reschedule(_GRACE_OF_LISTS)
        return max(left, _LEAST) if self.is_set else None

    def handed_on(self) -> float | None:
        """Seconds left, or None, for what tells of its end itself. The request is cut no longer: an answer that has
        begun would stay without an end. Raises RequestTimeout when late."""
        left = self.left()
        if self._limit is not None:
            self._limit.reschedule(None)
        return left

    async def each(self, events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
        """A stream's events; raises RequestTimeout to the reader when one is late."""
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
"""Of the current task's request."""
