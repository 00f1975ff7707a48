"""What endpoints answer, for /openapi.json. An object may have more fields than are named here."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

Entry = list[float | str | None]
"""[logprob | null, token id, text | null]"""
FinishedBy = Literal["stop", "length", "tool_calls", "abort"]


class ErrorDetail(TypedDict):
    """What went wrong; `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """A request that failed."""

    error: ErrorDetail


class Ok(TypedDict):
    """It is done, or all is well."""

    status: Literal["ok"]


class Version(TypedDict):
    """The release that serves."""

    version: str


# ── native ──────────────────────────────────────────────────────────────────────────────────────────────────────


class FinishReason(TypedDict):
    """Why a generation ended, with what belongs to the type."""

    type: Literal["stop", "length", "abort"]
    matched: NotRequired[str | int | None]
    length: NotRequired[int]
    message: NotRequired[str]
    status_code: NotRequired[int]
    err_type: NotRequired[str]


class MetaInfo(TypedDict):
    """Counts, times in seconds, and the logprobs that were asked for."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    forced_tokens: int
    cached_tokens: int
    num_retractions: int
    queue_time: float | None
    prefill_time: float | None
    e2e_latency: float
    weight_version: str
    drafted_tokens: NotRequired[int]
    accepted_tokens: NotRequired[int]
    matched_regex: NotRequired[str]
    input_token_logprobs: NotRequired[list[Entry]]
    output_token_logprobs: NotRequired[list[Entry]]
    output_token_logprobs_length: NotRequired[int]
    input_top_logprobs: NotRequired[list[list[Entry] | None]]
    output_top_logprobs: NotRequired[list[list[Entry] | None]]
    input_token_ids_logprobs: NotRequired[list[list[Entry] | None]]
    output_token_ids_logprobs: NotRequired[list[list[Entry] | None]]


class Result(TypedDict):
    """One generation; `index` tells those of a stream apart."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: NotRequired[int]
    kv_transfer_params: NotRequired[dict[str, Any]]


class ModelInfo(TypedDict):
    """The served model."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None
    context_length: int
    has_image_understanding: bool
    reasoning_parser: str | None
    weight_version: str
    chat_template: str | None
    special_tokens: dict[str, str]
    engine: str
    programs: bool
    version: str


class ServerInfo(TypedDict):
    """Every option as it was resolved, and the engine's state."""

    served_model_name: str
    grpc_port: int | None
    version: str
    startup_time: float
    internal_states: list[dict[str, Any]]


class EndedTransfers(TypedDict):
    """How many of the leases named went on."""

    ended: int


class StatusMessage(TypedDict):
    """A change was made."""

    message: str
    status: str


class ReleasedMemory(StatusMessage):
    """Memory was given back: bytes by tag."""

    released: dict[str, int]


class WeightUpdate(TypedDict):
    """Whether weights, or a group that they come from, were changed."""

    success: bool
    message: str
    num_paused_requests: int
    new_version: NotRequired[str]


class WeightVersion(TypedDict):
    """What the last update called its weights, or "default"."""

    weight_version: str


class LoraUpdate(TypedDict):
    """The LoRA adapters after a change: paths by name."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]


class Profile(TypedDict):
    """Where the profile is, on the server."""

    path: str


class Tokens(TypedDict):
    """Token ids and their number, of one text or of each."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class Texts(TypedDict):
    """The text, or one for each list of tokens."""

    text: str | list[str]


# ── OpenAI ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Model(TypedDict):
    """A model, or a LoRA adapter of it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    root: str
    parent: str | None
    """Of an adapter, the model's id."""
    max_model_len: int
    input_modalities: list[Literal["text", "image", "video"]]


class Models(TypedDict):
    """The served one, and its LoRA adapters."""

    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool


class PromptTokensDetails(TypedDict):
    """Tokens of the prompt that were cached."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Tokens of the answers that are reasoning."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class Choice(TypedDict):
    """What every choice has."""

    index: int
    finish_reason: FinishedBy | None
    matched_stop: str | int | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class CompletionLogprobs(TypedDict):
    """Logprobs of a completion, in lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Choice):
    """One text."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: NotRequired[dict[str, Any] | list[dict[str, Any]]]


class TokenLogprob(TypedDict):
    """A token's logprob."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """With alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Logprobs of a chat's answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    """The called function; arguments as JSON text."""

    name: str
    arguments: str


class ChatToolCall(TypedDict):
    """A call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(TypedDict):
    """The answer's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChatChoice(Choice):
    """One answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(TypedDict):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    kv_transfer_params: NotRequired[dict[str, Any] | list[dict[str, Any]]]


# ── programs and operation ──────────────────────────────────────────────────────────────────────────────────────


class ProgramId(TypedDict):
    """A program."""

    id: str


class ProgramPages(TypedDict):
    """What a prefill engine offers of the rows' beginnings; null: of none of them."""

    kv_transfer_params: list[dict[str, Any] | None] | None


class ProgramSummary(ProgramId):
    """An entry of the list of programs."""

    name: str
    started: float
    is_running: bool
    num_nodes: int


class Timeline(ProgramSummary):
    """Its nodes, and its events with the seconds `at` which they came."""

    nodes: list[dict[str, Any]]
    events: list[dict[str, Any]]


class Status(TypedDict):
    """What the page shows."""

    model: str
    time: float
    started: float
    open_requests: int
    max_total_tokens: int
    engine: dict[str, Any]
    latency: dict[str, dict[str, float | None]]
    responses: list[list[str | int]]


class EngineLoad(TypedDict):
    """What one engine has to do, with sections that were asked for."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int
    memory: NotRequired[dict[str, float]]
    speculative: NotRequired[dict[str, float]]
    queues: NotRequired[dict[str, int]]


class EngineLoads(TypedDict):
    """What the engines have to do."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[EngineLoad]
    aggregate: dict[str, float]


class Sample(TypedDict):
    """The engine's counts at a time, in seconds since the epoch; null while it did not serve."""

    time: float
    engine: dict[str, float] | None


class Samples(TypedDict):
    """The last minutes, oldest first."""

    samples: list[Sample]


class RequestRecord(TypedDict):
    """A request that generates. Its tokens are those of its finished outputs; `status` is null while it goes on."""

    id: str
    path: str
    started: float
    seconds: float
    status: int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    outputs: int
