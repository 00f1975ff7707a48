"""What the fields of the OpenAI API do to answers, whole and streamed, and the shape of chunks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sgl.errors import ContextTooLong, ProgramError
from sgl.formats.calls import HERMES
from sgl.lang.ir.reasoning import ReasoningSplitter
from sgl.runtime.engine import Engine
from sgl.runtime.server.answers import Turn
from sgl.runtime.server.chat import prompt_ids
from sgl.runtime.server.protocol import ChatBody
from sgl.runtime.server.responses.body import MessageItem, ResponsesBody
from sgl.runtime.server.responses.translation import chat_of
from sgl.runtime.server.tool_calls import AnswerSplitter, Reading
from tests.live_server import LiveServer

HELLO = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASKS: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "hello"}, CHATS: {"messages": HELLO}}


SERVED = {"served_model_name": "tiny", "reasoning_parser": "qwen3"}


def whole(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    """The answer."""
    answer = server.post(path, {**ASKS[path], **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def chunks(server: LiveServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Those of a stream."""
    answer = server.post(path, {**ASKS[path], **GREEDY, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    *lines, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(choice: dict[str, Any]) -> str:
    """What a choice, whole or of a chunk, brings of the text."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content") or "")


def ended(server: LiveServer, path: str, stream: bool, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The text, and the choice that says why it ended."""
    if not stream:
        [choice] = whole(server, path, **fields)["choices"]
        return text_of(choice), choice
    choices = [chunk["choices"][0] for chunk in chunks(server, path, **fields)]
    for choice in choices[:-1]:
        assert [choice[name] for name in ("finish_reason", "matched_stop", "stop_reason")] == [None] * 3
    return "".join(map(text_of, choices)), choices[-1]


both_ways = pytest.mark.parametrize("stream", [False, True])
both_paths = pytest.mark.parametrize("path", ASKS)


@both_ways
@both_paths
def test_choices_say_which_stop_ended_them(server: LiveServer, path: str, stream: bool) -> None:
    free, choice = ended(server, path, stream)
    assert [choice[name] for name in ("finish_reason", "matched_stop", "stop_reason")] == ["length", None, None]
    part = free[3:5]

    text, choice = ended(server, path, stream, stop=["zzz", part])
    assert text == free[: free.index(part)]
    assert [choice[name] for name in ("finish_reason", "matched_stop", "stop_reason")] == ["stop", part, part]

    regex = f"zzz|{re.escape(part[0])}{re.escape(part[1])}"
    text, choice = ended(server, path, stream, stop_regex=["qqq", regex])
    assert text == free[: free.index(part)]
    assert [choice[name] for name in ("finish_reason", "matched_stop", "stop_reason")] == ["stop", regex, regex]

    [token, *_] = whole(server, path, return_token_ids=True)["choices"][0]["token_ids"][4:]
    text, choice = ended(server, path, stream, stop_token_ids=[119_690])  # of another model
    assert (text, choice["finish_reason"]) == (free, "length")
    text, choice = ended(server, path, stream, stop_token_ids=[token, 119_690])
    assert [choice[name] for name in ("finish_reason", "matched_stop", "stop_reason")] == ["stop", token, token]


@both_ways
@both_paths
def test_the_end_of_the_text_is_no_stop_of_the_callers(server: LiveServer, path: str, stream: bool) -> None:
    eos = server.get("/server_info").json()["eos_token_ids"][0]
    _, choice = ended(server, path, stream, ignore_eos=False, logit_bias={str(eos): 100})
    assert [choice[name] for name in ("finish_reason", "matched_stop", "stop_reason")] == ["stop", eos, None]


@both_ways
@both_paths
@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_may_stay_in_the_text(server: LiveServer, path: str, stream: bool, field: str) -> None:
    free, _ = ended(server, path, stream)
    part = free[3:5]
    assert ended(server, path, stream, stop=part, **{field: True})[0] == free[: free.index(part) + 2]
    assert ended(server, path, stream, stop=part, **{field: False})[0] == free[: free.index(part)]


@both_paths
def test_token_ids_come_with_the_text(server: LiveServer, engine: Engine, path: str) -> None:
    assert engine.tokenizer is not None
    plain = whole(server, path)
    assert "token_ids" not in plain["choices"][0]
    answer = whole(server, path, n=2, return_token_ids=True)
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == 12
        assert engine.tokenizer.decode(choice["token_ids"]) == text_of(choice)
        assert len(choice["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    if path == CHATS:
        assert answer["prompt_token_ids"] == answer["choices"][0]["prompt_token_ids"]
        only = whole(server, path, return_prompt_token_ids=True)["choices"][0]
        assert "token_ids" not in only
        assert only["prompt_token_ids"] == answer["prompt_token_ids"]
    for index in range(2):
        pieces = [
            chunk["choices"][0]
            for chunk in chunks(server, path, n=2, return_token_ids=True)
            if chunk["choices"][0]["index"] == index
        ]
        assert [i for piece in pieces for i in piece["token_ids"]] == answer["choices"][index]["token_ids"]
        prompts = [piece.get("prompt_token_ids") for piece in pieces]
        assert prompts == [answer["choices"][index]["prompt_token_ids"], *[None] * (len(pieces) - 1)]


@both_paths
def test_tokens_of_logprobs_may_be_written_as_ids(server: LiveServer, path: str) -> None:
    fields = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    [choice] = whole(server, path, return_tokens_as_token_ids=True, return_token_ids=True, **fields)["choices"]
    expected = [f"token_id:{token}" for token in choice["token_ids"]]
    if path == COMPLETIONS:
        assert choice["logprobs"]["tokens"] == expected
        assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[token] for token in expected]
    else:
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == expected
        assert [entry["top_logprobs"][0]["token"] for entry in choice["logprobs"]["content"]] == expected


@both_paths
@pytest.mark.parametrize("at_end", [False, True])
def test_usage_may_come_with_each_chunk(server: LiveServer, path: str, at_end: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": at_end}
    found = chunks(server, path, n=2, stream_options=options)
    if at_end:
        last = found.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 24
    for index in range(2):
        mine = [chunk["usage"] for chunk in found if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in mine]
        assert counts == sorted(counts)
        assert counts[-1] == 12
        assert all(each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"] for each in mine)
    without = chunks(server, path, stream_options={"continuous_usage_stats": False, "include_usage": False})
    assert all("usage" not in chunk for chunk in without)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True},
        {"stop": ["\n", "never", "zz"], "logprobs": True, "return_token_ids": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "logprobs": True, "n": 2},
        {"max_tokens": 0},
        {"max_tokens": 1, "stream_options": {"include_usage": True}},
    ],
)
def test_chunks_of_chats_are_as_openai_sends_them(server: LiveServer, fields: dict[str, Any]) -> None:
    answer = whole(server, CHATS, **{name: value for name, value in fields.items() if name != "stream_options"})
    found = chunks(server, CHATS, **fields)
    if "stream_options" in fields:
        assert found.pop()["choices"] == []
    for index, choice in enumerate(answer["choices"]):
        first, *others, last = [c["choices"][0] for c in found if c["choices"][0]["index"] == index]
        assert first["delta"]["role"] == "assistant"
        assert "role" not in {name for other in (*others, last) for name in other["delta"]}
        assert all(other["delta"] and other["finish_reason"] is None for other in (first, *others))
        assert (last["delta"], last["finish_reason"]) == ({}, choice["finish_reason"])
        assert "".join(map(text_of, (first, *others))) == choice["message"]["content"]
        if "logprobs" in fields:
            given = [each["logprobs"]["content"] for each in (first, *others, last) if each["logprobs"] is not None]
            assert all(given), "clients look at the first token of any that are there"
            entries = [entry for each in given for entry in each]
            assert [entry["token"] for entry in entries] == [e["token"] for e in choice["logprobs"]["content"]]


def test_what_is_held_back_keeps_its_logprobs_and_ids_until_it_goes() -> None:
    text = '<think>\nhm\n</think>\n\nyes<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    splitter = AnswerSplitter(
        ReasoningSplitter("qwen3", only_leading=True), Reading(has_tools=True, format=HERMES, is_sure=True)
    )
    turn = Turn(
        0,
        splitter,
        lambda meta: meta["entries"],
        with_reasoning=False,
        prompt_ids=[7],
        with_token_ids=True,
    )
    found = []
    for length in range(1, len(text) + 1):
        reason = {"type": "stop", "matched": 2} if length == len(text) else None
        meta = {"finish_reason": reason, "entries": [length]}
        event = {"text": text[:length], "output_ids": list(range(length)), "meta_info": meta}
        found += turn.deltas(event)
    assert all(chunk["delta"] for chunk in found[:-1])
    assert (found[-1]["delta"], found[-1]["finish_reason"]) == ({}, "tool_calls")
    assert [entry for chunk in found for entry in chunk["logprobs"]["content"]] == list(range(1, len(text) + 1))
    assert [token for chunk in found for token in chunk["token_ids"]] == list(range(len(text)))
    assert [chunk.get("prompt_token_ids") for chunk in found] == [[7], *[None] * (len(found) - 1)]
    assert "".join(map(text_of, found)) == "yes"
    assert not any("reasoning_content" in chunk["delta"] for chunk in found), "it was not wanted"


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {
    "triggers": ["<a>"],
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "at_least_one": True,
    "stop_after_first": True,
}
FORMAT = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}
IS_DOCUMENT, IS_CHOICE = r'\{"a":(1|22)\}', r"yes\.|no \(b\)"
GRAMMAR = 'root ::= "yes." | "no (b)"'
CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[ab]{2,4}c"}, "[ab]{2,4}c"),
    ({"guided_regex": "[ab]{2,4}c"}, "[ab]{2,4}c"),
    ({"structured_outputs": {"regex": "[ab]{2,4}c"}}, "[ab]{2,4}c"),
    ({"choices": ["yes.", "no (b)"]}, IS_CHOICE),
    ({"guided_choice": ["yes.", "no (b)"], "guided_decoding_backend": "xgrammar"}, IS_CHOICE),
    ({"structured_outputs": {"choice": ["yes.", "no (b)"]}}, IS_CHOICE),
    ({"json_schema": SCHEMA}, IS_DOCUMENT),
    ({"json_schema": json.dumps(SCHEMA)}, IS_DOCUMENT),
    ({"guided_json": SCHEMA}, IS_DOCUMENT),
    ({"guided_json": json.dumps(SCHEMA)}, IS_DOCUMENT),
    ({"structured_outputs": {"json": SCHEMA}}, IS_DOCUMENT),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, IS_DOCUMENT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, IS_DOCUMENT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, IS_DOCUMENT),
    ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
    ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
    ({"guided_json_object": True}, r"\{.*\}"),
    ({"structural_tag": TAG}, rf".*<a>{IS_DOCUMENT}</a>"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, rf".*<a>{IS_DOCUMENT}</a>"),
    ({"response_format": {"type": "structural_tag", **TAG}}, rf".*<a>{IS_DOCUMENT}</a>"),
    ({"response_format": {"type": "structural_tag", "format": FORMAT}}, rf"<a>{IS_DOCUMENT}</a>"),
    ({"structural_tag": {"type": "structural_tag", "format": FORMAT}}, rf"<a>{IS_DOCUMENT}</a>"),
    ({"response_format": {"type": "text"}, "guided_choice": ["yes.", "no (b)"]}, IS_CHOICE),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}, "guided_json": SCHEMA}, IS_DOCUMENT),
]


