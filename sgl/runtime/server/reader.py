"""Reads request bodies: small ones are parsed in place, others in processes."""

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
"""Bodies below both limits take a few milliseconds."""
LARGE_BYTES = 1 << 20
_AT_ONCE = {False: 4, True: 2}  # processes for bodies that are medium, and large
_HELD_BODIES = 8  # longest bodies that fit into the shared memory


is_small: ContextVar[bool] = ContextVar("is_small", default=True)
"""Whether the current request's body is small, so that handling it is quick as well."""


class BodyReader:
    """Reads one server's bodies, on its event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._longest = config.max_request_bytes
        self._timeout = config.read_timeout
        self._processes = BodyProcesses()
        self._slots = {is_large: asyncio.Semaphore(number) for is_large, number in _AT_ONCE.items()}
        self._held = 0  # bytes of bodies that are not small

    async def read(self, request: web.Request, model: type[Body], context_length: int | None) -> Body:
        """Read and parse the JSON body. Raises InvalidRequest, BodyTooLong, RequestTimeout if it arrives late,
        QueueFull where long bodies fill the memory, ContextTooLong for too many ids."""
        data = bytearray()
        try:
            await self._receive(request, data)
            if len(data) <= SMALL_BYTES and most_values(data) <= SMALL_VALUES:
                return parse(data, model)
            is_small.set(False)
            slots = self._slots[len(data) > LARGE_BYTES]
            return await self._processes.run(slots, parse, data, model, context_length)
        finally:
            self._held -= _counted(len(data))

    def start(self) -> None:
        """Start the warm process."""
        self._processes.start()

    def close(self) -> None:
        """End the processes."""
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
            said = " ".join(str(error).rpartition("message:")[2].split())  # aiohttp's begins with a status
            raise InvalidRequest(f"the body cannot be read: {said}") from error

    def _check_length(self, length: int) -> None:
        if length > self._longest:
            raise BodyTooLong(f"the body is longer than {self._longest} bytes, see --max-request-bytes")

    def _take(self, number: int) -> None:
        """Reserve memory for a body. Raises QueueFull if it is full."""
        limit = _HELD_BODIES * self._longest
        if self._held + number > limit:
            raise QueueFull(f"other requests' bodies fill the {limit} bytes that there are for them", limit=limit)
        self._held += number


def _counted(length: int) -> int:
    """Bytes that count towards the memory; small bodies count nothing."""
    return length if length > SMALL_BYTES else 0
