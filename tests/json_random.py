"""Random JSON Schemas and values that are likely to have to do with each other."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from sgl.grammar import Grammar

KEYS = st.sampled_from(["a", "b", "ab", "c", ""])
TEXTS = st.sampled_from(["", "a", "b", "ab", "aab", "é", "a b", '"', "\n", "2024-02-29"])
NUMBERS = st.sampled_from([-3, -1, 0, 1, 2, 3, 10, 12, 1.5, -0.5, 2.25, 100])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
PATTERNS = st.sampled_from(["a", "^a", "b$", "^a*$", "^(a|b)+$", "^.$", "[^a]", "^a?b?$", "^a{2,3}"])
_COUNTS = st.integers(0, 3)
_TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])

_PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "type": st.one_of(_TYPES, st.lists(_TYPES, min_size=1, max_size=3, unique=True)),
    "enum": st.lists(VALUES, min_size=1, max_size=4),
    "const": VALUES,
    "minimum": NUMBERS,
    "maximum": NUMBERS,
    "exclusiveMinimum": NUMBERS,
    "exclusiveMaximum": NUMBERS,
    "multipleOf": st.sampled_from([1, 2, 3, 0.5, 1.5]),
    "minLength": _COUNTS,
    "maxLength": _COUNTS,
    "pattern": PATTERNS,
    "minItems": _COUNTS,
    "uniqueItems": st.booleans(),
    "maxItems": _COUNTS,
    "minProperties": _COUNTS,
    "maxProperties": _COUNTS,
    "required": st.lists(KEYS, max_size=2, unique=True),
    "dependentRequired": st.dictionaries(KEYS, st.lists(KEYS, max_size=2, unique=True), max_size=2),
}


def _nested(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    named = st.dictionaries(KEYS, inner, max_size=3)
    several = st.lists(inner, min_size=1, max_size=3)
    return {
        "properties": named,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "dependentSchemas": st.dictionaries(KEYS, inner, max_size=2),
        "items": inner,
        "prefixItems": several,
        "contains": inner,
        "allOf": several,
        "anyOf": several,
        "oneOf": several,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
    }


def _some_of(keywords: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[Any]:
    def build(names: list[str]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({name: keywords[name] for name in names})

    return st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=most, unique=True).flatmap(build)


SCHEMAS = st.recursive(
    st.one_of(_some_of(_PLAIN, 2), st.booleans()),
    lambda inner: _some_of(_PLAIN | _nested(inner), 4),
    max_leaves=8,
)


def text_of(value: object) -> bytes:
    """The compact JSON text of a value."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def accepts(grammar: Grammar, text: bytes | str) -> bool:
    """Whether a whole text belongs to a grammar."""
    matcher = grammar.matcher()
    return matcher.accept_bytes(text.encode() if isinstance(text, str) else text) and matcher.is_accepting()
