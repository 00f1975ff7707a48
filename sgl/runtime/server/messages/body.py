"""Bodies of Anthropic's Messages API. `translation` makes chats of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

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
from sgl.runtime.server.protocol import EngineFields, TokenCount


class TextBlock(Lenient):
    """A text."""

    type: Literal["text"]
    text: str


class ImageSource(Lenient):
    """Where an image is."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Lenient):
    """An image."""

    type: Literal["image"]
    source: ImageSource

    @property
    def url(self) -> str | None:
        """Its URL, or a data: URL."""
        if self.source.type == "url":
            return self.source.url
        return self.source.data and f"data:{self.source.media_type or 'image/png'};base64,{self.source.data}"


class ToolUseBlock(Lenient):
    """An earlier call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ShownBlock = Annotated[
    Annotated[TextBlock, kind("text")] | Annotated[ImageBlock, kind("image")],
    by_type(),
]


class ToolResultBlock(Lenient):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ShownBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Lenient):
    """Earlier reasoning."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Lenient):
    """Reasoning of another server, which nobody can read."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Annotated[TextBlock, kind("text")]
    | Annotated[ImageBlock, kind("image")]
    | Annotated[ToolUseBlock, kind("tool_use")]
    | Annotated[ToolResultBlock, kind("tool_result")]
    | Annotated[ThinkingBlock, kind("thinking")]
    | Annotated[RedactedBlock, kind("redacted_thinking")],
    by_type(),
]


class Turn(Lenient):
    """A turn; a system's changes the instructions from there on."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(Strict):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Off = None
    cache_control: Anything = None
    eager_input_streaming: Anything = None
    input_examples: Empty = None


class ToolChoice(Strict):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Options of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class Thinking(Strict):
    """Whether to reason, for models whose template can say so; `budget_tokens` is advice that none takes."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Anything = None
    display: Literal["summarized", "omitted"] | None = None


class AllTurns(Strict):
    """All of them."""

    type: Literal["all"]


class ClearThinking(Strict):
    """Which reasoning is forgotten: none."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllTurns


class ContextManagement(Strict):
    """What is left out of long conversations: nothing."""

    edits: list[ClearThinking] | None = None


@also_takes(
    (Anything, "billing_policy cache_control inference_geo service_tier speed user_profile_id workspace_id"),
    (Nothing, "compaction container diagnostics fallback_credit_token"),
    (Empty, "fallbacks mcp_servers"),
)
class CountBody(EngineFields):
    """POST /v1/messages/count_tokens, and what it shares with /v1/messages."""

    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The beta's name of output_config.format."""
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Template variables such as enable_thinking."""


@also_takes((called("stop_sequences"), "stop"))
class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: TokenCount
    thread: Anything = None
    """Whether the server keeps the conversation: the API refuses it as clients expect, who send all of it then."""
    stop_sequences: list[str] | None = None
    stream: bool | None = None
