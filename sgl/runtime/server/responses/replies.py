"""What the endpoints of responses answer, for /openapi.json. Objects have more fields, which repeat the request's."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class InputTokens(TypedDict):
    """The length of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Usage(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(TypedDict):
    """An answer: items of type message, reasoning, function_call or custom_tool_call."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "cancelled", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    store: bool
    usage: Usage | None
    kv_transfer_params: NotRequired[dict[str, Any]]


class Items(TypedDict):
    """A part of the items that a response answered."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(TypedDict):
    """It is forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool
