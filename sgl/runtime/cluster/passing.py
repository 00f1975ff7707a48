"""Passes each request on to a worker, in turn; what fails before its first byte goes to the next one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

_WAITING_SECONDS = 30.0  # for a worker
_PAUSE_SECONDS = 0.05
_MOST_BYTES = 64 << 20  # of a body; the workers' own limit is lower
_HOP = ("connection", "content-length", "host", "keep-alive", "transfer-encoding", "content-encoding", "upgrade")


class Gateway:
    """The application, and the workers that it knows."""

    def __init__(self) -> None:
        self._workers: dict[str, str] = {}
        self._turn = itertools.count()
        self._session: aiohttp.ClientSession | None = None
        self.app = web.Application(client_max_size=_MOST_BYTES)
        self.app.cleanup_ctx.append(self._connected)
        self.app.router.add_route("*", "/{path:.*}", self._pass)

    async def add_worker(self, url: str, worker_id: str) -> None:
        """Share requests with it, too."""
        self._workers[worker_id] = url

    async def drain_worker(self, worker_id: str) -> None:
        """Give it no more; what runs goes on."""
        self._workers.pop(worker_id, None)

    async def remove_worker(self, worker_id: str) -> None:
        """It is gone."""
        self._workers.pop(worker_id, None)

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            yield

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health" and not self._workers:
            return web.json_response({"error": "no worker serves"}, status=503)
        body = await request.read()
        loop = asyncio.get_running_loop()
        end = loop.time() + _WAITING_SECONDS
        while loop.time() < end:
            for _ in range(len(self._workers)):
                urls = list(self._workers.values())
                with contextlib.suppress(aiohttp.ClientConnectionError, ConnectionError):
                    if (
                        answer := await self._passed(request, body, urls[next(self._turn) % len(urls)])
                    ) is not None:
                        return answer
            await asyncio.sleep(_PAUSE_SECONDS)
        message = {"error": {"message": "no worker serves", "type": "unavailable"}}
        return web.json_response(message, status=503, headers={"Retry-After": "1"})

    async def _passed(self, request: web.Request, body: bytes, url: str) -> web.StreamResponse | None:
        """The answer of this worker; None: it takes none now. Raises what happens before the first byte."""
        assert self._session is not None
        headers = CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() not in _HOP)
        async with self._session.request(
            request.method, url + request.raw_path, data=body or None, headers=headers, allow_redirects=False
        ) as theirs:
            if theirs.status == 503:
                return None
            first = await theirs.content.readany()
            ours = web.StreamResponse(status=theirs.status)
            ours.headers.extend((name, value) for name, value in theirs.headers.items() if name.lower() not in _HOP)
            await ours.prepare(request)
            try:
                await ours.write(first)
                async for part in theirs.content.iter_any():
                    await ours.write(part)
                await ours.write_eof()
            except aiohttp.ClientError:  # too late for another: the client sees that it was cut
                if request.transport is not None:
                    request.transport.close()
            return ours
