"""What a gateway reads of bodies, and that no body holds up other requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from sgl.errors import InvalidRequest
from sgl.runtime.gateway import app, reading
from sgl.runtime.gateway.demands import facts_of
from sgl.runtime.gateway.openings import parts_of, segment_of, with_deadline
from sgl.runtime.gateway.reading import Reader
from sgl.runtime.server import bodies
from tests.test_gateway import MockWorker, echo, gateway_of, run, until
from tests.test_gateway_hostile import opened, program_of, stays

NONE = frozenset[str]()  # adapters of a worker

TEXT = {"st": 0, "op": "text", "text": "A beginning that all rows share, and which is long. " * 8}
NODES = [
    TEXT,
    {"st": 0, "op": "arg", "name": "x"},
    {"st": 0, "op": "gen", "name": "y", "params": {"max_tokens": 64}},
]


def program(number: int = 24, **more: Any) -> bytes:
    rows = [{"args": {"x": f"ü{i}"}, "seed": i} for i in range(number)]
    head = {"v": 1, "name": "p", "seed": 1, **more}
    return json.dumps(
        {"program": head, "rows": rows, "segment": {"nodes": NODES, "final": True}, "more": 1}
    ).encode()


def test_rows_are_shared_out_with_all_else_that_a_body_holds() -> None:
    data = program()
    given = json.loads(data)
    parts = parts_of(data, "s", [NONE] * 3)
    assert [(part.first_row, part.num_rows) for part in parts] == [(0, 8), (8, 8), (16, 8)]
    for part in parts:
        assert part.body is not None
        first = part.first_row or 0
        assert json.loads(part.body) == {**given, "rows": given["rows"][first : first + 8]}
        assert part.demand.session == "s"
        assert part.demand.generated == 8 * 64
    assert parts[0].demand.blocks == parts_of(data, None, [NONE])[0].demand.blocks
    assert parts_of(data, None, [NONE])[0].body is None, "the client's"


def gen(**extra: Any) -> dict[str, Any]:
    return {"st": 0, "op": "gen", "name": "x", "params": {"extra": extra} if extra else {}}


SELECT = {"st": 0, "op": "select", "name": "y", "choices": ["a", "b"]}


@pytest.mark.parametrize(
    ("nodes", "is_final", "expected"),
    [
        ([gen()], True, {"a"}),
        ([gen(lora_path="b")], True, {"b"}),
        ([gen(lora_path="b")], False, {"a", "b"}),
        ([gen(lora_path="b"), SELECT], True, {"a", "b"}),
        ([gen(extra_key="k")], True, set()),
        ([TEXT], True, set()),
        ([TEXT], False, {"a"}),
        ([gen(lora_path="unknown"), gen(lora_path=["b"]), gen(lora_path=None)], True, set()),
    ],
)
def test_a_program_asks_for_the_adapters_that_its_nodes_and_defaults_name(
    nodes: list[dict[str, Any]], is_final: bool, expected: set[str]
) -> None:
    """What a node gives in `extra` takes the place of the defaults' whole, as in an engine."""
    head = {"v": 1, "name": "p", "seed": 1, "defaults": {"extra": {"lora_path": "a"}}}
    opening = {"program": head, "rows": [{"args": {}}] * 2, "segment": {"nodes": nodes, "final": is_final}}
    for body in (opening, {**opening, "rows": None}):
        parts = parts_of(json.dumps(body).encode(), None, [NONE] * 2, frozenset("abc"))
        assert {part.demand.adapters for part in parts} == {frozenset(expected)}


def test_rows_are_shared_out_among_workers_that_have_their_adapters() -> None:
    data = program(defaults={"extra": {"lora_path": "a"}})
    workers = [frozenset("ab"), frozenset("b"), frozenset("a"), NONE]
    assert [part.num_rows for part in parts_of(data, None, workers, frozenset("ab"))] == [12, 12]
    assert [part.num_rows for part in parts_of(data, None, workers[1:2], frozenset("ab"))] == [24], (
        "who starts has it"
    )
    assert [part.num_rows for part in parts_of(data, None, workers)] == [6] * 4, "nobody has"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([TEXT, gen(lora_path="a"), SELECT, gen(lora_path="c")], {"a"}),
        ([*([TEXT] * 900), gen(lora_path="b")], {"b"}),
        ([gen(), TEXT], set()),
        ([gen(lora_path=["a"]), {"op": "gen", "params": {"extra": 1}}, gen(lora_path="a")], set()),
        ([1], set()),
    ],
)
def test_a_later_segment_asks_for_the_adapters_that_it_names(nodes: list[Any], expected: set[str]) -> None:
    data = json.dumps({"segment": {"nodes": nodes}, "number": 2}).encode()
    number, segment, adapters = segment_of(data, frozenset("ab"))
    assert (number, json.loads(segment), adapters) == (2, {"nodes": nodes}, expected)


def test_a_segment_of_bytes_that_are_no_text_is_the_workers_to_refuse() -> None:
    segment = b'{"nodes": [{"st": 0, "op": "gen", "name": "\xff", "params": {}}]}'
    assert segment_of(b'{"segment": ' + segment + b"}", frozenset("a")) == (None, segment, frozenset())


@pytest.mark.parametrize("data", [b'{"\xff": 1}', b'{"segment": {}, "number": ' + b"1" * 5000 + b"}"])
def test_what_no_worker_could_read_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        segment_of(data)
    with pytest.raises(InvalidRequest):
        parts_of(b'{"\xff": 1}', None, [])


