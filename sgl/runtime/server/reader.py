"""Request bodies as they arrive: small ones are parsed at once, others in processes, the largest in fewer of them."""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar

from aiohttp import web

from sgl.errors import InvalidRequest, QueueFull, RequestTimeout
from sgl.runtime.config import ServerConfig
from sgl.runtime.server.bodies import Body, most_values, parse
from sgl.runtime.server.body_process import BodyProcesses
from sgl.runtime.server.errors import BodyTooLong

SMALL_BYTES, SMALL_VALUES = 256 << 10, 4096
"""Reading a body within both takes a few milliseconds, whatever it holds."""
LARGE_BYTES = 1 << 20
_AT_ONCE = {False: 4, True: 2}  # processes, for bodies that are not large and for those that are
_HELD_BODIES = 8  # of the longest that may be sent: the memory that all together have


is_small: ContextVar[bool] = ContextVar("is_small", default=True)
"""Whether the present task's request has a small body: what comes of it then takes little time too."""


class BodyReader:
    """Reads the bodies of one server's requests, on its event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._longest = config.max_request_bytes
        self._timeout = config.read_timeout
        self._processes = BodyProcesses()
        self._slots = {is_large: asyncio.Semaphore(number) for is_large, number in _AT_ONCE.items()}
        self._held = 0  # bytes of bodies that are not small

    async def read(self, request: web.Request, model: type[Body], context_length: int | None = None) -> Body:
        """The request's JSON body. Raises InvalidRequest, BodyTooLong, RequestTimeout if it arrives late, QueueFull
        where too many long ones are on their way, and ContextTooLong for a long one."""
        data = bytearray()
        try:
            await self._receive(request, data)
            if len(data) <= SMALL_BYTES and most_values(data) <= SMALL_VALUES:
                return parse(data, model)
            is_small.set(False)
            async with self._slots[len(data) > LARGE_BYTES]:
                return await self._processes.parse(data, model, context_length)
        finally:
            self._held -= _counted(len(data))

    def start(self) -> None:
        """Get ready for the first body that is not small."""
        self._processes.start()

    def close(self) -> None:
        """End what reads."""
        self._processes.close()

    async def _receive(self, request: web.Request, data: bytearray) -> None:
        self._check_length(request.content_length or 0)
        try:
            async with contextlib.nullcontext() if request.content.is_eof() else asyncio.timeout(self._timeout):
                while piece := await request.content.readany():
                    self._check_length(len(data) + len(piece))
                    self._take(_counted(len(data) + len(piece)) - _counted(len(data)))
                    data += piece
        except TimeoutError as error:
            message = f"the body did not arrive within {self._timeout:g} s"
            raise RequestTimeout(message, seconds=self._timeout) from error
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body cannot be read: {error}") from error

    def _check_length(self, length: int) -> None:
        if length > self._longest:
            raise BodyTooLong(f"the body is longer than {self._longest} bytes, see --max-request-bytes")

    def _take(self, number: int) -> None:
        """Count bytes of bodies that are held. Raises QueueFull where there is no room for them."""
        limit = _HELD_BODIES * self._longest
        if self._held + number > limit:
            raise QueueFull(f"other requests' bodies fill the {limit} bytes that there are for them", limit=limit)
        self._held += number


def _counted(length: int) -> int:
    """What a body takes of the memory that bodies have. Small ones take none."""
    return length if length > SMALL_BYTES else 0
