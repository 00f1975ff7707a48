"""Programs over HTTP: segments in, events out.

    POST   /v1/programs                 open a program (or one per row); answers with its events
    POST   /v1/programs/{id}/segments   send the next segment
    GET    /v1/programs/{id}/events     resume after the event that Last-Event-ID names
    DELETE /v1/programs/{id}            cancel

Events are numbered and kept, so a broken connection loses nothing. A program without a listener for `--reconnect-grace`
seconds is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from sgl.errors import InvalidRequest, QueueFull, RequestAborted, SglError
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import registry
from sgl.lang.ir.check import Checker, Limits, program_from_wire
from sgl.lang.ir.pool import Pool
from sgl.lang.view.html import page_part
from sgl.runtime.program.sender import Sender, current_sender
from sgl.runtime.requests.threads import in_thread
from sgl.runtime.server import encoding, sse
from sgl.runtime.server.deadline import deadline
from sgl.runtime.server.encoding import json_response
from sgl.runtime.server.engine_process import RemoteSession
from sgl.runtime.server.errors import NotThere, error_body
from sgl.runtime.server.history import note
from sgl.runtime.server.identity import Caller, current_caller
from sgl.runtime.server.program_bodies import EXAMPLE, ProgramBody, Row, SegmentBody
from sgl.runtime.server.program_pages import Pages
from sgl.runtime.server.reader import is_small
from sgl.runtime.server.replicas import PlacedSession
from sgl.runtime.server.replies import ProgramId, ProgramPages, ProgramSummary, Timeline
from sgl.runtime.server.routes import Api, endpoint
from sgl.runtime.server.service import Service

_ROWS_AT_ONCE = 512  # rows of a batch; more would crowd out others
_ROWS_IN_TURN, _TURN_SECONDS = 32, 0.005  # opened in one turn, and the pause between turns

T = TypeVar("T")

MAX_PROGRAMS = 20_000  # open at once
MAX_HELD = 256_000_000  # characters of nodes and bytes of events, in all open programs
MAX_ARGS = 1_000_000  # rows x arguments shared by all rows
RECENT = 50  # programs whose timelines are kept
RECENT_CHARACTERS = 32_000_000  # of those programs; large ones leave room for fewer

_TYPES = {cls: name for name, cls in ir.EVENTS.items()}


class ProgramsApi(Api):
    """The endpoints, and the open programs."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._programs = _OpenPrograms()
        self._recent: deque[_Program] = deque(maxlen=RECENT)
        self._pages = Pages(service)
        service.abort_programs = self.abort_all

    @endpoint("POST /v1/programs", example=EXAMPLE, answer=ProgramPages, streams=True)
    async def create(self, request: web.Request, body: ProgramBody) -> web.StreamResponse:
        """Check and run a program; streams its events."""
        self._service.check_is_up()
        rows = body.rows or [Row()]
        self._programs.check_number()
        self._programs.check_room()
        self._service.history.generates()
        if body.rows is not None and not (body.segment and body.segment.get("final") is True):
            raise InvalidRequest("rows need a segment that is final", param="segment")
        first = await self._checked(program_from_wire, body.program)
        due = deadline.get()
        if due is not None and (left := due.handed_on()) is not None:
            left = left if first.deadline_s is None else min(left, first.deadline_s)
            first = dataclasses.replace(first, deadline_s=left)
        if first.chat_template is not None and first.chat_template not in registry:
            message = (
                f"a program may name a chat template ({', '.join(registry)}); its source is code of the client's"
            )
            raise InvalidRequest(message, param="program.chat_template")
        template = first.chat_template or self._service.chat_template
        if len(rows) * len(first.args) > MAX_ARGS:
            message = (
                f"{len(rows)} rows of {len(first.args)} arguments are more than {MAX_ARGS}: give rows their own"
            )
            raise InvalidRequest(message, param="program.args")
        programs = [
            dataclasses.replace(
                first,
                args={**first.args, **row.args},
                seed=first.seed if row.seed is None else row.seed,
                chat_template=template,
            )
            for row in rows
        ]
        num_rows = None if body.rows is None else len(rows)
        if body.return_kv_transfer_params:
            return json_response(await self._pages.offered(programs, await self._first_segment(body, programs[0])))
        if body.kv_transfer_params is not None:
            segment = await self._first_segment(body, programs[0])
            began = time.monotonic()
            await self._pages.pull(programs, segment, body.kv_transfer_params)
            if first.deadline_s is not None:  # of which that is a part
                left = max(0.0, first.deadline_s - (time.monotonic() - began))
                programs = [dataclasses.replace(each, deadline_s=left) for each in programs]
        opened = _Program(self._service, programs[0], self._programs, num_rows=num_rows)
        try:
            segment = None if body.segment is None else await self._checked(opened.checker.segment, body.segment)
            self._programs.add(opened)
            if body.rows is None:
                opened.nodes += [] if body.segment is None else body.segment["nodes"]
                self._recent.append(opened)
                while len(self._recent) > 1 and sum(each.size for each in self._recent) > RECENT_CHARACTERS:
                    self._recent.popleft()
            opened.count()
            opened.start(programs, segment)
        except BaseException:
            opened.end()
            raise
        return await opened.stream(request, 0, self._service.config.write_timeout)

    async def _first_segment(self, body: ProgramBody, program: ir.Program) -> ir.Segment | None:
        if body.segment is None:
            return None
        limits = Limits(requests=self._service.engine.config.max_requests_per_call)
        return await self._checked(Checker(program, limits, rows=len(body.rows or [0])).segment, body.segment)

    async def _checked(self, check: Callable[[Any], T], data: Any) -> T:
        """Check part of a body; in a thread if the body is large."""
        return check(data) if is_small.get() else await self._service.in_thread(check, data)

    @endpoint("GET /v1/programs")
    async def recent(self, request: web.Request) -> list[ProgramSummary]:
        """The caller's recent programs, latest first."""
        caller = current_caller.get()
        return [each.summary() for each in reversed(self._recent) if caller.may_reach(each.owner)]

    @endpoint("GET /v1/programs/{id}/timeline")
    async def timeline(self, request: web.Request) -> Timeline:
        """A recent program's nodes and events, in seconds since it opened."""
        opened = self._recent_one(request)
        return await in_thread(opened.timeline(), encoding.size_of_text(opened.size))

    def _recent_one(self, request: web.Request) -> _Program:
        for opened in self._recent:
            if opened.id == request.match_info["id"] and current_caller.get().may_reach(opened.owner):
                return opened
        raise NotThere("there is no such program, or others have followed since", param="id")

    @endpoint("GET /v1/programs/{id}/view", content_type="text/html")
    async def view(self, request: web.Request) -> web.Response:
        """A recent program's text in spans beside lanes of when they came about, as part of a page."""
        opened = self._recent_one(request)
        timeline = opened.timeline()
        text = await in_thread(lambda: page_part(timeline()), encoding.size_of_text(opened.size))
        return web.Response(text=text, content_type="text/html")

    @endpoint("POST /v1/programs/{id}/segments")
    async def segment(self, request: web.Request, body: SegmentBody) -> ProgramId:
        """Send the next segment; its results are events."""
        opened = self._find(request)
        self._programs.check_room()
        async with opened.checking:
            if body.number is not None and body.number > opened.num_segments + 1:
                raise InvalidRequest(f"segment {opened.num_segments + 1} is missing", param="number")
            if body.number is None or body.number == opened.num_segments + 1:
                segment = await self._checked(opened.checker.segment, body.segment)
                opened.num_segments += 1
                opened.nodes += body.segment["nodes"]
                opened.count()
                opened.send(segment)
        return {"id": opened.id}

    @endpoint("GET /v1/programs/{id}/events", headers=("Last-Event-ID",), content_type="text/event-stream")
    async def events(self, request: web.Request) -> web.StreamResponse:
        """Resume a program's events after Last-Event-ID."""
        opened = self._find(request)
        if (due := deadline.get()) is not None:
            due.handed_on()  # to the program, which has its own
        return await opened.stream(request, opened.last_seen(request), self._service.config.write_timeout)

    @endpoint("DELETE /v1/programs/{id}")
    async def cancel(self, request: web.Request) -> ProgramId:
        """Cancel a program and release what it holds."""
        opened = self._find(request)
        opened.end()
        return {"id": opened.id}

    def abort_all(self, caller: Caller) -> None:
        """Fail a caller's programs."""
        for opened in list(self._programs.values()):
            if caller.name == opened.owner:
                opened.abort()

    def _find(self, request: web.Request) -> _Program:
        opened = self._programs.get(request.match_info["id"])
        if opened is None or not current_caller.get().may_reach(opened.owner):  # guessing an id reveals nothing
            raise NotThere("there is no such program: it ended, or nobody listened to it for too long", param="id")
        return opened