@pytest.mark.parametrize(
    "body", ['{"program": 1}', "{}", '{"program": {"v": 1}, "rows": 3}', '{"program": {"x": 1}, "segment": [1]}']
)
def test_what_a_worker_refuses_reaches_one_as_it_is(body: str) -> None:
    assert [part.body for part in parts_of(body.encode(), None, [NONE] * 4)] == [None]


@pytest.mark.parametrize("body", ["[]", "", "{", '{"program": NaN', "\ufeff{}", "[" * 5000])
def test_what_is_no_object_is_refused(body: str) -> None:
    with pytest.raises(InvalidRequest, match="JSON object"):
        parts_of(body.encode(), None, [NONE] * 4)


def test_a_deadline_is_put_in_the_place_of_another() -> None:
    data = program(deadline_s=9.0)
    assert [part.deadline for part in parts_of(data, None, [NONE] * 2)] == [9.0, 9.0]
    given = json.loads(data)
    assert json.loads(with_deadline(data, 0.25)) == {**given, "program": {**given["program"], "deadline_s": 0.25}}


def test_bodies_of_any_size_are_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are the names of their blocks: each process of Python hashes texts in its own way."""
    chat = {
        "messages": [{"role": "user", "content": "hello world " * 2000}],
        "timeout": 3,
        "conversation": "c" * 900,
    }
    calls: list[tuple[Any, bytes, tuple[Any, ...]]] = [
        (facts_of, json.dumps(chat).encode(), ("/v1/chat/completions", None)),
        (facts_of, json.dumps({"input_ids": list(range(9000)), "extra_key": "k"}).encode(), ("/generate", "s")),
        (facts_of, b"[1" + b",1" * 9000, ("/generate", None)),
        (
            parts_of,
            program(200, chat_template="chatml", defaults={"extra": {"lora_path": "a"}}),
            (None, [frozenset("a")] * 3, frozenset("ab")),
        ),
        (segment_of, json.dumps({"segment": {"nodes": [TEXT] * 900}, "number": 3}).encode(), (frozenset("ab"),)),
    ]

    async def test() -> None:
        reader = Reader()
        with monkeypatch.context() as patched:
            patched.setattr(reading, "_FEW_BYTES", 0)
            patched.setattr(reading, "SMALL_BYTES", 0)
            found = [await reader.read(function, data, *more) for function, data, more in calls]
            with pytest.raises(InvalidRequest, match="segment"):
                await reader.read(segment_of, b'{"segment": 1, "more": ' + b"1" * 5000 + b"}")
        assert found == [function(data, *more) for function, data, more in calls]
        assert found[0].demand.blocks
        assert (found[3][0].demand.adapters, bool(found[3][0].demand.blocks)) == ({"a"}, True)
        reader.close()

    run(test)


def test_while_large_bodies_are_read_other_requests_are_answered() -> None:
    large = program(1, args={"z": "ü" * (600 << 10)})

    async def test() -> None:
        async with gateway_of(program_of(stays), program_of(stays)) as (gateway, workers, client):
            for worker in workers:
                worker.keeps_requests = False
            reader = gateway._reader
            for _ in range(reading.AT_ONCE):
                await reader.turns.acquire()  # as if others were read
            ids = {"input_ids": list(range(20_000))}
            asked = [
                asyncio.ensure_future(client.post("/v1/programs", data=large)),
                asyncio.ensure_future(client.post("/generate", json=ids)),
            ]
            await until(lambda: reader.num_reading == 2)
            assert (await client.post("/generate", json={"text": "x"})).status == 200
            async with opened(client, {}) as path:
                assert (await client.post(path + "/segments", json={"segment": {"nodes": []}})).status == 200
                assert (await client.get("/metrics")).status == 200
            assert reader.num_reading == 2
            for _ in range(reading.AT_ONCE):
                reader.turns.release()
            assert {(await each).status for each in asked} == {200}
            for each in asked:
                each.result().close()

    run(test)


def test_a_body_whose_client_left_holds_its_turn_until_its_process_ends() -> None:
    async def test() -> None:
        reader = Reader()
        data = program(1, args={"z": "u" * (2 << 20)})
        left = [asyncio.ensure_future(reader.read(parts_of, data, None, [NONE])) for _ in range(reading.AT_ONCE)]
        await until(reader.turns.locked)
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert reader.turns.locked()
        assert len(await reader.read(parts_of, data, None, [NONE])) == 1
        reader.close()

    run(test)


def test_too_many_values_are_refused_or_passed_on_unread_and_so_is_more_than_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def takes(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        assert len(await request.content.read()) > 3 << 20
        return await echo(request, worker)

    async def test() -> None:
        async with gateway_of(takes) as (gateway, workers, client):
            workers[0].keeps_requests = False
            data = b'{"text": [' + b"[]," * (bodies.MAX_VALUES // 2 + 9) + b"1]}"
            answer = await client.post("/v1/programs", data=data)
            assert (answer.status, "values" in await answer.text()) == (400, True)
            assert (await client.post("/generate", data=data)).status == 200
            monkeypatch.setattr(app, "READ_BYTES", 1 << 20)
            monkeypatch.setattr(gateway._reader, "read", None)
            assert (await client.post("/generate", data=data)).status == 200

    run(test)


@pytest.mark.parametrize(
    ("given", "seconds", "expected"),
    [(None, 2.0, 2.0), (9.0, 2.0, 2.0), (1, 2.0, 1.0), ("3", 2.0, None), (0, 2.0, None), (True, 2.0, None)],
)
def test_a_program_is_due_when_its_request_is(given: Any, seconds: float, expected: float | None) -> None:
    """What is no deadline is the worker's to refuse."""
    [part] = parts_of(program(0, deadline_s=given), None, [NONE], NONE, seconds)
    assert part.deadline == expected
