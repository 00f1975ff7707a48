"""The sampling parameters of one request: names, types, ranges and defaults. Knows no tokenizer, model or device."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from sgl.errors import InvalidRequest, nearest_name
from sgl.lang.ir.sampling import MAX_SECONDS, shown

GREEDY_BELOW = 1e-6
"""Lower temperatures count as 0."""

MAX_SAMPLES = 1024
MAX_STOPS = 32
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_REGEX_BYTES = 256
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGIT_BIAS = 100.0

CONSTRAINTS = ("regex", "json_schema", "ebnf", "structural_tag")
"""The parameters that constrain an output; at most one may be set."""


class LogitBias(Mapping[int, float]):
    """Token id → number added to its logit: checked, immutable, hashable, ascending by id."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[Any, Any]) -> None:
        if not isinstance(values, Mapping):
            raise InvalidRequest(
                f"logit_bias must map token ids to numbers, not be {_kind(values)}", param="logit_bias"
            )
        biases: dict[int, float] = {}
        for key, value in values.items():
            token_id = integer("logit_bias", _from_digits(key), 0, MAX_TOKEN_ID, what="each key of logit_bias")
            if token_id in biases:
                raise InvalidRequest(f"logit_bias names token {token_id} twice", param="logit_bias")
            biases[token_id] = _number(
                "logit_bias", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, what="each value of logit_bias"
            )
        self._values = dict(sorted(biases.items()))

    def __getitem__(self, token_id: int) -> float:
        return self._values[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    @property
    def largest(self) -> int:
        """The last token; -1: there is none."""
        return next(reversed(self._values), -1)

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked sampling parameters of one request. A value of the wrong type or range raises InvalidRequest.

    A bool is no number, and "5" is not 5. Lists, tuples and sets become tuples without duplicates; `stop` and
    `stop_regex` may be one string. Equal parameters hash alike.
    """

    max_new_tokens: int = 128
    """0 computes the prompt only."""
    min_new_tokens: int = 0
    """Before that many tokens, those that would end the request cannot be sampled."""
    n: int = 1
    """Independent samples of one prompt."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    temperature: float = 1.0
    """Below 1e-6: greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: off."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated."""
    presence_penalty: float = 0.0
    """Subtracted once if the token was generated at all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: LogitBias({}))
    """Keys may be digit strings, for JSON."""
    ignore_eos: bool = False
    seed: int | None = None
    """Any 64-bit integer. The same request and seed draw the same tokens in any batch."""
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[str, ...] = ()
    """Special tokens that the text holds all the same, by name."""
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    """Keep the matched stop string or token in the text."""
    regex: str | None = None
    json_schema: str | None = None
    """JSON text; a mapping is serialised."""
    ebnf: str | None = None
    structural_tag: str | None = None
    """JSON text; a mapping is serialised."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From a request body: null means the default, an unknown name raises InvalidRequest."""
        if not isinstance(values, Mapping):
            raise InvalidRequest(
                f"sampling_params must be an object of names and values, not {_kind(values)}",
                param="sampling_params",
            )
        given: dict[str, Any] = {}
        for name, value in values.items():
            known = _ALSO.get(name, name)
            if known in PARAMETERS:
                if value is not None and known in given:
                    raise InvalidRequest("seed and sampling_seed are the same: give one of them", param=name)
                given |= {} if value is None else {known: value}
            elif name not in _WITHOUT_EFFECT:
                near = nearest_name(name, PARAMETERS) if isinstance(name, str) else ""
                raise InvalidRequest(f"there is no sampling parameter {name!r}{near}", param=str(name))
            elif value is not None and value not in _WITHOUT_EFFECT[name]:
                raise InvalidRequest(f"{name} is not supported here: leave it out", param=name)
        return cls(**given)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "max_new_tokens", integer("max_new_tokens", self.max_new_tokens, 0, MAX_TOKENS))
        put(self, "min_new_tokens", integer("min_new_tokens", self.min_new_tokens, 0, MAX_TOKENS))
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens must not exceed max_new_tokens, got {self.min_new_tokens} > {self.max_new_tokens}",
                param="min_new_tokens",
            )
        put(self, "n", integer("n", self.n, 1, MAX_SAMPLES))
        put(self, "stop", _strings("stop", self.stop, None))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put(self, "stop_regex", _strings("stop_regex", self.stop_regex, MAX_STOP_REGEX_BYTES))
        put(self, "shown_special_tokens", _strings("shown_special_tokens", self.shown_special_tokens, None))
        put(self, "temperature", _number("temperature", self.temperature, 0.0, math.inf))
        put(self, "top_p", _number("top_p", self.top_p, 0.0, 1.0, above=True))
        put(self, "top_k", integer("top_k", self.top_k, -1, MAX_TOKEN_ID) or -1)
        put(self, "min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put(self, "frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put(self, "presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put(
            self, "repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, above=True)
        )
        if not isinstance(self.logit_bias, LogitBias):
            put(self, "logit_bias", LogitBias(self.logit_bias))
        if self.seed is not None:
            put(self, "seed", integer("seed", self.seed, -(2**63), 2**63 - 1))
        for name in ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequest(f"{name} must be true or false, not {_kind(value)}", param=name)
        self._check_constraints()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken; seed, top_k, top_p and min_p then have no effect."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def constraint(self) -> tuple[str, str] | None:
        """Name and text of the constraint, if any."""
        given = ((name, getattr(self, name)) for name in CONSTRAINTS)
        return next((pair for pair in given if pair[1] is not None), None)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise InvalidRequest if `logit_bias` has ids outside the vocabulary; `stop_token_ids` may."""
        assert isinstance(self.logit_bias, LogitBias), "it was normalised"
        if (largest := self.logit_bias.largest) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {largest}, but the vocabulary ends at {vocab_size - 1}", param="logit_bias"
            )

    def _check_constraints(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(
                f"at most one of {', '.join(CONSTRAINTS)} may be set, got {' and '.join(given)}", param=given[1]
            )
        for name in given:
            value = getattr(self, name)
            if name in _JSON_CONSTRAINTS and isinstance(value, Mapping):
                object.__setattr__(self, name, _json_text(name, value))
            elif not isinstance(value, str):
                kinds = "a dict or its JSON as a string" if name in _JSON_CONSTRAINTS else "a string"
                raise InvalidRequest(f"{name} must be {kinds}, not {_kind(value)}", param=name)
            else:
                _utf8(name, value)


PARAMETERS = frozenset(each.name for each in fields(SamplingParams))
"""Their names."""
_ALSO = {"sampling_seed": "seed"}
"""What others call them."""
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {"custom_params": ({},), "stream_interval": (1,)}
"""SGLang's that do nothing here, and the values besides null that they may have."""
_JSON_CONSTRAINTS = ("json_schema", "structural_tag")


def integer(param: str, value: object, lowest: int, highest: int, *, what: str = "") -> int:
    """Check a whole number, which may be written as 4.0. Raises InvalidRequest; `what`: its name in the message."""
    if type(value) is not int:
        is_whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole:
            raise InvalidRequest(f"{what or param} must be an integer, not {_kind(value)}", param=param)
        value = int(cast(float, value))
    if not lowest <= value <= highest:
        raise InvalidRequest(
            f"{what or param} must be an integer from {lowest} to {highest}, got {shown(value)}", param=param
        )
    return value


def _number(
    param: str, value: object, lowest: float, highest: float, *, above: bool = False, what: str = ""
) -> float:
    """Check a finite number in [lowest, highest], or (lowest, highest] if `above`."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidRequest(f"{what or param} must be a number, not {_kind(value)}", param=param)
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if math.isfinite(value) and lowest <= value <= highest and not (above and value == lowest):
        return value
    if highest == math.inf:
        wanted = f"a finite number of at least {lowest:g}"
    elif above:
        wanted = f"a number above {lowest:g} and at most {highest:g}"
    else:
        wanted = f"a number from {lowest:g} to {highest:g}"
    raise InvalidRequest(f"{what or param} must be {wanted}, got {value}", param=param)


def checked_seconds(param: str, value: object) -> float:
    """Check a positive, finite number of seconds. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECONDS:
        wanted = f"a number of seconds above 0 and at most {MAX_SECONDS:g}"
        raise InvalidRequest(f"{param} must be {wanted}, not {shown(value)}", param=param)
    return float(value)


def _strings(name: str, value: object, max_bytes: int | None) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else _items(name, value, "a string or a list of strings")
    texts: dict[str, None] = {}
    for item in items:
        if not isinstance(item, str):
            raise InvalidRequest(f"{name} must hold strings only, found {_kind(item)}", param=name)
        if not item:
            raise InvalidRequest(f"{name} must not hold an empty string: it would match everywhere", param=name)
        num_bytes = _utf8(name, item)
        if max_bytes is not None and num_bytes > max_bytes:
            raise InvalidRequest(f"each {name} may have {max_bytes} bytes, got one of {num_bytes}", param=name)
        texts[item] = None
    if len(texts) > MAX_STOPS:
        raise InvalidRequest(f"{name} may hold {MAX_STOPS} strings, got {len(texts)}", param=name)
    return tuple(texts)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    items = _items(name, value, "a list of token ids")
    if len(items) > MAX_STOP_TOKEN_IDS:  # before min_new_tokens each is masked at every step
        raise InvalidRequest(f"{name} may hold {MAX_STOP_TOKEN_IDS} token ids, got {len(items)}", param=name)
    return tuple(dict.fromkeys(integer(name, item, 0, MAX_TOKEN_ID, what=f"each of {name}") for item in items))


def _items(name: str, value: object, wanted: str) -> Collection[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=shown)
    raise InvalidRequest(f"{name} must be {wanted}, not {_kind(value)}", param=name)


def _from_digits(key: object) -> object:
    """A string of digits as a number; anything else unchanged."""
    return int(key) if isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdigit() else key


def _json_text(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}", param=name) from error


def _utf8(name: str, text: str) -> int:
    """The text's length in bytes. Lone surrogates are refused: no generated text could match them."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} holds a lone surrogate, which is not text: {error}", param=name) from error


def _kind(value: object) -> str:
    """A value of the wrong type, for messages."""
    if value is None:
        return "null"
    return f"{shown(value)} ({type(value).__name__})"