class _OpenPrograms(dict[str, "_Program"]):
    """The open programs by id, and their shared limits."""

    def __init__(self) -> None:
        super().__init__()
        self.programs = Pool()
        self.held = Pool()

    def add(self, opened: _Program) -> None:
        """Add a program."""
        self[opened.id] = opened
        self.programs.take(1, opened.tenant)

    def forget(self, opened: _Program) -> None:
        """Remove a program, if present."""
        if self.pop(opened.id, None) is not None:
            self.programs.take(-1, opened.tenant)

    def check_number(self) -> None:
        """Raise QueueFull if no further program may open."""
        tenant = current_caller.get().tenant
        if self.programs.room(MAX_PROGRAMS, tenant) < 1:
            what = f"{MAX_PROGRAMS} programs are open"
            if tenant is not None:
                what = (
                    f"{self.programs.of(tenant)} programs of this key are open: it leaves no more of {MAX_PROGRAMS}"
                )
            raise QueueFull(what, limit=MAX_PROGRAMS)

    def check_room(self) -> None:
        """Raise QueueFull if nodes have no room left. Events of accepted nodes still arrive."""
        tenant = current_caller.get().tenant
        if self.held.room(MAX_HELD, tenant) < 0:
            what = f"the programs that are open hold more than {MAX_HELD} characters together"
            if tenant is not None:
                what = f"the programs of this key hold more than they leave of {MAX_HELD} characters"
            raise QueueFull(f"{what}; try again later", limit=MAX_HELD)


