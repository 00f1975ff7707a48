"""The bodies of the OpenAI API: what they may hold, and how that reads as the engine's sampling parameters.

Unknown fields are refused, as OpenAI does. Fields that only mean something to OpenAI's own service (user, store, …)
are taken and have no effect here. Values are checked once, most by SamplingParams.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sgl.errors import InvalidRequest
from sgl.runtime.sampling_params import MAX_TOKENS, SamplingParams

# Checked here, since the engine calls them otherwise.
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class Strict(BaseModel):
    """A body or a part of one: fields that are not known are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Lenient(BaseModel):
    """The same, but what is not known is passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(Strict):
    """What a stream carries besides its chunks."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class NamedSchema(Strict):
    """A JSON Schema under a name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """How the whole answer must look."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class SamplingBody(Strict):
    """What both endpoints share. The second block extends OpenAI's parameters by the engine's own."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Any = None
    metadata: Any = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: TokenCount | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    choices: list[str] | None = None
    """The answer is one of these texts."""
    priority: int | None = None
    cache_salt: str | None = None
    """Requests share cached prefixes only with those of the same salt."""
    rid: str | None = None
    timeout: float | None = None

    def sampling_params(self, max_new_tokens: int) -> dict[str, Any]:
        """The engine's parameters; nulls are left out."""
        params = {item.name: getattr(self, item.name, None) for item in fields(SamplingParams)}
        params |= {"max_new_tokens": max_new_tokens, "min_new_tokens": self.min_tokens}
        if (schema := self._schema()) is not None:
            params["json_schema"] = schema
        if self.choices is not None:
            if not self.choices or self.regex is not None:
                raise InvalidRequest("choices must hold texts, and excludes regex", param="choices")
            params["regex"] = "(" + "|".join(_META.sub(r"\\\g<0>", choice) for choice in self.choices) + ")"
        return {name: value for name, value in params.items() if value is not None}

    def options(self) -> dict[str, Any]:
        """The engine's arguments beside the sampling parameters."""
        options = {
            "priority": self.priority,
            "extra_key": self.cache_salt,
            "rid": self.rid,
            "timeout": self.timeout,
        }
        return {name: value for name, value in options.items() if value is not None}

    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options are only allowed with stream: true", param="stream_options")
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _schema(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise InvalidRequest(
                "response_format.json_schema.schema is needed", param="response_format.json_schema"
            )
        return wanted.json_schema.schema_


_META = re.compile(r"[\\.^$*+?{}\[\]|()]")


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class Part(Lenient):
    """A piece of a message's content; texts only."""

    type: str
    text: str | None = None


class CalledFunction(Lenient):
    """A function that an earlier answer called, its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class Call(Lenient):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Lenient):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class ChosenName(Lenient):
    """The function that must be called."""

    name: str


class ChosenTool(Lenient):
    """Which tool must be used."""

    type: Literal["function"]
    function: ChosenName


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    verbosity: Any = None

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, such as enable_thinking."""
    continue_final_message: bool | None = None
    """The last message is the beginning of the answer."""
    separate_reasoning: bool | None = None
    """False: leave the reasoning in the content."""
