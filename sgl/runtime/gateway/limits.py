"""How many requests enter: so many a second of each key, and so many at the workers and waiting in all.

Workers check keys. A key has a bucket of its own once a worker that refuses others has accepted it; other requests
count for the address that they come from, whatever key they name."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from aiolimiter import AsyncLimiter

from sgl.errors import QueueFull
from sgl.runtime.gateway.config import GatewayConfig

BUCKETS = 10_000
"""Of keys and addresses. A full one may be forgotten; while none is, those that have none share one."""

_SITE_BITS = 64  # of an IPv6 address, that one client may have


def key_of(headers: Mapping[str, str]) -> str:
    """The API key that a request came with, or nothing. A server reads the same one."""
    kind, _, key = headers.get("Authorization", "").partition(" ")
    return key if kind.lower() == "bearer" else headers.get("X-Api-Key", "")


def headers_of(headers: Mapping[str, str], *more: str) -> dict[str, str]:
    """Those that say whose a request is, and more."""
    return {name: headers[name] for name in ("Authorization", "X-Api-Key", *more) if name in headers}


@dataclass(slots=True)
class _Bucket:
    limiter: AsyncLimiter
    used: float = 0.0


class Limits:
    """Of one gateway."""

    def __init__(self, config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._buckets: OrderedDict[bytes, _Bucket] = OrderedDict()  # the one used longest ago first
        self._shared: _Bucket | None = None
        self._places = None if config.max_in_flight is None else asyncio.Semaphore(config.max_in_flight)
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

    async def count(self, key: str, address: str) -> None:
        """A request with this key comes from there. Raises QueueFull if too many did."""
        rate = self._config.key_rate
        if rate is None:
            return
        name = _named(key)
        is_known = name in self._buckets
        bucket = self._bucket(name if is_known else _site(address))
        if not bucket.limiter.has_capacity():
            whose = "this key" if is_known else "an address, without a key that a worker has accepted,"
            raise QueueFull(
                f"{whose} may send {rate:g} requests a second: try again later", limit=self._config.key_burst
            )
        await bucket.limiter.acquire()  # at once

    def accepted(self, key: str) -> None:
        """A worker that refuses others took a request with this key."""
        if self._config.key_rate is not None:
            self._bucket(_named(key))

    def _bucket(self, name: bytes) -> _Bucket:
        rate, burst, now = self._config.key_rate, self._config.key_burst, self._clock()
        assert rate is not None, "there is a limit"
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = _Bucket(AsyncLimiter(burst, burst / rate))
            if len(self._buckets) >= BUCKETS:
                if next(iter(self._buckets.values())).used + burst / rate > now:
                    self._shared = self._shared or bucket
                    return self._shared
                self._buckets.popitem(last=False)
            self._buckets[name] = bucket
        bucket.used = now
        self._buckets.move_to_end(name)
        return bucket

    def place(self) -> AbstractAsyncContextManager[None]:
        """Hold one of the places at the workers, in order of arrival. Raises QueueFull if too many wait."""
        return contextlib.nullcontext() if self._places is None else self._one_of(self._places)

    @contextlib.asynccontextmanager
    async def _one_of(self, places: asyncio.Semaphore) -> AsyncIterator[None]:
        with self.wait() if places.locked() else contextlib.nullcontext():
            await places.acquire()
        try:
            yield
        finally:
            places.release()


def _named(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16, person=b"key").digest()


def _site(address: str) -> bytes:
    """What one client has of addresses."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
            parsed = ipaddress.IPv6Address(int(parsed) >> (128 - _SITE_BITS) << (128 - _SITE_BITS))
        address = str(parsed)
    return hashlib.blake2b(address.encode(), digest_size=16, person=b"address").digest()
