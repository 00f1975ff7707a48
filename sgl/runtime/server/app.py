"""The HTTP application. One middleware authenticates, logs and answers errors; disconnects cancel handlers.

A handler that is cancelled leaves `EngineProcess._call` or closes its stream of events, which sends "abort" to the
engine's process; there `Engine.abandon` aborts what is unfinished. Programs go on for `reconnect_grace` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from sgl.errors import SglError, nearest_name
from sgl.runtime.server.adapters import LoraApi
from sgl.runtime.server.connection import Connection
from sgl.runtime.server.deadline import DEADLINE_HEADER, Deadline, deadline
from sgl.runtime.server.embeddings.api import EmbeddingsApi
from sgl.runtime.server.errors import NotThere, Shape, WrongKey, error_response
from sgl.runtime.server.history import Note, note
from sgl.runtime.server.identity import ADMIN, Caller, caller, new_identity, request_id
from sgl.runtime.server.messages.api import MessagesApi
from sgl.runtime.server.messages.replies import error_shape as messages_error
from sgl.runtime.server.native import NativeApi
from sgl.runtime.server.ollama.api import OllamaApi
from sgl.runtime.server.ollama.replies import error_shape as ollama_error
from sgl.runtime.server.openai import OpenAIApi
from sgl.runtime.server.operation import OperationApi
from sgl.runtime.server.origins import Origins
from sgl.runtime.server.programs import ProgramsApi
from sgl.runtime.server.responses.api import ResponsesApi
from sgl.runtime.server.routes import Handler, Route
from sgl.runtime.server.service import Service

logger = logging.getLogger(__name__)

PROBE = "sgl-probe"
"""The user agent of a cluster's own looks at its workers, which come twice a second: they are no news."""
_PROBED = ("/health", "/get_server_info")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NO_MODELS = "there is one model here, which requests neither load nor change: /api/tags names it"
_ABSENT = {
    **dict.fromkeys((f"/api/{verb}" for verb in ("pull", "push", "create", "copy", "delete")), _NO_MODELS),
}
"""What clients may look for."""
_SHAPES: dict[str, Shape] = {"/v1/messages": messages_error, "/api/": ollama_error}
"""Of errors, by the beginning of a path."""
_CORS = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Last-Event-ID, X-Api-Key, X-Request-Id, "
    "Anthropic-Version, Anthropic-Beta, Anthropic-Dangerous-Direct-Browser-Access",
    "Access-Control-Max-Age": "86400",
}


def build_app(service: Service) -> web.Application:
    """The application of one service. Run it with `handler_cancellation=True`."""
    apis = (NativeApi, OpenAIApi, EmbeddingsApi, ResponsesApi, MessagesApi, OllamaApi, ProgramsApi, LoraApi)
    routes = [route for api in apis for route in api(service).routes()]
    routes += OperationApi(service, routes).routes()
    guard = _Guard(service, routes)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await guard.handle(request, handler)

    app = web.Application(client_max_size=service.config.max_request_bytes, middlewares=[middleware])
    app.on_response_prepare.append(guard.on_response_prepare)

    async def sampled(_: web.Application) -> AsyncIterator[None]:
        async with service.history.sampling(service.engine_state):
            yield

    app.cleanup_ctx.append(sampled)
    for route in routes:
        app.router.add_route(route.method, route.path, route.handler)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, route.handler)  # aiohttp leaves the body out
    return app


