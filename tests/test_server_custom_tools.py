"""Custom tools, whose input is a text, and the functions of the old API, in chats."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl.formats.calls import HERMES
from sgl.runtime.engine import Engine
from sgl.runtime.server.answers import Turn
from sgl.runtime.server.chat import prompt_ids
from sgl.runtime.server.custom_tools import CustomCalls
from sgl.runtime.server.protocol import ChatBody
from sgl.runtime.server.tool_calls import AnswerSplitter, Reading
from tests.live_server import LiveServer

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hello"}]
ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]},
}
LARK = 'start: NUMBER ("+" NUMBER)~0..3\nNUMBER: /[1-9]/'


def custom(name: str, syntax: str | None = None, definition: str = "") -> dict[str, Any]:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, **({} if syntax is None else {"format": grammar})}}


PICK, SUM, SAY = custom("pick", "regex", "[ab]{3}"), custom("sum", "lark", LARK), custom("say")


def chosen(name: str) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name}}


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chosen("sum")]}}


SERVED = {"served_model_name": MODEL}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("tools", "choice", "pattern"),
    [
        ([PICK, SAY], chosen("pick"), "[ab]{3}"),
        ([PICK], "required", "[ab]{3}"),
        ([SUM, SAY], chosen("sum"), r"[1-9](\+[1-9]){0,3}"),
        ([SUM], "required", r"[1-9](\+[1-9]){0,3}"),
        (
            [SAY, SUM],
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chosen("sum")]}},
            "[1-9+]+",
        ),
        ([SAY], chosen("say"), ".*"),
    ],
)
def test_the_input_of_a_custom_tool_keeps_to_its_grammar(
    client: Any, tools: Any, choice: Any, pattern: str
) -> None:
    if SUM in tools:
        pytest.importorskip("llguidance")
    options = {
        "model": MODEL,
        "messages": HELLO,
        "tools": tools,
        "tool_choice": choice,
        "max_tokens": 90,
        "seed": 1,
    }
    [whole] = client.chat.completions.create(parallel_tool_calls=False, **options).choices
    [call] = whole.message.tool_calls
    assert (call.type, whole.finish_reason, whole.message.content) == ("custom", "tool_calls", None)
    assert call.custom.name in {tool["custom"]["name"] for tool in tools}
    assert re.fullmatch(pattern, call.custom.input, re.DOTALL)
    chunks = list(client.chat.completions.create(parallel_tool_calls=False, stream=True, **options))
    deltas = [delta.custom for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(delta["input"] for delta in deltas) == call.custom.input
    turns = [*HELLO, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    assert client.chat.completions.create(model=MODEL, messages=turns, tools=[SAY], max_tokens=1).usage


def test_models_know_custom_tools_as_functions(engine: Engine) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "pick", "input": "ab"}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{{ tools[0].function.description }}|{{ messages[1].tool_calls[0].function.arguments.input }}"
    assert engine.tokenizer is not None
    ids = prompt_ids(engine.tokenizer, template, ChatBody(messages=messages, tools=[PICK]))
    assert engine.tokenizer.decode(ids) == "The input matches this regex grammar:\n[ab]{3}|ab"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [SUM]}, "name it in tool_choice"),
        ({"tools": [SUM, SAY], "tool_choice": "required"}, "name it in tool_choice"),
        ({"tools": [SUM], "tool_choice": chosen("sub")}, "did you mean 'sum'"),
        ({"tools": [custom("x", "lark", "start: nothing")], "tool_choice": "required"}, "nothing"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]}, "grammar"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"functions": [ADD], "tools": [SAY]}, "functions"),
        ({"function_call": {"name": "add"}}, "functions"),
        ({"functions": [ADD], "function_call": {"name": "sub"}}, "sub"),
    ],
)
def test_what_no_tool_can_do_is_refused(server: LiveServer, body: Any, words: str) -> None:
    if SUM in body.get("tools", ()) or "lark" in str(body):
        pytest.importorskip("llguidance")
    answer = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_functions_of_the_old_api_are_called_as_they_were(client: Any) -> None:
    options = {"model": MODEL, "messages": HELLO, "functions": [ADD], "max_tokens": 80, "seed": 1}
    options["function_call"] = {"name": "add"}
    [whole] = client.chat.completions.create(**options).choices
    call = whole.message.function_call
    assert (call.name, whole.finish_reason, whole.message.tool_calls) == ("add", "function_call", None)
    assert json.loads(call.arguments)["a"] <= 99
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **options)]
    deltas = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert (deltas[0].name, "".join(delta.arguments for delta in deltas)) == ("add", call.arguments)
    assert chunks[-1].finish_reason == "function_call"
    result = {"role": "function", "name": "add", "content": "7"}
    options["messages"] = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": call.model_dump()},
        result,
    ]
    options["function_call"] = "none"
    assert client.chat.completions.create(**options).choices[0].message.function_call is None


@given(text=st.text(), ascii_only=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_an_input_comes_out_however_its_arguments_are_cut(text: str, ascii_only: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    edges = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    calls = CustomCalls({"say"})
    function: dict[str, Any] = {"name": "say", "arguments": ""}
    found = calls.converted([{"index": 0, "id": "c", "type": "function", "function": function}])
    for start, end in itertools.pairwise(edges):
        found += calls.converted([{"index": 0, "function": {"arguments": arguments[start:end]}}])
    assert "".join(delta["custom"]["input"] for delta in found) == text
    assert found[0]["type"] == "custom"


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000 + "]", "12", '{"input": 5}', '{"inputs": "a"}', ' {"a": 1}', "say"]
)
@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_arguments_of_another_form_are_the_input(arguments: str, step: int) -> None:
    calls = CustomCalls({"say"})
    function: dict[str, Any] = {"name": "say", "arguments": ""}
    found = calls.converted([{"index": 0, "id": "c", "type": "function", "function": function}])
    for start in range(0, len(arguments), step):
        piece = arguments[start : start + step]
        found += calls.converted([{"index": 0, "function": {"arguments": piece}}])
    assert "".join(delta["custom"]["input"] for delta in found) == arguments


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_calls_of_custom_tools_and_functions_follow_each_other(step: int) -> None:
    text = "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'
        for name, arguments in [("say", '{"input": "a\\n\\"b\\""}'), ("add", '{"a": 1}'), ("say", '{"input": ""}')]
    )
    turn = Turn(
        0,
        AnswerSplitter(None, Reading(has_tools=True, format=HERMES, is_sure=True)),
        None,
        with_reasoning=True,
        custom={"say"},
    )
    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(text), step):
        end = min(start + step, len(text))
        reason = {"type": "stop", "matched": 2} if end == len(text) else None
        for delta in turn.deltas({"text": text[:end], "meta_info": {"finish_reason": reason}}):
            for call in delta["delta"].get("tool_calls", ()):
                kept = found.setdefault(call["index"], {"input": "", "arguments": ""})
                for name, value in (call.get("custom") or call["function"]).items():
                    kept[name] = kept[name] + value if name in ("input", "arguments") else value
    assert found == {
        0: {"name": "say", "input": 'a\n"b"', "arguments": ""},
        1: {"name": "add", "arguments": '{"a": 1}', "input": ""},
        2: {"name": "say", "input": "", "arguments": ""},
    }