@both_ways
@both_paths
@pytest.mark.parametrize(("fields", "pattern"), CONSTRAINTS)
def test_each_spelling_of_a_constraint_holds(
    server: LiveServer, path: str, stream: bool, fields: dict[str, Any], pattern: str
) -> None:
    text, choice = ended(server, path, stream, **fields, max_tokens=60, temperature=1.0, seed=3, ignore_eos=False)
    assert re.fullmatch(pattern, text, re.DOTALL), text
    assert choice["finish_reason"] == "stop"


@both_paths
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "a", "guided_regex": "b"}, "regex and guided_regex both say"),
        ({"choices": ["a"], "regex": "a"}, "regex and choices both say"),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "guided_json and response_format both say",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.json and structured_outputs.regex",
        ),
        ({"guided_choice": []}, "guided_choice must hold at least one text"),
        ({"choices": ["ab"] * 40_000}, "choices has 120000 characters, and 100000 are the most"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema is needed"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag", "triggers": []}}, "triggers"),
    ],
)
def test_constraints_that_cannot_be_are_refused(server: LiveServer, path: str, fields: Any, words: str) -> None:
    answer = server.post(path, {**ASKS[path], **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@both_ways
def test_only_allowed_tools_are_called(server: LiveServer, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "abc"]
    allowed = [{"type": "function", "function": {"name": "b"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 80}
    for seed in range(3):
        fields |= {"seed": seed, "temperature": 1.5, "ignore_eos": False}
        if stream:
            found = [c["choices"][0] for c in chunks(server, CHATS, **fields)]
            calls = [call for c in found for call in c["delta"].get("tool_calls", ())]
        else:
            calls = whole(server, CHATS, **fields)["choices"][0]["message"]["tool_calls"]
        assert calls[0]["function"]["name"] == "b"
    bad = {**choice, "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "d"}}]}}
    answer = server.post(CHATS, {**ASKS[CHATS], "tools": tools, "tool_choice": bad})
    assert "'d', which is not among the tools" in answer.json()["error"]["message"]


def test_the_callers_id_is_the_answers(server: LiveServer) -> None:
    assert whole(server, CHATS, request_id="mine")["id"] == "chatcmpl-mine"
    assert whole(server, COMPLETIONS, request_id="mine")["id"] == "cmpl-mine"
    assert whole(server, CHATS, rid="mine")["id"] == "mine"
    assert {chunk["id"] for chunk in chunks(server, CHATS, rid="mine")} == {"mine"}


def test_templates_hear_of_what_only_they_know(engine: Engine) -> None:
    assert engine.tokenizer is not None
    template = "{{ enable_thinking }} {{ documents | tojson }} {{ add_generation_prompt }} {{ reasoning_effort }}"

    def rendered(**fields: Any) -> str:
        body = ChatBody(messages=[{"role": "user", "content": "x"}], **fields)
        assert engine.tokenizer is not None
        return engine.tokenizer.decode(prompt_ids(engine.tokenizer, template, body), skip_special_tokens=False)

    assert rendered(reasoning_effort="none") == "False null True none"
    assert rendered(enable_thinking=False).startswith("False")
    assert rendered(thinking={"type": "disabled"}).startswith("False")
    assert rendered(thinking={"type": "enabled"}).startswith("True")
    assert rendered(thinking={"type": "auto"}) == rendered()
    assert rendered(enable_thinking=False, chat_template_kwargs={"enable_thinking": True}).startswith("True")
    asked = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert rendered(**asked) == "True null True none"
    responses = ResponsesBody(
        input="x", reasoning={"effort": "high"}, enable_thinking=False, documents=[{"text": "a"}]
    )
    chat = chat_of(responses, [MessageItem(role="user", content="x")])
    ids = prompt_ids(engine.tokenizer, template, chat)
    assert engine.tokenizer.decode(ids, skip_special_tokens=False) == 'False [{"text": "a"}] True high'
    assert rendered(documents=[{"text": "a</s>"}], add_generation_prompt=False) == ' [{"text": "a</s>"}] False '


def test_a_prompt_may_begin_without_special_tokens(server: LiveServer) -> None:
    asked = {"return_token_ids": True, "max_tokens": 1}
    bare = whole(server, COMPLETIONS, add_special_tokens=False, **asked)["choices"][0]["prompt_token_ids"]
    full = whole(server, COMPLETIONS, add_special_tokens=True, **asked)["choices"][0]["prompt_token_ids"]
    assert full == whole(server, COMPLETIONS, **asked)["choices"][0]["prompt_token_ids"]
    assert full[-len(bare) :] == bare


# ── prompts that are too long ───────────────────────────────────────────────────────────────────────────────────

TOO_LONG = (
    r"the prompt is too long: it has (more than )?\d+ tokens and this model's maximum context length is 512 tokens"
)


@both_ways
@pytest.mark.parametrize("length", [700, 40_000])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/v1/responses", "/generate"])
def test_a_prompt_over_the_context_reads_alike_everywhere(
    server: LiveServer, path: str, length: int, stream: bool
) -> None:
    text = "x7 " * length
    body = {
        COMPLETIONS: {"prompt": text},
        CHATS: {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
        "/generate": {"text": text},
    }[path]
    answer = server.post(path, {**body, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert re.match(TOO_LONG, error["message"])
    assert "Shorten it to at most 511 tokens" in error["message"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert [error["param"]] == list(body)
    if path in (COMPLETIONS, "/generate"):
        ids = {"prompt": [5] * length} if path == COMPLETIONS else {"input_ids": [5] * length}
        error = server.post(path, ids).json()["error"]
        assert [error["param"]] == list(ids)
        assert error["message"].startswith(f"the prompt is too long: it has {length} tokens and")


@pytest.mark.parametrize("length", [700, 40_000])
def test_a_prompt_over_the_context_reads_alike_in_process_and_in_programs(engine: Engine, length: int) -> None:
    import sgl

    text = "x7 " * length
    with pytest.raises(ContextTooLong, match=TOO_LONG):
        engine.generate(text)
    with pytest.raises(ContextTooLong, match=TOO_LONG):
        engine.score(text, ["a", "b"])

    @sgl.function
    def program(s: Any, how: str) -> None:
        s += text
        s += sgl.gen("x", max_tokens=4) if how == "gen" else sgl.select("x", choices=["a", "b"])

    for how in ("gen", "select"):
        with pytest.raises(ProgramError, match=TOO_LONG) as caught:
            program.run(how, backend=engine)["x"]
        assert isinstance(caught.value.__cause__, ContextTooLong)


@pytest.mark.costly
@both_paths
def test_more_output_than_fits_is_cut_to_what_fits(server: LiveServer, path: str) -> None:
    answer = whole(server, path, max_tokens=10_000)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"