def _digest(key: str) -> bytes:
    """A hash: keys of any length compare in the same time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class _Guard:
    """What every request passes before and after its handler."""

    def __init__(self, service: Service, routes: Sequence[Route]) -> None:
        self._service = service
        self._paths = [route.path for route in routes]
        self._routes = {route.path: route for route in routes}
        self._origins = Origins(service.config)
        config = service.config
        keys = config.api_key or ()
        are_several = len({key.name for key in keys}) > 1
        self._keys = [
            (_digest(key.key), Caller(key.name, False, key.name if are_several else None)) for key in keys
        ]
        if config.admin_api_key is not None:
            admin = Caller(ADMIN, is_admin=True, tenant=ADMIN if are_several else None)
            self._keys.append((_digest(config.admin_api_key), admin))
        # Only the admin has a key: everybody may enter. Nobody has one: everybody may do everything.
        self._stranger = None if config.api_key else Caller(None, is_admin=config.admin_api_key is None)

    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request through its handler."""
        given = request.headers.get("X-Request-Id", "")
        identity = given if _REQUEST_ID.fullmatch(given) else new_identity()
        request_id.set(identity)
        began = time.monotonic()
        metrics, tracer = self._service.metrics, self._service.tracer
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "unknown"
        metrics.open_requests += 1
        current = Note(identity, path, None, time.time())
        note.set(current)
        status = 499  # the client left, unless it is answered
        spanned = (
            contextlib.nullcontext()
            if tracer is None
            else tracer.request(request.method, path, identity, request.headers)
        )
        with spanned as span:
            try:
                response = await self._answer(request, handler)
                status = response.status
            except ConnectionError as error:
                logger.info("%s", error)
                if request.transport is not None and not request.transport.is_closing():
                    raise
                response = web.Response(status=status)  # never sent; raising would log a traceback
            finally:
                metrics.open_requests -= 1
                self._service.history.ended(current, status)
                metrics.answered(path, status)
                seconds = time.monotonic() - began
                fields = {"method": request.method, "path": path, "status": status}
                fields |= {"seconds": round(seconds, 6), "client": request.remote}
                if caller.get().name is not None:
                    fields["key"] = caller.get().name
                if tracer is not None and span is not None:
                    fields["trace_id"] = tracer.answered(span, status)
                shown = (request.method, path, status, 1000 * seconds)
                is_probe = status == 200 and path in _PROBED and request.headers.get("User-Agent") == PROBE
                level = logging.DEBUG if is_probe else logging.INFO
                logger.log(level, "%s %s %d %.1f ms", *shown, extra={"fields": fields})
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        due = Deadline()
        deadline.set(due)
        try:
            self._origins.check(request)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                return web.Response(status=204, headers=_CORS)
            asks = self._caller(request)
            caller.set(asks)
            if (current := note.get()) is not None:
                current.owner = asks.name
            async with due.enforced():
                if (left := request.headers.get(DEADLINE_HEADER)) is not None:
                    due.bound(left)
                return await handler(request)
        except web.HTTPNotFound:
            failure: Exception = self._no_such_endpoint(request.path)
        except (web.HTTPException, SglError) as error:
            failure = error
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            logger.exception("the request failed")
            failure = error
        shapes = (shape for start, shape in _SHAPES.items() if request.path.startswith(start))
        return error_response(failure, next(shapes, dict))

    def _no_such_endpoint(self, path: str) -> NotThere:
        if path in _ABSENT:
            return NotThere(_ABSENT[path], param="path")
        hint = nearest_name(path, self._paths)
        return NotThere(f"there is no endpoint {path!r}{hint}; /openapi.json lists them", param="path")

    def _caller(self, request: web.Request) -> Caller:
        """The caller. Raises WrongKey, or Forbidden on an admin's route."""
        resource = request.match_info.route.resource
        route = None if resource is None else self._routes.get(resource.canonical)
        if route is not None and route.is_open:
            return Caller(None, is_admin=False)
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        given = _digest(key if kind.lower() == "bearer" else request.headers.get("X-Api-Key", ""))
        found = self._stranger
        for expected, owner in self._keys:  # compare all: the time must not tell which key matched
            if hmac.compare_digest(given, expected):
                found = owner
        if found is None:
            raise WrongKey("the API key is missing or wrong: send Authorization: Bearer <key>")
        if route is not None and route.for_admin:
            self._service.check_admin(found)
        return found

    async def on_response_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Headers of every answer."""
        if isinstance(request.protocol, Connection):
            request.protocol.is_owed = False
        response.headers["X-Request-Id"] = request_id.get() or new_identity()
        if request.path.startswith("/v1/messages"):  # Anthropic's name
            response.headers["Request-Id"] = response.headers["X-Request-Id"]
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        origin = request.headers.get("Origin")
        if origin is not None and self._origins.is_allowed(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
