"""Tool calls in chats: what an answer is held to, and the calls that come out, whole or in pieces."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sgl
from sgl.errors import InvalidRequest
from sgl.formats.call_format import CallFormat
from sgl.formats.calls import ARRAY, HERMES, MISTRAL
from sgl.formats.detect import CallStyle, call_style
from sgl.lang.ir.reasoning import ReasoningSplitter
from sgl.runtime.engine import Engine
from sgl.runtime.server import tool_calls
from sgl.runtime.server.chat import prompt_ids
from sgl.runtime.server.protocol import (
    AllowedToolChoice,
    AllowedTools,
    ChatBody,
    ChosenName,
    ChosenTool,
    Function,
    Tool,
)
from sgl.runtime.server.tool_calls import AnswerSplitter, Piece, Reading, call_constraint, loosenings, merged
from sgl.runtime.text.tokenizer import Tokenizer
from tests.examples import few
from tests.live_server import OPTIONS, LiveServer, served
from tests.tiny_models import CALLING_TEMPLATE, WRITTEN_CALLS, calling_checkpoint

HELLO = [{"role": "user", "content": "hello"}]
ITEM = {
    "type": "object",
    "properties": {"sku": {"enum": ["A", "B"]}},
    "required": ["sku"],
    "additionalProperties": False,
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "minItems": 1, "maxItems": 2}},
    "required": ["items"],
    "additionalProperties": False,
    "$defs": {"Item": ITEM},
}
BOOK = {**ORDER, "$defs": {"Item": {"enum": ["C", "D"]}}}  # the same name for something else


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [function("order", ORDER, strict=True), function("book", BOOK, strict=True), function("stop", strict=True)]
SCHEMAS = {"order": ORDER, "book": BOOK, "stop": {"maxProperties": 0}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = calling_checkpoint(tmp_path_factory.mktemp("calls"))
    with Engine(path, **OPTIONS) as engine, served(engine) as server:
        yield server


def chat(server: LiveServer, **body: Any) -> dict[str, Any]:
    """The choice of one answer, put together from a stream where one is asked for."""
    body = {"model": "default", "messages": HELLO, "max_tokens": 120, "temperature": 1.0, **body}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        [choice] = json.loads(line.removeprefix("data: "))["choices"]
        message["content"] += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"function": {"name": delta["function"]["name"], "arguments": ""}})
            message["tool_calls"][delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return {"message": message, "finish_reason": reason}


def check_calls(choice: dict[str, Any]) -> int:
    calls = choice["message"].get("tool_calls") or []
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert not calls or choice["finish_reason"] in ("tool_calls", "length")
    return len(calls)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
def test_forced_calls_keep_to_schemas_with_definitions_of_their_own(
    server: LiveServer, choice: Any, stream: bool
) -> None:
    for seed in range(3):
        answer = chat(server, tools=TOOLS, tool_choice=choice, seed=seed, stream=stream)
        assert check_calls(answer) >= 1
        assert not answer["message"]["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
def test_a_format_for_texts_does_not_hold_forced_calls(server: LiveServer, choice: Any) -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    for form in (
        {"type": "json_schema", "json_schema": {"name": "song", "schema": schema, "strict": True}},
        {"type": "json_object"},
        {"type": "text"},
    ):
        answer = chat(server, tools=TOOLS, tool_choice=choice, response_format=form, parallel_tool_calls=False)
        assert check_calls(answer) == 1
        assert not answer["message"]["content"]


def test_a_stream_that_is_a_call_begins_without_a_text(server: LiveServer) -> None:
    for choice in ({"tools": TOOLS, "tool_choice": "required"}, {}):
        body = {"model": "default", "messages": HELLO, "max_tokens": 60, "stream": True, **choice}
        told = server.post("/v1/chat/completions", body).text.split("\n\n")[0]
        [begun] = json.loads(told.removeprefix("data: "))["choices"]
        assert begun["delta"]["role"] == "assistant"
        assert (begun["delta"]["content"] is None) == ("tools" in choice)


@pytest.mark.costly
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_seeds", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_answer_that_begins_a_call_ends_it_as_the_tool_wants_it(
    server: LiveServer, num_seeds: int, stream: bool
) -> None:
    """The model is random; a bias makes it begin calls."""
    [begin] = server.service.tokenizer.encode("<tool_call>", add_special_tokens=False).tolist()
    num_calls = 0
    for seed in range(num_seeds):
        body = {"logit_bias": {str(begin): 8.0}, "seed": seed, "max_tokens": 400, "stream": stream}
        num_calls += check_calls(chat(server, tools=TOOLS, **body))
        assert check_calls(chat(server, tools=TOOLS, parallel_tool_calls=False, **body)) <= 1
        assert not chat(server, tools=TOOLS, tool_choice="none", **body)["message"].get("tool_calls")
    assert num_calls


def test_a_document_may_be_asked_for_beside_tools(server: LiveServer) -> None:
    value = {"name": "Bob", "parameters": {"a": 1}, "more": 2}  # which begins as a call might
    document = {"const": value}
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": document}}
    kinds = set()
    for seed in range(12):
        choice = chat(server, tools=TOOLS, response_format=wanted, seed=seed, stream=seed % 2 == 1)
        if not check_calls(choice):
            assert json.loads(choice["message"]["content"]) == value
        kinds.add(choice["finish_reason"])
    assert kinds == {"stop", "tool_calls"}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([function("a"), function("b"), function("a")], "two tools are named 'a'"),
        ([function("a", {"type": "array"})], "the parameters of 'a' must be of type object"),
    ],
)
def test_tools_that_no_call_can_be_made_of_are_refused(server: LiveServer, tools: Any, words: str) -> None:
    answer = server.post("/v1/chat/completions", {"model": "default", "messages": HELLO, "tools": tools})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "tools"


def test_arguments_are_an_object_though_a_schema_allows_null_as_well(server: LiveServer) -> None:
    tool = function("a", {"type": ["null", "object"], "properties": {"x": {"const": 1}}, "required": ["x"]})
    for seed in range(6):
        choice = chat(server, tools=[tool], tool_choice="required", seed=seed, parallel_tool_calls=False)
        assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"x":1}']


def test_a_tool_is_found_among_thousands_by_its_name() -> None:
    """Names are compared as often as there are tools, and not each with each."""

    class Name(str):
        compared = 0
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

    functions = [Function.model_construct(name=Name(f"f{i}")) for i in range(2000)]
    tools = [Tool.model_construct(type="function", function=function) for function in functions]
    chosen = [ChosenTool.model_construct(function=ChosenName.model_construct(name=each.name)) for each in functions]
    allowed = AllowedTools.model_construct(mode="auto", tools=chosen[::-1])
    choice = AllowedToolChoice.model_construct(type="allowed_tools", allowed_tools=allowed)
    body = ChatBody(messages=HELLO).model_copy(update={"tools": tools, "tool_choice": choice})
    assert call_constraint(body, None, {})[1].has_tools
    assert Name.compared < 20 * len(tools)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("style", [None, CallStyle(HERMES)])
def test_a_tool_that_is_allowed_a_thousand_times_is_allowed(mode: str, style: CallStyle | None) -> None:
    """Its schema is written once: it may be as long as a body."""

    def constraint(times: int) -> Any:
        named = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named * times}}
        body = {"messages": HELLO, "tools": [function(name, ADD) for name in "efg"], "tool_choice": choice}
        return call_constraint(ChatBody.model_validate(body), style, {})[0]

    assert constraint(1000) == constraint(1)


ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def call_of(server: LiveServer, tool: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    """The arguments of the calls in some answers that may have calls, which a bias towards the tag brings."""
    [tag] = server.service.tokenizer.encode("<tool_call>", add_special_tokens=False).tolist()
    found = []
    for seed in range(4):
        answer = chat(server, tools=[tool], seed=seed, logit_bias={str(tag): 100}, **body)
        calls = answer["message"].get("tool_calls") or []
        found += [
            json.loads(call["function"]["arguments"]) for call in calls if answer["finish_reason"] != "length"
        ]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_may_come_keep_to_schemas(server: LiveServer, stream: bool) -> None:
    calls = call_of(server, function("add", ADD), stream=stream, parallel_tool_calls=False)
    assert calls
    for call in calls:
        jsonschema.validate(call, ADD)


UNKNOWN = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(.)\1"}}, "required": ["a"]}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_holds_nobody_who_did_not_ask_for_it(
    server: LiveServer, stream: bool, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "n": n, "stream": stream}
    for strict, holds in ((None, False), (False, False), (True, True)):
        caplog.clear()
        tools = [function("order", ORDER), function("add", UNKNOWN, strict=strict)]
        answer = server.post("/v1/chat/completions", {**body, "tools": tools})
        assert ("invalid_grammar" in answer.text) == holds
        assert answer.text.count('"finish_reason":"') == (0 if holds else n)
        assert ("be enforced, of these: add: " in caplog.text) == (strict is None)


def test_only_tools_whose_schemas_cannot_be_enforced_are_loosened_first() -> None:
    def loosened(*tools: Any) -> list[set[str]]:
        return [set(names) for names in loosenings(ChatBody(messages=HELLO, tools=list(tools)), HERMES, "closed")]

    good, bad = function("order", ORDER), function("add", UNKNOWN)
    assert loosened(good, bad) == [{"add"}, {"order", "add"}]
    assert loosened(bad) == [{"add"}]
    assert loosened(good, function("add", UNKNOWN, strict=False)) == [{"order"}]
    assert loosened(good, function("add", UNKNOWN, strict=True)) == []


def test_tools_are_looked_at_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of them is left is loosened, if it may be: thousands could hold a thread for an hour."""
    tools = [function(f"f{i}", UNKNOWN, strict=True if i == 9 else None) for i in range(10)]
    looked: list[str] = []

    def look(function: dict[str, Any], *_: Any) -> bool:
        looked.append(function["name"])
        return False

    monkeypatch.setattr(tool_calls, "thread_time", lambda: 2.0 * len(looked))
    monkeypatch.setattr(tool_calls, "_can_be_held", look)
    found = loosenings(ChatBody(messages=HELLO, tools=tools), HERMES, "closed")
    assert found == [frozenset(f"f{i}" for i in range(9))]
    assert len(looked) == 3


