"""Every kind of constraint generates through every door: the engine, the HTTP APIs and programs, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jsonschema
import pytest

import sgl
from sgl import Engine
from sgl.errors import GrammarTooLarge, ProgramError
from sgl.runtime.constraints.cursor import MatcherCursor
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99}, "name": {"enum": ["a", "bc"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
TAG = {
    "triggers": ["<f"],
    "structures": [{"begin": "<f=add>", "schema": POINT, "end": "</f>"}],
    "at_least_one": True,
    "stop_after_first": True,
}
SUM = 'root ::= term ("+" term)+ ";"\nterm ::= [0-9]{1,3} | "(" term "-" term ")"  # nested'
WORDS = ["yes (a)", "yes, and é", "no. [b]"]


@dataclass(frozen=True)
class Kind:
    """One kind of constraint, as each door takes it; None where a door has no such thing."""

    name: str
    check: Callable[[str], object]
    native: dict[str, Any] | None = None
    openai: dict[str, Any] | None = None
    gen: dict[str, Any] | None = None


def matches(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern, re.DOTALL).fullmatch


def fits(schema: dict[str, Any]) -> Callable[[str], object]:
    def check(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return check


OPEN = {key: value for key, value in POINT.items() if key != "additionalProperties"}
OPEN_TAG = {**TAG, "structures": [{"begin": "<f=add>", "schema": OPEN, "end": "</f>"}]}


def is_sum(text: str) -> bool:
    """Of the grammar above, read another way: differences are replaced by digits until none is left."""
    shorter = re.sub(r"\((\d|\d\d|\d\d\d)-(\d|\d\d|\d\d\d)\)", "1", text)
    while shorter != text:
        text, shorter = shorter, re.sub(r"\((\d|\d\d|\d\d\d)-(\d|\d\d|\d\d\d)\)", "1", shorter)
    return re.fullmatch(r"\d{1,3}(\+\d{1,3})+;", text) is not None


def is_call(text: str) -> object:
    call = re.fullmatch(r"(.*?)<f=add>(.*)</f>", text, re.DOTALL)
    return call is not None and fits(POINT)(call[2])


def everywhere(name: str, params: dict[str, Any], check: Callable[[str], object]) -> Kind:
    return Kind(name, check, params, params, params)


KINDS = [
    everywhere("regex", {"regex": r"\d{4}-(0[1-9]|1[0-2])( é)?"}, matches(r"\d{4}-(0[1-9]|1[0-2])( é)?")),
    everywhere("ebnf", {"ebnf": SUM}, is_sum),
    everywhere("ebnf of choices", {"ebnf": 'root ::= "Hello" | "Hi" | "Hey"'}, matches("Hello|Hi|Hey")),
    everywhere("lark", {"ebnf": 'start: "<" /[ab]{2,3}/ ">"'}, matches("<[ab]{2,3}>")),
    Kind("json_schema", fits(POINT), {"json_schema": json.dumps(POINT)}, None, {"json_schema": json.dumps(POINT)}),
    Kind("structural_tag", is_call, {"structural_tag": json.dumps(TAG)}, {"structural_tag": TAG}),
    Kind("choices", WORDS.__contains__, None, {"choices": WORDS}, {"choices": WORDS}),
    Kind("json_object", fits({"type": "object"}), None, {"response_format": {"type": "json_object"}}),
    Kind("text", matches(".*"), None, {"response_format": {"type": "text"}}),
    Kind(
        "response_format",
        fits(POINT),
        None,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}},
    ),
]
# The schema leaves other keys open, and the engine does not.
KINDS += [
    Kind("open schema", fits(POINT), {"json_schema": json.dumps(OPEN)}, None, {"json_schema": json.dumps(OPEN)}),
    Kind("open tag", is_call, {"structural_tag": json.dumps(OPEN_TAG)}, {"structural_tag": OPEN_TAG}),
    Kind(
        "open response_format",
        fits(POINT),
        None,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "point", "schema": OPEN}}},
    ),
]
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    pytest.importorskip("llguidance")
    model = str(chat_checkpoint(tmp_path_factory.mktemp("model")))
    with Engine(model, **OPTIONS) as engine, served(engine) as server:
        yield server


# Each door takes a server and a kind, and returns the finish reason and the text.


def sampling(kind: Kind) -> dict[str, Any]:
    assert kind.native is not None
    return {**kind.native, "max_new_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 7}


def last_of(events: list[dict[str, Any]]) -> tuple[str, str]:
    return events[-1]["meta_info"]["finish_reason"]["type"], events[-1]["text"]


def engine_whole(server: LiveServer, kind: Kind) -> tuple[str, str]:
    return last_of([server.engine.generate("so", sampling(kind))])


def engine_stream(server: LiveServer, kind: Kind) -> tuple[str, str]:
    return last_of(list(server.engine.generate("so", sampling(kind), stream=True)))


def engine_async(server: LiveServer, kind: Kind) -> tuple[str, str]:
    return last_of([asyncio.run(server.engine.async_generate("so", sampling(kind)))])


def engine_async_stream(server: LiveServer, kind: Kind) -> tuple[str, str]:
    async def collect() -> list[dict[str, Any]]:
        return [event async for event in await server.engine.async_generate("so", sampling(kind), stream=True)]

    return last_of(asyncio.run(collect()))


def native_whole(server: LiveServer, kind: Kind) -> tuple[str, str]:
    return last_of([server.post("/generate", {"text": "so", "sampling_params": sampling(kind)}).json()])


def native_stream(server: LiveServer, kind: Kind) -> tuple[str, str]:
    body = {"text": "so", "sampling_params": sampling(kind), "stream": True}
    return last_of(events_of(server.post("/generate", body).text))


def events_of(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def openai_body(kind: Kind, **more: Any) -> dict[str, Any]:
    assert kind.openai is not None
    return {**kind.openai, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 7, **more}


def completions_whole(server: LiveServer, kind: Kind) -> tuple[str, str]:
    [choice] = server.post("/v1/completions", openai_body(kind, prompt="so")).json()["choices"]
    return choice["finish_reason"], choice["text"]


def completions_stream(server: LiveServer, kind: Kind) -> tuple[str, str]:
    answer = server.post("/v1/completions", openai_body(kind, prompt="so", stream=True))
    choices = [chunk["choices"][0] for chunk in events_of(answer.text)]
    return choices[-1]["finish_reason"], "".join(choice["text"] for choice in choices)


HELLO = [{"role": "user", "content": "hello"}]


def chat_whole(server: LiveServer, kind: Kind) -> tuple[str, str]:
    [choice] = server.post("/v1/chat/completions", openai_body(kind, messages=HELLO)).json()["choices"]
    return choice["finish_reason"], choice["message"]["content"]


def chat_stream(server: LiveServer, kind: Kind) -> tuple[str, str]:
    answer = server.post("/v1/chat/completions", openai_body(kind, messages=HELLO, stream=True))
    choices = [chunk["choices"][0] for chunk in events_of(answer.text)]
    return choices[-1]["finish_reason"], "".join(choice["delta"].get("content") or "" for choice in choices)


@sgl.function
def program(s: Any, gen: dict[str, Any]) -> None:
    s += "so " + sgl.gen("text", max_tokens=MAX_TOKENS, seed=7, **gen) + "."


def run_program(backend: Any, kind: Kind, *, stream: bool) -> tuple[str, str]:
    state = program.run(kind.gen, backend=backend, temperature=1.0, stream=stream)
    if stream:
        assert "".join(state.text_iter("text")) == state["text"]
    assert state.text() == "so " + state["text"] + "."
    meta = state.get_meta_info("text")
    reason = meta["finish_reason"]["type"] if "finish_reason" in meta else "stop"  # a select has none
    return reason, state["text"]


def program_in_process(server: LiveServer, kind: Kind) -> tuple[str, str]:
    return run_program(server.engine, kind, stream=False)


def program_streamed(server: LiveServer, kind: Kind) -> tuple[str, str]:
    return run_program(server.engine, kind, stream=True)


def program_shipped(server: LiveServer, kind: Kind) -> tuple[str, str]:
    return run_program(sgl.RuntimeEndpoint(server.url), kind, stream=False)


def program_shipped_streamed(server: LiveServer, kind: Kind) -> tuple[str, str]:
    return run_program(sgl.RuntimeEndpoint(server.url), kind, stream=True)


DOORS = {
    "native": [engine_whole, engine_stream, engine_async, engine_async_stream, native_whole, native_stream],
    "openai": [completions_whole, completions_stream, chat_whole, chat_stream],
    "gen": [program_in_process, program_streamed, program_shipped, program_shipped_streamed],
}
CASES = [
    pytest.param(kind, door, id=f"{kind.name}-{door.__name__}")
    for kind in KINDS
    for way, doors in DOORS.items()
    for door in doors
    if getattr(kind, way) is not None
]


@pytest.mark.parametrize(("kind", "door"), CASES)
def test_text_matches_its_constraint(
    server: LiveServer, kind: Kind, door: Callable[[LiveServer, Kind], tuple[str, str]]
) -> None:
    reason, text = door(server, kind)
    assert reason == "stop" or kind.name == "text", text  # free text need not come to an end
    assert kind.check(text), text
    assert text or kind.name == "text"


# A constraint that fails while text is generated


class Failing:
    """Masks fail with the third token of a text, unless `spared` says that its constraint is another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spared: str = "nothing") -> None:
        mask = MatcherCursor.mask

        def fail_later(cursor: Any, remaining: int | None) -> Any:
            cursor.num_masks = getattr(cursor, "num_masks", 0) + 1
            if cursor.num_masks > 2 and spared not in cursor.source:
                raise GrammarTooLarge("the grammar has more than 7 states", states=8, limit=7)
            return mask(cursor, remaining)

        create = MatcherCursor.__init__

        def note_source(cursor: Any, grammar: Any, text: bytes = b"") -> None:
            create(cursor, grammar, text)
            cursor.source = grammar.constraint.source

        monkeypatch.setattr(MatcherCursor, "__init__", note_source)
        monkeypatch.setattr(MatcherCursor, "mask", fail_later)


