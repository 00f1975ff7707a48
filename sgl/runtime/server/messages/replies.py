"""What the endpoints of messages answer, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from sgl.errors import InvalidRequest
from sgl.runtime.server.identity import request_id


class NoThreads(InvalidRequest):
    """The conversation cannot be kept on the server. Clients know the code, and send all of it from there on."""

    code = "thread_unsupported_request"


class MessagesErrorDetail(TypedDict):
    """What went wrong."""

    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class MessagesError(TypedDict):
    """A request that failed."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class MessagesUsage(TypedDict):
    """Token counts; `input_tokens` has those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AssistantMessage(TypedDict):
    """An answer: blocks of type text, thinking or tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    kv_transfer_params: NotRequired[dict[str, Any]]


class InputTokenCount(TypedDict):
    """The length of a prompt."""

    input_tokens: int


_TYPES = {
    "authentication": "authentication_error",
    "request_aborted": "api_error",
    "server_error": "api_error",
    "service_unavailable": "overloaded_error",
}
_TYPES_OF_CODES = {
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "body_too_long": "request_too_large",
}


def error_shape(body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's error of ours."""
    error = body["error"]
    kind = _TYPES_OF_CODES.get(error["code"]) or _TYPES.get(error["type"], error["type"])
    told: MessagesErrorDetail = {"type": kind, "message": error["message"]}
    if error["code"] == NoThreads.code:
        told["details"] = {"error_code": error["code"], "unsupported": ["thread"]}
    return {"type": "error", "error": told, "request_id": request_id.get()}
