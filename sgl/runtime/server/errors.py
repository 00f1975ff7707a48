"""HTTP errors: those only a server has, and their body, OpenAI's:

{"error": {"message": …, "type": …, "param": … | null, "code": … | null}}"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sgl.errors import InvalidRequest, SglError, nearest_name
from sgl.runtime.server.encoding import json_response

_TYPES_OF_STATUS = {
    401: "authentication",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "request_aborted",
    500: "server_error",
    503: "service_unavailable",
}
_RETRY_AFTER = {429: "1", 503: "2"}  # seconds: a queue moves sooner than a restart ends

_PARAM_CHARACTERS = 200
_MESSAGE_CHARACTERS = 2000  # an error may repeat what was sent
_INPUT = "Input should be "  # how pydantic begins
_KIND = re.compile(r"str|int|float|bool|dict|.*\[.*|[A-Z]\w*[a-z]\w*", re.DOTALL)  # so it names a union's branches
_INSTANCE = re.compile(r" or instance of \w+")


Shape = Callable[[dict[str, Any]], dict[str, Any]]


class NotThere(InvalidRequest):
    """The path names nothing that exists."""

    http_status, code = 404, "not_found"


class NoSuchModel(NotThere):
    """Another model than the served one."""

    code = "model_not_found"


class NotServed(InvalidRequest):
    """This server, as it was started, does not do that."""

    http_status, code = 501, "not_served"


class BodyTooLong(InvalidRequest):
    """The body exceeds the server's limit."""

    http_status, code = 413, "body_too_long"


class WrongKey(InvalidRequest):
    """The API key is missing or wrong."""

    http_status = 401


class Forbidden(InvalidRequest):
    """The caller may not have this."""

    http_status, code = 403, "forbidden"


def error_body(error: Exception) -> dict[str, Any]:
    """An error's body. Unknown errors keep their details in the log."""
    if not isinstance(error, SglError):
        return described("internal error: the server's log has it", 500)
    return described(str(error), error.http_status, error.code, getattr(error, "param", None))


def described(message: str, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The error body for an HTTP status."""
    kind = _TYPES_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    if len(message) > _MESSAGE_CHARACTERS:
        message = message[:_MESSAGE_CHARACTERS] + "…"
    if param is not None and len(param) > _PARAM_CHARACTERS:
        param = param[:_PARAM_CHARACTERS] + "…"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception, shape: Shape = dict) -> web.Response:
    """The answer to a request that failed before its answer began. `shape`: makes a protocol's body of ours."""
    if isinstance(error, web.HTTPException):
        headers, message = {}, error.reason
        if isinstance(error, web.HTTPExpectationFailed):
            message = "the one expectation that is met is Expect: 100-continue"
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            message = f"this endpoint is not for {error.method}, but for {headers['Allow']}"
        return json_response(shape(described(message, error.status)), error.status, headers)
    status = error.http_status if isinstance(error, SglError) else 500
    headers = {"Retry-After": _RETRY_AFTER[status]} if status in _RETRY_AFTER else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(shape(error_body(error)), status, headers)


def as_invalid_request(error: ValidationError, known: list[str]) -> InvalidRequest:
    """A body's first error; `known`: its fields. A value that none of several kinds fits has the errors of each: the
    deepest belongs to the kind that was meant, and of those one that is not about its kind."""
    errors = error.errors(include_url=False, include_input=False)

    def meant(each: ErrorDetails) -> tuple[int, bool, bool]:
        kind = each["type"]
        return len(_place(each)), kind == "union_tag_invalid", not kind.endswith("_type")

    detail = max(errors, key=meant)
    place = _place(detail)
    param = ".".join(place) or None
    if detail["type"] == "extra_forbidden":
        hint = nearest_name(place[-1], known)
        return InvalidRequest(f"unrecognized request argument {param!r}{hint}", param=param)
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"].endswith("_type"):
        kinds = [each["msg"] for each in errors if _place(each) == place and each["type"].endswith("_type")]
        message = _INSTANCE.sub("", " or ".join(dict.fromkeys(kinds)).replace(f" or {_INPUT}", " or "))
    if detail["type"] == "union_tag_invalid":  # see fields.kind
        tag, expected = (re.sub(r"[\[\]']", "", detail["ctx"][name]) for name in ("tag", "expected_tags"))
        message = f"the type {tag!r} is not supported here, but {expected}"
    elif detail["type"] == "union_tag_not_found":
        message = "a type is needed"
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)


def _place(detail: ErrorDetails) -> list[str]:
    """The field that an error is about, without the kinds that were tried."""
    fields = [str(part) for part in detail["loc"]]
    is_unknown = detail["type"] == "extra_forbidden"  # then the last one is a client's word, whatever it looks like
    kept = {0, len(fields) - 1} if is_unknown else {0}
    return [part for index, part in enumerate(fields) if index in kept or not _KIND.fullmatch(part)]
