"""The options of engine and server, from keyword arguments and `SGL_*` variables.

Field names are the command line's flags with underscores. In the engine's options, None means "decide at start-up";
the choice is logged. No other module reads the environment.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from sgl.errors import ConfigError, nearest_name
from sgl.lang.ir.sampling import MAX_SECONDS

logger = logging.getLogger(__name__)

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "embedded"
"""The model that comes with the package."""

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
SchedulePolicy = Literal["lpm", "fcfs", "priority", "dfs-weight"]
JsonWhitespace = Literal["compact", "flexible"]
AdditionalProperties = Literal["closed", "schema"]
GrammarBackend = Literal["sgl", "outlines", "llguidance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine; `from_options` checks them."""

    model_path: str = "embedded"
    """A Hugging Face folder or hub id, or "embedded": the small model of this package."""
    tokenizer_path: str | None = None
    """The tokenizer's folder or hub id, if it is not with the model."""
    skip_tokenizer_init: bool = False
    """Serve token ids only: no text and no stop strings."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """dummy: random weights from config.json alone."""
    context_length: PositiveInt | None = None
    """Longest prompt plus output in tokens. None: the model's."""
    device: str | None = None
    """cpu, cuda or cuda:N. None: cuda if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's on a GPU, float32 on a CPU."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """auto: the model's. fp8_e4m3: half the bytes, without scales; needs flashinfer or triton, and compute
    capability 8.9 or above."""
    quantization: Literal["fp8"] | None = None
    """fp8: the layers' weights in e4m3 with a scale for each row, and activations rounded alike; needs bfloat16 and
    compute capability 8.9 or above."""
    attention_backend: Literal["torch", "cpu", "flashinfer", "triton"] | None = None
    """None: flashinfer on a GPU, cpu on a CPU, torch where these cannot serve the model. triton: for GPUs without
    FlashInfer. cpu: float32 only, compiled with gcc for this processor."""
    prefill_kernel: Literal["fa2", "fa3"] | None = None
    """FlashInfer's kernels for prompts. None: fa3 on Hopper, else fa2. With fa3, steps whose prompts average fewer
    than 128 tokens take fa2."""
    disable_cuda_graph: bool = False
    """Launch all kernels of decodes and prompts one by one."""
    cuda_graph_max_bs: PositiveInt | None = None
    """Decode steps of more rows are replayed layer by layer, like steps with prompts. None: up to 512."""
    page_size: PositiveInt | None = None
    """Tokens in a KV page; requests share prefixes in whole pages. None: 16 on a GPU, 8 on a CPU."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the device's memory for weights and KV pages; on a CPU, of what the container and `ulimit -v` leave.
    None: 0.88 on a GPU, 0.3 on a CPU."""
    max_total_tokens: PositiveInt | None = None
    """Tokens of KV to allocate. None: what mem_fraction_static leaves, but no more than can be used."""
    max_running_requests: PositiveInt | None = None
    """Most requests in one step. None: 512 on a GPU, 128 on a CPU, fewer where KV is short."""
    max_queued_requests: PositiveInt | None = None
    """Requests that may wait for a row; more are refused with QueueFull. None: no limit."""
    max_requests_per_call: PositiveInt = 65_536
    """Requests that one call may ask for: prompts x n, for programs rows x streams x n."""
    chunked_prefill_size: PositiveInt | Literal[-1] | None = None
    """Tokens a step; prompts get what decodes leave, at least one. None: 2048 on a CPU, on a GPU 64 for each
    multiprocessor (8448 on an H200), up to four times as many for small models. -1: prompts are never split."""
    schedule_policy: SchedulePolicy = "lpm"
    """Who is admitted first: longest cached prefix, first come, priority, or depth-first by subtree weight."""
    schedule_conservativeness: PositiveFloat = 1.0
    """Scales the output length that admission expects; higher admits fewer requests and retracts less."""
    disable_radix_cache: bool = False
    """Share no KV between requests."""
    disable_overlap_schedule: bool | None = None
    """Handle each result before launching the next step. None: True on a CPU, whose cores the step itself needs."""
    request_timeout: Seconds | None = None
    """Seconds a request may take, unless it says otherwise. None: no limit."""
    queue_timeout: Seconds | None = None
    """Seconds a request may wait for its first step. None: no limit."""
    program_lease_ttl: Seconds = 60.0
    """Most seconds for which a program's KV pages stay locked while it waits for its client."""
    stream_interval: PositiveInt = 1
    """Tokens between two events of a stream."""
    disable_jump_forward: bool = False
    """Sample every token, also where a constraint leaves no choice."""
    json_whitespace: JsonWhitespace = "compact"
    """What may stand between the tokens of constrained JSON: nothing, or a bounded number of blanks and newlines."""
    json_additional_properties: AdditionalProperties = "closed"
    """Keys that a schema of constrained JSON does not declare, where it declares some and says nothing of others:
    "closed" forbids them, "schema" allows them as JSON Schema does. `additionalProperties: true` always allows
    them."""
    grammar_backend: GrammarBackend = "sgl"
    """Whose automata constrain outputs. outlines (needs sgl[outlines]) and llguidance (needs sgl[ebnf]) are for
    comparison: they refuse more, ignore token budgets, and work on the CPU."""
    constraint_timeout: Seconds = 10.0
    """Seconds of compiling after which a constraint is refused as too large."""
    random_seed: NonNegativeInt | None = None
    """Seed for requests that bring none. None: a new one each start."""
    check_ledger: bool = False
    """Prove after every step that each KV page has exactly one owner (slow; for tests and debugging)."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Options by name override `SGL_<NAME>` variables, which override defaults. Raises ConfigError."""
        config = cls(**_checked(cls, options))
        if config.model_path != "embedded":
            return config
        if "model_path" not in options:
            logger.warning(
                "sgl runs its embedded model, a toy: name another by model_path=, SGL_MODEL_PATH or MODEL"
            )
        return replace(config, model_path=str(EMBEDDED))

    @property
    def model_name(self) -> str:
        """The model's name for people: its path, or "embedded"."""
        return "embedded" if self.model_path == str(EMBEDDED) else self.model_path


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients send. Their programs and requests belong to its name."""

    name: str
    key: str = field(repr=False)


_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.*[^=].*)")  # a key without a name may end in `==`
_NO_KEY = re.compile(r"[\x00-\x20\x7f,]")


def _api_keys(given: Any) -> Any:
    """Read `NAME=KEY` or `KEY` texts, with commas between several. Keys without a name get one that users cannot
    choose. Messages never quote a key: they end up in logs."""
    if given is None or (isinstance(given, tuple) and all(isinstance(key, ApiKey) for key in given)):
        return given
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a key is a text, NAME=KEY or KEY")
    if not texts:
        raise ValueError("no key is given")
    keys: dict[str, ApiKey] = {}
    parts = [part.strip() for text in texts for part in text.split(",")]
    for i, part in enumerate(parts, 1):
        named = _NAMED_KEY.fullmatch(part)
        name, key = named.groups() if named else (f"#{i}", part)
        if not key or _NO_KEY.search(key):
            raise ValueError(f"key number {i} is empty, or has blanks or control characters")
        if key in keys:
            raise ValueError(f"keys number {i} and {list(keys).index(key) + 1} are the same")
        keys[key] = ApiKey(name, key)
    return tuple(keys.values())


def _admin_key(given: Any) -> Any:
    if isinstance(given, str) and (not given or _NO_KEY.search(given)):
        raise ValueError("the key is empty, or has commas, blanks or control characters")
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server in front of an engine; `from_options` checks them."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: Annotated[int, Field(ge=0, le=65535)] = 30000
    """0: any free port, which the ready line names."""
    api_key: Annotated[tuple[ApiKey, ...] | None, BeforeValidator(_api_keys)] = field(default=None, repr=False)
    """NAME=KEY or KEY; may be repeated. Clients send one as `Authorization: Bearer KEY`; what they make belongs to
    its name. None: no key is needed."""
    admin_api_key: Annotated[str | None, BeforeValidator(_admin_key)] = field(default=None, repr=False)
    """The only key that may flush the cache, profile, abort all requests, and reach other people's programs and
    requests. None: every key may flush and profile, and reaches its own."""
    cors_origins: str = ""
    """Origins, separated by commas, whose pages may call the server from a browser; * for all. Others are refused."""
    allowed_hosts: str = ""
    """Host names, separated by commas, that clients may use besides localhost and IP addresses; * for all. Checked
    only on a loopback address without keys."""
    max_request_bytes: PositiveInt = 32 << 20
    """Longer request bodies are refused with 413."""
    read_timeout: Seconds = 60.0
    """Seconds for which a client may leave a request unfinished or a connection unused."""
    write_timeout: Seconds = 60.0
    """Seconds for which a client may leave a stream unread; then its request is aborted."""
    reconnect_grace: Seconds = 5.0
    """Seconds for which a program continues without a listener, so that its client may reconnect."""
    drain_timeout: Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)] = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    watchdog_timeout: Seconds = 300.0
    """Seconds that one step may take before the engine's process is restarted."""
    served_model_name: str | None = None
    """The model's name in the OpenAI API. None: its path."""
    chat_template: str | None = None
    """A Jinja file that replaces the model's chat template."""
    reasoning_parser: str | None = None
    """The model family whose reasoning is split from its answers in chats (qwen3, deepseek-r1, …)."""
    incremental_streaming_output: bool = False
    """Events of /generate carry only new text and token ids, not all so far."""
    parity_logprobs: bool = False
    """Start prompt logprobs after the first token with a null, as the original's server does. False: without it, as
    the original's client expects."""
    otlp_endpoint: str | None = None
    """A collector for OpenTelemetry traces by OTLP over HTTP, such as http://localhost:4318; needs sgl[otel]. None:
    no traces."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages to log."""
    log_format: Literal["text", "json"] = "text"
    """json: one object a line."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServerConfig:
        """Options by name override `SGL_<NAME>` variables, which override defaults. Raises ConfigError."""
        config = cls(**_checked(cls, options))
        if config.admin_api_key in [key.key for key in config.api_key or ()]:
            raise ConfigError("admin_api_key is one of api_key's keys: it must be another", option="admin_api_key")
        return config


@contextmanager
def working_folder_left_out() -> Iterator[None]:
    """Python processes started within it import nothing from the working folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _checked(cls: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    known = {item.name for item in fields(cls)}
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{nearest_name(name, known)}", option=name)
    texts = {name: os.environ.get(f"SGL_{name.upper()}") for name in known if name not in options}
    variables = {name: text for name, text in texts.items() if text}  # an empty one counts as unset
    return {**parse_options(cls, variables), **_validated(cls, options)}


def parse_options(cls: type[Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse texts of variables or flags by the types of a dataclass' fields. Raises ConfigError."""
    values = {name: None if text.lower() in ("", "none") else text for name, text in texts.items()}
    return _validated(cls, values, strict=False)


def _validated(cls: type[Any], values: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in values.items():
        try:
            adapter = _fields(cls)[name]  # type: ignore[arg-type]  # classes are hashable
            checked[name] = adapter.validate_python(value, strict=strict)
        except ValidationError as error:
            said = dict.fromkeys(detail["msg"].removeprefix("Value error, ").lower() for detail in error.errors())
            shown = name if name in _SECRET else f"{name}={value!r}"
            raise ConfigError(f"{shown}: {'; or '.join(said)}", option=name) from None
    return checked


_SECRET = frozenset({"api_key", "admin_api_key"})


@cache
def _fields(cls: type[Any]) -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}
