"""JSON Schema compiled to a grammar against the jsonschema library: random schemas, random values, both ways."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.json_generation import BYTES, random_text
from sgl.errors import GrammarError, GrammarTooLarge, UnsupportedSchema
from sgl.grammar import Grammar, Vocabulary, compile
from tests.json_random import SCHEMAS, VALUES, accepts, text_of


def grammar_of(schema: object, **options: Any) -> Grammar:
    options = {"key_order": "any", **options}
    return compile(json_schema=schema, vocabulary=BYTES, **options)  # type: ignore[arg-type]


def is_valid(schema: object, value: object) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)  # type: ignore[arg-type]


@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=12))
@example({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {}, 3])
@example({"not": {"properties": {"a": {"type": "null"}}}}, [{"a": None}, {"a": 1}, {}, None])
@example({"uniqueItems": True, "allOf": [{"if": {"const": 1}, "enum": [[None, None], [1]]}]}, [[None, None], [1]])
def test_accepts_exactly_the_valid_values(schema: object, values: list[object]) -> None:
    try:
        grammar = grammar_of(schema)
    except (UnsupportedSchema, GrammarTooLarge):
        return
    except GrammarError:  # no value at all
        grammar = None
    for value in values:
        is_accepted = grammar is not None and accepts(grammar, text_of(value))
        assert is_accepted == is_valid(schema, value), value


@pytest.mark.parametrize(("whitespace", "key_order"), [("flexible", "any"), ("compact", "schema")])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_generates_only_valid_values(whitespace: str, key_order: str, schema: object, seed: int) -> None:
    try:
        grammar = grammar_of(schema, whitespace=whitespace, key_order=key_order)
    except GrammarError:
        return
    for turn in range(4):
        text = random_text(grammar, random.Random(seed + turn), 150)
        if text is not None:
            assert is_valid(schema, json.loads(text, parse_float=finite)), text


def finite(text: str) -> float:
    """A number, or the largest where doubles end: the library cannot divide infinities."""
    return max(-1e308, min(1e308, float(text)))


@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=8))
def test_lenient_allows_more_and_lists_what_it_dropped(schema: object, values: list[object]) -> None:
    try:
        grammar = grammar_of(schema, lenient=True)
    except GrammarError:
        return
    try:
        grammar_of(schema)
        refused = set()
    except UnsupportedSchema as error:
        refused = {(error.path, error.keyword)}
    assert refused <= {(record.path, record.keyword) for record in grammar.dropped}
    assert bool(refused) == bool(grammar.dropped)
    for value in values:
        if is_valid(schema, value):
            assert accepts(grammar, text_of(value)), value


def test_keys_come_in_the_order_of_the_schema_unless_told_otherwise() -> None:
    schema = {"properties": {"b": True, "a": True}, "required": ["a"], "type": "object"}
    texts = {b'{"b":1,"a":2}': True, b'{"a":2,"b":1}': False, b'{"a":2,"z":0}': True, b'{"z":0,"a":2}': False}
    in_order = grammar_of(schema, key_order="schema")
    for text, expected in texts.items():
        assert accepts(in_order, text) == expected
        assert accepts(grammar_of(schema), text)
    assert not accepts(grammar_of(schema), b'{"a":2,"a":2}')


def test_a_token_may_end_an_enumerated_value_that_begins_others() -> None:
    names = [f"n{i}" for i in range(100)] + [f"n1-{i}" for i in range(100)]
    vocabulary = Vocabulary([*(bytes([i]) for i in range(256)), b'"]', b'1"', None], [258], 259)
    grammar = compile(json_schema={"type": "array", "items": {"enum": names}}, vocabulary=vocabulary)
    matcher = grammar.matcher()
    assert matcher.accept_bytes(b'["n1')
    row = np.zeros(vocabulary.words, np.int32)
    matcher.fill_mask(row)
    allowed = {token for token in range(259) if int(row[token >> 5]) >> (token & 31) & 1}
    assert allowed == {*b'0123456789-"', 256, 257}


def test_white_space_is_none_or_one_space_or_one_indented_line() -> None:
    text = b'{"a": [1, 2]}'
    indented = b'{\n  "a": [\n    1,\n    2\n  ]\n}'
    assert not accepts(grammar_of(True), text)
    flexible = grammar_of(True, whitespace="flexible")
    assert accepts(flexible, text)
    assert accepts(flexible, indented)
    assert not accepts(flexible, b'{"a":  [1,2]}')


def test_integers_of_draft_4_have_no_point_where_they_are_listed_either() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "enum": [37, 0, 1.5]}
    flexible = grammar_of(schema, whitespace="flexible")
    texts = [b"37", b"0", b"37.0", b"0.0", b"3.7e1", b"1.5", b"3"]
    assert [text for text in texts if accepts(flexible, text)] == [b"37", b"0"]
    assert accepts(grammar_of({"type": "integer", "enum": [37]}, whitespace="flexible"), b"37.0")


MANY_WAYS = {"anyOf": [{"properties": {f"{i}{j}": {"const": j} for j in range(5)}} for i in range(5)]}
"""Of which everything else is 3,125 combinations."""


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"items": {"uniqueItems": True}}, "uniqueItems", "/items"),
        ({"properties": {"a/b": {"format": "regex"}}}, "format", "/properties/a~1b"),
        ({"allOf": [{"$ref": "other.json"}]}, "$ref", "/allOf/0"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}, "$ref", ""),
        ({"oneOf": [{}, {"items": {"$ref": "#/oneOf/1/items"}}]}, "$ref", "/oneOf/1/items"),
        ({"oneOf": [{"properties": {"a": MANY_WAYS}}, {}]}, "anyOf", "/oneOf/0/properties/a"),
        ({"oneOf": [{"pattern": "^(.{1,10},){0,20}.{1,10}$"}, {"format": "hostname"}]}, "oneOf", ""),
        ({"pattern": r"(a)\1"}, "pattern", ""),
        ({"type": "text"}, "type", ""),
        ({"minLength": -1}, "minLength", ""),
        ({"properties": {"x": 3}}, "schema", "/properties/x"),
        ({"$schema": "https://example.org/mine"}, "$schema", ""),
        ({"not": {"uniqueItems": True}}, "uniqueItems", "/not"),
    ],
)
def test_strict_refuses_by_keyword_and_path_what_lenient_lists(schema: object, keyword: str, path: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        grammar_of(schema)
    assert (caught.value.keyword, caught.value.path) == (keyword, path)
    dropped = [(record.keyword, record.path) for record in grammar_of(schema, lenient=True).dropped]
    assert dropped == [(keyword, path)]


def test_what_equal_subschemas_drop_is_listed_at_each_of_them() -> None:
    tags = {"type": "array", "items": {"type": "object"}, "uniqueItems": True}
    grammar = grammar_of({"properties": {"a": tags, "b": {"items": dict(tags)}}}, lenient=True)
    assert {record.path for record in grammar.dropped} == {"/properties/a", "/properties/b/items"}


def test_what_equals_a_schema_around_it_is_listed_once_for_each() -> None:
    node = {"$ref": "#/$defs/node"}
    schema = {"$defs": {"node": {"anyOf": [node, {"enum": [1]}]}}, **node}
    dropped = grammar_of(schema, lenient=True).dropped
    assert [(record.keyword, record.path) for record in dropped] == [("$ref", ""), ("$ref", "/$defs/node/anyOf/0")]


def test_unknown_and_annotating_formats_are_noted_and_no_error() -> None:
    declared = {"$schema": "https://json-schema.org/draft/2020-12/schema", "format": "date"}
    for schema in ({"format": "colour"}, declared):
        grammar = grammar_of(schema)
        assert [record.keyword for record in grammar.dropped] == ["format"]
        assert accepts(grammar, b'"no date"')


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "enum": [1]},
        {"$defs": {"n": {"type": "object", "required": ["n"], "properties": {"n": {"$ref": "#/$defs/n"}}}},
         "$ref": "#/$defs/n"},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"type": "object", "minProperties": 2, "properties": {"a": True, "b": False}, "additionalProperties": False},
        {"type": "object", "minProperties": 1, "maxProperties": 0},
        {"type": "array", "contains": {"type": "null"}, "minContains": 3, "maxContains": 2},
        {"type": "array", "contains": {"type": "null"}, "minContains": 10**9, "maxItems": 10**9 - 1},
    ],
)  # fmt: skip
def test_a_schema_without_values_is_refused(schema: object) -> None:
    with pytest.raises(GrammarError, match="no JSON value"):
        grammar_of(schema)


def _chain(length: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(length):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        _chain(100_000),
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(12)]},
        {"$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(100)}, "$ref": "#/$defs/0"},
        {"allOf": [{"pattern": f"{a}.{{0,9}}{a}.{{9}}$"} for a in "abcdef"]},
        {"properties": {"\ud800": True}},
        {"minimum": 10**2000},
        {"minLength": float("inf")},
    ],
    ids=["deep", "product", "doubling", "pattern", "surrogate", "digits", "infinity"],
)
def test_hostile_schemas_end_in_a_typed_error(schema: object) -> None:
    with pytest.raises(GrammarError):
        grammar_of(schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"default": NaN}', "not valid JSON: NaN is no number"),
        ('{"const": [-Infinity]}', "not valid JSON: -Infinity is no number"),
        ({"default": float("nan")}, "not JSON data"),
        ('{"maximum": 1e999}', "'maximum' at '/'.*must be finite"),
        ('{"enum": [1e999]}', "'enum' at '/'.*must be finite"),
    ],
)
def test_numbers_that_json_has_not_are_refused_by_name(schema: object, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        grammar_of(schema)
