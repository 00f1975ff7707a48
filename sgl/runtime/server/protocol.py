"""OpenAI's request bodies and their sampling parameters. `fields` has those without effect, `constrained` the
constraints; SamplingParams checks most values."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from sgl.errors import InvalidRequest
from sgl.runtime.sampling_params import CONSTRAINTS, MAX_TOKENS, SamplingParams
from sgl.runtime.server.constrained import Constrained
from sgl.runtime.server.fields import (
    Anything,
    ForeignFields,
    Lenient,
    Nothing,
    Off,
    Strict,
    SystemTurn,
    also_takes,
    by_type,
    called,
    kind,
)

# checked here under their own names
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class StreamOptions(Strict):
    """What a stream carries besides chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class EngineFields(Constrained, ForeignFields):
    """What every protocol takes, under the same names: the sampler's parameters, constraints and scheduling."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: TokenCount | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    """vLLM's no_stop_trim."""
    priority: int | None = None
    cache_salt: str | None = None
    """Prefixes are shared only between requests of the same salt."""
    extra_key: str | None = None
    """SGLang's second salt."""
    lora_path: str | list[str | None] | None = None
    """The name of a loaded LoRA adapter, which may also stand in `model`: NAME or MODEL:NAME. A list has one for each
    prompt."""
    rid: str | None = None
    request_id: str | None = None
    """vLLM's rid."""
    timeout: float | None = None

    return_kv_transfer_params: bool | None = None
    """Of a prefill engine, with max_tokens 0: answer what a decode engine takes as kv_transfer_params."""
    kv_transfer_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    """What a prefill engine answered for the prompt; for several prompts a list."""

    def engine_fields(self) -> dict[str, Any]:
        """These fields, for another body."""
        return {name: getattr(self, name) for name in EngineFields.model_fields}


class SamplingBody(EngineFields):
    """Fields of completions and chats: OpenAI's, then extensions."""

    max_tokens: TokenCount | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Write tokens of logprobs as token_id:N."""

    def sampling_params(self, max_new_tokens: int) -> dict[str, Any]:
        """The engine's sampling parameters, without nulls. Raises InvalidRequest for a minimum above the maximum."""
        if self.min_tokens is not None and self.min_tokens > max_new_tokens:
            message = f"min_tokens is {self.min_tokens}, but the output has {max_new_tokens} tokens at most"
            raise InvalidRequest(message, param="min_tokens")
        params = {item.name: getattr(self, item.name, None) for item in fields(SamplingParams)}
        params |= {"max_new_tokens": max_new_tokens, "min_new_tokens": self.min_tokens}
        if self.include_stop_str_in_output:
            params["no_stop_trim"] = True
        if self.top_p == 0:  # which OpenAI's API has for the likeliest token
            params |= {"top_p": 1.0, "top_k": 1}
        params |= dict.fromkeys(CONSTRAINTS) | self.constraint()
        return {name: value for name, value in params.items() if value is not None}

    def options(self) -> dict[str, Any]:
        """The engine's other arguments, without nulls."""
        salts = [salt for salt in (self.cache_salt, self.extra_key) if salt is not None]
        options = {
            "priority": self.priority,
            "extra_key": "\0".join(salts) if salts else None,
            "rid": self.rid if self.rid is not None else self.request_id,
            "timeout": self.timeout,
            "return_kv_transfer_params": self.return_kv_transfer_params,
            "kv_transfer_params": self.kv_transfer_params,
        }
        if self.stream and self.return_kv_transfer_params:
            raise InvalidRequest(
                "kv_transfer_params are answered whole: leave stream out", param="return_kv_transfer_params"
            )
        return {name: value for name, value in options.items() if value is not None}

    def usage_wanted(self) -> tuple[bool, bool]:
        """Whether each chunk carries usage, and whether a last one does."""
        wanted = self.stream_options
        if wanted is None:
            return False, False
        if not self.stream:
            raise InvalidRequest("stream_options are only allowed with stream: true", param="stream_options")
        return bool(wanted.continuous_usage_stats), bool(wanted.include_usage)


@also_takes((called("max_tokens"), "max_completion_tokens max_new_tokens max_output_tokens"))
class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ImageUrl(Lenient):
    """Where an image is: a data: URL or an http one."""

    url: str


class Part(Lenient):
    """A piece of a message's content: a text or an image."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    image: str | None = None
    """transformers' image_url."""


