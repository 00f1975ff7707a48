"""A program on a server: segments out, numbered events in, over connections that may break. On the io thread.

A server that was killed has forgotten the program when it is back. Then it is opened again, from its segments and with
its seeds, and goes on where it was. One that the server ended itself, or whose values come out otherwise, fails. The
listener alone judges connections: when a segment does not arrive, it asks for the events again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from sgl import errors
from sgl.errors import BackendError, InvalidRequest, RequestTimeout, ServerUnreachable, SglError
from sgl.lang.backends.base import Session
from sgl.lang.backends.http import HttpClient, NotThere, retry_delay
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.encoding import to_json
from sgl.lang.ir.interpreter import as_known
from sgl.lang.ir.told import Told

MAX_PAUSE = 2.0  # seconds between tries to reconnect: servers soon drop programs without listeners
UNREACHABLE_SECONDS = 60.0  # for a server that has opened a program to come back

_NO_SERVER = (None, 502, 503, 504)  # answers, by their status


class RemoteSession(Session):
    """One program. The first segment opens it; lost connections resume after the last event, or open it again."""

    def __init__(self, http: HttpClient, program: ir.Program, sink: ir.Sink, opened: Callable[[str], None]) -> None:
        """`opened`: called with the program's id."""
        self._http = http
        self._program = program
        self._sink = sink
        self._opened = opened
        self._path: str | None = None  # once open
        self._is_open = asyncio.Event()
        self._last = 0  # last event's number
        self._told = Told()
        self._num_news = 0
        self._segments: list[Any] = []  # after the first
        self._has_more = asyncio.Event()
        self._is_answered = asyncio.Event()  # the listener's request: the server has the program
        self._connection = asyncio.timeout(None)  # the listener's
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self._num_unanswered = 0

    def send(self, segment: ir.Segment) -> None:
        if self._is_over:
            return
        self._num_unanswered += sum(isinstance(node, ir.ANSWERED) for _, node in segment.nodes)
        if self._tasks:
            self._segments.append(to_json(segment))
            self._has_more.set()
        else:
            body = {"program": to_json(self._program), "segment": to_json(segment)}
            self._tasks = [self._begin(self._listen(body)), self._begin(self._send())]

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        if self._is_over:
            return
        self._end()
        if self._path is not None:
            self._http.tell_delete(self._path)

    async def _send(self) -> None:
        """Send later segments in order; numbers make repeating safe."""
        await self._is_open.wait()
        number = failures = 0
        while True:
            self._has_more.clear()
            while number < len(self._segments):
                body = {"segment": self._segments[number], "number": number + 1}
                try:
                    await self._http.post(f"{self._path}/segments", body)
                except SglError as error:
                    failures += 1
                    if not (isinstance(error, NotThere) or _is_lost(error)) or failures > self._http.max_retries:
                        raise self._given_up(error) if isinstance(error, NotThere) else error from None
                    # The listener's connection may be half open: it asks again, and cancels this if nobody knows of it.
                    self._is_answered.clear()
                    if not self._connection.expired():
                        self._connection.reschedule(asyncio.get_running_loop().time())
                    await self._is_answered.wait()
                else:
                    number, failures = number + 1, 0
            await self._has_more.wait()

    async def _listen(self, body: Any) -> None:
        """Take events until the end; reconnect while retrying helps and something new arrives."""
        failures = openings = losses = 0  # since the last news, or answer
        has_ended, began, delay = False, time.monotonic(), 0.0  # has_ended: the program, by the server's will
        lost_at = began
        while True:
            before = self._num_news
            self._is_answered.clear()
            try:
                async with asyncio.timeout(None) as self._connection:
                    await asyncio.sleep(delay)
                    delay = 0.0
                    async for number, data in self._events(body):
                        has_ended = False
                        self._take(number, data)
                        if self._num_news > before:
                            failures = openings = 0
                if self._is_over:
                    return
                has_ended = True
                raise BackendError(f"{self._http.base_url} ended the program's events early", retryable=True)
            except InvalidRequest as error:
                if self._path is None:
                    raise
                openings, failures, losses = openings + 1, 0, 0
                if has_ended or not isinstance(error, NotThere) or openings > self._http.max_retries:
                    raise self._given_up(error) from None
                self._forget()
                if self._program.deadline_s is not None:
                    left = max(0.001, self._program.deadline_s + began - time.monotonic())
                    body = {**body, "program": {**body["program"], "deadline_s": left}}
            except SglError as error:
                if self._num_news and _is_lost(error) and not self._is_answered.is_set():
                    now = time.monotonic()
                    lost_at, losses = lost_at if losses else now, losses + 1
                    left = lost_at + UNREACHABLE_SECONDS - now
                    if self._program.deadline_s is not None:
                        left = min(left, began + self._program.deadline_s - now)
                    if left <= 0:
                        raise
                    delay = min(MAX_PAUSE, left, retry_delay(losses - 1, error))
                    continue
                failures, losses = failures + 1, 0
                if isinstance(error, RequestTimeout) and self._last and not self._num_unanswered:
                    failures = 1  # the server owes nothing: the program waits for Python
                if not getattr(error, "retryable", False) or failures > self._http.max_retries:
                    raise
                delay = min(MAX_PAUSE, retry_delay(failures - 1, error))
            except TimeoutError:  # a segment did not arrive
                delay = 0.0

    def _events(self, body: Any) -> AsyncIterator[tuple[int, Any]]:
        answered = self._is_answered.set
        if self._path is None:
            return self._http.sse("POST", "/v1/programs", body, max_retries=0, answered=answered)
        path = f"{self._path}/events"
        return self._http.sse("GET", path, last_event_id=self._last, max_retries=0, answered=answered)

    def _given_up(self, error: SglError) -> BackendError:
        return BackendError(f"{self._http.base_url} has given the program up: {error}")

    def _forget(self) -> None:
        """The server has: the next events are those of the program opened again."""
        self._path, self._last = None, 0
        self._is_open.clear()
        self._told.begin_again()
        self._tasks[1].cancel()
        self._tasks[1] = self._begin(self._send())

    def _take(self, number: int, data: dict[str, Any]) -> None:
        kind = data.get("type")
        if kind is None:
            raise BackendError(f"the server failed while it sent events: {data}", retryable=True)
        if number <= self._last:
            return
        self._last = number
        has_news = self._told.has_news(data)
        self._num_news += has_news
        if kind == "node_done":
            self._num_unanswered -= has_news
        if kind == "opened":
            self._path = f"/v1/programs/{data['id']}"
            self._opened(data["id"])
            self._is_open.set()
        elif not has_news:
            pass
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


def _is_lost(error: SglError) -> bool:
    """Whether a connection was, or none came about, or a proxy finds no server: it may come back."""
    is_lost = isinstance(error, BackendError) and error.retryable and error.status in _NO_SERVER
    return isinstance(error, ServerUnreachable) or (is_lost and not isinstance(error, RequestTimeout))


def _error(data: dict[str, Any]) -> Exception:
    """The server's error, in our class if we have it."""
    cls = getattr(errors, str(data.get("class")), None)
    if not (isinstance(cls, type) and issubclass(cls, SglError)):
        cls = BackendError
    error: Exception = cls.__new__(cls, data["message"])
    error.__dict__.update({"retryable": False, "status": None} if issubclass(cls, BackendError) else {})
    error.__dict__.update(data.get("data") or {})
    return error
