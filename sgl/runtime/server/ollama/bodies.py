"""Ollama's request bodies, and the chats and completions that they ask for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from sgl.errors import InvalidRequest
from sgl.runtime.sampling_params import MAX_TOKENS
from sgl.runtime.server.fields import (
    Anything,
    Empty,
    Lenient,
    NoContext,
    Nothing,
    Off,
    On,
    One,
    Strict,
    Zero,
    also_takes,
)
from sgl.runtime.server.protocol import AnyCall, AnyTool, ChatBody, FunctionCallParam, Message, Part, Tool, ToolCall

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.0}
"""As Ollama has them, whatever the model's authors recommend."""
_DURATION = re.compile(r"-?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+|-?\d+(\.\d*)?")


def _duration(given: Any) -> Any:
    if isinstance(given, str) and not _DURATION.fullmatch(given):
        raise PydanticCustomError("no_duration", 'it is a duration such as "5m", or a number of seconds')
    return given


KeepAlive = Annotated[float | str | None, AfterValidator(_duration)]
"""Taken, and without effect: the model stays."""


@also_takes(
    (Anything, "numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv use_mmap use_mlock num_thread num_keep"),
    (Anything, "mirostat_tau mirostat_eta"),
    (Off, "logits_all vocab_only embedding_only"),
    (On, "penalize_newline"),
    (Zero, "mirostat"),
    (One, "tfs_z typical_p"),
)
class OllamaOptions(Strict):
    """Sampling. What loads a model (num_ctx, num_gpu, …) has no effect: it is loaded."""

    num_predict: Annotated[int, Field(le=MAX_TOKENS)] | None = None
    """0 or less: as many as the context holds."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    """-1: a random one."""
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    """Only 0, for no penalty, or -1: it looks at the whole prompt and output."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def sampling(self) -> dict[str, Any]:
        """Fields of a chat's or completion's body."""
        penalty = self.repeat_penalty
        if self.repeat_last_n == 0:
            penalty = None
        elif self.repeat_last_n not in (None, -1) and penalty not in (None, 1):
            message = "repeat_last_n is -1 here, the whole prompt and output, or 0 for no penalty"
            raise InvalidRequest(message, param="options.repeat_last_n")
        found = {
            "max_tokens": self.num_predict if self.num_predict is not None and self.num_predict > 0 else None,
            "temperature": self.temperature,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed == -1 else self.seed,
            "stop": self.stop,
            "repetition_penalty": penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        return {**_DEFAULTS, **{name: value for name, value in found.items() if value is not None}}


@also_takes((Off, "truncate shift"))
class _Body(Strict):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    """Null: true."""
    format: Literal["", "json"] | dict[str, Any] | None = None
    """json, or a JSON Schema."""
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    """Null: as the model does."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: KeepAlive = None

    def fields(self) -> dict[str, Any]:
        """Fields of a chat's body, but for the messages."""
        fields = (self.options or OllamaOptions()).sampling()
        fields |= {"model": self.model, "logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if self.format:
            fields["json_schema"] = {"type": "object"} if self.format == "json" else self.format
        return fields

    def thinking(self) -> dict[str, Any]:
        """Fields of a chat's body that switch reasoning."""
        if self.think is True:
            return {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
        return {} if self.think is None else {"reasoning_effort": self.think or "none"}


class OllamaFunction(Lenient):
    """A function called earlier."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(Lenient):
    """A tool call of an earlier answer."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Lenient):
    """A turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        """A chat's message."""
        calls: list[AnyCall] = [
            ToolCall(id=call.id, function=FunctionCallParam(**call.function.model_dump()))
            for call in self.tool_calls or ()
        ]
        return Message(
            role=self.role,
            content=_content(self.content, self.images),
            name=self.tool_name,
            reasoning_content=self.thinking,
            tool_calls=calls or None,
            tool_call_id=self.tool_call_id,
        )


def _content(text: str | None, images: list[str] | None) -> str | list[Part] | None:
    """A message's, images first."""
    if not images:
        return text
    return [*(Part(type="image_url", image_url=image) for image in images), Part(type="text", text=text or "")]


class OllamaChatBody(_Body):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None

    def chat(self) -> ChatBody:
        """The chat that it asks for."""
        messages = [message.message() for message in self.messages or ()]
        for tool in self.tools or ():
            _split_types(tool)
        tools: list[AnyTool] | None = None if self.tools is None else [*self.tools]
        return ChatBody(messages=messages, tools=tools, **self.fields(), **self.thinking())


@also_takes(
    (Empty, "suffix template"),
    (NoContext, "context"),
    (Nothing, "width height steps"),
)
class OllamaGenerateBody(_Body):
    """POST /api/generate."""

    prompt: str | None = None
    images: list[str] | None = None
    system: str | None = None
    raw: bool | None = None
    """The prompt as it is, without the model's chat template."""

    def chat(self) -> ChatBody:
        """The chat that it asks for."""
        system = [Message(role="system", content=self.system)] if self.system else []
        messages = [*system, Message(role="user", content=_content(self.prompt, self.images))]
        return ChatBody(messages=messages, **self.fields(), **self.thinking())

    def raw_chat(self) -> ChatBody:
        """The same without a chat template. Raises InvalidRequest for what only a template can tell the model."""
        if self.system:
            message = "there is no place for a system message: the prompt goes to the model as it is"
            raise InvalidRequest(message, param="system")
        if self.images:
            raise InvalidRequest("images need the model's chat template", param="images")
        if self.think:
            raise InvalidRequest("thinking needs the model's chat template", param="think")
        return ChatBody(messages=[Message(role="user")], separate_reasoning=False, **self.fields())


@also_takes((Anything, "options"))
class OllamaEmbedBody(Strict):
    """POST /api/embed."""

    model: str | None = None
    input: str | list[str]
    truncate: bool | None = None
    """Null or true: a text is cut to what the context holds."""
    dimensions: int | None = None
    keep_alive: KeepAlive = None


@also_takes((Anything, "options"))
class OllamaEmbeddingBody(Strict):
    """POST /api/embeddings, the old form."""

    model: str | None = None
    prompt: str
    keep_alive: KeepAlive = None


class OllamaShowBody(Lenient):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    """The old name of `model`."""


def _split_types(tool: Tool) -> None:
    """Ollama's client writes the types of a union as one text, which no JSON Schema has."""
    properties = (tool.function.parameters or {}).get("properties")
    for field in properties.values() if isinstance(properties, dict) else ():
        if isinstance(field, dict) and isinstance(kind := field.get("type"), str) and "," in kind:
            field["type"] = sorted(each.strip() for each in kind.split(","))
