"""Calls of tools in each family's format, through every door: held to it while written, read, streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jsonschema
import pytest

from sgl.lang.ir.reasoning import FORMATS
from sgl.runtime.engine import Engine
from tests.call_writer import WRITERS
from tests.calling_templates import every_format_checkpoint, template_of
from tests.live_server import OPTIONS, LiveServer, served

HELLO = [{"role": "user", "content": "hello"}]
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {"item": {"enum": ["egg", "tea"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["item"],
    "additionalProperties": False,
}
SCHEMAS = {"order": ORDER, "order_now": ORDER, "stop": {"type": "object", "maxProperties": 0}}
BEGINNINGS = {
    # a token with which calls begin, or what is called a channel
    "llama3": "<|python_tag|>",
    "llama4": "<|python_start|>",
    "hy_v3": "<tool_calls>",
    "hy_v3_open": "<tool_calls:opensource>",
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "glm45": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS]",
    "mistral_ids": "[TOOL_CALLS]",
    "deepseekv3": "<｜tool▁calls▁begin｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "seed_oss": "<seed:tool_call>",
    "minimax_m2": "<minimax:tool_call>",
    "deepseekv32": "<｜DSML｜function_calls>",
    "deepseekv4": "<｜DSML｜tool_calls>",
    "step3": "<｜tool_calls_begin｜>",
    "nemotron_json": "<TOOLCALL>",
    "apriel": "<tool_calls>",
    "granite": "<|tool_call|>",
    "phi4_mini_json": "functools[",
    "internlm": "<|action_start|>",
    "longcat": "<longcat_tool_call>",
    "xlam": '[{"name": "',
    "pythonic": "[order(",
    "lfm2": "<|tool_call_start|>",
    "olmo3": "<function_calls>",
    "gemma4": "<|tool_call>",
    "functiongemma": "<start_function_call>",
    "minicpm3": "<|tool_call_start|>",
    "minicpm5": "<function name=",
    "apertus": "<|tools_prefix|>",
    "dots": "<dots_function_call>",
    "gigachat3": "<|message_sep|>",
    "gigachat31": "<|function_call|>",
    "gigachat35": "<｜GCML｜tool_calls>",
    "function_call": "<function_call>",
    "granite-20b-fc": "<function_call>",
    "k2_horizon": "<ifm|tool_calls>",
    "k2_horizon_json": "<ifm|tool_calls>",
    "solar_open2": "<|tool_call:start|>",
    "cohere_command3": "<|START_ACTION|>",
    "cohere_command4": "<|START_ACTION|>",
    "kimi_k3": "<|open|>",
    "gpt-oss": "<|end|>",
}


class Answer(NamedTuple):
    """What a client puts together."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    """Names and arguments."""
    ending: str


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = every_format_checkpoint(tmp_path_factory.mktemp("formats"))
    with Engine(path, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module", params=WRITERS)
def door(request: pytest.FixtureRequest, engine: Engine) -> Iterator[tuple[str, LiveServer]]:
    """A format and a server of a model that writes it, as its template shows."""
    with served(engine, template=template_of(request.param)) as server:
        yield request.param, server


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def chat(server: LiveServer, *, stream: bool, choice: Any = "auto", **body: Any) -> Answer:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in SCHEMAS.items()
    ]
    body = {"messages": HELLO, "tools": tools, "tool_choice": choice, "stream": stream, **body}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    if not stream:
        [found] = answer.json()["choices"]
        message = found["message"]
        calls = [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
        ]
        return Answer(message.get("reasoning_content", ""), message["content"] or "", calls, found["finish_reason"])
    reasoning, content, ending, named = "", "", "", list[list[str]]()
    for event in events_of(answer.text):
        [found] = event["choices"]
        reasoning += found["delta"].get("reasoning_content") or ""
        content += found["delta"].get("content") or ""
        for call in found["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(named)
                named.append([call["function"]["name"], ""])
            named[call["index"]][1] += call["function"]["arguments"]
        ending = found["finish_reason"] or ending
    return Answer(reasoning, content, [(name, arguments) for name, arguments in named], ending)


def respond(server: LiveServer, *, stream: bool, choice: Any = "auto", max_tokens: int, **body: Any) -> Answer:
    tools = [
        {"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()
    ]
    body = {"input": HELLO, "tools": tools, "tool_choice": choice, "max_output_tokens": max_tokens, **body}
    answer = server.post("/v1/responses", {**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    response = answer.json() if not stream else {}
    deltas: dict[str, str] = {}
    if stream:
        for event in events_of(answer.text):
            response = event.get("response", response)
            if event["type"].endswith(".delta"):
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    for item in response["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
            text = item["arguments"]
        else:
            [part] = item["content"]
            text = part["text"]
            reasoning += text if item["type"] == "reasoning" else ""
            content += text if item["type"] == "message" else ""
        assert not stream or deltas.get(item["id"], "") == text
    return Answer(reasoning, content, calls, "length" if response["status"] == "incomplete" else "stop")


def message(server: LiveServer, *, stream: bool, choice: str = "auto", **body: Any) -> Answer:
    tools = [{"name": name, "input_schema": schema, "strict": True} for name, schema in SCHEMAS.items()]
    wanted = {"type": {"required": "any"}.get(choice, choice)}
    body = {"messages": HELLO, "tools": tools, "tool_choice": wanted, "stream": stream, **body}
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    if not stream:
        found = answer.json()
        blocks, ending = found["content"], found["stop_reason"]
        for block in blocks:
            block["input"] = json.dumps(block.get("input", {}))
    else:
        blocks, ending = [], ""
        for event in events_of(answer.text):
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "input": ""})
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                block["input"] += delta.get("partial_json", "")
                for key in ("text", "thinking"):
                    block[key] = block.get(key, "") + delta.get(key, "")
            elif event["type"] == "message_delta":
                ending = event["delta"]["stop_reason"]
    return Answer(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        [(block["name"], block["input"] or "{}") for block in blocks if block["type"] == "tool_use"],
        ending,
    )


DOORS: dict[str, Callable[..., Answer]] = {"chat": chat, "responses": respond, "messages": message}


def biased(server: LiveServer, **tokens: float) -> dict[str, float]:
    """A bias by the names of tokens."""
    ids = server.service.tokenizer.hf.get_vocab()
    return {str(ids[name]): value for name, value in tokens.items()}


def through(path: str, server: LiveServer, **wanted: Any) -> Answer:
    """The same answer, whole and as a stream."""
    whole, streamed = (DOORS[path](server, stream=stream, **wanted) for stream in (False, True))
    loaded = [[(name, json.loads(arguments)) for name, arguments in each.calls] for each in (whole, streamed)]
    assert whole._replace(calls=[]) == streamed._replace(calls=[])
    assert loaded[0] == loaded[1]
    return whole


def seed_of(server: LiveServer, shows: Callable[[Answer], Any], **wanted: Any) -> int:
    """The first seed whose answer shows what the test is about: the model is random."""
    for seed in range(60):
        if shows(chat(server, stream=False, seed=seed, **wanted)):
            return seed
    raise AssertionError("none of 60 answers shows it")


def has_calls(answer: Answer) -> bool:
    """Some, none of them cut off."""
    return bool(answer.calls) and all(arguments.endswith("}") for _, arguments in answer.calls)


@pytest.mark.costly
def test_calls_are_held_to_their_schemas_through_every_door(door: tuple[str, LiveServer]) -> None:
    name, server = door
    bias = biased(server, **{BEGINNINGS[name]: 30.0 if name in ("llama3", "llama4", "xlam", "pythonic") else 9.0})
    long = ("deepseekv32", "deepseekv4", "step3", "hy_v3", "hy_v3_open", "gigachat35", "k2_horizon", "dots")
    long += ("cohere_command3", "cohere_command4", "kimi_k3")
    limit = (
        250 if name in long else 150 if name in ("minicpm5", "solar_open2", "gigachat3", "k2_horizon_json") else 50
    )
    wanted: dict[str, Any] = {"temperature": 1.0, "max_tokens": limit, "logit_bias": bias}
    seeds = {choice: seed_of(server, has_calls, choice=choice, **wanted) for choice in ("required", "auto")}
    doors = DOORS if name in ("hermes", "glm45", "gpt-oss") else ["chat"]
    for choice, path in (("required", "chat"), *(("auto", path) for path in doors)):
        answer = through(path, server, choice=choice, seed=seeds[choice], **wanted)
        assert answer.calls
        for called, arguments in answer.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
        assert answer.ending in (
            "length",
            "max_tokens",
            {"responses": "stop", "messages": "tool_use"}.get(path, "tool_calls"),
        )
        assert choice == "auto" or not answer.content or name == "kimi_k3"


@pytest.fixture(scope="module")
def channels(engine: Engine) -> Iterator[LiveServer]:
    with served(engine, template=template_of("gpt-oss")) as server:
        yield server


def thoughtful(server: LiveServer) -> dict[str, Any]:
    """Sampling after which a random model thinks briefly, then calls or answers."""
    tokens = {"<|channel|>": 6.0, "an": 3.0, "a": 3.0, "<|end|>": 5.0, "<|return|>": 3.0, "<|start|>": 2.0}
    return {"temperature": 1.0, "max_tokens": 100, "logit_bias": biased(server, **tokens)}


def test_channels_are_told_apart_through_every_door(channels: LiveServer) -> None:
    wanted = thoughtful(channels)
    seed = seed_of(channels, lambda answer: answer.reasoning and has_calls(answer), **wanted)
    first, *others = (through(path, channels, seed=seed, **wanted) for path in DOORS)
    calls = [(name, json.loads(arguments)) for name, arguments in first.calls]
    for answer in others:
        assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == calls
        assert answer._replace(calls=first.calls, ending=first.ending) == first
    assert not re.search(r"<\|[a-z]+\|>", first.reasoning)
    assert not first.content
    seed = seed_of(channels, lambda answer: answer.reasoning and answer.content, **wanted)
    answer = through("chat", channels, seed=seed, **wanted)
    assert answer.reasoning
    assert not re.search(r"<\|[a-z]+\|>", answer.reasoning + answer.content)


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_a_document_comes_in_the_last_channel(channels: LiveServer, choice: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER}}
    wanted = {"choice": choice, "response_format": schema, **thoughtful(channels)}
    seed = seed_of(channels, lambda answer: answer.reasoning and answer.content.endswith("}"), **wanted)
    answer = chat(channels, stream=True, seed=seed, **wanted)
    assert answer.reasoning
    jsonschema.validate(json.loads(answer.content), ORDER)


def test_reasoning_in_channels_may_be_left_in_the_text(channels: LiveServer) -> None:
    wanted = thoughtful(channels)
    wanted["seed"] = seed_of(channels, lambda answer: answer.reasoning, **wanted)
    apart = through("chat", channels, **wanted)
    joined = through("chat", channels, separate_reasoning=False, **wanted)
    assert joined == apart._replace(reasoning="", content=apart.reasoning + apart.content)
    assert through("chat", channels, stream_reasoning=False, **wanted) == apart
    assert through("chat", channels, include_reasoning=False, **wanted) == apart._replace(reasoning="")


@pytest.mark.costly
@pytest.mark.parametrize("begun", ["", "<|START_THINKING|>"])
def test_blocks_are_told_apart_through_every_door(engine: Engine, begun: str) -> None:
    template = template_of("cohere_command3").replace("[assistant]", "[assistant]" + begun)
    with served(engine, template=template) as server:
        tokens = {
            "<|START_THINKING|>": 9.0,
            "<|END_THINKING|>": 6.0,
            "<|START_RESPONSE|>": 3.0,
            "<|END_RESPONSE|>": 6.0,
        }
        bias = biased(server, **tokens)
        wanted: dict[str, Any] = {"temperature": 1.0, "max_tokens": 100, "logit_bias": bias}
        seed = seed_of(server, lambda answer: answer.reasoning and answer.content, **wanted)
        first, *others = (through(path, server, seed=seed, **wanted) for path in DOORS)
        assert all(answer._replace(ending=first.ending) == first for answer in others)
        assert not re.search(r"<\|[A-Z_]+\|>", first.reasoning + first.content)
        schema = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER}}
        wanted |= {"choice": "none", "response_format": schema}
        seed = seed_of(server, lambda answer: answer.reasoning and answer.content.endswith("}"), **wanted)
        answer = through("chat", server, seed=seed, **wanted)
        jsonschema.validate(json.loads(answer.content), ORDER)


@pytest.mark.costly
@pytest.mark.parametrize("options", [{"tool_call_parser": "gpt-oss"}, {"reasoning_parser": "gpt-oss"}])
def test_channels_are_read_where_an_option_says_so(engine: Engine, options: dict[str, str]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant"
    with served(engine, template=template, **options) as server:
        assert seed_of(server, lambda answer: answer.reasoning and answer.calls, **thoughtful(server)) >= 0


PARSERS = [
    pytest.param(name, marks=() if name in ("deepseek-v3", "kimi", "seed_oss") else pytest.mark.slow)
    for name in {format: name for name, format in reversed(FORMATS.items())}.values()  # of names of one format, one
    if name not in ("gpt-oss", "apriel", "granite", "kimi_k3")  # a random model does not write these
]


@pytest.mark.costly
@pytest.mark.parametrize("parser", PARSERS)
def test_reasoning_of_each_family_is_told_and_free_of_the_constraint(engine: Engine, parser: str) -> None:
    format = FORMATS[parser]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}[assistant]"
    begun = format.begin if format.starts_inside else ""
    with served(engine, template=template + begun, reasoning_parser=parser) as server:
        bias = biased(server, **{format.begin: 9.0, format.end: 4.0})
        wanted = {"choice": "none", "regex": "[ab]{3}", "temperature": 1.0, "max_tokens": 300, "logit_bias": bias}
        wanted["seed"] = seed_of(server, lambda answer: answer.reasoning and answer.content, **wanted)
        answer = through("responses" if format.starts_inside else "messages", server, **wanted)
        assert answer == through("chat", server, **wanted)._replace(ending=answer.ending)
        assert re.fullmatch("[ab]{3}", answer.content)


@pytest.mark.parametrize(
    ("said", "is_thought"), [("Yes, ", False), ("<think>Hm", True), ("<think>Hm</think>So ", False)]
)
def test_a_continued_answer_is_reasoning_only_where_it_was_begun(
    engine: Engine, said: str, is_thought: bool
) -> None:
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    with served(engine, template=template, reasoning_parser="deepseek-r1") as server:
        begun = {"messages": [*HELLO, {"role": "assistant", "content": said}], "continue_final_message": True}
        answer = through("chat", server, choice="none", regex="[ab]{9}", max_tokens=9, temperature=0.0, **begun)
        assert bool(answer.reasoning) == is_thought
        assert is_thought or re.fullmatch("[ab]{9}", answer.content)


def test_a_continued_answer_goes_on_in_its_block(engine: Engine) -> None:
    with served(engine, template=template_of("cohere_command3")) as server:
        begun = {"messages": [*HELLO, {"role": "assistant", "content": "Yes"}], "continue_final_message": True}
        begun |= {"logit_bias": biased(server, **{"<|START_THINKING|>": 50.0})}
        answer = through("chat", server, choice="none", regex="[ab]{9}", max_tokens=60, temperature=0.0, **begun)
        assert not answer.reasoning
        assert re.fullmatch("[ab]{9}", answer.content)


@pytest.mark.parametrize(
    ("name", "parser"),
    [
        ("glm45", "glm45"),
        *(
            pytest.param(name, parser, marks=pytest.mark.slow)
            for name, parser in (("deepseekv3", "deepseek-r1"), ("kimi_k2", "kimi_k2"), ("mistral_args", "mistral"))
        ),
    ],
)
def test_a_call_that_must_come_may_be_thought_about_first(engine: Engine, name: str, parser: str) -> None:
    format = FORMATS[parser]
    with served(engine, template=template_of(name), reasoning_parser=parser) as server:
        bias = biased(server, **{format.begin: 30.0, format.end: 5.0})
        wanted = {"choice": "required", "temperature": 1.0, "max_tokens": 150, "logit_bias": bias}
        wanted["seed"] = seed_of(server, lambda answer: answer.reasoning and has_calls(answer), **wanted)
        answer = through("chat", server, **wanted)
        assert not answer.content.strip()
        for called, arguments in answer.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])


BEGIN, END = "<|tool_call_begin|>", "<|tool_call_end|>"
TAGS = [
    # one begins as the other does
    {"type": "tag", "begin": f"{BEGIN}f", "content": {"type": "const_string", "value": "(1)"}, "end": END},
    {"type": "tag", "begin": f"{BEGIN}f2", "content": {"type": "regex", "pattern": "[ab]"}, "end": END},
]
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "format": {"type": "triggered_tags", "triggers": [BEGIN], "tags": TAGS},
}
WRITTEN = re.compile(rf"(?s:.*?)(?:{re.escape(BEGIN)}(?:f\(1\)|f2[ab]){re.escape(END)}(?s:.*?))+")


def test_a_special_token_triggers_tags_through_every_door(channels: LiveServer) -> None:
    server = channels
    bias = biased(server, **{BEGIN: 8.0, "2": 4.0})
    common = {"temperature": 1.0, "seed": 5, "logit_bias": bias, "skip_special_tokens": False}
    native = {**common, "structural_tag": json.dumps(TAG), "max_new_tokens": 30, "no_stop_trim": True}
    texts = [server.post("/generate", {"text": "hello", "sampling_params": native}).json()["text"]]
    for field in (
        {"response_format": TAG},
        {"structural_tag": TAG},
        {"structured_outputs": {"structural_tag": TAG}},
    ):
        body = {"messages": HELLO, "max_tokens": 30, **common, **field}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["message"]["content"])
        answer = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 30, **common, **field})
        texts.append(answer.json()["choices"][0]["text"])
    for text in texts:
        complete, _, rest = text.rpartition(END)
        assert WRITTEN.fullmatch(complete + END), text
        assert len(rest.partition(BEGIN)[2]) < 5
