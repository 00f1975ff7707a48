"""Sampling parameters: names, ranges and executors' names for them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypedDict

from sgl.errors import InvalidRequest, RegexSyntaxError, nearest_name

_INF = float("inf")
MAX_WHOLE = 2**64  # bound of integers in programs
_MOST = 2**31 - 1
MAX_SECONDS = 10_000_000.0
"""The longest timeout, four months; clocks count no further."""


class Param(NamedTuple):
    """A parameter's default and range."""

    default: Any
    kind: Literal["integer", "number", "boolean", "texts", "ids", "object"]
    low: float = -_INF
    high: float = _INF


PARAMS: dict[str, Param] = {
    "max_tokens": Param(128, "integer", 0, _MOST),
    "min_tokens": Param(0, "integer", 0, _MOST),
    "n": Param(1, "integer", 1, 1024),
    "stop": Param((), "texts"),
    "stop_token_ids": Param((), "ids"),
    "stop_regex": Param((), "texts"),
    "temperature": Param(1.0, "number", 0.0),
    "top_p": Param(1.0, "number", 0.0, 1.0),
    "top_k": Param(-1, "integer", -1, _MOST),
    "min_p": Param(0.0, "number", 0.0, 1.0),
    "frequency_penalty": Param(0.0, "number", -2.0, 2.0),
    "presence_penalty": Param(0.0, "number", -2.0, 2.0),
    "repetition_penalty": Param(1.0, "number", 0.0),
    "ignore_eos": Param(False, "boolean"),
    "return_logprob": Param(None, "boolean"),
    "logprob_start_len": Param(None, "integer"),
    "top_logprobs_num": Param(None, "integer"),
    "return_text_in_logprobs": Param(None, "boolean"),
    "seed": Param(None, "integer", -(2**63), 2**63 - 1),
    "logit_bias": Param(None, "object"),
    "priority": Param(0, "integer", -(2**31), 2**31),
    "timeout": Param(None, "number", 0.0, MAX_SECONDS),
    "extra": Param(None, "object"),
}


class SampleOptions(TypedDict, total=False):
    """Parameters of one sample as keyword arguments, for type checkers. PARAMS has their ranges."""

    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    priority: int | None
    timeout: float | None
    extra: Mapping[str, Any] | None


class SamplingOptions(SampleOptions, total=False):
    """All of PARAMS and RENAMED as keyword arguments, for type checkers."""

    max_tokens: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    n: int | None


DEFAULTS: dict[str, Any] = {name: param.default for name, param in PARAMS.items()}
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""The original's names, also the engine's."""
CONSTRAINT_NAMES = {"regex": "regex", "json": "json_schema", "ebnf": "ebnf"}
"""The engine's parameter for each kind of constraint."""
LOGPROB_OPTIONS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
_NOT_NATIVE = {*LOGPROB_OPTIONS, *RENAMED.values(), "n", "seed", "priority", "timeout", "extra"}


def sampling_params(**given: Any) -> dict[str, Any]:
    """Check and normalise parameters for the IR, without None. Also takes max_new_tokens and min_new_tokens. Raises
    InvalidRequest and RegexSyntaxError."""
    params: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        name = RENAMED.get(key, key)
        if name not in PARAMS:
            hint = nearest_name(key, PARAMS)
            raise InvalidRequest(f"there is no sampling parameter {key!r}{hint}", param=key)
        params[name] = _checked(name, value)
    if params.get("min_tokens", 0) > params.get("max_tokens", params.get("min_tokens", 0)):
        raise InvalidRequest("min_tokens is greater than max_tokens", param="min_tokens")
    return params


def native_sampling(sampling: Mapping[str, Any], constraint: tuple[str, Any] | None, seed: int) -> dict[str, Any]:
    """A sample's parameters under the names of the engine and /generate."""
    native = {key: value for key, value in sampling.items() if key not in _NOT_NATIVE and value is not None}
    native |= {new: sampling[name] for new, name in RENAMED.items()}
    if constraint is not None:
        native[CONSTRAINT_NAMES[constraint[0]]] = constraint[1]
    return {**native, "seed": seed}


def logprob_options(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `LOGPROB_OPTIONS` that are set."""
    return {name: sampling[name] for name in LOGPROB_OPTIONS if sampling[name] is not None}


def shown(value: object) -> str:
    """A value for messages: one line, bounded."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:199]}…"


def check_regex(regex: str) -> None:
    """Raise RegexSyntaxError for an invalid regex."""
    try:
        re.compile(regex)
    except re.error as error:
        raise RegexSyntaxError(f"regex {regex!r}: {error}", pattern=regex, position=error.pos) from error


def _checked(name: str, value: Any) -> Any:
    """A parameter normalised: lists as tuples, numbers in range."""
    _, kind, low, high = PARAMS[name]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    match kind:
        case "texts" | "ids":
            value = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
            is_right = all(
                isinstance(item, str) and item if kind == "texts" else isinstance(item, Integral) for item in value
            )
            wanted = "a non-empty string or a list of them" if kind == "texts" else "a list of token ids"
        case "object":
            is_right, wanted = isinstance(value, Mapping), "a dict"
        case "boolean":
            is_right, wanted = isinstance(value, bool), "true or false"
        case _:
            is_finite = kind == "number" and isinstance(value, float) and math.isfinite(value)
            is_right = (is_finite or (is_whole and abs(value) <= MAX_WHOLE)) and low <= value <= high
            bounds = "" if low == -_INF else f" from {low}" if high == _INF else f" from {low} to {high}"
            wanted = f"a {'whole ' if kind == 'integer' else ''}number{bounds}"
    if not is_right:
        raise InvalidRequest(f"{name} must be {wanted}, not {shown(value)}", param=name)
    for pattern in value if name == "stop_regex" else ():
        check_regex(pattern)
    if kind == "ids":
        return tuple(map(int, value))
    return dict(value) if kind == "object" else value
