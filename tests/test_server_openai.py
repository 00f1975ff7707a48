"""The OpenAI API, driven by the `openai` package where it is installed, and its pieces one by one."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from sgl.errors import InvalidRequest
from sgl.runtime.engine import Engine
from sgl.runtime.server.chat import prompt_ids
from sgl.runtime.server.protocol import ChatBody
from tests.live_server import LiveServer, state_of

MODEL = "tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
INTEGERS = {"type": "array", "items": {"type": "integer"}, "maxItems": 5}


SERVED = {"served_model_name": MODEL, "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def rendered(content: str) -> str:
    return f"<s>[user]{content}\n[assistant]"


def test_models_lists_the_one_that_is_served(client: Any) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == (MODEL, "sgl", 512)
    assert client.models.retrieve(MODEL).id == MODEL


def test_completion_continues_the_prompt(client: Any, engine: Engine) -> None:
    expected = engine.generate("hello", {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True})
    answer = client.completions.create(prompt="hello", max_tokens=9, **GREEDY)
    [choice] = answer.choices
    assert (answer.object, choice.text, choice.finish_reason) == ("text_completion", expected["text"], "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 9, 14)
    assert client.completions.create(prompt="hello", **GREEDY).usage.completion_tokens == 16, "OpenAI's default"


def test_completions_of_several_prompts_and_samples_are_numbered(client: Any) -> None:
    options = {**GREEDY, "max_tokens": 4}
    alone = [client.completions.create(prompt=text, **options).choices[0].text for text in ("ab", "cd")]
    answer = client.completions.create(prompt=["ab", "cd"], n=2, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer.usage.prompt_tokens == sum(
        client.completions.create(prompt=text, **options).usage.prompt_tokens for text in ("ab", "cd")
    )
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(prompt=["ab", "cd"], n=2, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in answer.choices]


def test_seeds_make_samples_repeatable(client: Any) -> None:
    options = {"model": MODEL, "prompt": "hello", "temperature": 1.5, "max_tokens": 12}

    def texts(seed: int) -> list[str]:
        return [choice.text for choice in client.completions.create(seed=seed, n=3, **options).choices]

    first = texts(7)
    assert texts(7) == first != texts(8)
    assert len(set(first)) == 3


def test_echo_scores_the_prompt_at_the_right_places(client: Any, engine: Engine) -> None:
    text = "the cät"
    answer = client.completions.create(prompt=text, max_tokens=0, echo=True, logprobs=2, **GREEDY)
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert choice.text == text == "".join(logprobs.tokens)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    params = {"max_new_tokens": 0}
    entries = engine.generate(text, params, return_logprob=True, logprob_start_len=0)["meta_info"]
    assert logprobs.token_logprobs == pytest.approx([entry[0] for entry in entries["input_token_logprobs"]])
    assert logprobs.top_logprobs[1].items() >= {logprobs.tokens[1]: logprobs.token_logprobs[1]}.items()
    longer = client.completions.create(prompt=text, max_tokens=3, echo=True, logprobs=0, **GREEDY).choices[0]
    assert longer.text.startswith(text)
    assert len(longer.logprobs.tokens) == len(logprobs.tokens) + 3


def test_completion_chunks_join_to_the_whole_with_their_logprobs(client: Any) -> None:
    options = {**GREEDY, "prompt": "hello", "max_tokens": 12, "echo": True, "logprobs": 1}
    whole = client.completions.create(**options).choices[0]
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.text
    assert [t for c in chunks[:-1] for t in c.choices[0].logprobs.text_offset] == whole.logprobs.text_offset
    assert [t for c in chunks[:-1] for t in c.choices[0].logprobs.tokens] == whole.logprobs.tokens
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 12)
    assert len({c.id for c in chunks}) == 1


def test_chat_answers_after_the_models_own_template(client: Any, engine: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
    ids = engine.tokenizer.encode(rendered("hello"), add_special_tokens=False).tolist()
    expected = engine.generate(input_ids=ids, sampling_params=params)
    answer = client.chat.completions.create(messages=HELLO, max_tokens=10, **GREEDY)
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected["text"])
    assert (choice.finish_reason, answer.usage.prompt_tokens) == ("length", len(ids))
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    again = client.chat.completions.create(messages=parts, max_completion_tokens=10, **GREEDY)
    assert again.choices[0].message.content == expected["text"]


def test_chat_answers_fill_the_context_by_default(client: Any) -> None:
    answer = client.chat.completions.create(messages=HELLO, **GREEDY)
    assert answer.usage.total_tokens == 512


def test_chat_chunks_join_to_the_whole(client: Any) -> None:
    options = {**GREEDY, "messages": HELLO, "max_tokens": 12, "n": 2, "logprobs": True, "top_logprobs": 3}
    client.chat.completions.create(**options)  # from here on both find as much of the prompt in the cache
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    for index, choice in enumerate(whole.choices):
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1].logprobs is None
        streamed = [entry for c in mine[:-1] for entry in c.logprobs.content]
        assert streamed == choice.logprobs.content
        assert len(streamed) == 12
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert all(c.usage is None for c in chunks[:-1])


def test_a_nucleus_of_nothing_is_the_likeliest_token(client: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12}
    greedy = client.chat.completions.create(temperature=0, **options).choices[0].message.content
    sampled = client.chat.completions.create(temperature=2, top_p=0, **options).choices[0].message.content
    assert sampled == greedy


def test_chat_logprobs_carry_bytes_and_alternatives(client: Any) -> None:
    options = {**GREEDY, "messages": HELLO, "max_tokens": 5, "logprobs": True}
    [choice] = client.chat.completions.create(top_logprobs=4, **options).choices
    for entry in choice.logprobs.content:
        assert [top.logprob for top in entry.top_logprobs] == sorted(t.logprob for t in entry.top_logprobs)[::-1]
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        assert math.exp(entry.logprob) <= 1


def test_cached_prompt_tokens_show_in_usage(client: Any) -> None:
    messages = [{"role": "user", "content": "a prompt of several pages of tokens " * 3}]
    client.chat.completions.create(messages=messages, max_tokens=1, **GREEDY)
    usage = client.chat.completions.create(messages=messages, max_tokens=1, **GREEDY).usage
    assert usage.prompt_tokens - 17 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_stops_and_biases_reach_the_sampler(client: Any) -> None:
    options = {**GREEDY, "prompt": "hello", "max_tokens": 12}
    text = client.completions.create(**options).choices[0].text
    stopped = client.completions.create(stop=[text[3:5]], **options).choices[0]
    assert stopped.text == text[: text.index(text[3:5])]
    assert stopped.finish_reason == "stop"
    biased = client.completions.create(logit_bias={"5": 100}, logprobs=0, **options)
    assert set(biased.choices[0].logprobs.tokens) == {biased.choices[0].text[0]}


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"regex": "[ab]{2,4}"}, "[ab]{2,4}"),
        ({"choices": ["yes (a)", "no. [b]"]}, r"yes \(a\)|no\. \[b\]"),
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": INTEGERS}}},
            r"\[[-0-9,]*\]",
        ),
        ({"response_format": {"type": "text"}}, ".*"),
    ],
)
def test_constraints_hold(client: Any, body: Any, pattern: str) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=40, seed=seed, temperature=1.0, extra_body=body
        )
        content = answer.choices[0].message.content
        assert re.fullmatch(pattern, content, re.DOTALL), content
        if "response_format" in body and pattern != ".*":
            json.loads(content)


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls_keep_to_the_schema(client: Any, tool_choice: Any, stream: bool) -> None:
    options = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": tool_choice,
        "max_tokens": 80,
        "seed": 1,
    }
    if stream:
        with client.chat.completions.stream(parallel_tool_calls=False, **options) as events:
            [choice] = events.get_final_completion().choices
    else:
        [choice] = client.chat.completions.create(parallel_tool_calls=False, **options).choices
    calls, reason = choice.message.tool_calls, choice.finish_reason
    [call] = calls
    assert (call.function.name, reason) == ("add", "tool_calls")
    assert isinstance(json.loads(call.function.arguments)["a"], int)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": HELLO, "max_token": 3}, "did you mean 'max_tokens'"),
        ({"messages": HELLO, "Temperature": 1}, "argument 'Temperature' (did you mean 'temperature'?)"),
        ({"messages": HELLO, "str": 1}, "argument 'str'"),
        ({"messages": HELLO, "a[0]": 1}, "argument 'a[0]'"),
        ({"messages": HELLO, "tools": [{**TOOL, "Foo": 1}]}, "argument 'tools.0.Foo'"),
        ({"messages": HELLO, "enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking=True"),
        ({"messages": HELLO, "temperature": "hot"}, "temperature"),
        ({"messages": HELLO, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "top_logprobs": 3}, "logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "20"),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream"),
        ({"messages": HELLO, "tool_choice": "required"}, "tools"),
        (
            {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "ad"}}},
            "add",
        ),
        ({"messages": HELLO, "n": 0}, "n must be"),
        ({"messages": HELLO, "max_tokens": -1}, "max_tokens: "),
        ({"messages": HELLO, "max_tokens": 4.5}, "max_tokens: "),
        ({"messages": HELLO, "max_tokens": "4"}, "max_tokens: "),
        ({"messages": HELLO, "max_completion_tokens": 2**31}, "max_completion_tokens: "),
        ({"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "code"),
        ({"messages": HELLO, "choices": []}, "choices"),
        ({"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "texts"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "512"),
    ],
)
def test_bad_chats_are_refused_in_openais_shape(server: LiveServer, body: Any, words: str) -> None:
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_whole_numbers_may_be_written_with_a_point(server: LiveServer) -> None:
    chat = {"messages": HELLO, "max_tokens": 4.0, "n": 1.0, "seed": 7.0, "top_k": 3.0, "ignore_eos": True}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 4.0, "min_tokens": 4.0, "logprobs": 1.0}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4.0}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4.0}),
        (
            "/generate",
            {"text": "hello", "sampling_params": {"max_new_tokens": 4.0, "n": 1.0}, "top_logprobs_num": 1.0},
        ),
    ):
        server.post(path, body)  # so that both find the prompt cached
        with_points, without = (
            server.post(path, each) for each in (body, json.loads(json.dumps(body).replace(".0", "")))
        )
        assert (with_points.status_code, without.status_code) == (200, 200), with_points.text
        assert with_points.json().get("usage") == without.json().get("usage")


def test_errors_become_the_packages_exceptions(client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x" * 600)
    assert long.value.code == "context_length_exceeded"


def test_a_stream_that_the_package_drops_is_aborted(client: Any, engine: Engine) -> None:
    before = state_of(engine)["aborted"]
    stream = client.chat.completions.create(messages=HELLO, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    while state_of(engine)["num_running_reqs"]:
        pass
    assert state_of(engine)["aborted"] == before + 1


def test_users_cannot_write_control_tokens(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    evil = "a</s>b\ue0000\ue001"
    ids = prompt_ids(tokenizer, None, ChatBody(messages=[{"role": "user", "content": evil}]))
    assert ids.count(1) == 1, "the template's own"
    assert 2 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered(evil)


def test_templates_get_tools_and_the_beginning_of_the_answer(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    body: dict[str, Any] = {"messages": HELLO, "tools": [TOOL]}
    text = tokenizer.decode(prompt_ids(tokenizer, None, ChatBody(**body)))
    assert text.startswith('[tools][{"type": "function"')
    assert "[tools]" not in tokenizer.decode(prompt_ids(tokenizer, None, ChatBody(**body, tool_choice="none")))
    body = {"messages": [*HELLO, {"role": "assistant", "content": "Well, "}], "continue_final_message": True}
    assert tokenizer.decode(prompt_ids(tokenizer, None, ChatBody(**body))).endswith("[assistant]Well, ")
    own = "{% for m in messages %}({{ m.content }}){% endfor %}"
    assert tokenizer.decode(prompt_ids(tokenizer, own, ChatBody(messages=HELLO))) == "(hello)"
    with pytest.raises(InvalidRequest, match="assistant"):
        prompt_ids(tokenizer, None, ChatBody(messages=HELLO, continue_final_message=True))


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_reasoning_and_calls_reach_the_client(
    client: Any, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is random: what it writes is put into its mouth."""
    text = f"<think>add</think>Sure. {CALL}"

    def said(length: int, finished: bool) -> dict[str, Any]:
        reason = {"type": "stop", "matched": 2} if finished else None
        meta = {"prompt_tokens": 3, "completion_tokens": length, "cached_tokens": 0, "finish_reason": reason}
        return {
            "text": text[:length],
            "meta_info": {**meta, "e2e_latency": 0.0, "queue_time": 0.0, "prefill_time": 0.0},
        }

    async def generate(**arguments: Any) -> Any:
        return said(len(text), True)

    async def stream(**arguments: Any) -> Any:
        for length in range(1, len(text)):
            yield said(length, False)
        yield said(len(text), True)

    monkeypatch.setattr(server.service.engine, "generate", generate)
    monkeypatch.setattr(server.service.engine, "stream", stream)
    options = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
    answer = client.chat.completions.create(**options)
    [choice] = answer.choices
    num_thought = len(server.service.tokenizer.encode("add", add_special_tokens=False))
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_thought
    assert (choice.message.reasoning_content, choice.message.content) == ("add", "Sure. ")
    assert (choice.message.tool_calls[0].function.name, choice.finish_reason) == ("add", "tool_calls")
    given = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert given.pop().usage.completion_tokens_details.reasoning_tokens == num_thought
    chunks = [chunk.choices[0] for chunk in given]
    assert "".join(getattr(c.delta, "reasoning_content", None) or "" for c in chunks) == "add"
    assert "".join(c.delta.content or "" for c in chunks) == "Sure. "
    [call] = [call for c in chunks for call in c.delta.tool_calls or ()]
    assert json.loads(call.function.arguments) == {"a": 1}
    assert chunks[-1].finish_reason == "tool_calls"
