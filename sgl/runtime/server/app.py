"""The HTTP application: every endpoint behind one middleware that identifies, admits, answers errors and logs.

A handler is cancelled when its client disconnects, and what it waits for is aborted with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
from collections.abc import Sequence

from aiohttp import web

from sgl.errors import SglError, nearest_name
from sgl.runtime.server.connection import Connection
from sgl.runtime.server.errors import NotThere, described, error_response, json_response
from sgl.runtime.server.identity import new_identity, request_id
from sgl.runtime.server.native import NativeApi
from sgl.runtime.server.openai import OpenAIApi
from sgl.runtime.server.operation import OperationApi
from sgl.runtime.server.programs import ProgramsApi
from sgl.runtime.server.service import Handler, Route, Service

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_EMBEDDINGS = ("/encode", "/v1/embeddings")  # which clients may look for
_CORS = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Last-Event-ID, X-Request-Id",
    "Access-Control-Max-Age": "86400",
}


def build_app(service: Service) -> web.Application:
    """The application over one service. Run it with `handler_cancellation=True`."""
    routes = [*NativeApi(service).routes(), *OpenAIApi(service).routes(), *ProgramsApi(service).routes()]
    routes += OperationApi(service, routes).routes()
    guard = _Guard(service, routes)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await guard.handle(request, handler)

    app = web.Application(client_max_size=service.config.max_request_bytes, middlewares=[middleware])
    app.on_response_prepare.append(guard.on_response_prepare)
    for route in routes:
        for method in route.methods:
            app.router.add_route(method, route.path, route.handler)
    return app


class _Guard:
    """What happens to every request before and after its handler."""

    def __init__(self, service: Service, routes: Sequence[Route]) -> None:
        self._service = service
        self._paths = [route.path for route in routes]
        self._open = {route.path for route in routes if route.is_open}
        self._origins = {origin.strip() for origin in service.config.cors_origins.split(",") if origin.strip()}
        key = service.config.api_key
        self._expected = None if key is None else f"Bearer {key}".encode()

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
        status = 499  # until there is an answer: the client left
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
                raise
            finally:
                metrics.open_requests -= 1
                metrics.answered(path, status)
                seconds = time.monotonic() - began
                fields = {"method": request.method, "path": path, "status": status}
                fields |= {"seconds": round(seconds, 6), "client": request.remote}
                if span is not None:
                    span.answered(status)
                    fields["trace_id"] = span.trace_id
                shown = (request.method, path, status, 1000 * seconds)
                logger.info("%s %s %d %.1f ms", *shown, extra={"fields": fields})
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204, headers=_CORS)
        if not self._may_enter(request):
            error = described("the API key is missing or wrong: send Authorization: Bearer <key>", "authentication")
            return json_response(error, 401, {"WWW-Authenticate": "Bearer"})
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return error_response(self._no_such_endpoint(request.path))
        except web.HTTPException as error:
            return error_response(error)
        except SglError as error:
            return error_response(error)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            logger.exception("the request failed")
            return error_response(error)

    def _no_such_endpoint(self, path: str) -> NotThere:
        if path in _EMBEDDINGS:
            return NotThere("there are no embeddings: the models that are served here generate", param="path")
        hint = nearest_name(path, self._paths)
        return NotThere(f"there is no endpoint {path!r}{hint}; /openapi.json lists them", param="path")

    def _may_enter(self, request: web.Request) -> bool:
        if self._expected is None or request.path in self._open:
            return True
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._expected)

    async def on_response_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Headers that every answer carries."""
        if isinstance(request.protocol, Connection):
            request.protocol.is_owed = False
        response.headers["X-Request-Id"] = request_id.get()
        origin = request.headers.get("Origin")
        if origin is not None and (origin in self._origins or "*" in self._origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
