"""Formats of tool calls: what is written in one is read back in any pieces; its constraint allows that and no more."""

from __future__ import annotations

import itertools
import json
import math
import time
from decimal import Decimal
from functools import cache, partial
from typing import Any
from unittest import mock

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.json_generation import BYTES
from sgl.errors import InvalidRequest
from sgl.formats import harmony
from sgl.formats.arguments import JsonReader
from sgl.formats.call_format import BlockKind, CallFormat
from sgl.formats.calls import FORMATS, PARSERS, formats_of
from sgl.formats.constraint import behind_reasoning, calls_tag, in_channels, loose
from sgl.formats.parser import (
    MAX_CALLS,
    MAX_NAME,
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallStart,
)
from sgl.formats.reading import calls_in, reader_of
from sgl.formats.value_types import parsed
from sgl.grammar import Grammar, compile
from tests.call_writer import WRITERS, Call
from tests.examples import few
from tests.json_random import accepts

BY_NAME = {format.name: format for format in FORMATS}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "note": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
        "exact": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string"}},
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": PLACE},
    {"name": "get_weather_now", "parameters": PLACE},
    {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}},
]
SCHEMAS = {function["name"]: function["parameters"] for function in FUNCTIONS}
MARKS = (
    "<",
    "[",
    "{",
    "<tool_call>",
    "</parameter>",
    "</arg_value>",
    "</｜DSML｜parameter>",
    "null",
    "1",
    '"',
    "\\",
    "\n",
    "{}",
    "<|call|>",
    "<![CDATA[",
    "]]>",
    "</param>",
)


ENDS = (
    "</parameter>",
    "</arg_value>",
    "</arg_value:opensource>",
    "</｜DSML｜parameter>",
    "</steptml:parameter>",
    "</ifm|arg_value>",
    "<|tool_arg:end|>",
    "</｜GCML｜parameter>",
    "]]></param>",
    "<|close|>argument<|sep|>",
    '<|"|>',
    "<escape>",
)


UNMARKED = (
    *("qwen_xml", "glm_xml", "hy_xml", "minimax_xml", "step_xml"),
    *("ifm_xml", "solar_xml", "minicpm_xml"),
)
"""Which do not mark strings."""


def is_writable(format: CallFormat, value: Any) -> bool:
    """Whether the parameters' tags can hold a value: what ends them cannot, and a nullable text is no null."""
    if format.arguments in ("json", "pythonic"):
        return True
    return not isinstance(value, str) or not any(end in value for end in ENDS)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(MARKS)


@st.composite
def calls_of(draw: st.DrawFn, format: CallFormat) -> list[Call]:
    calls: list[Call] = []
    for name in draw(st.lists(st.sampled_from(list(SCHEMAS)), min_size=1, max_size=3)):
        arguments: dict[str, Any] = {}
        if name != "stop":
            arguments["city"] = draw(TEXTS.filter(lambda text: is_writable(format, text)))
            options = {
                "days": st.integers(0, 99),
                "unit": st.sampled_from("CF"),
                "note": st.none()
                | TEXTS.filter(
                    lambda text: (
                        is_writable(format, text)
                        and (text.strip() != "null" or not format.arguments.endswith(UNMARKED))
                    )
                ),
                "tags": st.lists(
                    TEXTS if format.arguments.endswith("_xml") else TEXTS.filter(partial(is_writable, format)),
                    max_size=3,
                ),
                "exact": st.booleans(),
            }
            arguments |= {key: draw(option) for key, option in options.items() if draw(st.booleans())}
        calls.append((name, arguments))
    return calls


def read(format: CallFormat, text: str, cuts: list[int], *, is_sure: bool) -> tuple[str, str, list[Call]]:
    """(reasoning, content, calls) of a text that comes in pieces."""
    reader = reader_of(format, SCHEMAS, is_sure=is_sure)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events: list[Event] = []
    for start, end in itertools.pairwise(edges):
        events += reader.feed(text[start:end], final=not cuts)
    events += reader.feed("", final=True)
    return told(events)


def told(events: list[Event]) -> tuple[str, str, list[Call]]:
    """(reasoning, content, calls) of what a reader says."""
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    said = "".join(event.text for event in events if isinstance(event, ContentDelta))
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ArgumentsDelta):
            calls[-1][1] += event.text
    return thought, said, [(name, json.loads(arguments)) for name, arguments in calls]


