"""Programs behind prefill and decode workers: their beginnings are computed apart, and their values stay the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import requests
from aiohttp import web

import sgl
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import PrefixTemplate
from sgl.runtime.engine import Engine
from sgl.runtime.gateway.app import Gateway
from sgl.runtime.program.first_prompt import FirstPrompt, first_prompt_of
from sgl.runtime.program.tokens import Encoder
from sgl.runtime.server.program_pages import MOST_ROWS
from tests.live_server import served
from tests.patience import PATIENCE
from tests.test_gateway import MockWorker, breaks, gateway_of, run, until, value
from tests.test_gateway_pairs import ended, generated, pairs, post
from tests.test_transfers_engine import TEMPLATE, assert_all_is_back, decode, key, path, plain, prefill, state

__all__ = ["decode", "key", "path", "plain", "prefill"]  # fixtures

TEXT = "It was a long winter, and the short summer that followed it was no better"
GEN = ir.Gen("x", params={"max_tokens": 5})


@sgl.function
def asks(s: sgl.ProgramState, topic: str) -> None:
    s += TEXT + topic
    s += sgl.gen("first", max_tokens=6, temperature=1.0)
    if len(s["first"]) % 2:  # observed: another segment
        s += " odd"
    s += sgl.gen("second", max_tokens=4, regex="[a-c]+")


@sgl.function
def branches(s: sgl.ProgramState, topic: str) -> None:
    s += TEXT
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += f" {number} {topic}" + sgl.gen("thought", max_tokens=5, temperature=1.0)
    forks.join("concate_and_append")
    s += sgl.gen("first", max_tokens=4)


@sgl.function
def chooses(s: sgl.ProgramState, topic: str) -> None:
    s += sgl.user(TEXT + topic)
    s += sgl.assistant(sgl.select("first", ["yes", "no"]) + sgl.gen("second", max_tokens=4, temperature=0.5))


def read(s: Any) -> tuple[str, str]:
    return s["first"], s.text()


def gateway_test(
    prefill: Engine, decode: Engine, plain: Engine, test: Callable[[Gateway, str, str, Callable[[], None]], None]
) -> None:
    """Run a test in a thread, before one of each. It gets the gateway, its URL, a plain server's, and what has the
    engines forget what they computed."""
    with (
        served(prefill, template=TEMPLATE) as one,
        served(decode, template=TEMPLATE) as other,
        served(plain, template=TEMPLATE) as alone,
    ):

        async def around() -> None:
            async with gateway_of(min_prefill_tokens=8) as (gateway, _, client):
                gateway.servers.add(one.url)
                gateway.servers.add(other.url)
                await until(lambda: {its.mode for its in gateway.servers.values()} == {"prefill", "decode"})
                async with client.get("/health") as answer:
                    url = str(answer.url.origin())

                def forget() -> None:
                    for engine in (prefill, decode):
                        engine.flush_cache()
                    gateway.fleet.index.cleared(other.url)

                await asyncio.to_thread(test, gateway, url, alone.url, forget)
                await until(lambda: not state(prefill)["num_transfer_leases"])

        run(around)
    assert_all_is_back(prefill)
    assert_all_is_back(decode)


def test_values_are_those_of_one_engine(prefill: Engine, decode: Engine, plain: Engine) -> None:
    def test(gateway: Gateway, url: str, alone: str, forget: Callable[[], None]) -> None:
        cases = [(asks, False), (asks, True), (branches, False), (chooses, False)]
        found_at, wanted_at = sgl.RuntimeEndpoint(url), sgl.RuntimeEndpoint(alone)
        for number, (program, stream) in enumerate(cases):
            forget()
            pulled = state(decode)["transfer_pulled_tokens"]
            wanted = read(program.run(" of a town", backend=wanted_at, seed=3))
            assert read(program.run(" of a town", backend=found_at, seed=3, stream=stream)) == wanted
            assert value(gateway, "pairs_total", outcome="paired") == number + 1
            assert state(decode)["transfer_pulled_tokens"] - pulled >= 48
        assert state(decode)["num_transfers_failed"] == 0

    gateway_test(prefill, decode, plain, test)


def test_each_row_of_a_batch_brings_its_own_pages(prefill: Engine, decode: Engine, plain: Engine) -> None:
    rows = [{"args": {"x": TEXT[number : 50 + number]}, "seed": number} for number in (1, 2, 3)]
    rows.append({**rows[-1], "seed": 7})  # another value, of the same beginning
    nodes = [
        {"st": 0, "op": "text", "text": "Of "},
        {"st": 0, "op": "arg", "name": "x"},
        {"st": 0, "op": "gen", "name": "y", "params": {"max_tokens": 8, "temperature": 1.0}},
    ]
    program = {"v": 1, "name": "p", "seed": 1, "args": {}}
    body = {"program": program, "segment": {"nodes": nodes, "final": True}, "rows": rows}

    def texts(url: str) -> dict[int, str]:
        answer = requests.post(f"{url}/v1/programs", json=body, timeout=PATIENCE)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        return {event["row"]: event["text"] for event in events if event["type"] == "node_done"}

    def test(gateway: Gateway, url: str, alone: str, forget: Callable[[], None]) -> None:
        pulled = state(decode)["transfer_pulled_tokens"]
        wanted = texts(alone)
        assert len(wanted) == len(rows)
        assert texts(url) == wanted
        assert value(gateway, "pairs_total", outcome="paired") == 1
        assert state(decode)["num_transfers_failed"] == 0
        assert state(decode)["transfer_pulled_tokens"] - pulled >= 3 * 24

    gateway_test(prefill, decode, plain, test)


PROGRAM: dict[str, Any] = {
    "program": {"v": 1, "name": "p", "seed": 1},
    "segment": {
        "nodes": [
            {"st": 0, "op": "text", "text": "x" * 2000},
            {"st": 0, "op": "gen", "name": "y", "params": {"max_tokens": 8}},
        ],
        "final": True,
    },
}


async def computes(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    if request.path == "/end_kv_transfer":
        return web.json_response({"ended": 1})
    offers = [{"lease": f"{len(worker.requests)}"}, None]
    return web.json_response({"kv_transfer_params": offers})


async def runs(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    events = [{"type": "opened", "id": "its"}, {"type": "done"}]
    text = "".join(f"id: {i}\ndata: {json.dumps(event)}\n\n" for i, event in enumerate(events, 1))
    return web.Response(text=text, content_type="text/event-stream")


async def refuses_pages(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    if "kv_transfer_params" in await request.json():
        return web.json_response({"error": {"message": "kv_transfer_params is of another model"}}, status=400)
    return await runs(request, worker)


async def opened(client: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    async with client.post("/v1/programs", json=body, headers={"Authorization": "Bearer k"}) as answer:
        return await answer.text()


def test_a_program_goes_with_the_pages_of_its_beginning() -> None:
    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        first, second = workers
        assert '"done"' in await opened(client, PROGRAM)
        [asked], [sent] = generated(first), generated(second)
        assert asked == {**PROGRAM, "return_kv_transfer_params": True}
        assert sent == {**PROGRAM, "kv_transfer_params": [{"lease": "1"}, None]}
        assert [headers["authorization"] for _, _, headers in first.requests] == ["Bearer k"]
        await opened(client, PROGRAM)  # it is there since then
        nodes = PROGRAM["segment"]["nodes"]
        short = {"st": 0, "op": "text", "text": "short"}
        for segment in ({"nodes": [short, nodes[1], nodes[0]]}, {"nodes": []}, None):  # long after it generates
            await opened(client, {**PROGRAM, "segment": segment})
        assert len(first.requests) == 1
        assert value(gateway, "pairs_total", outcome="short") == 4
        for name, given in (("kv_transfer_params", [None]), ("return_kv_transfer_params", True)):
            status, answer = await post(client, "/v1/programs", {**PROGRAM, name: given})
            assert (status, answer["error"]["param"]) == (400, name)
        assert ended(first) == []

    pairs(test, "PD", computes, runs)


def test_a_program_runs_without_pages_that_are_refused_or_that_nobody_computes() -> None:
    async def refused(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        assert '"done"' in await opened(client, PROGRAM)
        assert ["kv_transfer_params" in body for body in generated(workers[1])] == [True, False]
        await until(lambda: ended(workers[0]) == [[{"lease": "1"}, None]])
        assert value(gateway, "pairs_total", outcome="refused") == 1

    async def failed(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        assert '"done"' in await opened(client, PROGRAM)
        assert generated(workers[1]) == [PROGRAM]
        assert value(gateway, "pairs_total", outcome="failed") == 1

    async def computes_nothing(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.json_response({"kv_transfer_params": None})

    pairs(refused, "PD", computes, refuses_pages)
    pairs(failed, "PD", breaks, runs)
    pairs(failed, "PD", computes_nothing, runs)


def test_over_http_the_params_are_fields_of_programs(prefill: Engine, decode: Engine) -> None:
    body = {**PROGRAM, "segment": {"nodes": [{"st": 0, "op": "text", "text": TEXT}], "final": True}}
    with served(prefill, template=TEMPLATE) as one, served(decode, template=TEMPLATE) as other:
        [params] = one.post("/v1/programs", {**body, "return_kv_transfer_params": True}).json()[
            "kv_transfer_params"
        ]
        assert other.post("/v1/programs", {**body, "kv_transfer_params": [params]}).status_code == 200
        for wrong, match in (
            ({"kv_transfer_params": [{**params, "port": 1}]}, "not signed"),
            ({"kv_transfer_params": [params], "segment": None}, "needs a segment"),
            ({"kv_transfer_params": [params, params]}, "one for each row"),
            ({"return_kv_transfer_params": True}, "disaggregation_mode='prefill'"),
        ):
            answer = other.post("/v1/programs", {**body, **wrong})
            assert (answer.status_code, match in answer.text) == (400, True), answer.text
        short = {"nodes": [{"st": 0, "op": "text", "text": "x"}], "final": True}
        answer = one.post("/v1/programs", {**body, "segment": short, "return_kv_transfer_params": True})
        assert [offer["num_pages"] for offer in answer.json()["kv_transfer_params"]] == [0]
        rows = [{"args": {}}] * (MOST_ROWS + 1)
        answer = one.post("/v1/programs", {**body, "rows": rows, "return_kv_transfer_params": True})
        offers = answer.json()["kv_transfer_params"]
        assert [offer is None for offer in offers] == [False] + [True] * (MOST_ROWS - 1)
        ends = other.post("/v1/programs", {**body, "rows": rows, "kv_transfer_params": offers})
        assert ends.status_code == 200
    assert_all_is_back(prefill)
    assert_all_is_back(decode)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([(0, ir.Text("one ")), (0, ir.Arg("x")), (0, GEN), (0, ir.Text("late"))], "one two"),
        ([(0, ir.Text("one ")), (0, ir.Select("y", ("a", "b")))], "one "),
        ([(0, ir.Text("one ")), (0, ir.Fork((1, 2))), (2, GEN), (1, ir.Text("two")), (1, GEN)], "one two"),
        ([(0, ir.Text("one ")), (0, ir.Media("image", "AAAA")), (0, GEN)], "one "),
        ([(0, ir.RoleBegin("user")), (0, ir.Text("one")), (0, ir.RoleEnd("user")), (0, GEN)], "[user]one[/user]"),
        ([(0, ir.Text("all of it"))], "all of it"),
        ([(0, GEN)], None),
        ([(0, ir.Text("one ")), (0, replace(GEN, params={"extra": {"lora_path": "its"}}))], None),
    ],
)
def test_a_beginning_is_the_text_up_to_what_runs(plain: Engine, nodes: Any, expected: str | None) -> None:
    assert plain.tokenizer is not None
    program = ir.Program("p", 1, args={"x": "two"})
    template = PrefixTemplate("brackets", {"user": ("[user]", "[/user]")})
    found = first_prompt_of(program, ir.Segment(tuple(nodes)), template, Encoder(plain.tokenizer))
    if expected is None:
        assert found is None
    else:
        is_written = expected.startswith("[")  # by a template, which opens the text itself
        ids = plain.tokenizer.encode(expected, add_special_tokens=not is_written)
        assert found == FirstPrompt(ids.tolist(), None)
