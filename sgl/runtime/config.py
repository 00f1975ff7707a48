"""The engine's options: one frozen dataclass, read once from keyword arguments and `SGL_*` variables.

Field names are the command line's flags with underscores. A None means "decide at start-up": the engine replaces
each by what the model and the machine allow and logs the result. No other module reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from sgl.errors import ConfigError, nearest_name

SchedulePolicy = Literal["lpm", "fcfs", "priority", "dfs-weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine; `from_options` checks them."""

    model_path: str
    """A Hugging Face folder or hub id."""
    tokenizer_path: str | None = None
    """Where the tokenizer is, if not with the model."""
    skip_tokenizer_init: bool = False
    """Serve token ids only: no text in, no text out, no stop strings."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """dummy: random weights from config.json alone."""
    device: str | None = None
    """cpu, cuda or cuda:N. None: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's on a GPU, float32 on a CPU."""
    context_length: PositiveInt | None = None
    """Longest prompt plus output, in tokens. None: the model's."""
    attention_backend: Literal["torch"] | None = None
    """None: the fastest that the device has."""
    page_size: PositiveInt = 16
    """Tokens a KV page; prefixes are shared in whole pages."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the device's memory for weights and KV pages. None: 0.88 on a GPU, 0.3 on a CPU."""
    max_total_tokens: PositiveInt | None = None
    """Tokens of KV to allocate. None: what mem_fraction_static leaves, and no more than can be used."""
    max_running_requests: PositiveInt | None = None
    """Requests in one step. None: 512 on a GPU, 128 on a CPU, fewer where KV is short."""
    max_queued_requests: PositiveInt | None = None
    """Requests waiting for a row; one more is refused with QueueFull. None: no limit."""
    chunked_prefill_size: PositiveInt | Literal[-1] | None = None
    """Tokens a step; decodes are charged first and prompts get the rest, at least one. None: 8192 on a GPU,
    2048 on a CPU; -1: prompts are never split."""
    schedule_policy: SchedulePolicy = "lpm"
    """Who is admitted first: longest cached prefix, first come, priority, or depth-first by subtree weight."""
    schedule_conservativeness: PositiveFloat = 1.0
    """Scales the output length that admission expects of a request; higher admits fewer and retracts less."""
    disable_radix_cache: bool = False
    """Share no KV between requests."""
    disable_overlap_schedule: bool | None = None
    """Handle each step's result before launching the next. None: True on a CPU, where the step itself needs
    the cores that scheduling would overlap with."""
    request_timeout: PositiveFloat | None = None
    """Seconds a request may take in all unless it says otherwise. None: no limit."""
    queue_timeout: PositiveFloat | None = None
    """Seconds a request may wait for its first step. None: no limit."""
    stream_interval: PositiveInt = 1
    """Tokens between two events of a stream."""
    random_seed: NonNegativeInt | None = None
    """Seeds requests that bring no seed of their own. None: another one each start."""
    check_ledger: bool = False
    """Prove after every step that each KV page has exactly one owner (slow; for tests and debugging)."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Options by name, over `SGL_<NAME>` variables, over defaults. Raises ConfigError."""
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}{nearest_name(name, known)}", option=name)
        variables = {
            name: os.environ[f"SGL_{name.upper()}"]
            for name in known
            if name not in options and f"SGL_{name.upper()}" in os.environ
        }
        if "model_path" not in options and "model_path" not in variables:
            raise ConfigError("option 'model_path' is needed: a Hugging Face folder or hub id", option="model_path")
        return cls(**{**_parse(variables), **_validated(options)})


def _parse(variables: Mapping[str, str]) -> dict[str, Any]:
    """Values of `SGL_*` variables: texts, read as the fields' types."""
    values = {name: None if text.lower() in ("", "none") else text for name, text in variables.items()}
    return _validated(values, strict=False)


def _validated(values: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in values.items():
        try:
            checked[name] = _FIELDS[name].validate_python(value, strict=strict)
        except ValidationError as error:
            wanted = "; or ".join(dict.fromkeys(detail["msg"].lower() for detail in error.errors()))
            raise ConfigError(f"{name}={value!r}: {wanted}", option=name) from None
    return checked


_FIELDS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(hint) for name, hint in get_type_hints(EngineConfig, include_extras=True).items()
}
