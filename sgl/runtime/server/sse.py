"""Server-sent events: one `data:` line each, flushed at once, `[DONE]` at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

from aiohttp import web

from sgl.errors import InvalidRequest, SglError
from sgl.numerals import whole
from sgl.runtime.server.encoding import json_bytes
from sgl.runtime.server.errors import error_body

logger = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # otherwise nginx buffers events
}
DONE = b"data: [DONE]\n\n"
_SMALL = 1 << 15  # bytes that an idle transport takes at once


def event(data: Any, event_id: int | None = None, *, name: str | None = None) -> bytes:
    """One event; JSON fits on one line."""
    head = "" if event_id is None else f"id: {event_id}\n"
    head += "" if name is None else f"event: {name}\n"
    return b"%bdata: %b\n\n" % (head.encode(), json_bytes(data))


def named(events: Iterable[dict[str, Any]]) -> bytes:
    """Events with their types as names."""
    return b"".join([event(each, name=each["type"]) for each in events])


class EventStream(web.StreamResponse):
    """Sends headers with the first event, saving the client a wake-up. (Older aiohttps send them at once.)"""

    _send_headers_immediately = False


def failure(error: Exception) -> bytes:
    """The event for an error in a stream."""
    return event(error_body(error))


async def send_events(
    request: web.Request,
    events: AsyncGenerator[bytes, None],
    write_timeout: float,
    *,
    done: bytes = DONE,
    failure: Callable[[Exception], bytes] = failure,
    headers: Mapping[str, str] = HEADERS,
) -> web.StreamResponse:
    """Stream events; errors before the first are raised, others sent. A client that stops reading is disconnected."""
    async with contextlib.aclosing(events):
        if request.method == "HEAD":
            return web.Response(headers=headers)
        first = await anext(events, None)
        response = EventStream(headers=headers)
        await response.prepare(request)
        try:
            if first is not None:
                await write(request, response, first, write_timeout)
            async for data in events:
                await write(request, response, data, write_timeout)
        except SglError as error:
            await write(request, response, failure(error), write_timeout)
        except ConnectionError:
            raise
        except Exception as error:  # a defect: logged, and told as the last event
            logger.exception("the request failed while streaming")
            await write(request, response, failure(error), write_timeout)
    await response.write_eof(done)
    return response


async def write(
    request: web.Request, response: web.StreamResponse, data: bytes, timeout: float, *, is_last: bool = False
) -> None:
    """Send data, and the end of the response with it. Raises ConnectionError if the client is gone or stopped
    reading."""
    send = response.write_eof if is_last else response.write
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    if not transport.get_write_buffer_size() and len(data) < _SMALL:
        await send(data)
        return
    try:
        async with asyncio.timeout(timeout):
            await send(data)
    except TimeoutError:
        transport.abort()
        raise ConnectionAbortedError(f"the client left the stream unread for {timeout:g} s") from None


class EventLog(ABC):
    """A program's events, kept so that a connection that breaks loses none. Without a listener for a while, the program
    is cancelled. Needs a running event loop."""

    def __init__(self, grace: float) -> None:
        """grace: seconds without a listener."""
        self.id = secrets.token_hex(16)
        self.log: list[bytes] = []  # event n is at n - 1
        self.is_over = False  # ended and forgotten
        self._grace = grace
        self._num_listeners = 0
        self._changed = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(grace, self.end)

    @property
    @abstractmethod
    def has_run(self) -> bool:
        """Whether no further event comes."""

    def end(self) -> None:
        """Cancel and forget it. Idempotent."""
        self.is_over = True
        self._timer.cancel()
        self._changed.set()

    def note(self, data: dict[str, Any]) -> None:
        """One more event."""
        self.log.append(event(data, len(self.log) + 1))
        self._changed.set()

    def last_seen(self, request: web.Request) -> int:
        """The number of the event that a client had last. Raises InvalidRequest."""
        given = request.headers.get("Last-Event-ID", "0")
        last = whole(given, 10**12)
        if last is None or last > len(self.log):
            raise InvalidRequest(f"Last-Event-ID is none of this program's: {given[:99]!r}", param="Last-Event-ID")
        return last

    async def stream(self, request: web.Request, last: int, write_timeout: float) -> web.StreamResponse:
        """Stream the events after number `last`."""
        return await send_events(request, self.listen(last), write_timeout, done=b"")

    async def listen(self, last: int) -> AsyncGenerator[bytes, None]:
        """Events after number `last`, until the program ends."""
        self._num_listeners += 1
        self._timer.cancel()
        try:
            while True:
                news = self.log[last:]
                if news:
                    last += len(news)
                    yield b"".join(news)
                elif self.is_over or self.has_run:
                    return
                else:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            self._num_listeners -= 1
            if not self._num_listeners and not self.is_over:  # even after the last event, which may be lost
                self._timer = asyncio.get_running_loop().call_later(self._grace, self.end)
