"""How many requests enter: so many a second of each key, and so many at the workers and waiting in all."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator

from aiohttp import web
from aiolimiter import AsyncLimiter

from sgl.errors import QueueFull
from sgl.runtime.gateway.config import GatewayConfig

KEYS = 10_000  # with a bucket of their own; the one used longest ago is forgotten, and so full again


def key_of(request: web.Request) -> str:
    """The API key that a request came with, or nothing."""
    return request.headers.get("Authorization", "") or request.headers.get("X-Api-Key", "")


class Limits:
    """Of one gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._buckets: OrderedDict[str, AsyncLimiter] = OrderedDict()
        self._free = config.max_in_flight
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.num_waiting = 0
        """Requests that wait for others to end, or for a worker."""

    @contextlib.contextmanager
    def wait(self, *, is_admitted: bool = False) -> Iterator[None]:
        """Wait within the context. is_admitted: it is not refused. Raises QueueFull if too many wait."""
        most = self._config.max_waiting
        if self.num_waiting >= most and not is_admitted:
            raise QueueFull(f"{most} requests are waiting already; try again later", limit=most)
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def count(self, key: str) -> None:
        """A request of this key comes. Raises QueueFull if it has sent too many."""
        rate, burst = self._config.key_rate, self._config.key_burst
        if rate is None:
            return
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = AsyncLimiter(burst, burst / rate)
            if len(self._buckets) > KEYS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        if not bucket.has_capacity():
            raise QueueFull(f"this key may send {rate:g} requests a second: try again later", limit=burst)
        await bucket.acquire()  # at once

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one of the places at the workers, in order of arrival. Raises QueueFull if too many wait."""
        if self._free is None:
            yield
            return
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            try:
                with self.wait():
                    self._waiting.append(turn)
                    await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it had its turn already
                    self._pass_on()
                else:
                    self._waiting.remove(turn)
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        assert self._free is not None, "there is a limit"
        self._free += 1
