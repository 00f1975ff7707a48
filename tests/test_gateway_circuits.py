"""When a gateway leaves a worker alone whose requests fail: a few pay for what is wrong with it, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sgl.runtime.gateway import app, passing
from sgl.runtime.gateway import workers as workers_of
from sgl.runtime.gateway.app import Gateway
from sgl.runtime.gateway.breaker import MOST_SECONDS, Breaker
from sgl.runtime.gateway.workers import Server
from tests.patience import PATIENCE
from tests.test_gateway import MockWorker, echo, gateway_of, run, until, value
from tests.test_gateway_broken import EVENTS, JSON, RawWorker, beside, endless, event, silent_after

FAILURES = 3


async def resets(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


WRONG = {"garbage": b"\x00\xff\x13 hello\r\n\r\n", "a reset": resets, "nothing": silent_after(b"")}
NEUTRAL = {
    "a model's list": ("GET", "/v1/models", JSON + b"Content-Length: 2\r\n\r\n{}"),
    "tokens": ("POST", "/tokenize", JSON + b"Content-Length: 2\r\n\r\n{}"),
    "a text": ("POST", "/v1/detokenize", JSON + b"Content-Length: 2\r\n\r\n{}"),
    "a count": ("POST", "/v1/messages/count_tokens", JSON + b"Content-Length: 2\r\n\r\n{}"),
    "a model that is there": ("POST", "/api/chat", JSON + b'Content-Length: 22\r\n\r\n{"done_reason":"load"}'),
    "a refusal": ("POST", "/tokenize", b"HTTP/1.1 400 X\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"),
    "a defect": ("POST", "/tokenize", b"HTTP/1.1 500 X\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"),
}
OPTIONS = {"breaker_failures": FAILURES, "breaker_seconds": 0.05, "worker_timeout": 0.2}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_worker_whose_health_hangs_is_tried_no_more_once_it_has_failed_a_few_times(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_of, "TIMEOUT", 0.1)
    monkeypatch.setattr(workers_of, "SILENT_SECONDS", 2 * PATIENCE)  # its looks alone do not find it
    raw = RawWorker(generate=WRONG[wrong], health=silent_after(b""))

    async def test() -> None:
        async with beside(raw, echo, **OPTIONS) as (gateway, _, client):
            server = gateway.servers[raw.url]
            await until(lambda: server.missed > 0)
            for _ in range(4 * FAILURES):
                assert (await client.post("/generate", json={"text": "x"})).status == 200
                await asyncio.sleep(0.02)  # its breaker half opens meanwhile, several times
            assert raw.asked.count("generate") == FAILURES
            assert server.is_up
            raw.answers["health"] = JSON + b"Content-Length: 2\r\n\r\n{}"
            await until(lambda: server.lets_pass)

    run(test)


@pytest.mark.parametrize("neutral", NEUTRAL)
def test_answers_that_no_engine_gave_do_not_speak_for_a_worker_that_fails(neutral: str) -> None:
    method, path, answer = NEUTRAL[neutral]
    raw = RawWorker(generate=WRONG["garbage"], **{path.rpartition("/")[2]: answer})

    async def test() -> None:
        async with beside(raw, echo, **{**OPTIONS, "breaker_seconds": 60.0}) as (gateway, _, client):
            for _ in range(3 * FAILURES):
                assert (await client.post("/generate", json={"text": "x"})).status == 200
                for _ in range(2):  # one of them goes there
                    await (await client.request(method, path, json={})).read()
            assert raw.asked.count("generate") == FAILURES
            assert gateway.servers[raw.url].breaker.is_open

    run(test)


@pytest.mark.parametrize("meta", [{}, {"finish_reason": {"type": "stop"}}])
def test_a_program_speaks_for_a_worker_whose_engine_computed_some_of_it(meta: dict[str, object]) -> None:
    """Not one that is all text, whose roles' marks come from there as well."""
    done = event(2, type="node_done", stream=0, index=0, text="a", value="a", meta=meta)
    told = EVENTS + event(1, type="opened", id="r") + done + event(3, type="done") + b"0\r\n\r\n"
    raw = RawWorker(generate=WRONG["garbage"], programs=told)

    async def test() -> None:
        async with beside(raw, **{**OPTIONS, "retries": 0, "breaker_seconds": 60.0}) as (gateway, _, client):
            for number in range(FAILURES):
                assert gateway.servers[raw.url].lets_pass, number
                assert (await client.post("/generate", json={"text": "x"})).status == 503
                if number < FAILURES - 1:
                    async with client.post("/v1/programs", json={"program": {"v": 1, "name": "p"}}) as answer:
                        assert b'"done"' in await answer.read()
            assert gateway.servers[raw.url].breaker.is_open == (not meta)

    run(test)


