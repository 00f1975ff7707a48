"""Passes a request on to a worker, and its answer back.

What fails before the first byte of an answer is tried again, at another worker if there is one, after a pause that
doubles and is shortened by chance. After it nothing is: an answer that breaks off ends in an event that says so, or in
a closed connection, and is counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from sgl.errors import EngineDead, RequestTimeout, SglError
from sgl.runtime.gateway.config import GatewayConfig
from sgl.runtime.gateway.fleet import Fleet, Ticket
from sgl.runtime.gateway.limits import Limits, key_of
from sgl.runtime.gateway.metrics import GatewayMetrics
from sgl.runtime.gateway.policy import Demand
from sgl.runtime.gateway.replies import (
    DUE_SECONDS,
    STALL_SECONDS,
    STREAMS,
    is_computed,
    is_ours,
    up_to_last_event,
    whole,
    why_not,
)
from sgl.runtime.gateway.workers import Call, Overdue, Server, Servers
from sgl.runtime.server import sse
from sgl.runtime.server.deadline import DEADLINE_HEADER
from sgl.runtime.server.errors import error_body

WORKER_HEADER = "X-Sgl-Worker"

_HOP = {"connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-connection"}
_HOP |= {"te", "trailer", "transfer-encoding", "upgrade"}
_AGAIN = (429, 502, 503, 504)  # of a worker: another one may answer
_LONGEST_PAUSE = 2.0
_PIECE_BYTES = 256 << 10
_STORED = 100_000  # responses
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,128})"')
WRITE_SECONDS = 60.0
"""For a client that does not read."""


class NotBegunError(EngineDead):
    """A worker failed before the first byte of its answer."""

    def __init__(self, reason: str, answer: web.Response | None = None) -> None:
        super().__init__(f"no worker answered: {reason}")
        self.reason = reason
        self.answer = answer  # the worker's own, if it gave one


class Pairing(Protocol):
    """What a request brings from a prefill worker to the one that answers it."""

    async def body(self, server: Server, ticket: Ticket) -> bytes | bytearray:
        """What the server gets."""
        ...

    def answered(self, server: Server, status: int, first: bytes) -> None:
        """It answers so. Raises NotBegunError where the request is to be sent again, without what it brought."""


@dataclass(slots=True)
class Passed:
    """One request on its way."""

    method: str
    path: str  # with the query, as it came
    headers: Mapping[str, str]
    body: bytes | bytearray
    demand: Demand
    due: float | None = None  # on the loop's clock
    only: str | None = None  # the worker that it is for
    mode: str | None = None  # of the workers that it is for; None: those that generate
    pairing: Pairing | None = None
    is_begun: bool = False  # its client had a part of the answer: it waits, however many do
    waited: float = 0.0  # seconds, for a worker
    tried: dict[str, int] = field(default_factory=dict)  # workers, numbered in the order of their last tries

    def left(self) -> float | None:
        """Seconds until it is due. Raises RequestTimeout."""
        if self.due is None:
            return None
        left = self.due - time.monotonic()
        if left <= 0:
            raise RequestTimeout("the request's time was over before a worker answered", seconds=-left)
        return left


def headers_to_worker(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Those of a request, but its deadline: each try gets what is left. Its body has been decompressed."""
    passed = headers_for(headers)
    for name in ("Content-Encoding", DEADLINE_HEADER):
        passed.popall(name, None)
    return passed


