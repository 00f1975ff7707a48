"""OpenAI's Responses API, driven by the `openai` package."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from pydantic import BaseModel

from sgl.errors import EngineDead
from sgl.formats.calls import HERMES
from sgl.lang.ir.reasoning import ReasoningSplitter
from sgl.runtime.engine import Engine
from sgl.runtime.server import encoding
from sgl.runtime.server.answers import Turn
from sgl.runtime.server.identity import Caller
from sgl.runtime.server.responses import store as stores
from sgl.runtime.server.responses.body import InputBody, ResponsesBody
from sgl.runtime.server.responses.store import ResponseStore, Stored
from sgl.runtime.server.responses.writer import ResponseWriter
from sgl.runtime.server.tool_calls import AnswerSplitter, Reading
from tests.live_server import LiveServer, served, slow_steps
from tests.patience import wait_until

openai = pytest.importorskip("openai")

MODEL = "tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Add numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}


LARK = r"""
start: NUMBER ("+" NUMBER)~0..3
NUMBER: /[1-9]/
"""


class Point(BaseModel):
    x: int
    y: bool


SERVED = {"served_model_name": MODEL, "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Any:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_a_response_is_the_chats_answer(client: Any) -> None:
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        max_tokens=9,
        **GREEDY,
    )
    answer = client.responses.create(
        input="hello", instructions="Be brief.", max_output_tokens=9, metadata={"who": "me"}, **GREEDY
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.object, answer.model, answer.metadata) == ("response", MODEL, {"who": "me"})
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (9, chat.usage.total_tokens)
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_events_come_in_order_and_add_up_to_the_response(client: Any) -> None:
    options = {"input": [{"role": "user", "content": "hello"}], "max_output_tokens": 9, **GREEDY}
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    begun = ["created", "in_progress", "output_item.added", "content_part.added"]
    ended = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert (kinds[:4], kinds[-4:]) == (begun, ended)
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert len(kinds) > 10, "it comes in pieces"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text == events[-4].text
    assert len({events[-1].response.id, events[0].response.id}) == 1
    assert events[2].item.id == events[4].item_id == events[-1].response.output[0].id
    assert events[-1].response.usage.output_tokens == 9


@pytest.mark.slow
def test_the_packages_stream_helper_and_parse_read_a_schema(client: Any) -> None:
    parsed = client.responses.parse(model=MODEL, input="A point.", text_format=Point)
    assert isinstance(parsed.output_parsed, Point)
    assert parsed.status == "completed"
    with client.responses.stream(model=MODEL, input="A point.", text_format=Point) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Point)
    assert "response.output_text.done" in kinds
    loose = client.responses.create(model=MODEL, input="x", text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(loose.output_text), dict)


@pytest.mark.costly
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "add"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
    ],
)
def test_functions_are_called_and_answered(client: Any, choice: Any, stream: bool) -> None:
    options = {"model": MODEL, "input": "Add.", "tools": [ADD], "parallel_tool_calls": False, "tool_choice": choice}
    if stream:
        events = list(client.responses.create(stream=True, **options))
        answer = events[-1].response
        joined = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        [done] = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert joined == done.arguments == answer.output[-1].arguments
    else:
        answer = client.responses.create(**options)
    [call] = [item for item in answer.output if item.type != "reasoning"]
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    assert 0 <= json.loads(call.arguments)["a"] <= 99
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    following = client.responses.create(
        model=MODEL, input=[result], previous_response_id=answer.id, tools=[ADD], max_output_tokens=4
    )
    assert following.previous_response_id == answer.id
    assert following.usage.input_tokens > answer.usage.input_tokens


PICK = {"type": "custom", "name": "pick", "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"}}
SUM = {"type": "custom", "name": "sum", "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tool", "pattern"), [(PICK, "[ab]{3}"), (SUM, r"[1-9](\+[1-9]){0,3}")])
def test_custom_tools_get_a_text_of_their_grammar(client: Any, tool: Any, pattern: str, stream: bool) -> None:
    if tool is SUM:
        pytest.importorskip("llguidance")
    choice = {"type": "custom", "name": tool["name"]}
    options = {"model": MODEL, "input": "x", "tools": [tool], "tool_choice": choice, "max_output_tokens": 90}
    if stream:
        events = list(client.responses.create(stream=True, **options))
        answer = events[-1].response
        joined = "".join(e.delta for e in events if e.type == "response.custom_tool_call_input.delta")
        [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
        assert joined == done.input == answer.output[0].input
    else:
        answer = client.responses.create(**options)
    [call] = [item for item in answer.output if item.type != "reasoning"]
    assert (call.type, call.name) == ("custom_tool_call", tool["name"])
    assert re.fullmatch(pattern, call.input)
    told = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "7"}
    following = client.responses.create(
        model=MODEL, input=[told], previous_response_id=answer.id, max_output_tokens=1
    )
    items = client.responses.input_items.list(following.id, order="asc").data
    assert [item.type for item in items] == ["message", "custom_tool_call", "custom_tool_call_output"]


def test_items_become_the_turns_that_a_chat_would_have(client: Any, server: LiveServer) -> None:
    def size(items: Any, **more: Any) -> int:
        answer = server.post("/v1/responses/input_tokens", {"input": items, **more})
        assert answer.status_code == 200, answer.text
        assert answer.json()["object"] == "response.input_tokens"
        number: int = answer.json()["input_tokens"]
        return number

    items = [
        {"role": "developer", "content": "Add."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one and two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
    ]
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "one and two"},
        {"role": "assistant", "content": "Let me see."},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    usage = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage
    assert size(items) == usage.prompt_tokens
    assert size(items[1:], instructions="Add.") == usage.prompt_tokens
    counted = client.responses.input_tokens.count(model=MODEL, input=items)
    assert counted.input_tokens == usage.prompt_tokens


def test_conversations_go_on_from_stored_responses(client: Any) -> None:
    first = client.responses.create(input="one", instructions="Be brief.", max_output_tokens=5, **GREEDY)
    second = client.responses.create(
        input="two", previous_response_id=first.id, instructions="Be long.", max_output_tokens=5, **GREEDY
    )
    said = {"role": "assistant", "content": first.output_text}
    told = [{"role": "user", "content": "one"}, said, {"role": "user", "content": "two"}]
    again = client.responses.create(input=told, instructions="Be long.", max_output_tokens=5, **GREEDY)
    assert again.output_text == second.output_text
    assert again.usage.input_tokens == second.usage.input_tokens, "instructions are not carried over"
    stored = client.responses.retrieve(second.id)
    assert stored == second
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[1].id == first.output[0].id
    latest = client.responses.input_items.list(second.id, limit=1)
    assert (latest.data[0].content[0].text, latest.has_more) == ("two", True)
    for limit in ("0", "1001", "1_0", " 1", "１", "nan", "00000001" + "0" * 5000):
        with pytest.raises(openai.BadRequestError, match="limit must be from 1"):
            client.responses.input_items.list(second.id, extra_query={"limit": limit})
    rest = client.responses.input_items.list(second.id, after=latest.data[0].id)
    assert [item.id for item in rest.data] == [items[1].id, items[0].id]
    referred = client.responses.create(
        input=[told[0], {"type": "item_reference", "id": first.output[0].id}, told[2]],
        instructions="Be long.",
        max_output_tokens=5,
        **GREEDY,
    )
    assert referred.output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(input="x", previous_response_id=second.id, max_output_tokens=1, **GREEDY)
    assert third.usage.input_tokens > second.usage.input_tokens, "what goes on from it keeps it"


def test_what_is_not_stored_cannot_be_gone_on_from(client: Any) -> None:
    answer = client.responses.create(input="one", store=False, max_output_tokens=2, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(input="two", previous_response_id=answer.id, **GREEDY)
    assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_lease_keeps_the_pages_of_a_stored_response(engine: Engine, client: Any) -> None:
    memory = engine._scheduler.memory
    assert engine.flush_cache()
    text = "a conversation of some pages " * 4
    kept = client.responses.create(input=text, max_output_tokens=20, **GREEDY)
    forgotten = client.responses.create(input="b" + text, store=False, max_output_tokens=20, **GREEDY)
    wait_until(lambda: memory.leases.num_pages > 0)
    engine._loop.call(lambda: memory.cache.evict(memory.cache.evictable_pages))
    more = {"max_output_tokens": 1, **GREEDY}
    following = client.responses.create(input="c", previous_response_id=kept.id, **more)
    assert following.usage.input_tokens_details.cached_tokens >= kept.usage.input_tokens // 16 * 16 > 0
    said = {"role": "assistant", "content": forgotten.output_text}
    history = [{"role": "user", "content": "b" + text}, said, {"role": "user", "content": "c"}]
    again = client.responses.create(input=history, store=False, **more)
    assert again.usage.input_tokens_details.cached_tokens < 32, "what nobody leases was evicted"
    assert engine.flush_cache(), "leases of what is stored do not hold a flush up"
    assert memory.leases.num_pages == 0


def test_logprobs_are_those_of_the_text(client: Any) -> None:
    options = {"input": "hello", "max_output_tokens": 6, "top_logprobs": 2, **GREEDY}
    options["include"] = ["message.output_text.logprobs"]
    answer = client.responses.create(**options)
    [part] = answer.output[0].content
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode("utf-8", "replace") == part.text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    streamed = [
        entry
        for event in client.responses.create(stream=True, **options)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in part.logprobs]


def test_old_turns_are_dropped_only_where_truncation_says_so(client: Any) -> None:
    turns = [{"role": "user", "content": f"{number} " + "x" * 90} for number in range(8)]
    options = {"input": turns, "instructions": "Be brief.", "max_output_tokens": 1, **GREEDY}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**options)
    assert error.value.code == "context_length_exceeded"
    answer = client.responses.create(truncation="auto", **options)
    assert answer.truncation == "auto"
    fewer = client.responses.create(**{**options, "input": turns[4:]})
    assert answer.usage.input_tokens == fewer.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="too long"):
        client.responses.create(truncation="auto", **{**options, "input": "x" * 600})


def test_long_responses_are_written_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = {"type": "function", "name": "f", "description": "x" * 100_000, "parameters": {}}
    body = {"input": "hi", "max_output_tokens": 1, "tools": [tool], "tool_choice": "none"}
    made = server.post("/v1/responses", body).json()
    written, threads = encoding.json_bytes, list[str]()

    def writing(value: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return written(value)

    monkeypatch.setattr(encoding, "json_bytes", writing)
    assert server.get(f"/v1/responses/{made['id']}").json()["tools"] == made["tools"]
    assert [name.rpartition("_")[0] for name in threads] == ["sgl-results"]


ARGUMENTS_AS_TEXT = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments + '}' }}</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_prompt_is_cut_as_it_is_written(engine: Engine) -> None:
    """Also where the template takes arguments of calls as a text."""
    call = {"type": "function_call", "call_id": "x", "name": "add", "arguments": '{"a": 1}'}
    turns = [
        {"role": "user", "content": "1 and 1?"},
        call,
        {"type": "function_call_output", "call_id": "x", "output": "2"},
    ]
    with served(engine, template=ARGUMENTS_AS_TEXT) as server:
        for body in ({"input": turns}, {"input": [{"role": "user", "content": "x" * 480}, *turns]}):
            answer = server.post("/v1/responses", {**body, "truncation": "auto", "max_output_tokens": 1})
            assert answer.status_code == 200, answer.text
        wanted = {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "tool_calls": [{
            "id": "x", "function": {"name": "add", "arguments": '{"a": 1}'},
        }]}]}  # fmt: skip
        assert server.post("/v1/embeddings", wanted).status_code == 200


def test_a_running_response_can_be_cancelled(engine: Engine, client: Any) -> None:
    with slow_steps(engine):
        stream = client.responses.create(input="hello", stream=True, **GREEDY)
        identity = next(iter(stream)).response.id
        assert client.responses.retrieve(identity).status == "in_progress"
        assert client.responses.cancel(identity).status == "cancelled"
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert client.responses.retrieve(identity).output_text == last.response.output_text
    ended = client.responses.create(input="hello", max_output_tokens=1, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(ended.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_0")


def test_a_failure_in_a_stream_is_told_in_events(
    client: Any, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stream(**arguments: Any) -> Any:
        meta = {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0, "finish_reason": None}
        yield {"text": "so", "output_ids": [1], "meta_info": meta}
        raise EngineDead("the engine's process ended")

    monkeypatch.setattr(server.service.engine, "stream", stream)
    events: list[Any] = []
    with pytest.raises(openai.APIError, match="the engine's process ended"):
        events.extend(client.responses.create(model=MODEL, input="x", stream=True))
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "the engine's process ended"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "max_tokens": 4}, "max_output_tokens"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "metadata": {"k": 1}}, "metadata"),
        ({"input": "x", "metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"input": "x", "include": ["all"]}, "include"),
        ({"input": "x", "top_logprobs": 21}, "20"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": "x", "tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "definition"),
        ({"input": "x", "tool_choice": "required"}, "tools"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "computer_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "no images"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "msg_0"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "}"}]}, "JSON"),
        ({"input": "x", "stream": True, "temperature": -1}, "temperature"),
    ],
)
def test_bad_responses_are_refused_in_words(server: LiveServer, body: Any, words: str) -> None:
    answer = server.post("/v1/responses", body)
    assert answer.status_code in (400, 404), answer.text
    assert words in answer.json()["error"]["message"]


def test_every_field_of_the_package_is_decided(server: LiveServer) -> None:
    from openai.types.responses import input_token_count_params, response_create_params

    for theirs, ours in (
        (response_create_params.ResponseCreateParamsBase, ResponsesBody),
        (input_token_count_params.InputTokenCountParams, InputBody),
    ):
        assert theirs.__annotations__.keys() <= ours.model_fields.keys()
    harmless = {"store": True, "user": "u", "service_tier": "auto", "prompt_cache_key": "k", "max_tool_calls": 3}
    harmless |= {"background": False, "text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}}
    options = {
        "include_obfuscation": False,
        "include_usage": True,
    }  # the second is the chats', which benchmarks send
    harmless |= {"include": ["reasoning.encrypted_content"], "stream_options": options}
    body = {"input": "x", "max_output_tokens": 1, **harmless}
    assert server.post("/v1/responses", body).json()["status"] == "incomplete"
    its = {"enable_thinking": False, "thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1}}
    for given in (its, {"thinking": None}):
        assert server.post("/v1/responses/input_tokens", {"input": "x", **given}).json()["input_tokens"]
    answer = server.post("/v1/responses", {"input": "x", "reasoning_effort": "low"})
    assert "called reasoning.effort" in answer.json()["error"]["message"]


def test_keys_reach_only_what_is_their_own(engine: Engine) -> None:
    with served(engine, api_key=["a=key-of-a", "b=key-of-b"]) as server:
        mine, other = ({"Authorization": f"Bearer key-of-{name}"} for name in "ab")
        body = {"input": "x", "max_output_tokens": 1}
        identity = server.post("/v1/responses", body, headers=mine).json()["id"]
        path = f"/v1/responses/{identity}"
        assert server.get(path, headers=mine).json()["id"] == identity
        assert server.get(path, headers=other).status_code == 404
        assert server.get(path + "/input_items", headers=other).status_code == 404
        assert server.post(path + "/cancel", {}, headers=other).status_code == 404
        following = server.post("/v1/responses", {**body, "previous_response_id": identity}, headers=other)
        assert following.json()["error"]["code"] == "previous_response_not_found"


def response(number: int, length: int) -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": "x" * length}]}


def test_stored_responses_stay_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_STORED", 100_000)
    store, anyone = ResponseStore(), Caller()
    latest = None
    for number in range(100):
        latest = Stored(response(number, 5000), [], latest if number % 10 else None, anyone)
        store.add(latest)
        assert store.size <= 100_000
    assert latest is not None
    assert store.find("resp_99", anyone) is latest
    assert len(latest.items()) == 10, "a chain lives as long as its end"
    for number in range(100):
        if f"resp_{number}" in store._responses:
            store.delete(f"resp_{number}", anyone)
    assert (store.size, store._with) == (0, {})
    greedy, modest = Caller("a", False, "a"), Caller("b", False, "b")
    for number in range(100):
        store.add(Stored(response(number, 5000), [], None, greedy))
    assert store.size <= 50_000, "a tenant leaves as much as it has"
    store.add(Stored(response(100, 5000), [], None, modest))
    assert store.find("resp_100", modest).id == "resp_100"
    store.add(Stored(response(101, 99_000), [], None, greedy))
    assert "resp_101" not in store._responses


TEXT = (
    "<think>\nlet me</think>\n\nTwo calls. "
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call> And that.'
)


@pytest.mark.parametrize("step", [1, 3, 7, len(TEXT)])
def test_reasoning_text_and_calls_are_items_in_their_order(step: int) -> None:
    def entries(meta: dict[str, Any]) -> Any:
        return [{"token": char, "bytes": list(char.encode())} for char in meta["new"]]

    turn = Turn(
        0,
        AnswerSplitter(
            ReasoningSplitter("qwen3", only_leading=True), Reading(has_tools=True, format=HERMES, is_sure=True)
        ),
        entries,
        with_reasoning=True,
    )
    writer = ResponseWriter({"id": "resp_1", "output": []}, len)
    events = list(writer.begin({}))
    for start in range(0, len(TEXT), step):
        end = min(start + step, len(TEXT))
        reason = {"type": "stop", "matched": 2} if end == len(TEXT) else None
        meta = {"finish_reason": reason, "new": TEXT[start:end], "prompt_tokens": 3, "cached_tokens": 1}
        result = {"text": TEXT[:end], "meta_info": {**meta, "completion_tokens": end}}
        part = turn.part(result)
        events += writer.add(part)
        if reason:
            events += writer.end(part, result)
    output = writer.response["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert output[0]["content"][0]["text"].strip() == "let me" == writer.reasoning.strip()
    assert [output[i]["content"][0]["text"] for i in (1, 4)] == ["Two calls. ", "And that."]
    assert [json.loads(output[i]["arguments"]) for i in (2, 3)] == [{"a": 1}, {"a": 2}]
    for i in (1, 4):
        [part_] = output[i]["content"]
        assert "".join(entry["token"] for entry in part_["logprobs"]) == part_["text"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert all(item["status"] == "completed" for item in output)
    open_items: list[int] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert open_items == [], "one item after the other"
            open_items.append(event["output_index"])
        elif event["type"] == "response.output_item.done":
            assert open_items.pop() == event["output_index"]
        elif "output_index" in event:
            assert event["output_index"] in open_items