EMBEDDED = Tokenizer.load(Path(sgl.__file__).parent / "models" / "embedded")


def format_of(tokenizer: Tokenizer, template: str | None = None) -> CallFormat | None:
    options = {} if template is None else {"chat_template": template}
    found = call_style(partial(tokenizer.apply_chat_template, **options))
    return None if found is None else found.format


def written(format: CallFormat | None) -> tuple[str, str, str]:
    assert format is not None
    return format.begin, format.middle, format.end


def test_the_format_of_calls_is_read_off_the_template(server: LiveServer) -> None:
    tokenizer = server.service.tokenizer
    assert format_of(tokenizer) == HERMES
    compact = CALLING_TEMPLATE.replace('<tool_call>\n{"name": ', '<tool_call>{"name":').replace(', "arg', ',"arg')
    assert written(format_of(tokenizer, compact)) == ('<tool_call>{"name":"', '","arguments": ', "}\n</tool_call>")
    silent = CALLING_TEMPLATE.replace(WRITTEN_CALLS, "")
    for other in (silent, "{{ raise_exception('no calls') }}"):
        assert format_of(tokenizer, other) is None


def test_what_is_held_depends_on_what_was_asked_for() -> None:
    def held_to(params: Any = None, format: Any = HERMES, **more: Any) -> dict[str, Any]:
        style = None if format is None else CallStyle(format)
        return call_constraint(ChatBody(messages=HELLO, tools=TOOLS, **more), style, params or {})[0]

    tag = held_to()["structural_tag"]
    assert [structure["begin"] for structure in tag["structures"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in SCHEMAS
    ]
    assert tag["structures"][0]["schema"] == ORDER
    assert not tag["stop_after_first"]

    for strict, names in ((None, {"order"}), (False, {"order"}), (True, set())):  # what nothing holds
        body = ChatBody(messages=HELLO, tools=[function("order", ORDER, strict=strict)])
        assert call_constraint(body, CallStyle(HERMES), {})[1].bare == names

    def arguments_of(strict: bool | None, *loosened: str) -> Any:
        body = ChatBody(messages=HELLO, tools=[function("order", ORDER, strict=strict)])
        constraint, _ = call_constraint(body, CallStyle(HERMES), {}, loosened=loosened)
        return constraint["structural_tag"]["structures"][0]["schema"]

    assert arguments_of(None) == arguments_of(True) == arguments_of(True, "order") == ORDER
    assert arguments_of(False) == arguments_of(None, "order") == {"type": "object"}
    assert held_to(format=None) == held_to(params={"regex": "a"}) == held_to(tool_choice="none") == {}
    with pytest.raises(InvalidRequest, match="did you mean 'order'"):
        held_to(tool_choice={"type": "function", "function": {"name": "orders"}})


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWERS = [
    # text, reasoning, content, names of calls
    ("plain text", "", "plain text", []),
    ("<think>why</think>\n\nso", "why", "so", []),
    (f"I will add.{CALL}{CALL}", "", "I will add.", ["add", "add"]),
    (f"I will add.{CALL}\n{CALL}\n", "", "I will add.", ["add", "add"]),
    (f"<think>add</think>{CALL}", "add", "", ["add"]),
    ('{"name": "add", "parameters": {"a": 1}}', "", "", ["add"]),
    ('[{"name": "add", "arguments": {"a": 1}}]', "", "", ["add"]),
    ('{"no": "call"}', "", '{"no": "call"}', []),
    ('{"name": "Bob"}', "", '{"name": "Bob"}', []),
    ('{"name": "sub", "arguments": {"a": 1}}', "", '{"name": "sub", "arguments": {"a": 1}}', []),
    ('{"name": "add", "arguments": {"a": NaN}}', "", '{"name": "add", "arguments": {"a": NaN}}', []),
    ('{"name": "add", "arguments": {"a": 1e9999}}', "", '{"name": "add", "arguments": {"a": 1e9999}}', []),
    ("a < b <tool", "", "a < b <tool", []),
    ("<tool_call>broken", "", "<tool_call>broken", []),
    ("", "", "", []),
]


READINGS = {
    "any": Reading(has_tools=True, bare=frozenset({"add"})),
    "perhaps": Reading(has_tools=True, format=HERMES, bare=frozenset({"add"})),
    "tags": Reading(has_tools=True, format=HERMES, is_sure=True, bare=frozenset({"add"})),
    "all": Reading(has_tools=True, format=ARRAY, is_sure=True),
}


def split(text: str, cuts: list[int], sure: Any) -> Piece:
    """All that the splitter makes of a text, cut into pieces."""
    splitter = AnswerSplitter(ReasoningSplitter("qwen3", only_leading=True), READINGS[sure])
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [merged(splitter.feed(text[a:b])) for a, b in itertools.pairwise(edges)]
    pieces.append(merged(splitter.feed("", final=True)))
    whole = Piece("".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces))
    for call in [call for piece in pieces for call in piece.calls]:
        if "id" in call:
            whole.calls.append(call)
        else:
            whole.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return whole


