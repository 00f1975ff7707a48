"""Programs before several workers: each is placed once, by all that it will do, and outlives its worker.

The gateway keeps what a client sent and what it was told. When a worker fails, the program is opened again at another
one, from its segments; a program's values depend on its seeds alone, so they come again, and the client gets only what
it has not had, or an error if they come out otherwise. The rows of a batch go to as many workers as their shared
beginning is worth."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from sgl.errors import EngineDead, InvalidRequest, QueueFull, RequestTimeout, SglError
from sgl.lang.ir.told import Told
from sgl.runtime.gateway.demands import session_of
from sgl.runtime.gateway.limits import key_of
from sgl.runtime.gateway.openings import PartBody, parts_of, segment_of, with_deadline
from sgl.runtime.gateway.pairs import Pairs
from sgl.runtime.gateway.passing import WRITE_SECONDS, NotBegunError, Passed, Passing, headers_to_worker, in_pieces
from sgl.runtime.gateway.policy import Demand
from sgl.runtime.gateway.reading import Reader
from sgl.runtime.gateway.replies import DUE_SECONDS, Lost, Moved, Refused, event_of, whole
from sgl.runtime.gateway.workers import Server
from sgl.runtime.server import sse
from sgl.runtime.server.encoding import json_response
from sgl.runtime.server.errors import NotThere, error_body

logger = logging.getLogger(__name__)

MAX_PROGRAMS = 20_000
MAX_BYTES = 256_000_000
"""Of what is kept of all open programs."""
GRACE_SECONDS = 30.0
"""A program without a listener for so long is cancelled."""
_LIMIT = aiohttp.ClientTimeout(total=30.0)  # of a call about a program that is open at a worker
OPENED_SECONDS = 30.0
"""For a worker that has begun to answer to say that it has opened a program."""
MOST_EVENT_BYTES = 64 << 20
MOST_FAILURES = 10
"""Of workers that ran a program in a row, before it is given up."""
_IN_TURN = 64  # events of one program

_LOST = ("EngineDead", "ServerUnreachable")  # failures of a worker, not of the program


class Programs:
    """The open programs of a gateway."""

    def __init__(
        self,
        passing: Passing,
        pairs: Pairs,
        reader: Reader,
        session: Callable[[], aiohttp.ClientSession],
        reopened: Callable[[], None],
    ) -> None:
        """reopened: is called for each program that is opened again."""
        self.passing = passing
        self.pairs = pairs
        self.reader = reader
        self.events = Reader()  # workers' large events hold up no client's bodies
        self.session = session
        self.reopened = reopened
        self.held = 0  # bytes
        self.open: dict[str, Program] = {}

    async def create(self, request: web.Request, body: bytearray, due: float | None) -> web.StreamResponse:
        """Open a program and stream its events. due: when its request is, by the clock."""
        opened_at = time.monotonic()  # from when its deadline counts
        if len(self.open) >= MAX_PROGRAMS:
            raise QueueFull(f"{MAX_PROGRAMS} programs are open", limit=MAX_PROGRAMS)
        self.check_room(len(body))
        servers, session = self.pairs.servers, session_of(request.headers)
        workers = [its.adapters for its in servers.ready_for(None)]
        seconds = None if due is None else max(0.001, due - opened_at)
        parts = await self.reader.read(parts_of, body, session, workers, servers.adapters, seconds)
        size = sum(len(body if part.body is None else part.body) for part in parts)
        self.check_room(size)
        program = Program(self, request, body, parts, opened_at)
        program.count(size)
        self.open[program.id] = program
        try:
            program.note({"type": "opened", "id": program.id})
            await asyncio.gather(*(part.opened for part in program.parts))
        except BaseException as error:
            program.end()
            if isinstance(error, (Refused, NotBegunError)) and error.answer is not None:
                return error.answer
            raise
        return await program.stream(request, 0, WRITE_SECONDS)

    async def of_one(self, request: web.Request, body: bytearray) -> web.StreamResponse:
        """What clients do with an open program, by its path."""
        _, _, _, program_id, *rest = request.path.split("/")
        program = self.open.get(program_id)
        key = key_of(request.headers).encode("utf-8", "surrogateescape")
        if program is None or not secrets.compare_digest(program.key, key):
            raise NotThere("there is no such program: it ended, or nobody listened to it for too long", param="id")
        if request.method == "DELETE" and not rest:
            program.end()
            return json_response({"id": program.id})
        if request.method == "POST" and rest == ["segments"]:
            return await program.add(body)
        if request.method == "GET" and rest == ["events"]:
            return await program.stream(request, program.last_seen(request), WRITE_SECONDS)
        if request.method == "GET" and rest in (["timeline"], ["view"]):
            part = program.parts[0]
            if part.server is None or part.remote is None:
                raise NotThere("the program is at no worker at the moment: ask again", param="id")
            path = f"/v1/programs/{part.remote}/{rest[0]}"
            passed = Passed("GET", path, request.headers, b"", Demand(), only=part.server.id)
            return await self.passing.answer(request, passed)
        raise web.HTTPNotFound

    def check_room(self, size: int) -> None:
        """Whether that many bytes more may be kept. Raises QueueFull."""
        if self.held + size > MAX_BYTES:
            raise QueueFull(f"the programs that are open hold {MAX_BYTES} bytes: try again later", limit=MAX_BYTES)

    def count(self, size: int) -> None:
        """So many bytes more are kept. Events of a worker that never stops end the program that holds most."""
        self.held += size
        if size > 0 and self.held > 2 * MAX_BYTES and self.open:
            largest = max(self.open.values(), key=lambda program: program.size)
            logger.warning("a program is ended: its workers have sent %d bytes", largest.size)
            largest.end()

    async def close(self) -> None:
        """End them all."""
        for program in list(self.open.values()):
            program.end()
        self.events.close()


class Program(sse.EventLog):
    """One program, or rows of one, as its client sees it."""

    def __init__(
        self, programs: Programs, request: web.Request, body: bytearray, parts: list[PartBody], opened_at: float
    ) -> None:
        super().__init__(GRACE_SECONDS)
        self.key = key_of(request.headers).encode("utf-8", "surrogateescape")
        self.segments: list[bytes] = []  # beside the opening one
        self.headers = headers_to_worker(request.headers)
        self.programs = programs
        self.parts = [Part(self, body if part.body is None else part.body, part) for part in parts]
        self.opened_at = opened_at
        self.size = 0  # bytes kept of it
        self._adding = asyncio.Lock()

    async def add(self, body: bytearray) -> web.Response:
        """Take the next segment: the worker checks it, if there is one now."""
        async with self._adding:
            adapters = self.programs.pairs.servers.adapters
            number, segment, asked = await self.programs.reader.read(segment_of, body, adapters)
            number = len(self.segments) + 1 if number is None else number
            if number > len(self.segments) + 1:
                raise InvalidRequest(f"segment {len(self.segments) + 1} is missing", param="number")
            if number == len(self.segments) + 1:
                self.programs.check_room(len(segment))
                refused = await self.parts[0].pass_on(segment, number, asked)
                if refused is not None:
                    return refused
                self.parts[0].asks(asked)
                self.segments.append(segment)
                self.count(len(segment))
                self.parts[0].has_more.set()
        return json_response({"id": self.id})

    def note(self, data: dict[str, Any]) -> None:
        """An event for the client."""
        if self.is_over:
            return
        super().note(data)
        self.count(len(self.log[-1]))

    def part_ended(self) -> None:
        """A part has: the program, too, if all have."""
        self._changed.set()

    @property
    def has_run(self) -> bool:
        return all(part.is_done for part in self.parts)

    def end(self) -> None:
        """Cancel and forget it. Idempotent."""
        super().end()
        for part in self.parts:
            part.stop()
        self.count(-self.size)
        self.programs.open.pop(self.id, None)

    def count(self, size: int) -> None:
        """So many bytes more are kept of it."""
        self.size += size
        self.programs.count(size)


class Part:
    """What one worker has of a program: all, or some of its rows. It goes on elsewhere when its worker fails."""

    def __init__(self, program: Program, body: bytes | bytearray, about: PartBody) -> None:
        """body: what its worker gets."""
        self.server: Server | None = None
        self.remote: str | None = None  # the program's id there
        self.is_done = False
        self.has_more = asyncio.Event()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._program = program
        self._body = body
        self._about = about
        self._left = about.num_rows
        self._told = Told()
        self._tried: dict[str, int] = {}  # see `Passed`
        self._first = 1  # number in it of the first of those that failed in a row, while the client had no news
        self._num_failures = 0  # of these
        self._num_begun = 0  # of these that had begun the program
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """End it at its worker: the connection closes, and then a DELETE says so."""
        self._task.cancel()
        if not self.opened.done():
            self.opened.cancel()
        if not self.is_done:
            self._end_remote()

    def asks(self, adapters: frozenset[str]) -> None:
        """A segment names these LoRA adapters, which may be at other workers alone."""
        demand = self._about.demand
        self._about = replace(self._about, demand=replace(demand, adapters=demand.adapters | adapters))

    def _is_elsewhere(self, more: frozenset[str] = frozenset()) -> bool:
        """Whether others have the adapters that it names, with these, and its worker has not."""
        servers, asked = self._program.programs.pairs.servers.values(), self._about.demand.adapters | more
        lacks = self.server is not None and not asked <= self.server.adapters
        return lacks and any(asked <= its.adapters for its in servers)

    async def pass_on(self, segment: bytes, number: int, asked: frozenset[str]) -> web.Response | None:
        """Send a segment to the worker; its answer, if it refuses it. A worker that fails gets it later, and another
        one if the adapters that it asks for are there."""
        if self.remote is None or self._is_elsewhere(asked):
            return None
        try:
            async with self._post_segment(segment, number) as answer:
                if answer.status < 500 and answer.status not in (200, 404, 429):
                    text, kind = await whole(answer), answer.content_type
                    return web.Response(status=answer.status, body=text, content_type=kind)
        except (aiohttp.ClientError, OSError):
            pass  # it is sent again with all others
        return None

    async def _run(self) -> None:
        """Follow it at one worker after the other."""
        limit = None if self._about.deadline is None else self._about.deadline + DUE_SECONDS
        try:
            async with asyncio.timeout_at(None if limit is None else self._program.opened_at + limit):
                while not self.is_done:
                    try:
                        await self._follow()
                    except (Lost, NotBegunError, aiohttp.ClientError, OSError) as lost:
                        if not self.opened.done() and isinstance(lost, NotBegunError):
                            raise
                        self._lose(lost)
        except Exception as error:  # the program's client is told
            if isinstance(error, TimeoutError):
                error = RequestTimeout("no worker ended the program within its deadline_s", seconds=limit or 0.0)
            self.remote = None
            if not self.opened.done():
                self.opened.set_exception(error)
            else:
                self._fail(error)
        finally:
            self._program.part_ended()

    def _lose(self, lost: Exception) -> None:
        """Its worker failed. Raises EngineDead if nobody else is to run it while its client has no news: all have
        tried, or it may be what ends those that begin it."""
        programs = self._program.programs
        if isinstance(lost, Moved):
            self._end_remote()
        elif self.server is not None:
            self.server.failed()
        self._num_failures += 1
        self._num_begun += self.remote is not None
        if self._num_failures > MOST_FAILURES:
            ready = programs.pairs.servers.ready_for(None, self._tried, adapters=self._about.demand.adapters)
            if self._num_begun > MOST_FAILURES or all(self._tried.get(its.id, 0) >= self._first for its in ready):
                raise EngineDead(
                    f"{self._num_failures} workers in a row failed that ran the program: {lost}"
                ) from lost
        self.remote, self.server = None, None
        self._told.begin_again()
        programs.reopened()

    async def _follow(self) -> None:
        """Open it at a worker and tell what comes. Raises Lost."""
        programs = self._program.programs
        body, is_begun = self._body, self.opened.done()
        if self._about.deadline is not None:
            left = max(0.001, self._about.deadline + self._program.opened_at - time.monotonic())
            body = await programs.reader.read(with_deadline, body, left)
        passed = Passed("POST", "/v1/programs", self._program.headers, body, self._about.demand, is_begun=is_begun)
        passed.tried = self._tried
        pairing = programs.pairs.of(passed, "/v1/programs", "could", self._about.beginning)
        async with pairing, programs.passing.opened(passed) as (theirs, first, server):
            self.server = server
            if theirs.status != 200:
                text = await whole(theirs, first)
                if is_begun:  # others took it
                    raise Lost(f"status {theirs.status}")
                raise Refused(web.Response(status=theirs.status, body=text, content_type=theirs.content_type))
            if theirs.content_type != "text/event-stream":
                raise Lost(f"it answers {theirs.content_type}, and no events")
            reading = asyncio.ensure_future(self._read(server, theirs, first))
            sending = asyncio.ensure_future(self._send_segments())
            try:
                done, _ = await asyncio.wait([reading, sending], return_when=asyncio.FIRST_COMPLETED)
                if reading not in done:
                    sending.result()
                await reading
            finally:
                for task in (reading, sending):
                    task.cancel()
                await asyncio.gather(reading, sending, return_exceptions=True)

    async def _read(self, server: Server, theirs: aiohttp.ClientResponse, first: bytes) -> None:
        buffer, searched, number, programs = bytearray(first), 0, 0, self._program.programs
        is_computed = False
        while True:
            while (end := buffer.find(b"\n\n", searched)) >= 0:
                if b"data: " in (data := bytes(buffer[:end])):
                    number += 1
                    try:
                        event = await programs.events.read(event_of, data, number, self._about.num_rows)
                    except InvalidRequest as error:
                        raise Lost(str(error)) from error
                    self._take(event)
                    is_computed |= event["type"] == "node_done" and bool(event.get("meta"))  # by its engine
                del buffer[: end + 2]
                searched = 0
                if not number % _IN_TURN:  # others have their turn
                    await asyncio.sleep(0)
            if self.is_done:
                if is_computed:
                    server.answered()
                return
            searched = max(0, len(buffer) - 1)
            if searched > MOST_EVENT_BYTES:
                raise Lost(f"an event has more than {MOST_EVENT_BYTES} bytes")
            async with asyncio.timeout(None if self.remote else OPENED_SECONDS):
                part = await theirs.content.readany()
            if not part:
                raise Lost("its events ended")
            server.heard()
            buffer += part

    async def _send_segments(self) -> None:
        """The client's segments, from the first on: the worker knows by their numbers which it has."""
        number = 0
        while True:
            self.has_more.clear()
            if self.remote is not None:
                if self._is_elsewhere():
                    raise Moved("others have its adapters")
                while number < len(self._program.segments):
                    async with self._post_segment(self._program.segments[number], number + 1) as answer:
                        if answer.status in (404, 429) or answer.status >= 500:
                            raise Lost(f"status {answer.status}")
                        if answer.status != 200:
                            raise InvalidRequest(f"a worker does not take segment {number + 1}")
                    number += 1
            await self.has_more.wait()

    def _take(self, event: dict[str, Any]) -> None:
        """Tell the client what it has not had. Raises Lost where a node failed because the worker did, and BackendError
        where what it has had comes out otherwise."""
        kind = event["type"]
        if kind == "opened":
            self.remote = event["id"]
            self.has_more.set()
            if not self.opened.done():
                self.opened.set_result(None)
            return
        if kind == "node_failed" and event["error"].get("class") in _LOST:
            raise Lost(event["error"].get("message", ""))
        if self._about.first_row is not None:
            event["row"] = event.get("row", 0) + self._about.first_row
        if not self._told.has_news(event):
            return
        if self._num_failures:
            self._num_failures = self._num_begun = 0
            self._first = max(self._tried.values())
        self._program.note(event)
        if kind == "done":
            self._left -= 1
            self.is_done = not self._left

    def _fail(self, error: Exception) -> None:
        """Nobody can go on with it."""
        if not isinstance(error, SglError):
            logger.error("a program failed", exc_info=error)
            error = EngineDead(f"the program failed at the gateway: {type(error).__name__}")
        first = self._about.first_row
        rows = [None] if first is None else range(first, first + self._about.num_rows)
        described = {**error_body(error)["error"], "class": type(error).__name__, "data": {}}
        for row in rows:
            if ("done", row, None, None) in self._told:
                continue
            of_row = {} if row is None else {"row": row}
            self._program.note({"type": "node_failed", **of_row, "stream": None, "index": None, "error": described})
            self._program.note({"type": "done", **of_row})
        self.is_done = True

    def _url(self) -> str:
        assert self.server is not None, "it is open there"
        return f"{self.server.url}/v1/programs/{self.remote}"

    def _post_segment(self, segment: bytes, number: int) -> Any:
        headers = CIMultiDict(self._program.headers)
        headers["Content-Type"] = "application/json"
        body = b'{"segment":%b,"number":%d}' % (segment, number)
        data, post = in_pieces(body, headers), self._program.programs.session().post
        return post(self._url() + "/segments", data=data, headers=headers, timeout=_LIMIT, allow_redirects=False)

    def _end_remote(self) -> None:
        if self.remote is not None:
            task = asyncio.ensure_future(self._cancel(self._url()))
            _CANCELLING.add(task)
            task.add_done_callback(_CANCELLING.discard)

    async def _cancel(self, url: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            session = self._program.programs.session()
            async with session.delete(url, headers=self._program.headers, timeout=_LIMIT):
                pass


_CANCELLING: set[asyncio.Task[None]] = set()  # or nobody would hold them