def headers_for(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Those of an answer that are passed on."""
    left = _HOP.union(name.strip().lower() for name in headers.get("Connection", "").split(","))
    return CIMultiDict([(name, value) for name, value in headers.items() if name.lower() not in left])


def in_pieces(
    body: bytes | bytearray, headers: CIMultiDict[str]
) -> bytes | bytearray | AsyncIterator[bytes] | None:
    """What to send of a body: a large one by and by, or it would be copied at once."""
    if len(body) <= _PIECE_BYTES:
        return body or None
    headers["Content-Length"] = str(len(body))

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), _PIECE_BYTES):
            yield bytes(body[start : start + _PIECE_BYTES])

    return pieces()


class Passing:
    """Passes requests on."""

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        servers: Servers,
        metrics: GatewayMetrics,
        limits: Limits,
        session: Callable[[], aiohttp.ClientSession],
    ) -> None:
        self.stored: OrderedDict[str, str] = OrderedDict()
        """Workers by the ids of their latest stored responses."""
        self._config = config
        self._fleet = fleet
        self._servers = servers
        self._metrics = metrics
        self._limits = limits
        self._session = session

    async def answer(self, request: web.Request, passed: Passed) -> web.StreamResponse:
        """The answer, sent. Raises EngineDead and RequestTimeout before it has begun."""
        began = time.monotonic()
        try:
            async with self.opened(passed) as (theirs, first, server):
                self._metrics.first_byte.observe(time.monotonic() - began)
                return await self._relay(request, theirs, first, server)
        except NotBegunError as error:
            if error.answer is None:
                raise
            return error.answer

    @contextlib.asynccontextmanager
    async def opened(self, passed: Passed) -> Any:
        """What `sent` gives, from the first worker that answers. Raises what `sent` does for the last try."""
        for number in itertools.count():
            try:
                async with self.sent(passed) as found:
                    yield found
                return
            except NotBegunError as error:
                if number >= self._config.retries:
                    raise
                self._metrics.retries.labels(error.reason).inc()
            left = passed.left()
            longest = min(self._config.retry_pause * 2.0**number, _LONGEST_PAUSE)
            await asyncio.sleep(random.uniform(0, longest if left is None else min(longest, left)))

    @contextlib.asynccontextmanager
    async def sent(self, passed: Passed) -> Any:
        """Send it to a worker: its answer, the first bytes of it, and the server. Raises NotBegunError,
        EngineDead, QueueFull and RequestTimeout."""
        ticket = await self._ticket(passed)
        server = self._servers[ticket.worker.id]
        passed.tried[server.id] = 1 + max(passed.tried.values(), default=0)
        number = server.breaker.began()
        self._metrics.sent.labels(server.id).inc()
        call: Call | None = None
        late: asyncio.TimerHandle | None = None
        theirs: aiohttp.ClientResponse | None = None
        try:
            body = passed.body if passed.pairing is None else await passed.pairing.body(server, ticket)
            if self._servers.get(server.id) is not server:  # meanwhile
                raise NotBegunError("gone")
            headers = headers_to_worker(passed.headers)
            left = None if passed.due is None else max(passed.due - time.monotonic(), 0.001)  # workers refuse 0
            if left is not None:
                headers[DEADLINE_HEADER] = f"{left:.3f}"
            limits = [each for each in (self._config.worker_timeout, left) if each is not None]
            call, began = Call(min(limits, default=None)), time.monotonic()
            try:
                async with call.limit:
                    server.calls.add(call)
                    theirs = await self._session().request(
                        passed.method,
                        server.url + passed.path,
                        data=in_pieces(body, headers),
                        headers=headers,
                        allow_redirects=False,
                    )
                    first = await theirs.content.readany()
                call.theirs = theirs
            except TimeoutError:
                if call.is_cut or call.seconds != left or server.is_mute(began):  # or a client has little patience
                    server.failed()
                passed.left()
                raise NotBegunError("silent" if call.is_cut else "timeout") from None
            except (aiohttp.ClientError, OSError) as error:
                if not is_ours(error):
                    server.failed()
                raise NotBegunError(_reason(error)) from error
            except asyncio.CancelledError:  # its client has left
                if server.is_mute(began):
                    server.failed()
                raise
            if theirs.status in _AGAIN:
                raise await self._refusal(theirs, first, server)
            if (reason := why_not(theirs, passed.method, first)) is not None:
                server.failed()
                raise NotBegunError(reason)
            if passed.due is not None:
                late = asyncio.get_running_loop().call_at(passed.due + DUE_SECONDS, call.end)
            server.began_to_answer()
            if passed.pairing is not None:
                passed.pairing.answered(server, theirs.status, first)
            if server.checks_keys and passed.method == "POST" and theirs.status < 400:
                self._limits.accepted(key_of(passed.headers))
            ticket.first_byte()
            yield theirs, first, server
            if theirs.content.at_eof() and is_computed(theirs, passed.method, passed.path, first):
                server.answered()
        finally:
            if late is not None:
                late.cancel()
            if theirs is not None:
                theirs.release()  # closes the connection, unless the answer has ended
            if call is not None:
                server.calls.discard(call)
            if number:
                server.breaker.left(number)
                self._servers.tell()
            ticket.end()

    async def _ticket(self, passed: Passed) -> Ticket:
        """From a worker that takes it, once there is one."""
        has_turn = False
        while True:
            try:
                due, left = passed.left(), self._config.worker_wait - passed.waited
            except RequestTimeout:
                if has_turn:  # another may have it now
                    self._servers.tell()
                raise
            if passed.only is not None and passed.only not in self._servers:
                raise EngineDead(f"the worker that this is for, {passed.only}, is gone")
            adapters = passed.demand.adapters
            if ready := self._servers.ready_for(passed.mode, passed.tried, passed.only, adapters):
                break
            if left <= 0:
                which = "no worker takes requests: they are" if passed.only is None else f"{passed.only} is"
                raise EngineDead(f"{which} starting, draining, or gone")
            began = time.monotonic()
            with self._limits.wait(is_admitted=passed.is_begun):
                has_turn = await self._servers.turn(
                    passed.only, passed.mode, adapters, left if due is None else min(left, due)
                )
            passed.waited += time.monotonic() - began
        ticket = self._fleet.route(passed.demand, (its.worker for its in ready))
        self._metrics.prompt.inc(passed.demand.prompt)
        self._metrics.found.inc(ticket.found_tokens)
        return ticket

    async def _refusal(self, theirs: aiohttp.ClientResponse, first: bytes, server: Server) -> NotBegunError:
        """Of a worker that takes no request now. A full queue says nothing against it."""
        if theirs.status != 429:
            server.failed()
        reason = f"status {theirs.status}"
        with contextlib.suppress(aiohttp.ClientError, OSError):
            text = await whole(theirs, first)
            if why_not(theirs, "GET", text) is None:
                answer = web.Response(status=theirs.status, body=text, headers=headers_for(theirs.headers))
                return NotBegunError(reason, answer)
        return NotBegunError(reason)

    async def _relay(
        self, request: web.Request, theirs: aiohttp.ClientResponse, first: bytes, server: Server
    ) -> web.StreamResponse:
        ours = sse.EventStream(status=theirs.status)
        ours.headers.extend(headers_for(theirs.headers))
        if "Content-Length" in theirs.headers and "Content-Encoding" not in theirs.headers:
            ours.content_length = theirs.content_length
        ours.headers[WORKER_HEADER] = server.id
        if request.path == "/v1/responses" and (found := _RESPONSE_ID.search(first)):
            self.stored[found[1].decode()] = server.id
            if len(self.stored) > _STORED:
                self.stored.popitem(last=False)
        await ours.prepare(request)
        part, content, last, held = first, theirs.content, b"", b""
        is_stream = ours.content_type == "text/event-stream" and ours.content_length is None
        has_events = is_stream and "Content-Encoding" not in theirs.headers
        says_its_end = not has_events or "Transfer-Encoding" in theirs.headers  # else: closes the connection
        patience = None if theirs.content_type in STREAMS else STALL_SECONDS
        while part:
            part = held + part
            end = up_to_last_event(part) if has_events else len(part)
            if content.at_eof() and (says_its_end or end == len(part)):  # known at once: its end goes with it
                await sse.write(request, ours, part, WRITE_SECONDS, is_last=True)
                break
            part, held = part[:end], part[end:]
            if part:
                last = part
                await sse.write(request, ours, part, WRITE_SECONDS)
            is_ours_to_end = isinstance(content.exception(), Overdue)  # its client was slow to take what had come
            try:
                async with asyncio.timeout(patience):
                    part = await content.readany()
                if not part and held.strip() and not says_its_end:
                    raise aiohttp.ClientPayloadError("the connection ended within an event")
            except (aiohttp.ClientError, OSError) as error:  # too late for another worker
                self._metrics.cut.inc()
                if not is_ours_to_end:
                    server.failed()
                await self._cut(request, ours, last, error if has_events else None)
                return ours
            server.heard()
        if held and not part:
            await sse.write(request, ours, held, WRITE_SECONDS)
        return ours

    async def _cut(
        self, request: web.Request, ours: web.StreamResponse, last: bytes, error: Exception | None
    ) -> None:
        """Tell a client that its answer ends too early, with an event if there is an error to tell."""
        if error is not None:
            lost = EngineDead(f"the worker failed after its answer had begun: {_reason(error)}")
            between = b"" if not last or last.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
            with contextlib.suppress(ConnectionError):
                await ours.write(between + error_event(request.path, lost))
        if request.transport is not None:  # without the end of the last chunk
            request.transport.close()


def error_event(path: str, error: SglError) -> bytes:
    """An error as the last event of a stream."""
    body, start = error_body(error), b""
    if path in ("/v1/messages", "/v1/responses"):
        body = {"type": "error", **(body if path == "/v1/messages" else body["error"])}
        start = b"event: error\n"
    return start + b"data: " + json.dumps(body).encode() + b"\n\n"


def _reason(error: BaseException) -> str:
    """For a metric's label: a few kinds."""
    if is_ours(error):
        return "the gateway has no files or ports left"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "no connection"
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError)):
        return "disconnected"
    return type(error).__name__