@pytest.mark.parametrize("how", ["deadline", "leaves"])
@pytest.mark.parametrize("patience", [0.5, 0.01])
@pytest.mark.parametrize("looks", ["fail", "are answered", "are rare"])
def test_a_worker_that_says_nothing_to_anybody_fails_those_whose_time_is_over(
    how: str, patience: float, looks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But who has little time, or no patience with one that answers its looks, makes no worker look broken."""
    monkeypatch.setattr(workers_of, "TIMEOUT", 0.2)
    raw = RawWorker(generate=silent_after(b""), **({"health": silent_after(b"")} if looks == "fail" else {}))
    rate = PATIENCE if looks == "are rare" else 0.05

    async def test() -> None:
        async with beside(
            raw, breaker_failures=FAILURES, breaker_seconds=60.0, worker_wait=0.05, probe_seconds=rate
        ) as (gateway, _, client):
            server = gateway.servers[raw.url]
            await until(lambda: server.missed > 0 or (looks != "fail" and "get_server_info" in raw.asked))
            headers = {"X-Sgl-Deadline-S": str(patience)} if how == "deadline" else {}
            limit = aiohttp.ClientTimeout(PATIENCE if how == "deadline" else patience)
            for number in range(FAILURES):
                assert not server.breaker.is_open
                with contextlib.suppress(TimeoutError):
                    async with client.post("/generate", json={}, headers=headers, timeout=limit) as answer:
                        assert answer.status == 408
                await until(lambda: not any(its.in_flight for its in gateway.fleet.workers))
                assert raw.asked.count("generate") == number + 1 or patience < 0.1
            assert server.breaker.is_open == (patience > 0.2 and looks == "fail")

    run(test)


def test_a_worker_that_answers_others_is_not_broken_for_those_whose_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers_of, "TIMEOUT", 0.2)

    raw = RawWorker(
        health=silent_after(b""), generate=silent_after(b""), completions=endless(EVENTS, event(text="one"), 0.01)
    )

    async def test() -> None:
        late = {"X-Sgl-Deadline-S": "0.5"}
        async with (
            beside(raw, breaker_failures=1) as (gateway, _, client),
            client.post("/v1/completions", json={"stream": True}) as stream,
        ):
            await stream.content.readany()
            assert (await client.post("/generate", json={}, headers=late)).status == 408
            assert not gateway.servers[raw.url].breaker.is_open

    run(test)


def test_a_client_that_is_slow_to_take_its_answer_breaks_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over while the gateway waits for it; then it takes what had come, to where the answer is cut."""
    monkeypatch.setattr("sgl.runtime.gateway.passing.DUE_SECONDS", 0.1)
    raw, ended, end = (
        RawWorker(generate=endless(EVENTS, event(text="x" * 65536))),
        list[bool](),
        workers_of.Call.end,
    )
    monkeypatch.setattr(workers_of.Call, "end", lambda call: ended.append(True) or end(call))

    async def test() -> None:
        async with beside(raw, breaker_failures=1) as (gateway, _, client):
            late = {"X-Sgl-Deadline-S": "0.5"}
            async with client.post("/generate", json={"stream": True}, headers=late) as answer:
                await until(lambda: ended)
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    while await answer.content.readany():
                        pass
            await until(lambda: not any(its.in_flight for its in gateway.fleet.workers))
            assert value(gateway, "cut_streams_total") == 1
            assert not gateway.servers[raw.url].breaker.is_open

    run(test)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
def test_what_the_gateway_itself_lacks_breaks_no_worker(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, lacks = app._to_worker, False

    def to_worker(about: tuple[object, ...]) -> socket.socket:
        if lacks:
            raise OSError(number, "there is no more")
        return connect(about)

    monkeypatch.setattr(app, "_to_worker", to_worker)

    raw = RawWorker(generate=JSON + b"Content-Length: 2\r\n\r\n{}")  # closes each connection

    async def test() -> None:
        nonlocal lacks
        async with beside(raw, breaker_failures=1, retries=1) as (gateway, _, client):
            lacks = True
            for _ in range(3):
                async with client.post("/generate", json={}) as answer:
                    assert answer.status == 503
                    assert "no files or ports left" in (await answer.json())["error"]["message"]
            assert gateway.servers[raw.url].lets_pass
            lacks = False
            assert (await client.post("/generate", json={})).status == 200

    run(test)


def test_a_process_may_open_as_many_files_as_it_is_allowed() -> None:
    code = (
        "import resource; from sgl.machine_limits import allow_open_files\n"
        "hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "allow_open_files(); assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
        "allow_open_files()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@contextlib.asynccontextmanager
async def half_open() -> AsyncIterator[tuple[Gateway, Server, MockWorker, aiohttp.ClientSession]]:
    """A gateway whose only worker may be tried again, which nobody has been told. Its looks are rare."""
    options = {"worker_wait": PATIENCE, "probe_seconds": 2 * PATIENCE}
    async with gateway_of(echo, **options) as (gateway, [worker], client):
        server, now = gateway.servers[worker.url], 0.0
        await until(lambda: server.heard_at > 0)
        server.breaker = Breaker(1, 2 * PATIENCE, lambda: now)
        server.failed()
        yield gateway, server, worker, client
        assert not gateway.servers._turns


async def asks(
    gateway: Gateway, client: aiohttp.ClientSession, **body: object
) -> asyncio.Task[aiohttp.ClientResponse]:
    """A request that waits for a worker."""
    before = gateway._limits.num_waiting
    asked = asyncio.ensure_future(client.post("/generate", json={"text": "x", **body}))
    await until(lambda: gateway._limits.num_waiting > before)
    return asked


def half_opens(server: Server) -> None:
    server.breaker._until = 0.0


def test_who_gets_its_turn_when_its_time_is_over_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 0.0
    monkeypatch.setattr(passing, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))

    async def test() -> None:
        nonlocal ahead
        async with half_open() as (gateway, server, _, client):
            late, asked = await asks(gateway, client, timeout=PATIENCE), await asks(gateway, client)
            half_opens(server)
            ahead = PATIENCE
            server.tell()
            assert [(await late).status, (await asked).status] == [408, 200]

    run(test)


def test_those_that_wait_hear_of_a_worker_that_is_heard_again() -> None:
    """Its answer to another, which goes on, says so before its next look does."""

    async def test() -> None:
        async with half_open() as (gateway, server, _, client):
            asked = await asks(gateway, client)
            half_opens(server)
            server.missed = 1
            server.tell()
            await asyncio.sleep(0)
            assert gateway._limits.num_waiting == 1
            server.heard()
            assert (await asked).status == 200

    run(test)


def test_those_that_wait_for_a_mode_hear_of_a_worker_that_says_that_it_has_it() -> None:
    async def test() -> None:
        async with gateway_of(echo) as (gateway, [worker], _):
            await until(lambda: gateway.servers[worker.url].heard_at > 0)
            turn = asyncio.ensure_future(gateway.servers.turn(None, "prefill", frozenset(), PATIENCE))
            worker.info = {"disaggregation_mode": "prefill", "internal_states": [], "max_total_tokens": 0}
            await turn
            assert [its.url for its in gateway.servers.ready_for("prefill")] == [worker.url]

    run(test)


def test_a_try_that_ends_late_lets_nobody_pass_beside_the_next() -> None:
    now = 0.0
    breaker = Breaker(1, 1.0, lambda: now)
    breaker.failed()
    now = 1.0
    first = breaker.began()
    breaker.failed()  # one that went there earlier
    now += MOST_SECONDS
    second = breaker.began()
    assert second > first > 0
    breaker.left(first)
    assert not breaker.lets_pass
    breaker.left(second)
    assert breaker.lets_pass


@pytest.mark.parametrize(
    "asked",
    [{"lora_path": "a"}, {"lora_path": ["a", None]}, {"model": "a"}, {"model": "base:a"}],
    ids=str,
)
def test_an_adapters_requests_go_to_workers_that_have_it(asked: dict[str, Any]) -> None:
    """One that was started anew has only those of its options."""
    counts = ("kv_available_tokens", "kv_evictable_tokens", "num_running_reqs", "num_queue_reqs")
    info = {"max_total_tokens": 10, "internal_states": [dict.fromkeys(counts, 0)]}
    body = {"prompt": [1, 2], **asked}

    async def test() -> None:
        async with gateway_of(echo, echo) as (gateway, [one, two], client):
            one.info = {**info, "lora_paths": [{"lora_name": "a"}, {"lora_name": "b"}]}
            two.info = {**info, "lora_paths": [{"lora_name": "b"}]}
            await until(lambda: [len(its.adapters) for its in gateway.servers.values()] == [2, 1])
            for _ in range(6):
                async with client.post("/v1/completions", json=body) as answer:
                    assert (answer.status, answer.headers["X-Sgl-Worker"]) == (200, one.url)
            assert not two.requests
            for _ in range(2):
                async with client.post("/v1/completions", json={**body, "model": "b", "lora_path": None}) as answer:
                    assert answer.status == 200
            assert two.requests, "either has b"

            one.is_healthy = False  # it is started anew, and what it had is not forgotten meanwhile
            await until(lambda: gateway.servers.ready() == [gateway.servers[two.url]])
            waiting = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await until(lambda: gateway._limits.num_waiting == 1)
            one.info, one.is_healthy = two.info, True
            async with await waiting as answer:
                assert answer.status == 200, "of the worker: nobody has the adapter any more"
            await until(lambda: gateway.servers.adapters == {"b"})

    run(test)


def test_so_do_programs_that_name_one_and_where_those_workers_fail_they_end() -> None:
    """A worker that has no such adapter is nobody who could run them."""
    info = {"max_total_tokens": 0, "internal_states": []}
    program = {"v": 1, "name": "p", "seed": 1, "defaults": {"extra": {"lora_path": "a"}}}
    fails = False

    async def answer(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        runs = b'data: {"type": "opened", "id": "x"}\n\ndata: {"type": "done"}\n\n'
        await response.write(b": no event\n\n" if fails else runs)
        return response

    async def test() -> None:
        nonlocal fails
        async with gateway_of(answer, answer, breaker_seconds=0.01) as (gateway, [one, two], client):
            one.info, two.info = {**info, "lora_paths": [{"lora_name": "a"}]}, info
            await until(lambda: gateway.servers.adapters == {"a"})
            for _ in range(4):
                async with client.post("/v1/programs", json={"program": program}) as events:
                    assert '"done"' in await events.text()
            assert (len(one.requests), len(two.requests)) == (4, 0)
            fails = True
            async with client.post("/v1/programs", json={"program": program}) as events:
                assert "workers in a row failed" in await events.text()
            assert not two.requests

    run(test)


def test_a_program_goes_on_where_a_later_segments_adapter_is() -> None:
    """Its worker, which has not failed, ends what it has of it."""
    info = {"max_total_tokens": 0, "internal_states": []}
    opening = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": []}}
    gen = {"st": 0, "op": "gen", "name": "x", "params": {"extra": {"lora_path": "a"}}}
    nodes = [{"st": 0, "op": "text", "text": "Now: "}, gen]

    async def answer(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if request.path != "/v1/programs":
            return web.json_response({"id": "x"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"type": "opened", "id": "x"}\n\n')
        await until(lambda: any(path.endswith("/segments") for path, _, _ in worker.requests))
        await response.write(b'data: {"type": "done"}\n\n')
        return response

    async def test() -> None:
        async with gateway_of(answer, answer) as (gateway, [one, two], client):
            one.info, two.info = {**info, "lora_paths": [{"lora_name": "a"}]}, info
            await until(lambda: gateway.servers.adapters == {"a"})
            one.is_healthy = False
            await until(lambda: gateway.servers.ready() == [gateway.servers[two.url]])
            async with client.post("/v1/programs", json=opening) as events:
                program = json.loads((await events.content.readuntil(b"\n\n")).partition(b"data: ")[2])["id"]
                one.is_healthy = True
                await until(lambda: len(gateway.servers.ready()) == 2)
                body = {"segment": {"nodes": nodes, "final": True}, "number": 1}
                async with client.post(f"/v1/programs/{program}/segments", json=body) as taken:
                    assert taken.status == 200, await taken.text()
                assert '"done"' in await events.text()
            paths = ["/v1/programs", "/v1/programs/x/segments"]
            assert [(path, given) for path, given, _ in one.requests] == [*zip(paths, (opening, body), strict=True)]
            await until(lambda: [path for path, *_ in two.requests] == ["/v1/programs", "/v1/programs/x"])
            assert not gateway.servers[two.url].breaker._failures

    run(test)


def test_a_refused_segments_adapters_are_not_asked_for() -> None:
    """Its worker dies later, and one without them goes on."""
    dies = asyncio.Event()
    opening = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": []}}
    gen = {"st": 0, "op": "gen", "name": "x", "params": {"extra": {"lora_path": "a"}}}
    segments = [{"nodes": [gen]}, {"nodes": [{"st": 0, "op": "text", "text": "Now"}], "final": True}]

    async def answer(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if request.path != "/v1/programs":
            is_refused = worker.requests[-1][1].get("segment") == segments[0]
            return web.json_response({"id": "x"}, status=400 if is_refused else 200)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"type": "opened", "id": "x"}\n\n')
        if worker.info.get("lora_paths"):
            await dies.wait()
            return response
        await response.write(b'data: {"type": "done"}\n\n')
        return response

    async def test() -> None:
        async with gateway_of(answer, answer) as (gateway, [one, two], client):
            info = {"max_total_tokens": 0, "internal_states": []}
            one.info, two.info = {**info, "lora_paths": [{"lora_name": "a"}]}, info
            await until(lambda: gateway.servers.adapters == {"a"})
            two.is_healthy = False
            await until(lambda: gateway.servers.ready() == [gateway.servers[one.url]])
            async with client.post("/v1/programs", json=opening) as events:
                program = json.loads((await events.content.readuntil(b"\n\n")).partition(b"data: ")[2])["id"]
                two.is_healthy = True
                await until(lambda: len(gateway.servers.ready()) == 2)
                for segment, status in zip(segments, (400, 200), strict=True):
                    body = {"segment": segment, "number": 1}
                    async with client.post(f"/v1/programs/{program}/segments", json=body) as taken:
                        assert taken.status == status, await taken.text()
                one.is_healthy = False
                dies.set()
                assert '"done"' in await events.text()
            assert two.requests[0][0] == "/v1/programs"
            assert gateway.servers[one.url].breaker._failures

    run(test)
