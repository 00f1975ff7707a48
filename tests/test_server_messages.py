"""Anthropic's Messages API, driven by the `anthropic` package."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from sgl.errors import EngineDead
from sgl.formats.calls import HERMES
from sgl.lang.ir.reasoning import ReasoningSplitter
from sgl.runtime.engine import Engine
from sgl.runtime.server.answers import Turn
from sgl.runtime.server.messages.body import CountBody, MessagesBody
from sgl.runtime.server.messages.translation import chat_of
from sgl.runtime.server.messages.writer import MessageWriter
from sgl.runtime.server.tool_calls import AnswerSplitter, Reading
from tests.live_server import LiveServer, served

anthropic = pytest.importorskip("anthropic")

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": MODEL, "extra_body": {"ignore_eos": True, "temperature": 0}}
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


class Point(BaseModel):
    x: int
    y: bool


SERVED = {"served_model_name": MODEL, "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_a_message_is_the_chats_answer(client: Any, server: LiveServer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    chat = server.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    ).json()
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(messages=HELLO, system=system, max_tokens=9, **GREEDY)
    [block] = answer.content
    assert (block.type, block.text) == ("text", chat["choices"][0]["message"]["content"])
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", MODEL, "max_tokens")
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == 9
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]
    again = client.messages.create(messages=HELLO, system=system, max_tokens=9, **GREEDY)
    assert again.usage.cache_read_input_tokens > 0


def test_the_packages_stream_helper_adds_up_to_the_message(client: Any) -> None:
    options = {"messages": HELLO, "max_tokens": 9, **GREEDY}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 9)
    raw = list(client.messages.create(stream=True, **options))
    names = [event.type for event in raw]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert len(names) > 8, "it comes in pieces"
    assert "text" in kinds


def test_the_package_finds_the_model(client: Any) -> None:
    [model] = client.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert client.models.retrieve(MODEL).created_at == model.created_at


def test_stop_sequences_and_the_context_tell_why_it_ended(client: Any) -> None:
    text = client.messages.create(messages=HELLO, max_tokens=12, **GREEDY).content[0].text
    stopped = client.messages.create(messages=HELLO, max_tokens=12, stop_sequences=[text[3:5]], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5])
    assert stopped.content[0].text == text[: text.index(text[3:5])]
    full = client.messages.create(messages=HELLO, max_tokens=2000, **GREEDY)
    assert full.stop_reason == "model_context_window_exceeded"
    begun = [*HELLO, {"role": "assistant", "content": text[:4]}]
    assert client.messages.create(messages=begun, max_tokens=2, **GREEDY).usage.output_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_tools_are_called_and_answered(client: Any, choice: Any, stream: bool) -> None:
    options = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 80,
        "tools": [ADD],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    if stream:
        with client.messages.stream(**options) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**options)
    [call] = [block for block in answer.content if block.type != "thinking"]
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "add", "tool_use")
    assert 0 <= call.input["a"] <= 99
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "7"}]}
    turns = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    following = client.messages.create(model=MODEL, messages=turns, max_tokens=2, tools=[ADD])
    assert following.usage.output_tokens <= 2


def test_structured_output_is_parsed(client: Any) -> None:
    parsed = client.messages.parse(model=MODEL, messages=HELLO, max_tokens=200, output_format=Point)
    assert isinstance(parsed.parsed_output, Point)
    schema = Point.model_json_schema()
    named = client.messages.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=200,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert Point.model_validate_json(named.content[-1].text)


def test_turns_become_the_messages_that_a_chat_would_have() -> None:
    content = [
        {"type": "tool_result", "tool_use_id": "t", "content": "3", "is_error": True},
        {"type": "text", "text": "So "},
        {"type": "text", "text": "what?"},
    ]
    called = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}},
    ]
    messages = [{"role": "assistant", "content": called}, {"role": "user", "content": content}]
    body = MessagesBody(
        messages=messages,
        max_tokens=1,
        system="Be brief.",
        tools=[{**ADD, "strict": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        output_config={"effort": "low"},
        stop_sequences=["\n"],
        top_k=5,
    )
    chat = chat_of(body)
    described = [message.model_dump(exclude_none=True) for message in chat.messages]
    call = {"id": "t", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert described == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "error: 3", "tool_call_id": "t"},
        {"role": "user", "content": "So what?"},
    ]
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.reasoning_effort) == ("auto", False, "low")
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert (chat.include_reasoning, chat.stop, chat.top_k, chat.max_tokens) == (False, ["\n"], 5, 1)
    assert chat.tools is not None
    assert chat.tools[0].function.strict is True


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": HELLO}, "max_tokens"),
        ({"max_tokens": 1}, "messages"),
        ({"messages": [], "max_tokens": 1}, "messages"),
        ({"messages": HELLO, "max_tokens": 1, "stop": "x"}, "stop_sequences"),
        ({"messages": HELLO, "max_tokens": 1, "stop_sequences": [""]}, "stop_sequences must not hold an empty"),
        ({"messages": HELLO, "max_tokens": 1, "stop_sequences": [""], "stream": True}, "stop_sequences must not"),
        ({"messages": HELLO, "max_tokens": 1, "tool_choice": {"type": "tool"}}, "name"),
        ({"messages": HELLO, "max_tokens": 1, "tool_choice": {"type": "any"}}, "tools"),
        ({"messages": HELLO, "max_tokens": 1, "tools": [{"type": "web_search_20250305", "name": "w"}]}, "custom"),
        ({"messages": HELLO, "max_tokens": 1, "container": "c"}, "container"),
        ({"messages": HELLO, "max_tokens": 1, "temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 1}, "source"),
        ({"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 1}, "512"),
    ],
)
def test_bad_messages_are_refused_in_anthropics_shape(server: LiveServer, body: Any, words: str) -> None:
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 400
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert words in told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["X-Request-Id"]


def test_nothing_is_left_out_of_a_conversation(server: LiveServer) -> None:
    def answer(edit: dict[str, Any]) -> Any:
        body = {"messages": HELLO, "max_tokens": 1, "context_management": {"edits": [edit]}}
        return server.post("/v1/messages", body)

    for keep in ("all", {"type": "all"}):
        assert answer({"type": "clear_thinking_20251015", "keep": keep}).status_code == 200
    for edit in (
        {"type": "clear_thinking_20251015"},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {"type": "clear_tool_uses_20250919"},
    ):
        refused = answer(edit)
        assert refused.status_code == 400
        assert "context_management.edits.0" in refused.json()["error"]["message"]


def test_every_field_of_the_package_is_decided() -> None:
    from anthropic.types import beta, message_count_tokens_params, message_create_params

    headers = {"betas"}
    for theirs, ours in (
        (message_create_params.MessageCreateParamsBase, MessagesBody),
        (beta.message_create_params.MessageCreateParamsBase, MessagesBody),
        (message_count_tokens_params.MessageCountTokensParams, CountBody),
    ):
        assert theirs.__annotations__.keys() - headers <= ours.model_fields.keys()


@pytest.mark.parametrize("stream", [False, True])
def test_the_packages_tool_runner_goes_on_without_a_thread(client: Any, stream: bool) -> None:
    called: list[int] = []

    @anthropic.beta_tool(name="add", input_schema=ADD["input_schema"])
    def add(a: int) -> str:
        called.append(a)
        return "3"

    options = {"messages": HELLO, "max_tokens": 40, "tool_choice": {"type": "any"}, **GREEDY}
    runner = client.beta.messages.tool_runner(tools=[add], max_iterations=2, stream=stream, **options)
    answers = [turn.get_final_message() if stream else turn for turn in runner]
    calls = [block.input["a"] for answer in answers for block in answer.content if block.type == "tool_use"]
    assert calls[: len(called)] == called
    assert len(answers) == 2


def test_a_thread_is_refused_as_clients_know_it(server: LiveServer) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, 1):
        answer = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 1, "thread": thread})
        assert answer.status_code == 400
        assert answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert server.post("/v1/messages", {"messages": HELLO, "max_tokens": 1, "thread": None}).status_code == 200


def test_errors_become_the_packages_exceptions(
    client: Any, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", messages=HELLO, max_tokens=1)
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id

    async def stream(**arguments: Any) -> Any:
        meta = {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0, "finish_reason": None}
        yield {"text": "so", "output_ids": [1], "meta_info": meta}
        raise EngineDead("the engine's process ended")

    monkeypatch.setattr(server.service.engine, "stream", stream)
    events: list[Any] = []
    with pytest.raises(anthropic.APIStatusError, match="the engine's process ended") as error:
        events.extend(client.messages.create(model=MODEL, messages=HELLO, max_tokens=1, stream=True))
    assert error.value.body["error"]["type"] == "overloaded_error"
    assert [event.type for event in events] == ["message_start", "content_block_start", "content_block_delta"]


def test_the_packages_header_carries_the_key(engine: Engine) -> None:
    with served(engine, served_model_name=MODEL, api_key=["a=key-of-a"]) as server:
        mine = anthropic.Anthropic(base_url=server.url, api_key="key-of-a", max_retries=0)
        assert mine.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 1
        other = anthropic.Anthropic(base_url=server.url, api_key="key-of-b", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            other.messages.count_tokens(model=MODEL, messages=HELLO)


TEXT = (
    "<think>\nlet me</think>\n\nTwo calls. "
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call> And that.'
)


@pytest.mark.parametrize("step", [1, 3, 7, len(TEXT)])
def test_reasoning_text_and_calls_are_blocks_in_their_order(step: int) -> None:
    turn = Turn(
        0,
        AnswerSplitter(
            ReasoningSplitter("qwen3", only_leading=True), Reading(has_tools=True, format=HERMES, is_sure=True)
        ),
        None,
        with_reasoning=True,
    )
    writer = MessageWriter(MODEL, max_tokens=99)
    events: list[dict[str, Any]] = []
    for start in range(0, len(TEXT), step):
        end = min(start + step, len(TEXT))
        reason = {"type": "stop", "matched": 2} if end == len(TEXT) else None
        meta = {"finish_reason": reason, "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": end}
        result = {"text": TEXT[:end], "meta_info": meta}
        part = turn.part(result)
        events += writer.add(part)
        if reason:
            events += writer.end(part, result)
    content = writer.message["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert [content[i]["text"] for i in (1, 4)] == ["Two calls. ", "And that."]
    assert [content[i]["input"] for i in (2, 3)] == [{"a": 1}, {"a": 2}]
    assert writer.message["stop_reason"] == "tool_use"
    assert writer.message["usage"]["input_tokens"] == 2
    for i in (2, 3):
        parts = [e["delta"]["partial_json"] for e in events if e.get("index") == i and "delta" in e]
        assert json.loads("".join(parts)) == content[i]["input"]
    opened: list[int] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert opened == [], "one block after the other"
            opened.append(event["index"])
        elif event["type"] == "content_block_stop":
            assert opened.pop() == event["index"]
