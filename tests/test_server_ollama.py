"""Ollama's API, driven by the `ollama` package: chats and prompts are the same answers in another form."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import ANY

import pytest
import requests
from pydantic import BaseModel

from sgl.errors import RequestTimeout
from sgl.runtime.engine import Engine
from sgl.runtime.server.answers import Part
from sgl.runtime.server.ollama.replies import LineWriter
from sgl.runtime.server.service import VERSION
from sgl.runtime.server.tool_calls import Piece
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served
from tests.patience import PATIENCE

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 9}


class Pair(BaseModel):
    name: str
    count: int


SERVED = {"served_model_name": MODEL}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Any:
    return pytest.importorskip("ollama").Client(server.url)


@pytest.fixture
def called(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the engine is called with."""
    found: list[dict[str, Any]] = []
    generate = server.service.generate

    async def noted(**arguments: Any) -> Any:
        found.append(arguments)
        return await generate(**arguments)

    monkeypatch.setattr(server.service, "generate", noted)
    return found


def test_a_chat_is_answered_as_openais(client: Any, server: LiveServer) -> None:
    messages = [{"role": "system", "content": "be brief"}, *HELLO, {"role": "assistant", "content": "a"}, *HELLO]
    body = {"messages": messages, "temperature": 0, "max_tokens": 9}
    expected = server.post("/v1/chat/completions", body).json()
    answer = client.chat(MODEL, messages, options=GREEDY)
    assert answer.message.role == "assistant"
    assert answer.message.content == expected["choices"][0]["message"]["content"]
    assert (answer.model, answer.done, answer.done_reason) == (MODEL, True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (expected["usage"]["prompt_tokens"], 9)
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration - 1 > 0


def test_a_prompt_is_a_chat_of_one_message(client: Any) -> None:
    turn = client.chat(MODEL, [{"role": "system", "content": "be brief"}, *HELLO], options=GREEDY)
    answer = client.generate(MODEL, "hello", system="be brief", options=GREEDY)
    assert (answer.response, answer.done_reason) == (turn.message.content, "length")
    assert answer.prompt_eval_count == turn.prompt_eval_count


def test_a_raw_prompt_is_continued(client: Any, engine: Engine) -> None:
    expected = engine.generate("hello", {"temperature": 0, "max_new_tokens": 9, "top_k": 40, "top_p": 0.9})
    answer = client.generate(MODEL, "hello", raw=True, options=GREEDY)
    assert (answer.response, answer.prompt_eval_count) == (expected["text"], 5)


def test_models_without_a_chat_template_continue_prompts(tmp_path: Any) -> None:
    path = chat_checkpoint(tmp_path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    body = {"prompt": "hello", "options": GREEDY, "stream": False}
    with Engine(str(path), **OPTIONS) as engine, served(engine) as server:
        told = server.post("/api/generate", body).json()["response"]
        assert told == server.post("/api/generate", {**body, "raw": True}).json()["response"]
        assert "system" in server.post("/api/generate", {**body, "system": "a"}).json()["error"]
        assert "chat template" in server.post("/api/chat", {"messages": HELLO}).json()["error"]
        assert "tools" not in server.post("/api/show", {}).json()["capabilities"]


@pytest.mark.parametrize("kind", ["chat", "generate", "raw"])
def test_streams_are_lines_that_join_to_the_whole(client: Any, kind: str) -> None:
    def ask(stream: bool) -> Any:
        options = {"options": GREEDY, "stream": stream, "logprobs": True, "top_logprobs": 2}
        if kind == "chat":
            return client.chat(MODEL, HELLO, **options)
        return client.generate(MODEL, "hello", raw=kind == "raw", **options)

    def text(answer: Any) -> str:
        return str(answer.message.content if kind == "chat" else answer.response)

    whole, parts = ask(False), list(ask(True))
    assert "".join(map(text, parts)) == text(whole)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    assert len(logprobs) == len(whole.logprobs) == last.eval_count
    assert [entry.token for entry in logprobs] == [entry.token for entry in whole.logprobs]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_a_stream_is_the_default_and_json_a_line(server: LiveServer) -> None:
    answer = server.post("/api/generate", {"prompt": "hello", "options": GREEDY})
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert len(lines) > 1
    assert lines[-1]["done"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", lines[0]["created_at"])


def test_the_format_is_json_or_a_schema(client: Any) -> None:
    options = {"temperature": 1, "seed": 3, "num_predict": 90}
    for ask in (lambda **more: client.chat(MODEL, HELLO, **more).message.content,
                lambda **more: client.generate(MODEL, "a", **more).response,
                lambda **more: client.generate(MODEL, "a", raw=True, **more).response):  # fmt: skip
        Pair.model_validate_json(ask(format=Pair.model_json_schema(), options=options))
        assert isinstance(json.loads(ask(format="json", options=options)), dict)
        ask(format="", options=GREEDY)


CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "add"},
        "arguments": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def add(a: int, b: int | float) -> float:
    """Add numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def test_calls_come_whole_with_arguments_as_objects(client: Any) -> None:
    """A document in the shape of a call is one: so even this model calls."""
    options = {"options": {"num_predict": 200, "seed": 1}, "tools": [add], "format": CALL}
    whole = client.chat(MODEL, HELLO, **options)
    [call] = whole.message.tool_calls
    assert call.function.name == "add"
    assert set(call.function.arguments) >= {"a"}
    parts = list(client.chat(MODEL, HELLO, stream=True, **options))
    [called] = [part for part in parts if part.message.tool_calls]
    assert called.message.tool_calls == whole.message.tool_calls
    assert not called.done
    assert parts[-1].done
    earlier = [*HELLO, whole.message, {"role": "tool", "content": "7", "tool_name": "add"}]
    assert client.chat(MODEL, earlier, tools=[add], options=GREEDY).done


def test_calls_that_come_in_pieces_are_put_together() -> None:
    def part(**call: Any) -> Part:
        return Part([Piece(calls=[{"index": 0, **call}] if call else [])], [], {"finish_reason": None})

    meta = {"e2e_latency": 1.0, "queue_time": None, "prefill_time": None, "finish_reason": {"type": "length"}}
    meta |= {"prompt_tokens": 3, "completion_tokens": 4}
    writer = LineWriter("m", is_chat=True)
    deep = "[" * 100_000
    for call in (
        {"id": "x", "function": {"name": "f", "arguments": '{"a"'}},
        {"function": {"arguments": ": 1}"}},
        {"id": "y", "function": {"name": "g", "arguments": '{"b'}},
        {"id": "z", "function": {"name": "h", "arguments": deep}},
    ):
        assert list(writer.add(part(**call))) == []
    calls, last = writer.end(part(), {"meta_info": meta})
    assert calls["message"]["tool_calls"] == [{"id": "x", "function": {"name": "f", "arguments": {"a": 1}}}]
    cut = f'{{"name": "g", "arguments": {{"b{{"name": "h", "arguments": {deep}'
    assert last["message"]["content"] == cut, "what is cut off, or deeper than it can be read, is text"
    assert (last["done"], last["done_reason"], last["eval_duration"]) == (True, "length", 10**9)
    said = {"role": "assistant", "content": cut, "tool_calls": calls["message"]["tool_calls"]}
    assert writer.whole() == {**last, "message": said, "created_at": ANY}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.0}),
        (
            {"temperature": 0.5, "top_k": 3, "top_p": 0.7, "min_p": 0.1},
            {"temperature": 0.5, "top_k": 3, "min_p": 0.1},
        ),
        ({"top_k": -1}, {"top_k": 0}),
        ({"num_predict": 3}, {"max_new_tokens": 3}),
        ({"num_predict": 3.0, "top_k": 4.0, "seed": 7.0}, {"max_new_tokens": 3, "top_k": 4, "seed": 7}),
        ({"repeat_last_n": 64.0, "mirostat": 0.0, "num_ctx": 512.0}, {"repetition_penalty": 1.0}),
        ({"num_predict": -1}, {"max_new_tokens": 512}),
        ({"num_predict": -2}, {"max_new_tokens": 512}),
        ({"num_predict": 0}, {"max_new_tokens": 512}),
        ({"seed": 7, "stop": ["x", "y"]}, {"seed": 7, "stop": ["x", "y"]}),
        ({"seed": -1}, {"seed": None}),
        ({"repeat_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "repeat_last_n": -1}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_last_n": 64}, {"repetition_penalty": 1.0}),
        ({"presence_penalty": 1, "frequency_penalty": 0.5}, {"presence_penalty": 1, "frequency_penalty": 0.5}),
        ({"num_ctx": 8192, "num_gpu": 1, "num_thread": 8, "use_mmap": True, "numa": False, "num_keep": 5}, {}),
        ({"mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1.0, "typical_p": 1.0, "penalize_newline": True}, {}),
        ({"temperature": None}, {"temperature": 0.8}),
    ],
)
def test_options_reach_the_sampler(
    server: LiveServer, called: list[dict[str, Any]], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    body = {"messages": HELLO, "options": options, "format": {"const": 1}, "stream": False}
    assert server.post("/api/chat", body).status_code == 200
    params = called[0]["sampling_params"]
    assert {name: params.get(name) for name in expected} == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"options": {"repeat_penalty": 9.0}}, "repeat_penalty must be a number above 0"),
    ({"options": {"mirostat": 1}}, "options.mirostat"),
    ({"options": {"typical_p": 0.5}}, "options.typical_p"),
    ({"options": {"vocab_only": True}}, "options.vocab_only"),
    ({"options": {"tempurature": 1}}, "options.tempurature"),
    ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n is -1 here"),
    ({"options": {"num_predict": 10**12}}, "options.num_predict"),
    ({"options": {"num_predict": 3.5}}, "options.num_predict"),
    ({"options": {"temperature": "hot"}}, "options.temperature"),
    ({"options": {"top_p": -1}}, "top_p"),
    ({"format": "yaml"}, "format"),
    ({"format": {"type": "nothing"}}, "nothing"),
    ({"keep_alive": "soon"}, '"5m"'),
    ({"think": True}, "--reasoning-parser"),
    ({"think": "high"}, "--reasoning-parser"),
    ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"truncate": True}, "truncate"),
    ({"model": "other"}, "'other'"),
    ({"sudo": 1}, "sudo"),
]
OF_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": "a", "images": ["aGVsbG8="]}]}, "texts only"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "role"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "name"),
]
OF_PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"images": ["aGVsbG8="]}, "texts only"),
    ({"context": [1, 2, 3]}, "/api/chat"),
    ({"suffix": "b"}, "suffix"),
    ({"template": "{{ .Prompt }}"}, "template"),
    ({"width": 512}, "width"),
    ({"raw": True, "system": "a"}, "system"),
    ({"raw": True, "think": True}, "chat template"),
]


@pytest.mark.parametrize("streams", [False, True])
def test_what_is_not_done_here_is_refused_by_name(server: LiveServer, streams: bool) -> None:
    for path, own, refused in (
        ("/api/chat", {"messages": HELLO}, REFUSED + OF_CHATS),
        ("/api/generate", {"prompt": "a"}, REFUSED + OF_PROMPTS),
        ("/api/generate", {"prompt": "a", "raw": True}, [each for each in REFUSED if "think" not in each[0]]),
    ):
        for more, words in refused:
            answer = server.post(path, {**own, "stream": streams, **more})
            assert answer.status_code == (404 if "model" in more else 400), more
            assert list(answer.json()) == ["error"]
            assert words in answer.json()["error"], more


def test_neutral_values_are_taken(server: LiveServer) -> None:
    more = {"format": "", "images": [], "context": [], "suffix": "", "template": "", "think": False, "shift": False}
    body = {"prompt": "a", "options": GREEDY, "stream": False, "keep_alive": -1, "raw": False, **more}
    assert server.post("/api/generate", body).status_code == 200
    message = {"role": "user", "content": "a", "images": [], "extra": 1}
    body = {"messages": [message], "tools": [], "options": GREEDY, "stream": False, "keep_alive": "1h30m"}
    assert server.post("/api/chat", body).status_code == 200


def test_thinking_has_a_field_of_its_own(engine: Engine, called: list[dict[str, Any]]) -> None:
    with served(engine, served_model_name=MODEL, reasoning_parser="deepseek-r1") as server:
        for path, body in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "hello"})):
            whole = server.post(path, {**body, "options": GREEDY, "stream": False, "think": True}).json()
            said = whole["message"] if "messages" in body else whole
            assert said["thinking"]
            assert not said.get("content", said.get("response"))
            lines = server.post(path, {**body, "options": GREEDY, "think": "low"}).text.splitlines()
            told = [json.loads(line) for line in lines]
            parts = [part.get("message", part).get("thinking", "") for part in told]
            assert "".join(parts) == said["thinking"]
        assert "thinking" in server.post("/api/show", {}).json()["capabilities"]


def test_the_model_is_listed_shown_and_always_loaded(client: Any, server: LiveServer, engine: Engine) -> None:
    [model] = client.list().models
    [running] = client.ps().models
    shown = client.show(MODEL)
    assert model.model == running.model == MODEL
    assert model.details == running.details == shown.details
    assert (model.details.family, model.details.quantization_level) == ("llama", "FLOAT32")
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == running.context_length == 512
    assert model.size == 4 * shown.modelinfo["general.parameter_count"] < running.size
    assert shown.capabilities == ["completion", "tools", "embedding"]
    assert shown.template == engine.tokenizer.hf.chat_template  # type: ignore[union-attr]
    assert server.get("/api/version").json() == {"version": VERSION}
    for name in (MODEL, f"{MODEL}:latest", ""):
        assert server.post("/api/show", {"name": name}).status_code == 200
        assert client.generate(name or MODEL).done_reason == "load"
    assert client.chat(MODEL).done_reason == "load"
    assert "stop the server" in server.post("/api/generate", {"model": MODEL, "keep_alive": 0}).json()["error"]
    assert "other" in server.post("/api/show", {"model": "other"}).json()["error"]
    assert "one model" in server.post("/api/pull", {"model": MODEL}).json()["error"]


def test_errors_in_a_stream_are_its_last_line(
    client: Any, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = server.service.stream

    async def failing(**arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        events = stream(**arguments)
        yield await anext(events)
        await events.aclose()
        raise RequestTimeout("the request took longer than its 1 s", seconds=1.0)

    monkeypatch.setattr(server.service, "stream", failing)
    lines = server.post("/api/chat", {"messages": HELLO, "options": GREEDY}).text.splitlines()
    assert json.loads(lines[-1]) == {"error": "the request took longer than its 1 s"}
    with pytest.raises(pytest.importorskip("ollama").ResponseError, match="longer than its 1 s"):
        list(client.chat(MODEL, HELLO, stream=True))


def test_keys_are_asked_for(engine: Engine) -> None:
    with served(engine, api_key="k") as server:
        for path in ("/api/chat", "/api/tags", "/api/nothing"):
            answer = requests.request("GET" if path == "/api/tags" else "POST", server.url + path, timeout=PATIENCE)
            assert (answer.status_code, list(answer.json())) == (401, ["error"])
        headers = {"Authorization": "Bearer k"}
        assert server.get("/api/tags", headers=headers).status_code == 200
        assert server.get("/api/version").status_code == 200
