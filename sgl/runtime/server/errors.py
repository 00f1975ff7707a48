"""From the error tree to HTTP: the one table of statuses, and the one shape of an error body.

    {"error": {"message": …, "type": …, "param": … | null, "code": … | null}}

is what the OpenAI API answers; native clients read `error.message` of it.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import ValidationError

from sgl.errors import (
    ContextTooLong,
    EngineDead,
    GrammarError,
    InvalidRequest,
    ProgramError,
    QueueFull,
    RequestAborted,
    RequestTimeout,
    SglError,
    nearest_name,
)
from sgl.runtime.server.encoding import json_response

# class → status, type, code; the first that fits counts
_TABLE: tuple[tuple[type[SglError], int, str, str | None], ...] = (
    (ContextTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (GrammarError, 400, "invalid_request_error", "invalid_grammar"),
    (ProgramError, 400, "invalid_request_error", "program_error"),
    (QueueFull, 429, "rate_limit_error", "queue_full"),
    (RequestTimeout, 408, "timeout_error", "request_timeout"),
    (RequestAborted, 499, "request_aborted", "request_aborted"),
    (EngineDead, 503, "service_unavailable", "engine_unavailable"),
)
_RETRY_AFTER = {429: "1", 503: "2"}  # seconds: a queue moves on within one, a restart takes some

_PARAM_CHARACTERS = 200
_MESSAGE_CHARACTERS = 2000  # of an error: some repeat what was sent
_TYPES = frozenset({"str", "int", "float", "bool", "dict"})  # how pydantic names the branches of a union


class NotThere(InvalidRequest):
    """What the path names does not exist, or no longer does."""


class NoSuchModel(NotThere):
    """The request names another model than the one that is served."""


class BodyTooLong(InvalidRequest):
    """The request's body is longer than the server takes."""


class WrongKey(InvalidRequest):
    """The API key is missing or wrong."""


class Forbidden(InvalidRequest):
    """Who asks may not have this."""


def status_of(error: Exception) -> tuple[int, str, str | None]:
    """HTTP status, type and code of an error; 500 for what is not of our tree."""
    if isinstance(error, NotThere):
        return 404, "invalid_request_error", "model_not_found" if isinstance(error, NoSuchModel) else "not_found"
    if isinstance(error, BodyTooLong):
        return 413, "invalid_request_error", "body_too_long"
    if isinstance(error, WrongKey):
        return 401, "authentication", None
    if isinstance(error, Forbidden):
        return 403, "permission_error", "forbidden"
    for cls, status, kind, code in _TABLE:
        if isinstance(error, cls):
            return status, kind, code
    return 500, "server_error", None


def error_body(error: Exception) -> dict[str, Any]:
    """What a client is told of an error. Errors that are not of our tree keep their details to the log."""
    _, kind, code = status_of(error)
    message = str(error) if isinstance(error, SglError) else "internal error: the server's log has it"
    return described(message, kind, code, getattr(error, "param", None))


def described(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error body."""
    if len(message) > _MESSAGE_CHARACTERS:
        message = message[:_MESSAGE_CHARACTERS] + "…"
    if param is not None and len(param) > _PARAM_CHARACTERS:
        param = param[:_PARAM_CHARACTERS] + "…"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> web.Response:
    """The answer to a request that failed before anything was sent."""
    if isinstance(error, web.HTTPException):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        headers, message = {}, error.reason
        if isinstance(error, web.HTTPExpectationFailed):
            message = "the one expectation that is met is Expect: 100-continue"
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            message = f"this endpoint is not for {error.method}, but for {headers['Allow']}"
        return json_response(described(message, kind), error.status, headers)
    status, _, _ = status_of(error)
    headers = {"Retry-After": _RETRY_AFTER[status]} if status in _RETRY_AFTER else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), status, headers)


def as_invalid_request(error: ValidationError, known: list[str]) -> InvalidRequest:
    """The first thing that a body model found wrong; `known` are the body's fields."""
    detail = error.errors(include_url=False, include_context=False)[0]
    place = [str(part) for part in detail["loc"] if str(part) not in _TYPES and "[" not in str(part)]
    param = ".".join(place) or None
    if detail["type"] == "extra_forbidden":
        hint = nearest_name(place[-1], known)
        return InvalidRequest(f"unrecognized request argument {param!r}{hint}", param=param)
    message = detail["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)
