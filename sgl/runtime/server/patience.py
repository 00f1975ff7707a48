"""How long a request may take: its `timeout` counts from when it arrived, wherever it waits then."""

from __future__ import annotations

import asyncio
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


class Patience:
    """That of one request's client, from its arrival on."""

    def __init__(self) -> None:
        self._arrived = time.monotonic()
        self._seconds: float | None = None
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def lasting(self) -> AsyncIterator[None]:
        """Within it the present task is cancelled when patience ends, and RequestTimeout comes of that."""
        try:
            async with asyncio.timeout(None) as self._limit:
                yield
        except TimeoutError:
            if not self._limit or not self._limit.expired():
                raise
            raise self._late() from None

    def begin(self, timeout: Any) -> None:
        """It is so many seconds. Raises InvalidRequest for what is no number of seconds."""
        if timeout is None:
            return
        self._seconds = checked_seconds("timeout", timeout)
        self._reschedule(_GRACE)

    @property
    def ends(self) -> bool:
        """Whether it has an end."""
        return self._seconds is not None

    def left(self, *, is_list: bool = False) -> float | None:
        """Seconds for the engine; None without an end. Raises RequestTimeout if there are none."""
        if self._seconds is None:
            return None
        left = self._arrived + self._seconds - time.monotonic()
        if left <= 0:
            raise self._late()
        if is_list:
            self._reschedule(_GRACE_OF_LISTS)
        return max(left, _LEAST)

    async def each(self, events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream, each in time: an end of patience is raised to whoever reads them."""
        assert self._seconds is not None, "it ends"
        if self._limit is not None:
            self._limit.reschedule(None)
        end = asyncio.get_running_loop().time() + self._arrived + self._seconds - time.monotonic() + _GRACE
        while True:
            try:
                async with asyncio.timeout_at(end):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise self._late() from None
            yield event

    def _reschedule(self, grace: float) -> None:
        if self._limit is not None and self._seconds is not None:
            left = self._arrived + self._seconds - time.monotonic() + grace
            self._limit.reschedule(asyncio.get_running_loop().time() + left)

    def _late(self) -> RequestTimeout:
        assert self._seconds is not None, "it began"
        return RequestTimeout(f"the request took longer than its {self._seconds:g} s", seconds=self._seconds)


patience: ContextVar[Patience | None] = ContextVar("patience", default=None)
"""That of the client whose request the present task works for."""
