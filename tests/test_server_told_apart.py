"""Calls and reasoning in what /generate answered, as chats of the same format tell them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sgl.formats.calls import PARSERS
from sgl.runtime.engine import Engine
from tests.call_writer import WRITERS
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served

ARGUMENTS = {"city": "Graz", "days": 2}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(str(chat_checkpoint(tmp_path_factory.mktemp("model"))), **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[LiveServer]:
    with served(engine) as server:
        yield server


def read(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("format", WRITERS)
def test_calls_of_every_format_are_read(server: LiveServer, format: str) -> None:
    text = WRITERS[format]([("weather", ARGUMENTS), ("weather", {**ARGUMENTS, "days": 3})])
    parser = next(name for name, formats in PARSERS.items() if format in [each.name for each in formats])
    found = read(server, "/parse_function_call", text=text, tools=TOOLS, tool_call_parser=parser)
    assert [(call["tool_index"], call["name"]) for call in found["calls"]] == [(0, "weather"), (1, "weather")]
    assert [json.loads(call["parameters"]) for call in found["calls"]] == [ARGUMENTS, {**ARGUMENTS, "days": 3}]
    assert not found["normal_text"].strip()


def test_without_a_format_any_that_can_be_told_is_read(server: LiveServer) -> None:
    text = "Let me see.\n" + WRITERS["hermes"]([("weather", ARGUMENTS)])
    found = read(server, "/parse_function_call", text=text, tools=TOOLS)
    assert found["normal_text"].strip() == "Let me see."
    assert [json.loads(call["parameters"]) for call in found["calls"]] == [ARGUMENTS]


def test_thoughts_that_the_prompt_began_are_no_text_beside_calls(server: LiveServer) -> None:
    text = "Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
    text += WRITERS["kimi_k3"]([("weather", ARGUMENTS)])
    found = read(server, "/parse_function_call", text=text, tools=TOOLS, tool_call_parser="kimi_k3")
    assert (found["normal_text"], len(found["calls"])) == ("I look.", 1)


def test_the_end_of_thoughts_within_an_argument_ends_none(server: LiveServer) -> None:
    arguments = {**ARGUMENTS, "city": "<|END_THINKING|>"}
    text = "I look." + WRITERS["cohere_command3"]([("weather", arguments)])
    found = read(server, "/parse_function_call", text=text, tools=TOOLS, tool_call_parser="cohere_command3")
    assert (found["normal_text"], len(found["calls"])) == ("I look.", 1)


@pytest.mark.parametrize("name", ["get\\_weather", "\\u12"])
def test_a_name_that_is_none_leaves_the_call_a_text(server: LiveServer, name: str) -> None:
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    found = read(server, "/parse_function_call", text=text, tools=TOOLS, tool_call_parser="hermes")
    assert (found["normal_text"], found["calls"]) == (text, [])


def test_a_text_without_calls_is_a_text(server: LiveServer) -> None:
    assert read(server, "/parse_function_call", text="No.", tools=TOOLS, tool_call_parser="hermes") == {
        "normal_text": "No.",
        "calls": [],
    }


def test_the_servers_own_format_is_the_default(engine: Engine) -> None:
    with served(engine, tool_call_parser="qwen3_coder") as server:
        text = WRITERS["qwen3_coder"]([("weather", ARGUMENTS)])
        [call] = read(server, "/parse_function_call", text=text, tools=TOOLS)["calls"]
    assert json.loads(call["parameters"]) == ARGUMENTS


@pytest.mark.parametrize(
    ("parser", "text", "thought", "said"),
    [
        ("qwen3", "<think>2 and 2</think>\n\n4", "2 and 2", "4"),
        ("qwen3", "4</think>", "", "4</think>"),
        ("deepseek-r1", "2 and 2</think>4", "2 and 2", "4"),
        ("mistral", "[THINK]2[/THINK]4", "2", "4"),
        (
            "kimi_k3",
            "<|open|>think<|sep|>2<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response<|sep|>"
            "<|close|>message<|sep|>",
            "2",
            "4",
        ),
        ("kimi_k3", "2<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response<|sep|>", "2", "4"),
        ("kimi_k3", "<|open|>tools<|sep|>", "", "<|open|>tools<|sep|>"),
        (
            "cohere_command3",
            "<|START_THINKING|>2<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>",
            "2",
            "4",
        ),
        ("cohere_command4", "2<|END_THINKING|><|START_TEXT|>4<|END_TEXT|>", "2", "4"),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            "2",
            "4",
        ),
        ("openai_gptoss", "<|channel|>analysis<|message|>2<|end|>", "2", ""),
    ],
)
def test_reasoning_is_read(server: LiveServer, parser: str, text: str, thought: str, said: str) -> None:
    found = read(server, "/separate_reasoning", text=text, reasoning_parser=parser)
    assert found == {"reasoning_text": thought, "text": said}


@pytest.mark.parametrize("parser", ["gpt-oss", "kimi_k3", "cohere_command4", "qwen3", "mistral"])
def test_calls_stay_as_they_are_written_beside_reasoning(server: LiveServer, parser: str) -> None:
    """So that /parse_function_call can be asked next, as SGLang's trainers do."""
    thoughts = {
        "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        "kimi_k3": "<|open|>think<|sep|>Hm.<|close|>think<|sep|>",
        "cohere_command4": "<|START_THINKING|>Hm.<|END_THINKING|>",
        "qwen3": "<think>Hm.</think>",
        "mistral": "[THINK]Hm.[/THINK]",
    }
    calls_parser = {"qwen3": "qwen25"}.get(parser, parser)
    names = [each.name for each in PARSERS[calls_parser]]
    format = next(name for name in names if name in WRITERS)
    calls = WRITERS[format]([("weather", ARGUMENTS), ("weather", {**ARGUMENTS, "days": 3})])
    found = read(server, "/separate_reasoning", text=thoughts[parser] + calls, reasoning_parser=parser)
    assert found["reasoning_text"] == "Hm."
    found = read(server, "/parse_function_call", text=found["text"], tools=TOOLS, tool_call_parser=calls_parser)
    assert [json.loads(call["parameters"]) for call in found["calls"]] == [ARGUMENTS, {**ARGUMENTS, "days": 3}]
    assert not found["normal_text"].strip()


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/parse_function_call", {"text": "a", "tool_call_parser": "hermess"}, "tool_call_parser", "'hermes'"),
        ("/parse_function_call", {"text": 5}, "text", "string"),
        ("/parse_function_call", {"text": "a" * (1 << 21)}, "text", "characters are to be read"),
        ("/separate_reasoning", {"text": "a"}, "reasoning_parser", "required"),
        ("/separate_reasoning", {"text": "a", "reasoning_parser": "qwen4"}, "reasoning_parser", "qwen3"),
    ],
)
def test_mistakes_are_told(server: LiveServer, path: str, body: Any, param: str, words: str) -> None:
    answer = server.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("format", WRITERS)
def test_long_calls_are_read_whole(server: LiveServer, format: str) -> None:
    """Longer than what readers are given at once."""
    given = {"city": "Graz an der Mur " * 1000, "days": 2}
    text = WRITERS[format]([("weather", given), ("weather", ARGUMENTS)])
    parser = next(name for name, formats in PARSERS.items() if format in [each.name for each in formats])
    found = read(server, "/parse_function_call", text=text, tools=TOOLS, tool_call_parser=parser)
    assert [json.loads(call["parameters"]) for call in found["calls"]] == [given, ARGUMENTS]


@pytest.mark.parametrize("parser", [None, *PARSERS])
def test_what_is_nested_too_deep_is_a_text(server: LiveServer, parser: str | None) -> None:
    """It was a 500."""
    for text in ("[" * 100_000, '{"a":' * 20_000, "<tool_call>" * 5000):
        found = read(server, "/parse_function_call", text=text, tools=TOOLS, tool_call_parser=parser)
        assert found == {"normal_text": text, "calls": []}
