"""Objects whose schemas declare keys and say nothing of others: closed where that is asked for, never made empty."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.json_generation import BYTES
from sgl.errors import ConfigError, GrammarError
from sgl.grammar import Grammar, compile
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from tests.json_random import SCHEMAS, VALUES, accepts, text_of
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint

A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}
KIND: dict[str, Any] = {
    "properties": {"kind": {"enum": ["x", "y"]}},
    "required": ["kind"],
    "if": {"properties": {"kind": {"const": "x"}}},
    "then": {"properties": {"v": True}, "required": ["v"]},
}


def closed(schema: Any) -> Grammar:
    return compile(json_schema=schema, vocabulary=BYTES, additional_properties="closed", key_order="any")


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (A, [{"a": 1}, {}, 3, [{"b": 1}]], [{"b": 1}, {"a": 1, "b": 1}]),
        ({"items": A}, [[{"a": 1}]], [[{"b": 1}]]),
        ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": 1, "b": 1, "c": 1}]),
        ({"anyOf": [A, B], "type": "object"}, [{"a": 1}, {"b": 1}], [{"c": 1}]),
        ({**A, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [{"a": 1, "c": 1}]),
        ({"$ref": "#/$defs/a", **B, "$defs": {"a": A}}, [{"a": 1, "b": 1}], [{"c": 1}]),
        (KIND, [{"kind": "x", "v": 1}, {"kind": "y"}], [{"kind": "y", "w": 1}, {"kind": "x", "v": 1, "w": 1}]),
        ({**A, "dependentSchemas": {"a": B}}, [{"a": 1, "b": 1}], [{"a": 1, "b": 1, "c": 1}]),
        ({**A, "not": {"required": ["x"]}}, [{"a": 1}], [{"b": 1}]),
        ({"not": {"required": ["x"]}}, [{"b": 1}], [{"x": 1}]),
        ({**A, "maxProperties": 2}, [{"a": 1}], [{"b": 1}]),
        ({**A, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
        ({"properties": {}}, [{}, 3, [{"b": 1}]], [{"b": 1}]),
        ({"allOf": [{"properties": {}}, A]}, [{"a": 1}], [{"b": 1}]),
        # What speaks of other keys, or needs them, leaves them open.
        ({"type": "object"}, [{"b": 1}], []),
        ({"properties": {}, "additionalProperties": True}, [{"b": 1}], []),
        ({"properties": {}, "required": ["b"]}, [{"b": 1}], [{}]),
        ({"properties": {}, "minProperties": 1, "type": "object"}, [{"b": 1}], [{}]),
        ({**A, "additionalProperties": True}, [{"b": 1}], [{"a": "x"}]),
        ({**A, "additionalProperties": {}}, [{"b": 1}], []),
        ({"allOf": [A, {"additionalProperties": True}]}, [{"b": 1}], []),
        ({**A, "unevaluatedProperties": True}, [{"b": 1}], []),
        ({**A, "unevaluatedProperties": {"type": "integer"}}, [{"b": 1}], [{"b": "x"}]),
        ({**A, "patternProperties": {"^x": True}}, [{"x": 1}, {"b": 1}], []),
        ({**A, "propertyNames": {"maxLength": 2}}, [{"b": 1}], [{"bcd": 1}]),
        ({**A, "required": ["z"]}, [{"z": 1}, {"z": 1, "b": 1}], [{"a": 1}]),
        ({**A, "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({"properties": {"c": {"$ref": "#"}}, "minProperties": 1, "type": "object"}, [{"x": 1}], [{}]),
        ({"anyOf": [A, True]}, [{"b": 1}], []),
    ],
)
def test_undeclared_keys_come_where_a_schema_speaks_of_them(
    schema: Any, allowed: list[Any], refused: list[Any]
) -> None:
    grammar = closed(schema)
    assert [value for value in allowed if not accepts(grammar, text_of(value))] == []
    assert [value for value in refused if accepts(grammar, text_of(value))] == []


@given(SCHEMAS, st.lists(VALUES, max_size=8))
def test_a_closed_schema_allows_fewer_documents_and_some(schema: Any, values: list[Any]) -> None:
    try:
        standard = compile(json_schema=schema, vocabulary=BYTES, key_order="any")
    except GrammarError as error:
        with pytest.raises(type(error)):
            closed(schema)
        return
    grammar = closed(schema)
    for value in values:
        if accepts(grammar, text_of(value)):
            assert accepts(standard, text_of(value)), value
    end = grammar.matcher().shortest_end()
    assert accepts(grammar, end)
    assert accepts(standard, end)


def test_the_choice_is_the_standards_in_the_library_and_closed_in_an_engine() -> None:
    assert accepts(compile(json_schema=A, vocabulary=BYTES), text_of({"b": 1}))
    assert EngineConfig().json_additional_properties == "closed"
    assert (
        EngineConfig.from_options({"json_additional_properties": "schema"}).json_additional_properties == "schema"
    )
    with pytest.raises(ConfigError, match="json_additional_properties"):
        EngineConfig.from_options({"json_additional_properties": "open"})
    with pytest.raises(GrammarError, match="additional_properties is"):
        compile(json_schema=A, vocabulary=BYTES, additional_properties="open")  # type: ignore[arg-type]  # on purpose
    again = Grammar.from_bytes(closed(A).to_bytes(), BYTES)
    assert not accepts(again, text_of({"b": 1}))


@pytest.mark.costly
@pytest.mark.parametrize("reading", ["closed", "schema"])
def test_arguments_of_tools_have_the_keys_that_the_engine_is_made_with(
    reading: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Over HTTP, for a tool that has to be called and for one that is named; as an open schema would be, where the
    tool's schema says so itself."""
    tool = {"name": "f", "parameters": {"type": "object", **A}}
    says_so = {"name": "f", "parameters": {"type": "object", **A, "additionalProperties": True}}
    checkpoint = chat_checkpoint(tmp_path_factory.mktemp("model"))
    with Engine(str(checkpoint), json_additional_properties=reading, **OPTIONS) as engine:
        server = LiveServer(engine)
        try:
            for choice in ("required", {"type": "function", "function": {"name": "f"}}):
                keys = keys_of(server, tool, choice)
                assert keys
                assert (keys <= {"a"}) == (reading == "closed")
                assert not keys_of(server, says_so, choice) <= {"a"}
        finally:
            server.close()


def keys_of(server: LiveServer, tool: dict[str, Any], choice: Any) -> set[str]:
    """The keys of what a random model calls a tool with, in some answers."""
    keys = set[str]()
    for seed in range(12):
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 80,
            "seed": seed,
            "temperature": 1.0,
        }
        tools = [{"type": "function", "function": tool}]
        answer = server.post(
            "/v1/chat/completions", {**body, "model": "default", "tools": tools, "tool_choice": choice}
        )
        assert answer.status_code == 200, answer.text
        for call in answer.json()["choices"][0]["message"]["tool_calls"]:
            keys |= json.loads(call["function"]["arguments"]).keys()
    return keys