class _Program(sse.EventLog):
    """A program, or one per row, with its events so far."""

    def __init__(
        self, service: Service, program: ir.Program, others: _OpenPrograms, *, num_rows: int | None
    ) -> None:
        """`others`: the open programs, which it leaves at its end. `num_rows`: of a batch."""
        super().__init__(service.config.reconnect_grace)
        self.owner = current_caller.get().name
        self.tenant = current_caller.get().tenant
        self._context = contextvars.copy_context()  # of the opening request
        self._request = note.get()
        self._context.run(current_sender.set, Sender(self.tenant, self.id))
        limits = Limits(requests=service.engine.config.max_requests_per_call)
        self.checker = Checker(program, limits, rows=num_rows or 1)
        self.num_segments = 0  # beside the opening one
        self.checking = asyncio.Lock()  # held while a segment is checked
        self.nodes: list[dict[str, Any]] = []  # in order of arrival
        self._name = program.name
        self._started = time.time()
        self._times: list[float] = []  # of the log's events
        self._num_bytes = 0  # of all events
        self._num_counted = 0  # size already charged
        self._service = service
        self._parent = None if service.tracer is None else service.tracer.here()
        self._others = others
        self._is_batch = num_rows is not None
        self._num_rows = num_rows or 1
        self._sessions: dict[int, RemoteSession | PlacedSession] = {}  # of running rows
        self._waiting: deque[tuple[int, ir.Program]] = deque()  # rows not begun
        self._first: ir.Segment | None = None
        self._filling: asyncio.Handle | None = None
        self._num_running = 0  # rows not ended
        self._ended: set[int] = set()  # rows

    def start(self, programs: list[ir.Program], segment: ir.Segment | None) -> None:
        """Open a session per row; some wait until others end. Raises their errors."""
        self.note({"type": "opened", "id": self.id})
        self._waiting.extend(enumerate(programs))
        self._num_running, self._first = len(programs), segment
        self._fill()

    def _fill(self) -> None:
        """Start further rows, a few per turn."""
        self._filling = None
        for _ in range(_ROWS_IN_TURN):
            if not self._waiting or len(self._sessions) >= _ROWS_AT_ONCE:
                return
            row, program = self._waiting.popleft()
            begin: Callable[..., RemoteSession | PlacedSession] = self._service.engine.open_program
            session = self._context.run(begin, program, partial(self._take, row))
            self._sessions[row] = session
            if self._first is not None:
                session.send(self._first)
        self._filling = asyncio.get_running_loop().call_later(_TURN_SECONDS, self._fill_or_fail)

    def _fill_or_fail(self) -> None:
        try:
            self._fill()
        except SglError as error:  # no row can start any more
            self._fail(error)

    def _fail(self, error: SglError) -> None:
        self._stop_filling()
        for row in range(self._num_rows):
            if row not in self._ended:
                session = self._sessions.get(row)
                self._take(row, ir.NodeFailed(None, None, error))
                self._take(row, ir.Done())
                if session is not None:
                    session.cancel()

    def _stop_filling(self) -> None:
        self._waiting.clear()
        if self._filling is not None:
            self._filling.cancel()

    @property
    def size(self) -> int:
        """Characters of nodes plus bytes of events."""
        return self.checker.num_characters + self._num_bytes

    def count(self) -> None:
        """Charge its size to the shared limit, until it ends."""
        size = 0 if self.is_over else self.size
        self._others.held.take(size - self._num_counted, self.tenant)
        self._num_counted = size

    def summary(self) -> ProgramSummary:
        """Its entry in the list of programs."""
        return {
            "id": self.id,
            "name": self._name,
            "started": self._started,
            "is_running": self._num_running > 0 and not self.is_over,
            "num_nodes": len(self.nodes),
        }

    def timeline(self) -> Callable[[], Timeline]:
        """What makes its nodes and events so far, without deltas: of a long program in seconds."""
        summary, nodes, log = self.summary(), [*self.nodes], [*zip(self._times, self.log, strict=True)]

        def timeline() -> Timeline:
            events = [(at, json.loads(data.partition(b"data: ")[2])) for at, data in log]
            timed = [
                {"at": round(at - self._started, 6), **event} for at, event in events if event["type"] != "delta"
            ]
            return {**summary, "nodes": nodes, "events": timed}

        return timeline

    def send(self, segment: ir.Segment) -> None:
        """Forward a segment."""
        for session in self._sessions.values():
            session.send(segment)

    def abort(self) -> None:
        """Fail unfinished rows and tell listeners."""
        self._fail(RequestAborted("the program was aborted"))

    def end(self) -> None:
        """Cancel and forget it. Idempotent."""
        super().end()
        self._stop_filling()
        if self._num_running:
            for session in self._sessions.values():
                session.cancel()
        self._others.forget(self)
        self.count()
        kept = [i for i, data in enumerate(self.log) if b'"type":"delta"' not in data[:40]]
        self.log, self._times = [self.log[i] for i in kept], [self._times[i] for i in kept]  # for the timeline

    @property
    def has_run(self) -> bool:
        """See `sse.EventLog`."""
        return not self._num_running

    def _take(self, row: int, event: ir.Event) -> None:
        if self.is_over or row in self._ended:
            return
        if isinstance(event, ir.Done):
            self._num_running -= 1
            self._ended.add(row)
            self._sessions.pop(row, None)
            if self._waiting and self._filling is None:
                self._filling = asyncio.get_running_loop().call_soon(self._fill_or_fail)
        data = {"type": _TYPES[type(event)], **({"row": row} if self._is_batch else {})}
        if isinstance(event, ir.NodeFailed):
            error = {**error_body(event.error)["error"], "class": type(event.error).__name__}
            error["data"] = {name: value for name, value in vars(event.error).items() if _is_plain(value)}
            data |= {"stream": event.stream, "index": event.index, "error": error}
        else:
            data |= dataclasses.asdict(event)
            if isinstance(event, ir.NodeDone) and "usage" in event.meta:  # the node has computed
                for meta in event.meta.get("samples", [event.meta]):
                    self._service.finished(meta, name=f"node {event.stream}/{event.index}", parent=self._parent)
                    if self._request is not None:
                        self._request.finished({**meta.get("usage", {}), **meta})
        self.note(data)

    def note(self, data: dict[str, Any]) -> None:
        """See `sse.EventLog`."""
        super().note(data)
        self._num_bytes += len(self.log[-1])
        self.count()
        self._times.append(time.time())


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
