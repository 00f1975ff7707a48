"""Endpoints: routing, and what /openapi.json says of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar, get_type_hints

from aiohttp import web
from pydantic import BaseModel

from sgl.errors import InvalidRequest
from sgl.runtime.server import encoding
from sgl.runtime.server.replies import Error
from sgl.runtime.server.service import Service

F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ENGINES_PROMPT = ("prompt", "input_ids")
_PROMPTS = ("messages", "input", "text", "prompt")  # what bodies call it; beside text, prompt is refused


@dataclass(frozen=True)
class Route:
    """An endpoint."""

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str  # the Api's name
    body: type[BaseModel] | None = None
    example: dict[str, Any] | None = None  # of a body
    answer: Any = dict[str, Any]  # the type of its JSON, see `replies`
    failure: Any = Error
    streams: bool = False  # events, if asked to
    lines: bool = False  # of JSON, unless asked not to
    headers: tuple[str, ...] = ()  # that it reads itself
    is_open: bool = False  # needs no API key
    for_admin: bool = False  # needs the admin key, if set
    content_type: str = "application/json"


def endpoint(*places: str, **about: Any) -> Callable[[F], F]:
    """Marks an Api's handler with its places (`METHOD /path`) and fields of Route (`about`). It gets the body that it
    has in its signature, checked; it answers with a response, or what one holds as JSON, which /openapi.json tells by
    the type that it returns. Its docstring is the summary."""

    def mark(handler: F) -> F:
        handler.places, handler.about = places, about  # type: ignore[attr-defined]  # functions take any
        return handler

    return mark


class Api:
    """Handlers of one service."""

    failure: ClassVar[Any] = Error
    """The type of what errors say."""
    names: ClassVar[dict[str, str]] = {}
    """Of fields that the engine calls otherwise, by its names for them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> Iterator[Route]:
        """Its endpoints, in source order."""
        for function in vars(type(self)).values():
            for place in getattr(function, "places", ()):
                method, path = place.split()
                summary = " ".join(function.__doc__.split()).rstrip(".")
                hints = get_type_hints(function)
                about = {"body": hints.get("body"), "failure": self.failure, **function.about}
                if hints["return"] not in (web.Response, web.StreamResponse):
                    about.setdefault("answer", hints["return"])
                handle = partial(self._handle, function, about["body"])
                tag = type(self).__name__.removesuffix("Api").lower()
                yield Route(method, path, handle, summary, tag, **about)

    async def _handle(self, function: Any, body: Any, request: web.Request) -> web.StreamResponse:
        given = () if body is None else (await self._service.body(request, body),)
        try:
            answer = await function(self, request, *given)
        except InvalidRequest as error:
            if own := self.names.get(str(error.param)):
                error.param, error.args = own, (error.args[0].replace(str(error.param), own, 1),)
            elif body is not None and error.param in _ENGINES_PROMPT:
                error.param = _prompt_field(body, error.param)
            raise
        if isinstance(answer, web.StreamResponse):
            return answer
        return await encoding.answer(lambda: answer, encoding.size_of(answer))


def _prompt_field(body: type[BaseModel], name: str) -> str:
    """The field of a body that becomes what the engine knows by `name`."""
    fields = body.model_fields
    return (
        name if name == "input_ids" and name in fields else next((own for own in _PROMPTS if own in fields), name)
    )
