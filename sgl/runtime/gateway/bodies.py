"""Reads requests' bodies, which are kept until their answers end: within a time, and so many bytes of all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from sgl.errors import InvalidRequest, QueueFull, RequestTimeout
from sgl.runtime.server.errors import BodyTooLong

MAX_BYTES = 256 << 20
"""Of a body; workers have their own limit."""
HELD_BYTES = 2 << 30
"""Of all bodies together."""
READ_SECONDS = 300.0
"""Until a body is there; workers have their own limit."""
_SMALL = 256 << 10  # bytes that count nothing


class Bodies:
    """Of one gateway."""

    def __init__(self) -> None:
        self._held = 0

    @contextlib.asynccontextmanager
    async def of(self, request: web.Request) -> AsyncIterator[bytearray]:
        """A request's body, kept while the context is. Raises InvalidRequest, BodyTooLong, RequestTimeout and
        QueueFull."""
        data = bytearray()
        try:
            await self._read(request, data)
            yield data
        finally:
            self._held -= _counted(len(data))

    async def _read(self, request: web.Request, data: bytearray) -> None:
        self._check(request.content_length or 0, 0)
        try:
            is_here = request.content.is_eof()
            async with contextlib.nullcontext() if is_here else asyncio.timeout(READ_SECONDS):
                while piece := await request.content.readany():
                    length = len(data) + len(piece)
                    more = _counted(length) - _counted(len(data))
                    self._check(length, more)
                    self._held += more
                    data += piece
        except TimeoutError as error:
            message = f"the body did not arrive within {READ_SECONDS:g} s"
            raise RequestTimeout(message, seconds=READ_SECONDS) from error
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body cannot be read: {error}") from error

    def _check(self, length: int, more: int) -> None:
        if length > MAX_BYTES:
            raise BodyTooLong(f"the body is longer than the {MAX_BYTES} bytes that a gateway takes")
        if self._held + more > HELD_BYTES:
            raise QueueFull(
                f"other requests' bodies fill the {HELD_BYTES} bytes that there are for them", limit=HELD_BYTES
            )


def _counted(length: int) -> int:
    return length if length > _SMALL else 0
