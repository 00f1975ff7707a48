"""A program on a server: segments out, numbered events in, over connections that may break. On the io thread."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from sgl import errors
from sgl.errors import BackendError, InvalidRequest, RequestTimeout, SglError
from sgl.lang.backends.base import Session
from sgl.lang.backends.http import HttpClient, retry_delay
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.encoding import to_json
from sgl.lang.ir.interpreter import as_known

MAX_PAUSE = 1.0  # seconds between tries to reconnect: servers soon drop programs without listeners


class RemoteSession(Session):
    """One program. The first segment opens it; lost connections resume after the last event."""

    def __init__(self, http: HttpClient, program: ir.Program, sink: ir.Sink, opened: Callable[[str], None]) -> None:
        """`opened`: called with the program's id."""
        self._http = http
        self._program = program
        self._sink = sink
        self._opened = opened
        self._path: str | None = None  # once open
        self._is_open = asyncio.Event()
        self._last = 0  # last event's number
        self._segments: asyncio.Queue[ir.Segment] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self._num_unanswered = 0

    def send(self, segment: ir.Segment) -> None:
        if self._is_over:
            return
        self._num_unanswered += sum(isinstance(node, ir.ANSWERED) for _, node in segment.nodes)
        if self._tasks:
            self._segments.put_nowait(segment)
        else:
            loop = asyncio.get_running_loop()
            body = {"program": to_json(self._program), "segment": to_json(segment)}
            self._tasks = [loop.create_task(work) for work in (self._listen(body), self._send())]
            for task in self._tasks:
                task.add_done_callback(self._ended)

    def cancel(self) -> None:
        if self._is_over:
            return
        self._end()
        if self._path is not None:
            self._http.tell_delete(self._path)

    async def _send(self) -> None:
        """Send later segments in order; numbers make repeating safe."""
        await self._is_open.wait()
        for number in itertools.count(1):
            body = {"segment": to_json(await self._segments.get()), "number": number}
            await self._http.post(f"{self._path}/segments", body)

    async def _listen(self, body: Any) -> None:
        """Take events until the end; reconnect while retrying helps and something new arrives."""
        failures = 0  # since the last event
        while True:
            before = self._last
            try:
                if self._path is None:
                    events = self._http.sse("POST", "/v1/programs", body, max_retries=0)
                else:
                    path = f"{self._path}/events"
                    events = self._http.sse("GET", path, last_event_id=self._last, max_retries=0)
                async for number, data in events:
                    self._take(number, data)
                if self._is_over:
                    return
                raise BackendError(f"{self._http.base_url} ended the program's events early", retryable=True)
            except InvalidRequest as error:
                if self._path is None:
                    raise
                raise BackendError(f"{self._http.base_url} has given the program up: {error}") from None
            except SglError as error:
                failures = 1 if self._last > before else failures + 1
                if isinstance(error, RequestTimeout) and self._last and not self._num_unanswered:
                    failures = 1  # the server owes nothing: the program waits for Python
                if not getattr(error, "retryable", False) or failures > self._http.max_retries:
                    raise
                delay = min(MAX_PAUSE, retry_delay(failures - 1, error))
            await asyncio.sleep(delay)

    def _take(self, number: int, data: Mapping[str, Any]) -> None:
        kind = data.get("type")
        self._num_unanswered -= kind == "node_done" and number > self._last
        if kind is None:
            raise BackendError(f"the server failed while it sent events: {data}", retryable=True)
        if number <= self._last:
            return
        self._last = number
        if kind == "opened":
            self._path = f"/v1/programs/{data['id']}"
            self._opened(data["id"])
            self._is_open.set()
        elif kind == "done":
            self._end()
            self._sink(ir.Done())
        elif kind == "node_failed":
            self._sink(ir.NodeFailed(data["stream"], data["index"], _error(data["error"])))
        else:
            self._sink(ir.EVENTS[kind](**{name: value for name, value in data.items() if name != "type"}))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail the program with a task's error."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not self._is_over:
            self.cancel()
            self._sink(ir.NodeFailed(None, None, as_known(error)))
            self._sink(ir.Done())

    def _end(self) -> None:
        self._is_over = True
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()


def _error(data: Mapping[str, Any]) -> Exception:
    """The server's error, in our class if we have it."""
    cls = getattr(errors, str(data.get("class")), None)
    if not (isinstance(cls, type) and issubclass(cls, SglError)):
        cls = BackendError
    error: Exception = cls.__new__(cls, data["message"])
    error.__dict__.update({"retryable": False, "status": None} if issubclass(cls, BackendError) else {})
    error.__dict__.update(data.get("data") or {})
    return error