@pytest.mark.parametrize("sure", ["any", "perhaps", "tags"])
@pytest.mark.parametrize(("text", "reasoning", "content", "names"), ANSWERS)
@few
@given(cuts=st.lists(st.integers(0, 120)))
def test_answers_split_alike_in_any_pieces(
    sure: Any, text: str, reasoning: str, content: str, names: list[str], cuts: list[int]
) -> None:
    whole = split(text, cuts, sure)
    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert [call["function"]["name"] for call in whole.calls] == names
    assert all(json.loads(call["function"]["arguments"]) == {"a": 1} for call in whole.calls)


@pytest.mark.parametrize("sure", ["any", "perhaps", "tags"])
def test_a_number_beyond_floats_goes_out_as_an_integer(sure: Any) -> None:
    [call] = split('{"name": "add", "arguments": {"a": 1e999}}', [], sure).calls
    assert json.loads(call["function"]["arguments"]) == {"a": 10**999}


@pytest.mark.parametrize("sure", ["all", "tags"])
@given(
    calls=st.lists(
        st.tuples(st.text(min_size=1), st.dictionaries(st.text(), st.text() | st.lists(st.text()))),
        min_size=1,
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 200)),
)
@example(calls=[("\x1f" * 50, {})], cuts=[])
def test_any_arguments_go_out_as_they_come(
    sure: Any, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    made = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if sure == "all":
        text, behind = f"[{','.join(made)}]", ""
    else:
        text, behind = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in made) + " So.", "So."
    whole = split(text, cuts, sure)
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in whole.calls]
    assert found == calls
    assert [call["index"] for call in whole.calls] == list(range(len(calls)))
    assert whole.content == behind


