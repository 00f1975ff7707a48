"""The special tokens that a structural tag names: what `Constraint` has to know of a vocabulary, and nothing more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from sgl.errors import GrammarError
from sgl.grammar.automaton.styles import STYLES
from sgl.grammar.vocabulary.tokens import Vocabulary

_ELSEWHERE = frozenset({"json_schema", "schema", "regex", "pattern", "grammar", "type", "style"})
"""Fields whose texts name no tokens."""


class Named(NamedTuple):
    """A structural tag, and the special tokens that it names."""

    source: str
    """Its JSON text, with tokens by name."""
    special: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    """Those that end a text."""


def named_tokens(source: str, vocabulary: Vocabulary) -> Named:
    """Look up a structural tag's tokens. Raises GrammarError for ids without a token. JSON that is malformed is left as
    it is."""
    try:
        tag = json.loads(source)
    except (ValueError, RecursionError):
        return Named(source)
    if '"token' in source:
        _name_tokens(tag, vocabulary)
        source = json.dumps(tag)
    return Named(source, *vocabulary.tokens_named_in(_texts(tag)))


def _texts(tag: Any) -> Iterator[str]:
    """The texts in which tokens may be named."""
    left = [tag]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += [value for name, value in one.items() if name not in _ELSEWHERE]
            style = one.get("style")
            yield from STYLES[style].marks if isinstance(style, str) and style in STYLES else ()


def _name_tokens(tag: Any, vocabulary: Vocabulary) -> None:
    """Replace ids of tokens by what they are called, in place."""
    left = [tag]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            if one.get("type") == "token":
                one["token"] = _name(one.get("token"), vocabulary)
            for field in ("trigger_tokens", "exclude_tokens"):
                if isinstance(one.get(field), list):
                    one[field] = [_name(each, vocabulary) for each in one[field]]
            if one.get("type") == "token_dispatch" and isinstance(one.get("rules"), list):
                for rule in one["rules"]:
                    if isinstance(rule, list) and rule:
                        rule[0] = _name(rule[0], vocabulary)
            left += [value for name, value in one.items() if name not in _ELSEWHERE]


def _name(token: Any, vocabulary: Vocabulary) -> Any:
    """The name of a token's id; what is no id is left as it is."""
    if type(token) is not int:
        return token
    try:
        name = vocabulary.special[token] if token in vocabulary.special else vocabulary.token_bytes[token].decode()
    except (IndexError, UnicodeDecodeError):
        name = ""
    if token < 0 or not name:
        raise GrammarError(f"token {token} is no token that a structural tag can name")
    return name