class FunctionCallParam(Lenient):
    """A function called earlier; arguments as JSON text or parsed."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Lenient):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCallParam


class CustomCallParam(Lenient):
    """A custom tool called earlier."""

    name: str
    input: str


class CustomToolCall(Lenient):
    """A custom tool's call of an earlier answer."""

    id: str | None = None
    type: Literal["custom"]
    custom: CustomCallParam


AnyCall = Annotated[
    Annotated[ToolCall, kind("function")] | Annotated[CustomToolCall, kind("custom")], by_type("function")
]


class Message(Lenient):
    """A turn."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's reasoning_content."""
    tool_calls: list[AnyCall] | None = None
    function_call: FunctionCallParam | None = None
    tool_call_id: str | None = None


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Off = None


class Tool(Strict):
    """A tool: a function."""

    type: Literal["function"] = "function"
    function: Function
    defer_loading: Off = None


class Grammar(Strict):
    """The language of a text."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Strict):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class Custom(Strict):
    """A tool whose input is a text."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of its input. Raises InvalidRequest if it is missing."""
        if self.format is None or self.format.type == "text":
            return None
        if self.format.grammar is None:
            raise InvalidRequest(f"the format of {self.name!r} needs its grammar", param="tools")
        return self.format.grammar


class CustomTool(Strict):
    """A custom tool."""

    type: Literal["custom"]
    custom: Custom


AnyTool = Annotated[Annotated[Tool, kind("function")] | Annotated[CustomTool, kind("custom")], by_type("function")]


class ChosenName(Lenient):
    """The name of a function to call."""

    name: str


class ChosenTool(Lenient):
    """The tool to call."""

    type: Literal["function"] = "function"
    function: ChosenName


class ChosenCustom(Lenient):
    """The custom tool to call."""

    type: Literal["custom"]
    custom: ChosenName


AnyChosen = Annotated[
    Annotated[ChosenTool, kind("function")] | Annotated[ChosenCustom, kind("custom")],
    by_type("function"),
]


class AllowedTools(Lenient):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[AnyChosen] = Field(min_length=1)


class AllowedToolChoice(Lenient):
    """A choice among the described tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[ChosenTool, kind("function")]
    | Annotated[ChosenCustom, kind("custom")]
    | Annotated[AllowedToolChoice, kind("allowed_tools")],
    by_type("function"),
]


class ThinkingChoice(Lenient):
    """Whether to reason, as DeepSeek's, GLM's and Kimi's services take it; auto: as the template does."""

    type: Literal["enabled", "disabled", "auto"]


class TemplateFields(Strict):
    """What chats, in either of OpenAI's APIs, say to the template."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Template variables such as enable_thinking."""
    enable_thinking: bool | None = None
    """The template variable, as Qwen's services take it."""
    thinking: ThinkingChoice | None = None
    documents: list[dict[str, Any]] | None = None
    """The template variable `documents`."""


@also_takes(
    (Anything, "verbosity prediction"),  # a predicted answer only saves time
    (Nothing, "web_search_options audio"),
    (called("max_completion_tokens"), "max_new_tokens max_output_tokens"),
    (SystemTurn, "system"),
    (Off, "echo add_special_tokens return_meta_info return_prompt_text use_audio_in_video"),
)
class ChatBody(SamplingBody, TemplateFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    """What tools were before. The answer has one `function_call` then."""
    function_call: Literal["none", "auto"] | ChosenName | None = None
    reasoning_effort: str | float | None = None
    modalities: list[Literal["text"]] | None = None

    add_generation_prompt: bool | None = None
    """False: do not open the answer's turn."""
    continue_final_message: bool | None = None
    """The last message begins the answer."""
    separate_reasoning: bool | None = None
    """False: leave reasoning in the content."""
    stream_reasoning: bool | None = None
    """False: send the reasoning of a stream in one piece, when it has ended."""
    include_reasoning: bool | None = None
    """False: omit the reasoning."""
    return_prompt_token_ids: bool | None = None

    def with_tools(self) -> ChatBody:
        """The same with tools in place of functions. Raises InvalidRequest for both."""
        if not self.functions:
            if isinstance(self.function_call, ChosenName):
                raise InvalidRequest(
                    "function_call names one of functions, and there are none", param="function_call"
                )
            return self
        if self.tools or self.tool_choice:
            raise InvalidRequest("functions are what tools were before: give one of them", param="functions")
        choice: Any = self.function_call
        if isinstance(choice, ChosenName):
            choice = ChosenTool(function=choice)
        tools = [Tool(function=function) for function in self.functions]
        return self.model_copy(update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})
