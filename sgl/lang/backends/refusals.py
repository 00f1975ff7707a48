"""What an API refuses of a request, learnt from its errors, and the changed request. Models differ in the token limit's
name; some take no temperature, stops or seed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from sgl.errors import BackendError, InvalidRequest

logger = logging.getLogger(__name__)

LIMITS = ("max_tokens", "max_completion_tokens")  # two names for one limit
_REASONS = re.compile(r"(?:^|[/:])(?:o[1-9]|gpt-[5-9])(?![a-z])")
"""Models that know only `max_completion_tokens`: o1, o3-mini, openai/o4-mini, gpt-5, ft:gpt-5-mini:…"""
_REFUSES = re.compile(
    r"unsupported|not support|unrecogni[sz]ed|unknown|unexpected|not permitted|not allowed|only the default", re.I
)
"""How APIs refuse a parameter, unlike a value out of range."""
OPTIONAL = frozenset({"seed", "stream_options"})  # sent unasked, dropped when refused
SENT = (
    *("temperature", "top_p", "n", "stop", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("top_k", "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "stop_token_ids", "stop_regex"),
)
"""Parameters sent under the same names if a program sets them."""
_NAMES = {
    **{name: name for name in (*SENT, "seed", "tools", "tool_choice")},
    "stream_options": "stream",
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    "response_format": "schema",
}
"""Refusable fields, and their names in the language."""


class Refusals:
    """What one model has refused."""

    def __init__(self, model_name: str, *, is_chat_model: bool) -> None:
        self._model_name = model_name
        is_reasoning = is_chat_model and _REASONS.search(model_name)
        self._limits = LIMITS[::-1] if is_reasoning else LIMITS  # likelier first
        self._refused: set[str] = set()

    def limit(self) -> str:
        """The token limit's name."""
        return next(name for name in self._limits if name not in self._refused)

    def left_out(self, body: dict[str, Any], optional: frozenset[str]) -> dict[str, Any]:
        """The request without refused optional fields."""
        return {name: value for name, value in body.items() if name not in optional & self._refused}

    def changed(
        self, body: dict[str, Any], error: InvalidRequest | BackendError, optional: frozenset[str]
    ) -> dict[str, Any]:
        """The request without what the error refuses, or with its other name. Raises the error if neither helps."""
        text = str(error)
        is_refusal = isinstance(error, InvalidRequest) or error.status == 403
        if not (is_refusal and _REFUSES.search(text)):
            raise error
        name = _first_named([*_NAMES.keys() & body.keys(), *LIMITS], text)
        if name in LIMITS and (old := next((limit for limit in LIMITS if limit in body), None)):
            [new] = set(LIMITS) - {old}
            if new not in self._refused:
                self._refused.add(old)
                return {new if key == old else key: value for key, value in body.items()}
            self._refused.difference_update(LIMITS)  # the error is about something else
            raise error
        if name in optional:
            logger.warning("%s takes no %s: it is left out from now on", self._model_name, name)
            self._refused.add(name)
            return {key: value for key, value in body.items() if key != name}
        if name is None or name not in body:
            raise error
        asked = _NAMES[name]
        message = f"{self._model_name} takes no {asked}={body[name]!r}: leave {asked} out of the gen and of the run"
        raise InvalidRequest(f"{message} ({text})", param=asked) from error


def _first_named(names: Iterable[str], text: str) -> str | None:
    """The first name in the text; short names need quotes."""
    patterns = {name: rf"\b{name}\b" if len(name) > 2 else rf"['\"`]{name}['\"`]" for name in names}
    found = {name: match.start() for name, pattern in patterns.items() if (match := re.search(pattern, text))}
    return min(found, key=found.__getitem__, default=None)
