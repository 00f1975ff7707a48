"""The options of engine and server as keyword arguments, for type checkers.

`sgl.runtime.config` explains them, checks their ranges and has their defaults; a test holds both together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

ORIGINALS = {"enable_deterministic_inference": "deterministic"}
"""The original's other names of options."""


class EngineOptions(TypedDict, total=False):
    """What `sgl.Engine` takes besides its model."""

    tokenizer_path: str | None
    skip_tokenizer_init: bool
    model_impl: Literal["auto", "sgl", "transformers"]
    load_format: Literal["auto", "safetensors", "gguf", "dummy"]
    context_length: int | None
    device: str | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    kv_cache_dtype: Literal["auto", "fp8_e4m3"]
    quantization: Literal["fp8", "int4"] | None
    tp_size: int
    pp_size: int
    rank_timeout: float
    nnodes: int
    node_rank: int
    dist_init_addr: str | None
    dist_key_file: str | None
    dp_size: int
    dp_rank: int | None
    attention_backend: Literal["torch", "cpu", "flashinfer", "triton"] | None
    prefill_kernel: Literal["fa2", "fa3"] | None
    disable_cuda_graph: bool
    cuda_graph_max_bs: int | None
    page_size: int | None
    mem_fraction_static: float | None
    max_total_tokens: int | None
    state_checkpoints: int | None
    swa_full_tokens_ratio: float | None
    max_running_requests: int | None
    max_queued_requests: int | None
    max_requests_per_call: int
    chunked_prefill_size: int | None
    schedule_policy: Literal["lpm", "fcfs", "priority", "dfs-weight", "program"]
    schedule_conservativeness: float
    disable_radix_cache: bool
    enable_hierarchical_cache: bool
    hicache_ratio: float
    hicache_size: int
    hicache_storage_backend: Literal["file"] | None
    hicache_storage_dir: str | None
    hicache_storage_size: int
    disaggregation_mode: Literal["null", "prefill", "decode"] | None
    disaggregation_host: str
    disaggregation_port: int
    disaggregation_transport: Literal["tcp", "nixl", "cuda_ipc"]
    disaggregation_key_file: str | None
    disaggregation_lease: float
    disaggregation_buffer_mb: int | None
    disable_overlap_schedule: bool | None
    request_timeout: float | None
    queue_timeout: float | None
    kv_events: str | None
    kv_events_replay: str | None
    program_lease_ttl: float
    stream_interval: int
    image_urls: Literal["public", "any", "none"]
    image_cache_mb: int
    disable_jump_forward: bool
    json_whitespace: Literal["compact", "flexible"]
    json_additional_properties: Literal["closed", "schema"]
    grammar_backend: Literal["sgl", "outlines", "llguidance"]
    constraint_timeout: float
    enable_lora: bool | None
    lora_paths: Mapping[str, str | PathLike[str]] | Sequence[str | Mapping[str, Any]] | None
    max_loras_per_batch: int
    max_lora_rank: int | None
    lora_target_modules: Sequence[str] | None
    speculative_algorithm: Literal["auto", "off", "NGRAM", "GRAMMAR", "DRAFT", "STANDALONE", "EAGLE3"] | None
    speculative_draft_model_path: str | None
    speculative_num_draft_tokens: int | None
    speculative_num_steps: int | None
    deterministic: bool
    enable_deterministic_inference: bool
    random_seed: int | None
    check_ledger: bool


class ServerOptions(EngineOptions, total=False):
    """What `sgl.Runtime` takes besides its address, log level and `api_key`."""

    model_path: str
    grpc_port: int | None
    admin_api_key: str | None
    cors_origins: str
    allowed_hosts: str
    max_request_bytes: int
    read_timeout: float
    write_timeout: float
    reconnect_grace: float
    drain_timeout: float
    watchdog_timeout: float
    served_model_name: str | None
    chat_template: str | None
    sampling_defaults: Literal["model", "openai"]
    pooling: Literal["last", "mean"]
    tool_call_parser: str | None
    reasoning_parser: str | None
    incremental_streaming_output: bool
    parity_logprobs: bool
    otlp_endpoint: str | None
    log_format: Literal["text", "json"]
