"""Where replicas, the router and `sgl cluster` reach a cluster's process. HTTP; every call needs the token."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from sgl.errors import ConfigError, SglError
from sgl.numerals import whole
from sgl.runtime.cluster.link import TOKEN_HEADER
from sgl.runtime.cluster.registry import Registry, Report

NOTHING_KNOWN = "-1"
"""The version of who has not heard of any workers yet."""
_MOST = 1 << 53
_POLLING_SECONDS = 5.0  # a wait for news of the workers


class Control:
    """The endpoints."""

    def __init__(self, token: str, registry: Registry, more: Iterable[web.RouteDef] = ()) -> None:
        self._token = token
        self._registry = registry
        self._options: dict[int, dict[str, Any]] = {}
        self._news = asyncio.Condition()
        self.app = web.Application(middlewares=[self._guard])
        self.app.add_routes(
            [
                web.get("/options", self._get_options),
                web.post("/beat", self._hear),
                web.get("/workers", self._workers),
                *more,
            ]
        )

    def offer(self, generation: int, options: dict[str, Any], oldest: int = 0) -> None:
        """What replicas of a generation are to serve. oldest: of those that may serve, or serve again."""
        self._options = {number: its for number, its in self._options.items() if number >= oldest}
        self._options[generation] = options

    async def tell(self) -> None:
        """Wake who waits for news of the workers."""
        async with self._news:
            self._news.notify_all()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {self._token}".encode()):
            return web.json_response({"error": "this needs the cluster's token"}, status=401)
        try:
            return await handler(request)
        except ConfigError as error:
            return web.json_response({"error": str(error), "option": error.option}, status=400)
        except msgspec.DecodeError as error:
            return web.json_response({"error": f"the body of {request.path}: {error}"}, status=400)
        except SglError as error:
            return web.json_response({"error": str(error)}, status=503)

    async def _get_options(self, request: web.Request) -> web.Response:
        given = request.query.get("generation", "")
        generation = whole(given, _MOST)
        options = None if generation is None else self._options.get(generation)
        if options is None:
            raise ConfigError(f"there is no generation {given[:99]!r} of replicas", option="generation")
        return web.json_response(options)

    async def _hear(self, request: web.Request) -> web.Response:
        before = self._registry.version
        report, now = msgspec.json.decode(await request.read(), type=Report), time.monotonic()
        self._registry.hear(report, now)
        if self._registry.version != before:
            await self.tell()
        return web.json_response({"is_calm": self._registry.is_calm(report, now)})

    async def _workers(self, request: web.Request) -> web.Response:
        """Those that take requests, once they differ from `version`, or after a while."""
        given = request.query.get("version", "")
        version = whole(given, _MOST)
        if version is None and given != NOTHING_KNOWN:
            raise ConfigError(
                f"version is a number from 0, or {NOTHING_KNOWN}, not {given[:99]!r}", option="version"
            )
        try:
            async with asyncio.timeout(_POLLING_SECONDS), self._news:
                await self._news.wait_for(lambda: self._registry.version != version)
        except TimeoutError:
            pass
        registry = self._registry
        news = {"version": registry.version, "workers": registry.serving(time.monotonic())}
        return web.json_response({**news, "draining": registry.draining()})