def test_arguments_are_streamed_before_they_end() -> None:
    splitter = AnswerSplitter(None, READINGS["tags"])
    assert splitter.feed('So: <tool_call>\n{"name": "add", "argu') == [Piece(content="So: ")]
    [begun] = merged(splitter.feed('ments": {"a": [1')).calls
    assert begun["function"] == {"name": "add", "arguments": '{"a": [1'}
    assert merged(splitter.feed(", 2]")).calls == [{"index": 0, "function": {"arguments": ", 2]"}}]
    assert merged(splitter.feed("}}\n</tool_call>")).calls == [{"index": 0, "function": {"arguments": "}"}}]


@pytest.mark.parametrize(("name", "expected"), [("qwen2.5", HERMES), ("mistral-v3", MISTRAL)])
def test_formats_of_real_templates(name: str, expected: Any, unpacked: Callable[[str], Path]) -> None:
    assert format_of(Tokenizer.load(unpacked("tokenizers") / name)) == expected


def test_a_template_that_tells_calls_by_a_null_content_writes_them() -> None:
    each = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    each += "{{ c.function.arguments + '\n```<｜tool▁call▁end｜>' }}"
    calls = "{% for c in m['tool_calls'] %}" + each + "{% endfor %}"
    null = "{% if m['content'] is none %}<｜tool▁calls▁begin｜>" + calls + "<｜tool▁calls▁end｜>{% endif %}"
    template = "{% for m in messages %}" + null
    template += "{% if m['content'] is not none %}{{ '[' + m['role'] + ']' + m['content'] }}{% endif %}{% endfor %}"
    tokenizer = EMBEDDED
    style = call_style(partial(tokenizer.apply_chat_template, chat_template=template))
    assert style is not None
    assert (style.format.name, style.as_text, style.without_content) == ("deepseekv3", True, True)
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": 1}'}}
    for content in ({}, {"content": None}, {"content": ""}):
        messages = [*HELLO, {"role": "assistant", **content, "tool_calls": [call]}]
        ids = prompt_ids(tokenizer, template, ChatBody(messages=messages), style=style)
        assert '<｜tool▁sep｜>look_up\n```json\n{"what": 1}\n```<' in tokenizer.decode(ids)