LONG = [
    everywhere("regex", {"regex": "[a-f]{40}"}, matches("[a-f]{40}")),
    everywhere("ebnf", {"ebnf": "root ::= [a-f]{40}"}, matches("[a-f]{40}")),
]
SPARED = {"regex": "[g-k]{40}", "max_new_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 7}


@pytest.mark.parametrize("kind", LONG, ids=lambda kind: kind.name)
@pytest.mark.parametrize("door", DOORS["native"][:4], ids=lambda door: door.__name__)
def test_a_failing_constraint_raises_from_the_engine(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, kind: Kind, door: Callable[..., Any]
) -> None:
    Failing(monkeypatch)
    with pytest.raises(GrammarTooLarge, match="more than 7 states"):
        door(server, kind)
    assert server.engine.check_ledger() == []


HTTP = {
    "/generate": lambda kind: {"text": "so", "sampling_params": sampling(kind)},
    "/v1/completions": lambda kind: openai_body(kind, prompt="so"),
    "/v1/chat/completions": lambda kind: openai_body(kind, messages=HELLO),
}


def several(path: str, kind: Kind) -> dict[str, Any]:
    """A body that asks for two samples."""
    body = HTTP[path](kind)
    return body | ({"sampling_params": {**sampling(kind), "n": 2}} if path == "/generate" else {"n": 2})


@pytest.mark.parametrize("kind", LONG, ids=lambda kind: kind.name)
@pytest.mark.parametrize("path", HTTP)
@pytest.mark.parametrize("is_one", [True, False])
def test_a_failing_constraint_is_a_400(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, kind: Kind, path: str, is_one: bool
) -> None:
    Failing(monkeypatch)
    answer = server.post(path, HTTP[path](kind) if is_one else several(path, kind))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["message"]) == ("invalid_grammar", "the grammar has more than 7 states")


