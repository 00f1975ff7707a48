"""Small HTTP servers on a thread of their own, which answer as scripted and remember what they were asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.patience import PATIENCE

Body = dict[str, Any]


async def listening(runner: web.AppRunner) -> str:
    """The URL of an application, on a free port from now on."""
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


class FakeServer:
    """Answers every POST with `answer(path, body)`, or with the status and body of a pair; use as a context manager.
    `failures`: what to do first, one per request: a status, "drop" (close the connection), "hang", or a number of
    events after which a stream is cut. An event "hang" waits until the client has gone, and counts it."""

    def __init__(self, answer: Callable[[str, Body], Any], *, model_info: Body | None = None) -> None:
        self.answer = answer
        self.model_info = model_info or {"model_path": "fake"}
        self.failures: list[Any] = []
        self.requests: list[tuple[str, Body]] = []
        self.headers: list[Any] = []
        self.connections: set[Any] = set()
        self.disconnects = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # which ends what is left, and the loop
            runner.run(self._serve())

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._post)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self.url = await listening(runner)
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return web.json_response(self.model_info)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text() or "null")
        self.requests.append((request.path, body))
        self.headers.append(request.headers)
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername"))
        failure = self.failures.pop(0) if self.failures else None
        if failure == "drop":
            request.transport.close()
            return web.Response()
        if failure == "hang":
            await asyncio.sleep(PATIENCE)
        if isinstance(failure, int) and failure >= 100:
            return web.json_response(
                {"error": {"message": "scripted"}}, status=failure, headers={"Retry-After": "0"}
            )
        answer = self.answer(request.path, body)
        if isinstance(answer, tuple):
            return web.json_response(answer[1], status=answer[0])
        if not (body and body.get("stream")):
            return web.json_response(answer)
        return await self._stream(request, answer, failure)

    async def _stream(self, request: web.Request, events: Any, cut_after: int | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i, event in enumerate(events):
            if i == cut_after:
                assert request.transport is not None
                request.transport.close()
                return response
            if event == "hang":
                while request.transport is not None and not request.transport.is_closing():
                    await asyncio.sleep(0.01)
                self.disconnects += 1
                return response
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response
