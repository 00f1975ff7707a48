"""Nested arguments in every format of calls: what the constraint lets a model write is read back as arguments that keep
to the schema, and any arguments that do can be written."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.json_generation import BYTES, random_text
from sgl.errors import GrammarError
from sgl.formats.call_format import CallFormat
from sgl.formats.calls import FORMATS
from sgl.formats.constraint import calls_tag
from sgl.formats.parser import ArgumentsDelta, ContentDelta, ToolCallStart
from sgl.formats.reading import calls_in, reader_of
from sgl.grammar import Grammar, compile
from sgl.grammar.matching.matcher import Matcher
from tests.call_writer import WRITERS
from tests.examples import few
from tests.grammar_oracles import mask_of
from tests.json_random import accepts

NAMES = [format.name for format in FORMATS]
NESTING = [format.name for format in FORMATS if format.arguments in ("pythonic", "gemma4", "functiongemma")]
BY_NAME = {format.name: format for format in FORMATS}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["\"'", "\\", "\n", "]})", '<|"|', "True", "null", "1", "é\u2028😀", "{[(", ", a=1", "\x00\x7f", "\\u0041"]
)
LEAVES: st.SearchStrategy[Any] = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 6},
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["string", "null", "boolean"]},
        {"enum": ["a", "a'b\"c", True, None, 5]},
        {},
    ]
)
KEYS = st.sampled_from(["a", "ab", "abc", "x-y", "é", "from"])


def objects(values: st.SearchStrategy[Any], *, most: int = 3) -> st.SearchStrategy[Any]:
    def made(properties: dict[str, Any], required: list[str], more: Any) -> dict[str, Any]:
        required = [name for name in required if name in properties]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": more,
        }

    more = st.just(False) | values.filter(lambda schema: schema != {})
    return st.builds(made, st.dictionaries(KEYS, values, max_size=most), st.lists(KEYS, unique=True), more)


def arrays(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    whole = st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most}, values, st.integers(0, 3)
    )
    return whole | st.builds(
        lambda first, rest: {"type": "array", "prefixItems": [first], "items": rest, "maxItems": 2}, values, values
    )


SCHEMAS = objects(st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner), max_leaves=5))


@st.composite
def values_of(draw: st.DrawFn, schema: Any) -> Any:
    """A value of such a schema."""
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    kind = schema.get("type", "number")
    kind = draw(st.sampled_from(kind)) if isinstance(kind, list) else kind
    match kind:
        case "string":
            return draw(TEXTS)[: schema.get("maxLength")]
        case "integer":
            return draw(st.integers(schema["minimum"], schema["maximum"]))
        case "number":
            return draw(st.integers(-99, 99) | st.sampled_from([0.5, -1.25]))
        case "boolean":
            return draw(st.booleans())
        case "null":
            return None
        case "array":
            first = schema.get("prefixItems", [])
            items = [draw(values_of(each)) for each in first]
            most = schema["maxItems"] - len(items)
            return items + [draw(values_of(schema["items"])) for _ in range(draw(st.integers(0, max(most, 0))))]
    found = {}
    for name, each in schema["properties"].items():
        if name in schema["required"] or draw(st.booleans()):
            found[name] = draw(values_of(each))
    if schema["additionalProperties"] is not False and draw(st.booleans()):
        found["more"] = draw(values_of(schema["additionalProperties"]))
    return found


def constraint(format: CallFormat, schema: Any) -> Grammar:
    tag = calls_tag([{"name": "f", "parameters": schema}], format, choice="required", only_one=True)
    return compile(structural_tag=tag, vocabulary=BYTES)


def read(format: CallFormat, schema: Any, text: str, cuts: list[int], *, is_sure: bool) -> Any:
    """The arguments of the only call in a text that comes in pieces."""
    reader = reader_of(format, {"f": schema}, is_sure=is_sure)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events = [event for low, high in itertools.pairwise(edges) for event in reader.feed(text[low:high])]
    events += reader.feed("", final=True)
    assert not any(event.text.strip() for event in events if isinstance(event, ContentDelta)), text
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["f"]
    return "".join(event.text for event in events if isinstance(event, ArgumentsDelta))


@pytest.mark.parametrize("name", NESTING)
@few
@given(data=st.data(), cuts=st.lists(st.integers(0, 200)), is_sure=st.booleans())
def test_nested_arguments_are_written_and_read(
    name: str, data: st.DataObject, cuts: list[int], is_sure: bool
) -> None:
    format = BY_NAME[name]
    schema = data.draw(SCHEMAS)
    arguments = data.draw(values_of(schema))
    quote = {"gemma4": '<|"|>', "functiongemma": "<escape>"}.get(name)
    written = WRITERS[name]([("f", arguments)])
    if quote is not None and quote in json.dumps(arguments, ensure_ascii=False).replace('\\"', '"'):
        return
    assert json.loads(read(format, schema, written, cuts, is_sure=is_sure)) == arguments
    assert accepts(constraint(format, schema), written)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in NESTING else pytest.mark.slow) for name in NAMES]
)
@few
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 32), cuts=st.lists(st.integers(0, 300)))
def test_what_may_be_written_is_read_as_arguments_of_the_schema(
    name: str, schema: Any, seed: int, cuts: list[int]
) -> None:
    format = BY_NAME[name]
    try:
        grammar = constraint(format, schema)
    except GrammarError:
        assert name not in NESTING
        return
    written = random_text(grammar, random.Random(seed), 400)
    if written is None:
        return
    text = written.decode()
    whole = read(format, schema, text, [], is_sure=True)
    jsonschema.validate(json.loads(whole), schema)
    for is_sure in (False, True):
        assert read(format, schema, text, cuts, is_sure=is_sure) == whole


@pytest.mark.parametrize("name", ["pythonic", "gemma4"])
@settings(max_examples=10)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 32), spare=st.integers(0, 30))
def test_near_the_end_of_the_budget_calls_come_to_their_ends(name: str, schema: Any, seed: int, spare: int) -> None:
    format = BY_NAME[name]
    grammar = constraint(format, schema)
    shortest = written_within(grammar, itertools.repeat(1), random.Random(seed))  # there is no other way
    budget = range(len(shortest) + 1 + spare, 0, -1)
    text = written_within(grammar, budget, random.Random(seed)).decode()
    jsonschema.validate(json.loads(read(format, schema, text, [], is_sure=True)), schema)


def written_within(grammar: Grammar, budget: Iterable[int], rng: random.Random) -> bytes:
    """A random text that ends in time."""
    matcher, text = grammar.matcher(), b""
    assert isinstance(matcher, Matcher)
    for left in budget:
        token = rng.choice(np.flatnonzero(mask_of(matcher, BYTES, left)).tolist())
        if token == 256:
            return text
        assert matcher.accept(token)
        text += bytes([token])
    assert matcher.is_accepting(), f"{text!r} did not end in time"
    return text


def test_keys_are_escaped_where_the_format_escapes_them() -> None:
    schema = {
        "type": "object",
        "properties": {'R&D"now"': {"type": "string"}},
        "additionalProperties": {"type": "string"},
    }
    tag = calls_tag([{"name": "f", "parameters": schema}], BY_NAME["kimi_k3"], choice="required")
    grammar = compile(structural_tag=tag, vocabulary=BYTES)

    def written(key: str) -> str:
        value = f'<|open|>argument key="{key}" type="string"<|sep|>x<|close|>argument<|sep|>'
        call = f'<|open|>call tool="f" index="1"<|sep|>{value}<|close|>call<|sep|>'
        return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"

    escaped = "R&amp;D&quot;now&quot;"
    for key, is_allowed in {escaped: True, 'R&D"now"': False, "R&D&quot;now&quot;": False, "a": True}.items():
        assert accepts(grammar, written(key)) == is_allowed, key
    [call] = calls_in(written(escaped), BY_NAME["kimi_k3"])
    assert json.loads(call["arguments"] or "") == {'R&D"now"': "x"}