@cache
def constraint(name: str, choice: Any, *, only_one: bool = False) -> Grammar:
    tag = calls_tag(FUNCTIONS, BY_NAME[name], choice=choice, only_one=only_one)
    return compile(structural_tag=tag, vocabulary=BYTES, additional_properties="closed")


def test_the_tests_write_every_format() -> None:
    assert WRITERS.keys() == BY_NAME.keys()
    assert {format for formats in PARSERS.values() for format in formats} == set(FORMATS)


@pytest.mark.parametrize("name", WRITERS)
@few
@given(data=st.data(), cuts=st.lists(st.integers(0, 400)), is_sure=st.booleans())
def test_calls_are_read_back_in_any_pieces_and_allowed(
    name: str, data: st.DataObject, cuts: list[int], is_sure: bool
) -> None:
    format = BY_NAME[name]
    calls = data.draw(calls_of(format))
    before = data.draw(st.sampled_from(["", "I will look. "])) if format.trigger and not format.has_channels else ""
    written = WRITERS[name](calls)
    thought, said, found = read(format, before + written, cuts, is_sure=is_sure)
    assert (thought, said, found) == ("", before, calls)
    for _, arguments in (call for call in found if call[0] != "stop"):
        jsonschema.validate(arguments, PLACE)
    assert accepts(constraint(name, "required"), written)
    assert accepts(constraint(name, "auto"), before + written)
    assert accepts(constraint(name, "required", only_one=True), written) == (len(calls) == 1)
    assert accepts(constraint(name, "auto", only_one=True), before + written) == (len(calls) == 1)
    assert not before or not accepts(constraint(name, "required"), before + written)


@pytest.mark.costly
@pytest.mark.parametrize("name", WRITERS)
@few
@given(data=st.data())
def test_changed_calls_are_allowed_only_if_they_are_calls(name: str, data: st.DataObject) -> None:
    """What the constraint allows, the parser reads as calls that keep to their schemas."""
    format = BY_NAME[name]
    written = WRITERS[name](data.draw(calls_of(format)))
    start = data.draw(st.integers(0, len(written)))
    end = data.draw(st.integers(start, min(len(written), start + 8)))
    changed = written[:start] + data.draw(TEXTS) + written[end:]
    is_allowed = accepts(constraint(name, "required"), changed)
    try:
        _, said, found = read(format, changed, [], is_sure=False)
        is_valid = all(call in SCHEMAS for call, _ in found)
        for call, arguments in found:
            jsonschema.validate(arguments, SCHEMAS[call])
    except (ValueError, KeyError, jsonschema.ValidationError):
        is_valid = False
        said, found = "", []
    assert not is_allowed or (is_valid and found and not said.strip())


@pytest.mark.parametrize("name", WRITERS)
def test_other_tools_and_arguments_are_not_allowed(name: str) -> None:
    write, required, auto = WRITERS[name], constraint(name, "required"), constraint(name, "auto")
    for call in [
        ("get_whether", {"city": "x"}),
        ("get_weather", {"days": 1} if BY_NAME[name].arguments in UNMARKED else {"city": 1.5}),
        ("get_weather", {}),
        ("get_weather", {"city": "x", "days": 100}),
        ("get_weather", {"city": "x", "unit": "K"}),
        ("get_weather", {"city": "x", "more": 1}),
        ("stop", {"now": 1}),
    ]:
        written = write([call])
        assert not accepts(required, written)
        assert not accepts(auto, written)
        assert not accepts(required, "")
        assert not accepts(required, write([("stop", {})])[:-1])


@pytest.mark.parametrize("name", WRITERS)
def test_free_text_is_free_until_a_call_begins(name: str) -> None:
    auto = constraint(name, "auto")
    texts = ["Hello!", "a < b [x] {y}", '{"name": "Bob"', '{"no": 1}', "[1]", ""]
    if (blocks := BY_NAME[name].blocks) is not None:
        begin, end = blocks.said
        texts = [f"{begin}{text}{end}" for text in texts]
    if name == "gpt-oss":
        texts = [f"<|channel|>final<|message|>{text}<|return|>" for text in texts]
    for text in texts:
        if not name.startswith("llama") or not text.startswith('{"name"'):
            assert accepts(auto, text), text
    assert not accepts(auto, WRITERS[name]([("stop", {})])[:-1])


