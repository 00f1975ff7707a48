"""What an operator does to a gateway while requests run: workers added twice, taken away, and clients that leave."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections import deque
from typing import Any
from urllib.parse import quote

import pytest
import requests
from aiohttp import web
from yarl import URL

from sgl.errors import ConfigError, QueueFull
from sgl.runtime.gateway import index
from sgl.runtime.gateway import workers as workers_of
from sgl.runtime.gateway.app import Gateway
from sgl.runtime.gateway.config import GatewayConfig
from sgl.runtime.gateway.fleet import Fleet
from sgl.runtime.gateway.index import PrefixIndex
from sgl.runtime.gateway.limits import Limits
from sgl.runtime.gateway.policy import Demand
from sgl.runtime.server.training import TrainingApi
from tests.patience import PATIENCE
from tests.test_gateway import ADMIN, MockWorker, echo, gateway_of, run, until, value
from tests.test_gateway_pairs import PROMPT, computes, info, refuses_pages


def test_a_worker_that_is_added_again_keeps_what_runs_there_and_drains_no_longer() -> None:
    goes_on = asyncio.Event()

    async def slow(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await goes_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def test() -> None:
        async with gateway_of(slow) as (gateway, [worker], client):
            headers = {"Authorization": f"Bearer {ADMIN}"}
            answer = await client.post("/generate", json={"text": "x", "stream": True})
            assert await answer.content.readline() == b"data: 1\n"
            for _ in range(2):
                added = await client.post("/workers", json={"url": f"{worker.url}/"}, headers=headers)
                assert [each["in_flight"] for each in (await added.json())["workers"]] == [1]
            await client.delete("/workers", params={"id": worker.url}, headers=headers)
            assert gateway.servers.ready() == []
            [known] = (await (await client.post("/workers", json={"url": worker.url}, headers=headers)).json())[
                "workers"
            ]
            assert (known["is_draining"], known["in_flight"]) == (False, 1)
            assert [its.url for its in gateway.servers.ready()] == [worker.url]
            goes_on.set()
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
            await until(lambda: not any(each.in_flight for each in gateway.fleet.workers))

    run(test)


def test_trainers_ask_each_worker() -> None:
    """Through a gateway, one worker alone would be paused, or have new weights."""
    asked: list[str] = []

    async def worker(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({})

    async def test() -> None:
        service: Any = None
        paths = [route.path for route in TrainingApi(service).routes() if route.method == "POST"]
        assert len(paths) > 10
        async with gateway_of(worker) as (_, _, client):
            for path in paths:
                answer = await client.post(path, json={})
                assert answer.status == 400, path
                assert "/workers lists their URLs" in (await answer.json())["error"]["message"]
        assert not {*asked} & {*paths}

    run(test)


def test_the_last_worker_may_go_while_it_is_measured() -> None:
    now = 0.0
    fleet = Fleet(clock=lambda: now)
    fleet.add("a")
    first, second = (fleet.route(Demand(prompt=100.0, generated=10.0)) for _ in range(2))
    now = 100.0
    fleet.remove("a")
    first.first_byte()
    first.end()
    again = fleet.add("a")  # another one
    second.end()
    assert (again.in_flight, again.work, again.rate) == (0, 0.0, 1.0)


@pytest.mark.parametrize("number", [2, 3])
def test_a_client_that_leaves_while_it_is_passed_over_leaves_like_others(number: int) -> None:
    async def test() -> None:
        limits = Limits(GatewayConfig(max_in_flight=1, max_waiting=10))
        held = limits.place()
        await held.__aenter__()

        async def wait() -> None:
            async with limits.place():
                pass

        tasks = [asyncio.ensure_future(wait()) for _ in range(number)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await held.__aexit__(None, None, None)  # before it has noticed
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        assert ends[1:] == [None] * (number - 1)
        assert limits.num_waiting == 0
        async with limits.place():
            assert limits.num_waiting == 0, "it is free"
        full = Limits(GatewayConfig(max_in_flight=1, max_waiting=0))
        async with full.place():
            with pytest.raises(QueueFull):
                await full.place().__aenter__()
        async with full.place():
            pass

    run(test)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_half_closes_its_connection_has_left(is_stream: bool) -> None:
    """As nginx has it, too: who has only ended its own side cannot be told from who is gone."""
    left = asyncio.Event()

    async def answer(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if is_stream:
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        left.set()
        return response

    async def test() -> None:
        async with gateway_of(answer) as (gateway, [worker], client):
            base = client._base_url
            assert base is not None
            reader, writer = await asyncio.open_connection(base.host, base.port)
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            await until(lambda: bool(worker.requests))
            begun = await reader.readuntil(b"data: 1\n\n") if is_stream else b""
            writer.write_eof()
            rest = await reader.read()
            writer.close()
            assert (begun[:12], rest.strip()) == ((b"HTTP/1.1 200", b"") if is_stream else (b"", b""))
            await left.wait()
            await until(lambda: value(gateway, "requests_total", path="/generate", status="499") == 1)
            assert [each.in_flight for each in gateway.fleet.workers] == [0]

    run(test)


def test_a_worker_that_claims_endless_room_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST_ROOM", 100)
    known = PrefixIndex()
    known.set_room("w", 10**14)
    for first in range(0, 1000, 50):
        known.sent("w", range(first, first + 50))
    assert len(known._sent["w"]) == len(known._guessed) == 100


def test_workers_are_listed_as_clients_of_sglangs_router_read_them() -> None:
    async def test() -> None:
        async with gateway_of(echo, echo) as (gateway, workers, client):
            urls = [worker.url for worker in workers]
            found = await (await client.get("/workers")).json()
            assert [worker["url"] for worker in found["workers"]] == urls
            assert (found["total"], found["stats"]) == (
                2,
                {"regular_count": 2, "prefill_count": 0, "decode_count": 0},
            )
            assert all(each["is_healthy"] and each["worker_type"] == "regular" for each in found["workers"])
            assert await (await client.get("/list_workers")).json() == {"urls": urls}
            path = f"/workers/{quote(urls[0], safe='')}"
            async with client.get(URL(path, encoded=True)) as answer:
                assert (await answer.json())["url"] == urls[0]
            async with client.get("/workers/http://nobody") as answer:
                assert answer.status == 400
                assert "there is no worker 'http://nobody'" in await answer.text()
            async with client.delete(URL(path, encoded=True)) as answer:
                assert answer.status == 401
            admin = {"Authorization": f"Bearer {ADMIN}"}
            async with client.delete(URL(path, encoded=True), headers=admin) as answer:
                assert [its["is_draining"] for its in (await answer.json())["workers"]] == [True, False]
            assert [its.url for its in gateway.servers.ready()] == urls[1:]
            closed = "http://127.0.0.1:9"
            await client.post("/workers", json={"url": closed, "id": "w3"}, headers=admin)
            path = f"/workers/{quote(closed, safe='')}"
            async with client.get(URL(path, encoded=True)) as answer:
                assert (await answer.json())["id"] == "w3"
            async with client.delete(URL(f"{path}?now=true", encoded=True), headers=admin) as answer:
                assert [its["id"] for its in (await answer.json())["workers"]] == urls
            async with client.delete(URL(path, encoded=True), headers=admin) as answer:
                assert f"there is no worker '{closed}': /workers lists them" in await answer.text()
            async with client.post("/workers/w4", json={"url": closed}, headers=admin) as answer:
                assert answer.status == 405

    run(test)


def held(root: object, names: set[str]) -> set[str]:
    """Where below an object a text is kept that has one of the names in it."""
    found, seen, left = set[str](), set[int](), [("", root)]
    while left:
        where, its = left.pop()
        if isinstance(its, str):
            found |= {where} if any(name in its for name in names) else set()
            continue
        if id(its) in seen:
            continue
        seen.add(id(its))
        if isinstance(its, (dict, list, set, frozenset, tuple, deque)):
            left += ((where, each) for each in its)
        if isinstance(its, dict):
            left += ((where, each) for each in its.values())
        if type(its).__module__.startswith(("sgl.runtime.gateway", "prometheus_client")):
            slots = [name for base in type(its).__mro__ for name in getattr(base, "__slots__", ())]
            for name in [*getattr(its, "__dict__", ()), *slots]:
                left.append((f"{type(its).__name__}.{name}", getattr(its, name, None)))
    return found


def test_nothing_of_workers_that_have_left_is_kept() -> None:
    """They may come and go for months. How many remembered places there are has a bound of its own."""
    bounded = {"Passing.stored", "Fleet._homes"}

    async def answers(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        is_for_pages = (await request.json()).get("return_kv_transfer_params")
        return await (computes if is_for_pages else refuses_pages)(request, worker)

    async def responds(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if request.path == "/v1/responses":
            return web.json_response({"id": "resp_1"})
        return await answers(request, worker)

    async def test() -> None:
        async with gateway_of(responds, responds, min_prefill_tokens=1) as (gateway, workers, client):
            ids, names = [its.url for its in workers], set[str]()
            for number in range(20):
                for its, mode in zip(workers, ("prefill", "decode"), strict=True):
                    its.info = info(mode)
                    gateway.servers.remove(ids.pop(0), now=number % 2 == 0)
                    ids.append(f"{mode}-{number}.")
                    gateway.servers.add(its.url, ids[-1])
                await until(lambda: all(its.mode for its in gateway.servers.values()))
                headers = {"X-Session-Id": f"of-{number}"}
                for path, body in (("/generate", {"input_ids": PROMPT}), ("/v1/responses", {"input": "x"})):
                    answer = await client.post(path, json=body, headers=headers)
                    assert (answer.status, answer.headers["X-Sgl-Worker"]) == (200, f"decode-{number}.")
                assert f"decode-{number}." in await (await client.get("/metrics")).text()
                names |= {*ids}
            found = {where.partition(".")[0] for where in held(gateway, {*ids})}
            assert found > {"Passing", "Fleet", "Pairs", "Counter", "PrefixIndex"}
            assert held(gateway, names - {*ids}) <= bounded
            sent = gateway.metrics.counts()["sent"]
            for each in ids:
                gateway.servers.remove(each)
            await asyncio.gather(*gateway.servers._leaving, return_exceptions=True)
            assert "prefill-19." not in await (await client.get("/metrics")).text()
            assert held(gateway, {*ids}) <= bounded
            assert gateway.metrics.counts()["sent"] == sent > 40
            assert not gateway.fleet.index._guessed

    run(test)


def test_a_worker_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_of, "MOST_WORKERS", 2)

    async def test() -> None:
        async with gateway_of(echo, echo) as (gateway, workers, client):
            headers = {"Authorization": f"Bearer {ADMIN}"}
            for url, status in ((workers[0].url, 200), ("http://127.0.0.1:1", 400)):
                async with client.post("/workers", json={"url": url}, headers=headers) as answer:
                    assert answer.status == status
                    assert ("at most 2 workers" in await answer.text()) == (status == 400)
            gateway.servers.remove(workers[0].url)
            assert (
                await client.post("/workers", json={"url": "http://127.0.0.1:1"}, headers=headers)
            ).status == 200

    run(test)
    with pytest.raises(ConfigError, match="at most 2 workers"):
        Gateway(workers=[f"http://127.0.0.1:{port}" for port in range(1, 4)])


@pytest.mark.parametrize("output", ["/dev/full", ">(true)"])
def test_a_gateway_serves_though_nobody_can_be_told_of_it(output: str) -> None:
    command = f"exec {sys.executable} -m sgl gateway --port 0 --worker http://127.0.0.1:1 > {output}"
    with subprocess.Popen(["bash", "-c", command], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "standard output takes no more" in line)
        url = re.search(r"http://127.0.0.1:\d+", line)
        assert url is not None
        assert requests.get(f"{url[0]}/health", timeout=PATIENCE).json()["workers"] == 1
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(PATIENCE) == 0