def style_of(each: str, before: str = "", behind: str = "") -> CallStyle | None:
    """Of a template that writes each call `c` so, in turns `m`."""
    return call_style(partial(EMBEDDED.apply_chat_template, chat_template=turns_of(each, before, behind)))


def turns_of(each: str, before: str = "", behind: str = "") -> str:
    calls = before + "{% for c in m.tool_calls %}" + each + "{% endfor %}" + behind
    text = "{% if m.tool_calls %}" + calls + "{% else %}{{ m.content }}{% endif %}"
    return (
        "{% for m in messages %}[{{ m.role }}]"
        + text
        + "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )


BARE = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
TAGGED = "<tool_call>" + BARE.replace("parameters", "arguments") + "</tool_call>"


def test_calls_without_tags_are_those_that_begin_a_turn() -> None:
    assert (style := style_of(BARE)) is not None
    assert style.format.name == "llama3"
    assert style_of(BARE, "<CALLS>[", "]</CALLS>") is None


def test_templates_that_write_calls_beside_tools_only_are_read() -> None:
    assert (style := style_of("{% for t in tools %}" + TAGGED + "{% endfor %}")) is not None
    assert style.format.name == "hermes"


@pytest.mark.parametrize("one", ["{{ '' if m.tool_calls|length == 1 else raise_exception('one') }}", ""])
def test_a_template_that_takes_one_call_of_a_turn_gets_one(one: str) -> None:
    first = "{% if loop.first %}" + TAGGED + "{% endif %}"
    style = style_of(TAGGED if one else first, one)
    assert style is not None
    assert style.only_one
    tags = [
        call_constraint(ChatBody(messages=HELLO, tools=TOOLS), each, {})[0]["structural_tag"]
        for each in (style, style_of(TAGGED))
    ]
    assert [tag["stop_after_first"] for tag in tags] == [True, False]


def test_ids_are_as_short_as_the_template_wants_them() -> None:
    short = "{{ raise_exception('nine') if %s|length != 9 else %s }}"
    each, answers = TAGGED + short % ("c.id", "c.id"), short % ("m.tool_call_id", "m.tool_call_id")
    template = turns_of(each).replace("{{ m.content }}", "{% if m.role == 'tool' %}" + answers + "{% endif %}")
    style = call_style(partial(EMBEDDED.apply_chat_template, chat_template=template))
    assert style is not None
    assert style.short_ids
    long = f"call_{'0123' * 6}"
    for call_id, kept in ((long, False), ("callABC12", True)):
        call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": "{}"}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": call_id}]
        text = EMBEDDED.decode(prompt_ids(EMBEDDED, template, ChatBody(messages=messages), style=style))
        used = re.findall(r"</tool_call>(\w{9})\[tool\](\w{9})", text)
        assert len(used) == 1
        assert used[0][0] == used[0][1]
        assert (used[0][0] == call_id) == kept