TRANSCRIPTS: list[tuple[str, str, tuple[str, str, list[Call]]]] = [
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\nNaN\n</parameter>\n"
        "<parameter=tags>\n[Infinity]\n</parameter>\n</function>\n</tool_call>",
        ("", "", [("get_weather", {"days": "NaN", "tags": "[Infinity]"})]),
    ),
    # as published with the models
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "hermes",
        'Sure.\n<tool_call>{"name":"get_weather","parameters":{"city":"Paris"}}</tool_call> Done.',
        ("", "Sure.\nDone.", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "llama4",
        '<|python_start|><|python_end|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    ("llama3", 'It is {"name": "x"}', ("", 'It is {"name": "x"}', [])),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}]',
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "mistral_args",
        'Let me see.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]stop[ARGS]{}',
        ("", "Let me see.", [("get_weather", {"city": "Paris"}), ("stop", {})]),
    ),
    (
        "mistral_ids",
        '[TOOL_CALLS]get_weather[CALL_ID]q3vF8xYz1[ARGS]{"city": "Paris"}[TOOL_CALLS]stop[ARGS]{}',
        ("", "", [("get_weather", {"city": "Paris"}), ("stop", {})]),
    ),
    (
        "deepseekv3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "", [("get_weather", {"city": "Paris"}), ("stop", {})]),
    ),
    (
        "deepseekv31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\nor so\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        ("", "", [("get_weather", {"city": "Paris\nor so", "days": 3})]),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>12</parameter><parameter=note>null</parameter></function>"
        "</tool_call>",
        ("", "", [("get_weather", {"city": "12", "note": None})]),
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>tags</arg_key>\n"
        '<arg_value>["a"]</arg_value>\n</tool_call>',
        ("", "", [("get_weather", {"city": "Paris", "tags": ["a"]})]),
    ),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris\nor so</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        ("", "", [("get_weather", {"city": "Paris\nor so", "days": 3})]),
    ),
    (
        "minimax_m2",
        'Let me see.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="tags">["a"]</parameter>\n</invoke>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
        ("", "Let me see.\n", [("get_weather", {"city": "Paris", "tags": ["a"]}), ("stop", {})]),
    ),
    (
        "deepseekv32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="note" string="true">null</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ("", "", [("get_weather", {"city": "5", "days": 5, "note": "null"})]),
    ),
    (
        "deepseekv32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="false">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ("", "", [("get_weather", {"city": "5"})]),
    ),
    (
        "deepseekv4",
        'Now.<｜DSML｜tool_calls><｜DSML｜invoke name="stop"></｜DSML｜invoke></｜DSML｜tool_calls>',
        ("", "Now.", [("stop", {})]),
    ),
    (
        "step3",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
        '<steptml:parameter name="city">Paris</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "hy_v3_open",
        "I look.<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>",
        ("", "I look.", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "hy_v3",
        "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>5</arg_value></tool_call>"
        "<tool_call>stop<tool_sep></tool_call></tool_calls>",
        ("", "", [("get_weather", {"city": "5"}), ("stop", {})]),
    ),
    (
        "nemotron_json",
        'On it.<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "stop", "arguments": {}}]</TOOLCALL>',
        ("", "On it.", [("get_weather", {"city": "Paris"}), ("stop", {})]),
    ),
    (
        "apriel",
        '\n<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "x1"}]</tool_calls>',
        ("", "\n", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "apriel",
        '<tool_calls>[\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n]</tool_calls>',
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "granite",
        '<|tool_call|> [{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "phi4_mini_json",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "internlm",
        'I look.<|action_start|> <|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>\n',
        ("", "I look.", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "longcat",
        '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</longcat_tool_call>',
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    ("xlam", '[{"name": "stop", "arguments": {}}]', ("", "", [("stop", {})])),
    (
        "pythonic",
        """[get_weather(city='It\\'s "Paris"', days = 3, note=None, exact=True), stop()]""",
        (
            "",
            "",
            [("get_weather", {"city": 'It\'s "Paris"', "days": 3, "note": None, "exact": True}), ("stop", {})],
        ),
    ),
    ("pythonic", '<|python_start|>[get_weather(city="Paris")]', ("", "", [("get_weather", {"city": "Paris"})])),
    (
        "lfm2",
        "Let me see.<|tool_call_start|>[get_weather(city='Paris', tags=['a', {\"b\": true}, {},])]"
        "<|tool_call_end|>Done.",
        ("", "Let me see.Done.", [("get_weather", {"city": "Paris", "tags": ["a", {"b": True}, {}]})]),
    ),
    (
        "olmo3",
        "<function_calls>\nget_weather(city='New York', exact=true, note=null)\nstop()\n</function_calls>",
        ("", "", [("get_weather", {"city": "New York", "exact": True, "note": None}), ("stop", {})]),
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Par"{is<|"|>,days:42,tags:[<|"|>a<|"|>]}<tool_call|>'
        "<|tool_call>call:stop{}<tool_call|>",
        ("", "", [("get_weather", {"city": 'Par"{is', "days": 42, "tags": ["a"]}), ("stop", {})]),
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,exact:true}<end_function_call>",
        ("", "", [("get_weather", {"city": "Paris", "exact": True})]),
    ),
    (
        "minicpm3",
        "<|tool_call_start|>\n```python\nget_weather(city='Paris',days=2)\nstop()\n```\n<|tool_call_end|>\n",
        ("", "", [("get_weather", {"city": "Paris", "days": 2}), ("stop", {})]),
    ),
    (
        "minicpm5",
        'I look. <function name="get_weather"><param name="city"><![CDATA[a<b>\nc]]></param>'
        '<param name="days">2</param></function>\n<function name="stop"></function>',
        ("", "I look. ", [("get_weather", {"city": "a<b>\nc", "days": 2}), ("stop", {})]),
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city">Paris</param><param name="note"><![CDATA[null]]></param>'
        '<param name="days"><![CDATA[2]]></param></function>',
        ("", "", [("get_weather", {"city": "Paris", "note": "null", "days": 2})]),
    ),
    (
        "apertus",
        'Now.<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"stop": {}}]<|tools_suffix|>',
        ("", "Now.", [("get_weather", {"city": "Paris"}), ("stop", {})]),
    ),
    (
        "dots",
        '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        "</invoke>\n</dots_function_call>",
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "gigachat3",
        'I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        ("", "I look.", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "gigachat31",
        'I look.<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}',
        ("", "I look.", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "gigachat35",
        '\n\n<｜GCML｜tool_calls>\n<｜GCML｜invoke name="get_weather">\n'
        '<｜GCML｜parameter name="city" string="true">Paris</｜GCML｜parameter>\n'
        "</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
        ("", "\n\n", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "granite-20b-fc",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}<function_call> '
        '{"name": "stop", "arguments": {}}',
        ("", "", [("get_weather", {"city": "Paris"}), ("stop", {})]),
    ),
    (
        "k2_horizon",
        "Now.<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Paris"
        "</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
        ("", "Now.", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "k2_horizon_json",
        '<ifm|tool_calls>\n<ifm|tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</ifm|tool_call>\n'
        "</ifm|tool_calls>",
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "solar_open2",
        "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>\n"
        "<|tool_call:end|>",
        ("", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary to=functions."
        'get_weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>',
        ("The user asks.", "", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Paris"}',
        ("Hm.", "I look.", [("get_weather", {"city": "Paris"})]),
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>2 < 3<|return|>",
        ("Easy.", "2 < 3", []),
    ),
    ("gpt-oss", "Hello", ("", "Hello", [])),
    (
        "cohere_command3",
        "<|START_THINKING|>I look it up.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "stop", "parameters": {}}\n]<|END_ACTION|>',
        ("I look it up.", "", [("get_weather", {"city": "Paris"}), ("stop", {})]),
    ),
    (
        "cohere_command3",
        "<|START_THINKING|>Easy.<|END_THINKING|>\n<|START_RESPONSE|>2 < 3\n<|END_RESPONSE|>",
        ("Easy.", "2 < 3\n", []),
    ),
    ("cohere_command3", "Hello", ("", "Hello", [])),
    ("cohere_command4", "<|START_TEXT|>Hello", ("", "Hello", [])),
    (
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>5<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>5<|close|>argument<|sep|>'
        '<|open|>argument key="tags" type="array"<|sep|>["a"]<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="stop" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        ("Hm.", "I look.", [("get_weather", {"city": "5", "days": 5, "tags": ["a"]}), ("stop", {})]),
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="stop" index="1"<|sep|>'
        '<|open|>argument key="R&amp;D &quot;now&quot; &amp;quot;" type="string"<|sep|>&amp;<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        ("", "", [("stop", {'R&D "now" &quot;': "&amp;"})]),
    ),
    (
        "kimi_k3",
        "<|open|>think<|sep|>Broken off<|open|>response<|sep|>2<|close|>response<|sep|><|close|>message<|sep|>",
        ("Broken off", "2", []),
    ),
]


@pytest.mark.parametrize("is_sure", [False, True])
@pytest.mark.parametrize(("name", "text", "expected"), TRANSCRIPTS)
@few
@given(cuts=st.lists(st.integers(0, 300)))
def test_published_transcripts(
    name: str, text: str, expected: tuple[str, str, list[Call]], is_sure: bool, cuts: list[int]
) -> None:
    assert read(BY_NAME[name], text, cuts, is_sure=is_sure) == expected


PIECES = (
    "<|start|>",
    "assistant",
    "user",
    "<|channel|>",
    "analysis",
    "commentary",
    "final",
    "<|message|>",
    " ",
    "x<",
)
PIECES += ("<|end|>", "<|call|>", "<|return|>", "<|constrain|>json", " to=functions.f", '{"a": 1}', "to=", "{")


@pytest.mark.parametrize("is_sure", [False, True])
@given(
    parts=st.lists(st.sampled_from(PIECES), max_size=12),
    cuts=st.lists(st.integers(0, 100)),
    longest=st.sampled_from([4, 30, 4096]),
)
def test_any_messages_in_channels_are_read_alike_in_any_pieces(
    is_sure: bool, parts: list[str], cuts: list[int], longest: int
) -> None:
    def events(edges: list[int]) -> list[tuple[str, str]]:
        reader, found = reader_of(BY_NAME["gpt-oss"], {}, is_sure=is_sure), list[tuple[str, str]]()
        for start, end in itertools.pairwise(edges):
            for event in reader.feed(text[start:end], final=end == len(text)):
                kind, new = type(event).__name__, event.name if isinstance(event, ToolCallStart) else event.text
                if found and found[-1][0] == kind != "ToolCallStart":
                    found[-1] = kind, found[-1][1] + new
                else:
                    found.append((kind, new))
        return found

    text = "".join(parts) + "."
    with mock.patch.object(harmony, "_MAX_HEADER", longest):
        assert events([0, len(text)]) == events([0, *sorted({min(cut, len(text) - 1) for cut in cuts}), len(text)])


@pytest.mark.parametrize("begun", ["<|channel|>analysis ", "<|start|>assistant<|channel|>", " to="])
def test_a_header_that_does_not_end_is_text(begun: str) -> None:
    text = begun + "x" * 5000
    assert read(BY_NAME["gpt-oss"], text, [], is_sure=False) == ("", text, [])


@pytest.mark.parametrize("name", ["hermes", "olmo3", "kimi_k3", "xlam"])
def test_what_stands_behind_very_many_calls_is_text(name: str) -> None:
    _, said, calls = read(BY_NAME[name], WRITERS[name]([("stop", {})] * (MAX_CALLS + 3)), [], is_sure=False)
    assert (len(calls), said.count("stop")) == (MAX_CALLS, 3)


@pytest.mark.parametrize("name", ["hermes", "olmo3", "kimi_k3", "xlam"])
def test_as_many_calls_as_may_be_leave_no_text(name: str) -> None:
    _, said, calls = read(BY_NAME[name], WRITERS[name]([("stop", {})] * MAX_CALLS), [], is_sure=False)
    assert (len(calls), said) == (MAX_CALLS, "")


@pytest.mark.parametrize("name", WRITERS)
def test_each_piece_of_a_value_is_looked_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, feed = 0, JsonReader.feed

    def counted(self: JsonReader, text: str) -> tuple[str, int]:
        nonlocal looked
        looked += len(text)
        return feed(self, text)

    monkeypatch.setattr(JsonReader, "feed", counted)
    given = {"city": "x", "tags": ["</arg_value>"] * 200}
    text = WRITERS[name]([("get_weather", given)])
    assert read(BY_NAME[name], text, list(range(0, len(text), 4)), is_sure=False)[2] == [("get_weather", given)]
    assert looked < 2 * len(text)


@pytest.mark.parametrize("begun", ["", '<｜DSML｜parameter name="days" string="false">'])
def test_blanks_among_parameters_cost_what_their_number_costs(begun: str) -> None:
    def seconds(number: int) -> float:
        reader = reader_of(BY_NAME["deepseekv32"], SCHEMAS)
        reader.feed(f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{begun}')
        before = time.thread_time()
        for _ in range(number):
            reader.feed(" ")
        return time.thread_time() - before

    few, many = map(min, zip(*((seconds(20_000), seconds(100_000)) for _ in range(3)), strict=True))
    assert many < 10 * few


@pytest.mark.parametrize("size", [16, 10_000])
def test_a_parameters_name_that_does_not_end_is_none(size: int) -> None:
    reader, events = reader_of(BY_NAME["kimi_k3"], SCHEMAS), list[Event]()
    text = WRITERS["kimi_k3"]([("get_weather", {"city": "x"})]).replace("city", "&amp;" * 2000)
    for start in range(0, len(text), size):
        events += reader.feed(text[start : start + size], final=start + size >= len(text))
    assert "&&" not in str(told(events)[2])


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "gpt-oss"])
def test_a_call_whose_marks_do_not_come_is_text_soon(name: str) -> None:
    written, format = WRITERS[name]([("stop", {})]), BY_NAME[name]
    places = [written.index("stop")]
    if format.arguments == "json" and format.end:
        places.append(written.index("{}") + 2)
    for place in places:
        text = written[:place] + " " * 3 * MAX_NAME
        reader, events = reader_of(format, SCHEMAS), list[Event]()
        for start in range(0, len(text), 16):
            events += reader.feed(text[start : start + 16])
        assert (told(events), reader.is_calling) == (("", text, []), False)


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("gpt-oss", "kimi_k2")])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_name_is_read_alike_in_any_pieces(name: str, *, is_long: bool) -> None:
    tool = "n" * (MAX_NAME + 1 if is_long else 300)
    text = WRITERS[name]([(tool, {}), ("stop", {})])
    found = []
    for size in (1, 7, 4096, len(text)):
        reader, events = reader_of(BY_NAME[name], SCHEMAS), list[Event]()
        for start in range(0, len(text), size):
            events += reader.feed(text[start : start + size], final=start + size >= len(text))
        found.append(told(events))
    assert all(each == found[0] for each in found)
    assert (tool in dict(found[0][2])) != is_long


BLOCKS = [format for format in FORMATS if format.blocks is not None]


@pytest.mark.parametrize("format", BLOCKS, ids=[format.name for format in BLOCKS])
@pytest.mark.parametrize("begun", ["", "thought", "said"])
def test_blocks_are_held_and_read_from_where_the_prompt_begins_them(format: CallFormat, begun: BlockKind) -> None:
    assert format.blocks is not None
    (think, thought), (say, said) = format.blocks.thought, format.blocks.said
    prompt = {"": "", "thought": think, "said": say}[begun]
    assert format.blocks.begun_by(f"[assistant]{prompt}") == begun
    call = WRITERS[format.name]([("stop", {})])
    held = compile(structural_tag=calls_tag(FUNCTIONS, format, choice="required", begun=begun), vocabulary=BYTES)
    free = compile(structural_tag=calls_tag(FUNCTIONS, format, begun=begun), vocabulary=BYTES)
    digits = in_channels("regex", "[0-9]+", format, begun)
    document = compile(structural_tag=digits, vocabulary=BYTES)
    for answer, allows, expected in (
        (f"{say}12{said}", {free, document}, ("", "12", [])),
        (f"{say}ab{said}", {free}, ("", "ab", [])),
        (f"{think}why{thought}{say}12{said}{format.blocks.end}", {free, document}, ("why", "12", [])),
        (f"{think}why{thought}{call}", {free, held}, ("why", "", [("stop", {})])),
        (call, {free, held}, ("", "", [("stop", {})])),
        (f"{say}I look.{said}{call}", {free, held}, ("", "I look.", [("stop", {})])),
        (f"{think}why{thought}{say}I look.{said}{call}", {free, held}, ("why", "I look.", [("stop", {})])),
    ):
        if not answer.startswith(prompt):
            continue
        if "I look." in answer and format.name == "cohere_command3" and begun != "said":
            allows = set()
        text = answer.removeprefix(prompt)
        for grammar in (free, held, document):
            assert accepts(grammar, text) == (grammar in allows), (text, allows)
        for size in (1, 2, 7, len(text)):
            reader, events = reader_of(format, SCHEMAS, begun=begun), list[Event]()
            for start in range(0, len(text), size):
                events += reader.feed(text[start : start + size], final=start + size >= len(text))
            assert told(events) == expected, (text, size)


@pytest.mark.parametrize("format", BLOCKS, ids=[format.name for format in BLOCKS])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_blanks_in_texts_outside_of_blocks_are_said(format: CallFormat, size: int) -> None:
    assert format.blocks is not None
    (_, thought), (say, said), call = (
        format.blocks.thought,
        format.blocks.said,
        WRITERS[format.name]([("stop", {})]),
    )
    words = "Paris is  the capital\n\n of\tFrance. "
    for text, expected in (
        (words, (words, 0)),
        (f"\n\n{words}", (f"\n\n{words}", 0)),
        (f"{call}\n{words}", (f"\n{words}", 1)),
        (f"{call}\n \n{say}{words}{said} \n", (words, 1)),
        (f"\n {format.trigger} no call{words}", (f"{format.trigger} no call{words}", 0)),
        (f"why{thought}\n {words}{say} b {said}\n\n{words}", (f"\n {words} b \n\n{words}", 0)),
    ):
        reader, events = reader_of(format, SCHEMAS, begun="thought" * text.startswith("why")), list[Event]()
        for start in range(0, len(text), size):
            events += reader.feed(text[start : start + size], final=start + size >= len(text))
        _, content, calls = told(events)
        assert (content, len(calls)) == expected, text


@pytest.mark.parametrize("number", ["1e999", "-1.5e999", "9" * 400])
def test_numbers_beyond_floats_are_integers_as_good(number: str) -> None:
    assert json.loads(json.dumps(parsed(number))) == int(Decimal(number))


@pytest.mark.parametrize("number", ["1e4300", "1e" + "9" * 30])
def test_numbers_of_more_digits_than_are_written_are_numbers_all_the_same(number: str) -> None:
    assert parsed(number) == math.inf


@pytest.mark.parametrize("number", ["9" * 4301, "NaN", "-Infinity"])
def test_numbers_of_no_json_or_of_too_many_digits_are_none(number: str) -> None:
    with pytest.raises(ValueError, match=r"digits|int\(\)"):
        parsed(number)


NO_CALLS = [
    ("hermes", "<tool_call>broken</tool_call> and more"),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "argu'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=tags>\n[-Infinity"),
    ("llama3", '{"name": "Bob", "age": 3}'),
    ("mistral", "[TOOL_CALLS] none"),
    ("deepseekv3", "<｜tool▁calls▁begin｜>nothing"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1'),
    (
        "deepseekv32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" strong="true">',
    ),
    ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>"),
    ("phi4_mini_json", "functools[0]"),
    ("internlm", "<|action_start|><|interpreter|>\nprint(1)<|action_end|>"),
    ("xlam", '[{"name": "Bob", "age": 3}]'),
    ("pythonic", "[1] says (so)"),
    ("pythonic", "[f(a=b c)]"),
    ("pythonic", "[f(1)] and [g]"),
    ("pythonic", "[get(a=1"),
    ("lfm2", "<|tool_call_start|>[f(a='b' 'c')]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=NaN)]<|tool_call_end|>"),
    ("olmo3", "<function_calls>\nno call\n</function_calls>"),
    ("gemma4", '<|tool_call>call:f{a:<|"|>b<|"|>;c:1}<tool_call|>'),
    ("gemma4", "<|tool_call>call:f{a:b}<tool_call|>"),
    ("cohere_command3", '<|START_ACTION|>[{"tool_call_id": "0", "tool": "f"}]'),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call name="f"'),
    (
        "k2_horizon",
        '<ifm|tool_calls>\n<ifm|tool_call>{"name": "f", "arguments": {"a": 1}}</ifm|tool_call>\n</ifm|tool_calls>',
    ),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
@given(cuts=st.lists(st.integers(0, 80)))
def test_what_is_no_call_after_all_is_text(name: str, text: str, cuts: list[int]) -> None:
    assert read(BY_NAME[name], text, cuts, is_sure=False) == ("", text, [])


SECTIONS = [name for name in WRITERS if BY_NAME[name].opening and BY_NAME[name].trigger]


@pytest.mark.parametrize("name", SECTIONS)
@given(cuts=st.lists(st.integers(0, 400)))
def test_calls_behind_a_section_that_never_ended_are_calls(name: str, cuts: list[int]) -> None:
    calls = WRITERS[name]([("get_weather", {"city": "Rome"})])
    begun = calls.removesuffix(BY_NAME[name].closing)
    assert begun != calls
    expected = [("get_weather", {"city": "Rome"})] * 2
    assert read(BY_NAME[name], begun + calls, cuts, is_sure=False) == ("", "", expected)


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_come_before_they_end(name: str) -> None:
    text = WRITERS[name]([("get_weather", {"city": "a long name of a city"})])
    reader = reader_of(BY_NAME[name], SCHEMAS, is_sure=True)
    events = reader.feed(text[: text.index("a long") + 4])
    ids: dict[str, str] = {"kimi_k2": "functions.get_weather:0", "mistral_ids": "a1B2c3D40"}
    assert events[0] == ToolCallStart("get_weather", ids.get(name))
    assert "a lo" in "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert reader.is_calling


@pytest.mark.parametrize("name", WRITERS)
def test_tools_with_names_that_calls_cannot_hold_are_refused_or_written(name: str) -> None:
    odd = [{"name": 'a "b" <c>', "parameters": {"type": "object"}}]
    if BY_NAME[name].quotes_name:
        written = WRITERS[name]([('a "b" <c>', {})])
        found = compile(structural_tag=calls_tag(odd, BY_NAME[name], choice="required"), vocabulary=BYTES)
        assert accepts(found, written)
        [call] = calls_in(written, BY_NAME[name])
        assert call["name"] == 'a "b" <c>'
    else:
        with pytest.raises(InvalidRequest, match="cannot be written"):
            calls_tag(odd, BY_NAME[name])


def test_parsers_are_told_by_their_names() -> None:
    assert [format.name for format in formats_of("mistral")] == ["mistral", "mistral_args", "mistral_ids"]
    with pytest.raises(InvalidRequest, match="did you mean 'qwen25'"):
        formats_of("qwen2.5")


def test_a_tool_that_is_not_strict_tells_strings_from_other_values() -> None:
    assert loose(PLACE, BY_NAME["hermes"]) == {"type": "object"}
    coder = BY_NAME["qwen3_coder"]
    tag = calls_tag([{"name": "f", "parameters": loose(PLACE, coder)}], coder)
    found = compile(structural_tag=tag, vocabulary=BYTES)
    for arguments, is_allowed in (({"city": "{ no JSON", "days": 1000}, True), ({"tags": "{ no JSON"}, False)):
        assert accepts(found, WRITERS["qwen3_coder"]([("f", arguments)])) == is_allowed


REASONED = [
    ("regex", "[ab]", "a", "c"),
    ("json_schema", {"type": "array"}, "[1]", "{}"),
    ("json_schema", '{"type": "integer"}', "12", "x"),
    ("structural_tag", calls_tag(FUNCTIONS, BY_NAME["hermes"]), "So.", "<tool_call>no"),
    (
        "structural_tag",
        calls_tag(FUNCTIONS, BY_NAME["kimi_k2"], choice="required"),
        WRITERS["kimi_k2"]([("stop", {})]),
        "x",
    ),
]


@pytest.mark.parametrize(("kind", "source", "good", "bad"), REASONED)
def test_a_constraint_holds_from_where_the_reasoning_ends(kind: str, source: Any, good: str, bad: str) -> None:
    outside = behind_reasoning(kind, source, "<think>", "</think>", is_inside=False)
    inside = behind_reasoning(kind, source, "<think>", "</think>", is_inside=True)
    free, held = (compile(structural_tag=tag, vocabulary=BYTES) for tag in (outside, inside))
    for text in (good, f"<think>why [{bad}\n</think>{good}", f"<think></think>\n\n{good}"):
        assert accepts(free, text), text
        assert accepts(held, text.removeprefix("<think>")) == ("</think>" in text), text
        assert not accepts(free, text + "</think>" + bad) or kind == "structural_tag"
    assert not accepts(free, bad)
    assert not accepts(free, f"<think>{good}")
    assert not accepts(free, f"<think></think>{bad}")


def test_constraints_that_cannot_stand_behind_reasoning_are_left_as_they_are() -> None:
    for kind, source in (("ebnf", 'root ::= "a"'), ("json_schema", "{"), ("structural_tag", {"triggers": []})):
        assert behind_reasoning(kind, source, "<think>", "</think>", is_inside=True) is None
