"""The HTTP application. One middleware authenticates, logs and answers errors; disconnects cancel handlers.

A handler that is cancelled leaves `EngineProcess._call` or closes its stream of events, which sends "abort" to the
engine's process; there `Engine.abandon` aborts what is unfinished. Programs go on for `reconnect_grace` seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from sgl.errors import SglError, nearest_name
from sgl.runtime.server.adapters import LoraApi
from sgl.runtime.server.answering import Arrived, answering
from sgl.runtime.server.connection import Connection
from sgl.runtime.server.deadline import DEADLINE_HEADER, Deadline, deadline
from sgl.runtime.server.embeddings.api import EmbeddingsApi
from sgl.runtime.server.errors import NotThere, Shape, error_response
from sgl.runtime.server.identity import new_identity, request_id
from sgl.runtime.server.keys import Keys
from sgl.runtime.server.messages.api import MessagesApi
from sgl.runtime.server.messages.replies import error_shape as messages_error
from sgl.runtime.server.native import NativeApi
from sgl.runtime.server.ollama.api import OllamaApi
from sgl.runtime.server.ollama.replies import error_shape as ollama_error
from sgl.runtime.server.openai import OpenAIApi
from sgl.runtime.server.operation import OperationApi
from sgl.runtime.server.origins import Origins
from sgl.runtime.server.parsing import TextsApi
from sgl.runtime.server.probe import PROBE
from sgl.runtime.server.programs import ProgramsApi
from sgl.runtime.server.responses.api import ResponsesApi
from sgl.runtime.server.routes import Handler, Route
from sgl.runtime.server.service import Service
from sgl.runtime.server.training import TrainingApi

logger = logging.getLogger(__name__)

_PROBED = ("/health", "/get_server_info")

_NO_MODELS = "there is one model here, which requests neither load nor change: /api/tags names it"
_WEIGHTS = "new weights come by /update_weights_from_tensor, _from_distributed or _from_disk"
_ADAPTERS = "adapters come from a folder, by /load_lora_adapter"
_ABSENT = {
    **dict.fromkeys((f"/api/{verb}" for verb in ("pull", "push", "create", "copy", "delete")), _NO_MODELS),
    **dict.fromkeys(("/update_weights_from_ipc", "/pull_weights"), _WEIGHTS),
    **dict.fromkeys((f"/load_lora_adapter_from_{where}" for where in ("tensors", "distributed")), _ADAPTERS),
    "/weights_checker": "an update checks what it writes; /get_weights_by_name reads weights",
    "/get_load": "what each engine has to do is at /v1/loads",
    **dict.fromkeys(
        ("/open_session", "/close_session"), "sessions need not be opened: what prompts share is cached"
    ),
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
    apis = (
        NativeApi,
        OpenAIApi,
        EmbeddingsApi,
        ResponsesApi,
        MessagesApi,
        OllamaApi,
        ProgramsApi,
        LoraApi,
        TrainingApi,
        TextsApi,
    )
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


def _is_probe(request: web.Request, path: str) -> bool:
    return path in _PROBED and request.headers.get("User-Agent") == PROBE


class _Guard:
    """What every request passes before and after its handler."""

    def __init__(self, service: Service, routes: Sequence[Route]) -> None:
        self._service = service
        self._paths = [route.path for route in routes]
        self._routes = {route.path: route for route in routes}
        self._origins = Origins(service.config)
        self._keys = Keys(service)

    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request through its handler."""
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "unknown"
        about = Arrived(request.method, path, request.headers, request.remote, _is_probe(request, path))
        with answering(self._service, about) as answered:
            try:
                response = await self._answer(request, handler)
                answered.status = response.status
            except ConnectionError as error:
                logger.info("%s", error)
                if request.transport is not None and not request.transport.is_closing():
                    raise
                response = web.Response(status=answered.status)  # never sent; raising would log a traceback
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        due = Deadline()
        deadline.set(due)
        try:
            self._origins.check(request)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                return web.Response(status=204, headers=_CORS)
            route = self._route_of(request)
            self._keys.enter(
                request.headers,
                is_open=route is not None and route.is_open,
                for_admin=route is not None and route.for_admin,
            )
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
        except Exception as error:  # a defect: logged, and answered with 500
            logger.exception("the request failed")
            failure = error
        shapes = (shape for start, shape in _SHAPES.items() if request.path.startswith(start))
        return error_response(failure, next(shapes, dict))

    def _no_such_endpoint(self, path: str) -> NotThere:
        if path in _ABSENT:
            return NotThere(_ABSENT[path], param="path")
        hint = nearest_name(path, self._paths, 0.8)  # long paths have much in common
        return NotThere(f"there is no endpoint {path!r}{hint}; /openapi.json lists them", param="path")

    def _route_of(self, request: web.Request) -> Route | None:
        resource = request.match_info.route.resource
        return None if resource is None else self._routes.get(resource.canonical)

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
