"""Bodies of OpenAI's Responses API. `translation` makes chats of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field

from sgl.runtime.server.fields import (
    Anything,
    Empty,
    Lenient,
    Nothing,
    Off,
    Strict,
    also_takes,
    by_type,
    called,
    kind,
)
from sgl.runtime.server.protocol import EngineFields, TemplateFields, TokenCount

MAX_METADATA = 16
"""Pairs of metadata."""


class TextPart(Lenient):
    """A piece of a message or of a tool's output: a text or an image."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


Content = str | list[TextPart]


class MessageItem(Lenient):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None


class CallItem(Lenient):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None


class CallOutputItem(Lenient):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None


class CustomCallItem(Lenient):
    """An earlier call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None


class CustomOutputItem(CallOutputItem):
    """What a custom tool answered."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]  # another one


class ReasoningText(Lenient):
    """A piece of reasoning or of its summary."""

    text: str


class ReasoningItem(Lenient):
    """Earlier reasoning."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None


class ReferenceItem(Lenient):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _kind(value: Any) -> str | None:
    """The type of an item; it may be left out of messages and references."""
    if not isinstance(value, dict):
        return None
    return f"[{value.get('type') or ('message' if 'role' in value else 'item_reference')}]"


Item = Annotated[
    Annotated[MessageItem, kind("message")]
    | Annotated[CallItem, kind("function_call")]
    | Annotated[CallOutputItem, kind("function_call_output")]
    | Annotated[CustomCallItem, kind("custom_tool_call")]
    | Annotated[CustomOutputItem, kind("custom_tool_call_output")]
    | Annotated[ReasoningItem, kind("reasoning")]
    | Annotated[ReferenceItem, kind("item_reference")],
    Discriminator(_kind),
]


class FunctionTool(Strict):
    """A function that the model may call. `strict` is true unless it says otherwise."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Off = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: Anything = None
    async_: Off = Field(None, alias="async")


class InputFormat(Strict):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Strict):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    format: InputFormat | None = None
    defer_loading: Off = None
    allowed_callers: list[Literal["direct"]] | None = None
    async_: Off = Field(None, alias="async")


AnyTool = Annotated[Annotated[FunctionTool, kind("function")] | Annotated[CustomTool, kind("custom")], by_type()]


class ToolName(Lenient):
    """A tool by its name."""

    type: Literal["function", "custom"]
    name: str


class AllowedNames(Lenient):
    """The tools that may be called, and whether one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ToolName] = Field(min_length=1)


ToolChoice = Annotated[
    Annotated[ToolName, kind("function")]
    | Annotated[ToolName, kind("custom")]
    | Annotated[AllowedNames, kind("allowed_tools")],
    by_type("function"),
]


class TextFormat(Strict):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Anything = None


class ReasoningOptions(Strict):
    """Options of reasoning. Answers hold the reasoning itself, and no summary."""

    effort: str | None = None
    mode: Literal["standard"] | None = None
    summary: Anything = None
    generate_summary: Anything = None
    context: Anything = None


class StreamOptions(Strict):
    """Options of a stream; its last event always has the usage."""

    include_obfuscation: Off = None
    include_usage: Anything = None


class InputBody(EngineFields, TemplateFields):
    """POST /v1/responses/input_tokens, and what it shares with /v1/responses."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Nothing = None
    personality: Nothing = None


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


@also_takes(
    (Anything, "max_tool_calls background_options image"),  # of tools, runs and images that there are none of
    (Nothing, "prompt moderation access_programs"),
    (called("max_output_tokens"), "max_tokens max_completion_tokens"),
    (called("reasoning.effort"), "reasoning_effort"),
    (Off, "background"),
    (Empty, "context_management"),
)
class ResponsesBody(InputBody):
    """POST /v1/responses."""

    max_output_tokens: TokenCount | None = None
    top_logprobs: int | None = None
    include: list[Include] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    store: bool | None = None
    """True unless it says otherwise: the answer can be read again and gone on from, while there is room."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