@pytest.mark.parametrize("kind", LONG, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("path", "body"), [*HTTP.items(), *((path, partial(several, path)) for path in list(HTTP)[1:])]
)
def test_a_failing_constraint_is_an_error_event(
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    path: str,
    body: Callable[[Kind], dict[str, Any]],
) -> None:
    Failing(monkeypatch)
    answer = server.post(path, {**body(kind), "stream": True})
    assert answer.status_code == 200  # the first token was there
    *pieces, last = events_of(answer.text)
    assert pieces
    assert (last["error"]["code"], last["error"]["message"]) == (
        "invalid_grammar",
        "the grammar has more than 7 states",
    )


@pytest.mark.parametrize("kind", LONG, ids=lambda kind: kind.name)
@pytest.mark.parametrize("door", DOORS["gen"], ids=lambda door: door.__name__)
def test_a_failing_constraint_is_the_nodes_error(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, kind: Kind, door: Callable[..., Any]
) -> None:
    Failing(monkeypatch)
    with pytest.raises(ProgramError, match="more than 7 states"):
        door(server, kind)


def test_other_rows_go_on_when_one_constraint_fails(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = server.engine.generate("so", SPARED)["text"]
    Failing(monkeypatch, spared=SPARED["regex"])
    params = [sampling(LONG[0]), SPARED, sampling(LONG[1]), SPARED]
    for failed, spared in (0, 1), (2, 3):
        results = server.engine.generate(["so"] * 4, params)
        reason = results[failed]["meta_info"]["finish_reason"]
        assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", 400, "GrammarTooLarge")
        assert "more than 7 states" in reason["message"]
        assert results[spared]["text"] == alone
    body = {"text": ["so"] * 4, "sampling_params": params, "stream": True}
    last = {event["index"]: event for event in events_of(server.post("/generate", body).text)}
    assert [last[i]["meta_info"]["finish_reason"]["type"] for i in range(4)] == ["abort", "stop"] * 2