def test_the_embedded_model_reads_and_writes_the_same_calls() -> None:
    tokenizer = EMBEDDED
    assert written(format_of(tokenizer)) == ('<tool_call>{"name":"', '","arguments":', "}</tool_call>")
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "the café"}'}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "closed"}]
    text = tokenizer.decode(prompt_ids(tokenizer, None, ChatBody(messages=messages)), skip_special_tokens=False)
    assert '<tool_call>{"name":"look_up","arguments":{"what":"the café"}}</tool_call><|im_end|>' in text


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_template_that_shows_no_tools_is_told_of_once(
    is_shown: bool, server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    shown = "{{ tools | tojson if tools }}" if is_shown else ""
    template = shown + "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    with served(server.engine, template=template) as other:
        body = {"messages": HELLO, "max_tokens": 2}
        for tools in ([], TOOLS, TOOLS):
            assert other.post("/v1/chat/completions", {**body, "tools": tools}).status_code == 200
        [*told] = [record for record in caplog.records if "does not show tools" in record.message]
        assert len(told) == (0 if is_shown else 1)
        assert ("tools" in other.post("/api/show", {}).json()["capabilities"]) == is_shown


CUT = [
    ('{"what": "the caf', '{"what": "the caf"}'),
    ('{"what": [1, {"a": "b\\', '{"what": [1, {"a": "b"}]}'),
    ('{"what": 1, "wh', '{"what": 1}'),
    ("{", "{}"),
    ('{"what":  1}', '{"what":  1}'),
]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(("arguments", "shown"), CUT)
def test_a_call_that_was_cut_off_can_be_sent_back(arguments: str, shown: str, as_text: bool) -> None:
    written = TAGGED.replace("c.function.arguments | tojson", "c.function.arguments + ''") if as_text else TAGGED
    template = turns_of(written)
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "cut off"}]
    style = call_style(partial(EMBEDDED.apply_chat_template, chat_template=template))
    assert style is not None
    assert style.as_text == as_text
    text = EMBEDDED.decode(prompt_ids(EMBEDDED, template, ChatBody(messages=messages), style=style))
    expected = shown if as_text else json.dumps(json.loads(shown))
    assert f'"arguments": {expected}}}</tool_call>[tool]cut off' in text


@pytest.mark.parametrize("arguments", ['{"a" "b"', "hello", '["a"]', '"a', "1"])
def test_arguments_sent_back_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(InvalidRequest, match="arguments of the call of 'look_up'"):
        prompt_ids(EMBEDDED, turns_of(TAGGED), ChatBody(messages=messages))
