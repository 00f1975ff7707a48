"""A gateway before clients that are hostile, and workers that are."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from sgl.cli import main
from sgl.errors import ConfigError
from sgl.runtime.gateway import app, bodies, passing, programs, replies
from sgl.runtime.gateway import workers as workers_of
from sgl.runtime.gateway.app import Gateway
from sgl.runtime.gateway.config import checked_url
from sgl.runtime.gateway.demands import demand_of, session_of
from sgl.runtime.gateway.running import serving
from sgl.runtime.server.serve import listen
from tests.patience import PATIENCE
from tests.test_gateway import ADMIN, Answer, MockWorker, echo, gateway_of, run, until, value

STATE = {"num_running_reqs": 8, "num_queue_reqs": 4, "kv_available_tokens": 20, "kv_evictable_tokens": 5}
INFO = {"internal_states": [STATE], "max_total_tokens": 100}


def test_a_request_for_one_worker_is_tried_there_again_and_gets_its_refusal() -> None:
    async def full(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if len(worker.requests) == 1:
            return web.json_response({"id": "resp_1", "object": "response"})
        return web.json_response({"error": {"message": "full"}}, status=429)

    async def test() -> None:
        async with gateway_of(full, full, retries=2, worker_wait=PATIENCE) as (_, workers, client):
            await client.post("/v1/responses", json={"input": "x"})
            answer = await client.post("/v1/responses", json={"input": "y", "previous_response_id": "resp_1"})
            assert answer.status == 429, "the worker's own, at once"
            assert sorted(len(worker.requests) for worker in workers) == [0, 4]

    run(test)


def test_a_program_that_every_worker_refuses_gets_its_refusal() -> None:
    async def full(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "7"})

    async def test() -> None:
        async with gateway_of(full, full, retries=2) as (gateway, workers, client):
            body = {"program": {"v": 1, "name": "p", "seed": 1}}
            async with client.post("/v1/programs", json=body) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
            assert sum(len(worker.requests) for worker in workers) == 3
            assert not gateway._programs.open

    run(test)


async def said(client: aiohttp.ClientSession, data: bytes) -> bytes:
    """What the gateway answers to bytes of a connection of their own."""
    base = client._base_url
    assert base is not None
    reader, writer = await asyncio.open_connection(base.host, base.port)
    writer.write(data)
    answer = await reader.readuntil(b"\r\n")
    writer.close()
    return answer


def test_whatever_paths_clients_name_they_reach_workers_only_and_take_no_room_for_good() -> None:
    async def test() -> None:
        async with gateway_of(echo, breaker_failures=2) as (gateway, workers, client):
            end = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            for target in (b"OPTIONS *", b"CONNECT 127.0.0.1:80", b"CONNECT x:1"):
                for _ in range(3):
                    assert b" 40" in await said(client, target + end), target
            assert not any(server.breaker.is_open for server in gateway.servers.values())
            assert b" 200 " in await said(client, b"GET http://elsewhere.example/v1/models?a=b" + end)
            assert workers[0].requests[-1][0] == "/v1/models"
            for number in range(50):
                await client.get(f"/{number}/x")
                await client.get(f"/v1/{number}/x")
            series = [each for family in gateway.metrics.requests.collect() for each in family.samples]
            assert len(series) < 20

    run(test)


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "x-session-id", "x-smg-routing-key"])
def test_a_sessions_name_takes_little_room_however_long_it_is(field: str) -> None:
    names = ["s" * 1_000_000, "s" * 1_000_000 + "\ud800", "short"]
    asks = [demand_of("/v1/responses", {"input": "x", field: name}, session_of({field: name})) for name in names]
    sessions = [demand.session or "" for demand in asks]
    assert all(0 < len(session) <= 200 for session in sessions)
    assert len(set(sessions)) == 3
    assert sessions[2] == "short"


def test_a_client_that_does_not_read_gives_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def long(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.Response(body=bytes(64 << 20 if request.path == "/long" else 1))

    async def test() -> None:
        monkeypatch.setattr(passing, "WRITE_SECONDS", 0.2)
        async with gateway_of(long, max_in_flight=1) as (gateway, _, client):
            base = client._base_url
            assert base is not None
            _, writer = await asyncio.open_connection(base.host, base.port, limit=1024)
            writer.write(b"POST /long HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            await until(lambda: any(worker.in_flight for worker in gateway.fleet.workers))
            assert (await client.post("/short")).status == 200
            assert not any(worker.in_flight for worker in gateway.fleet.workers)
            writer.transport.abort()

    run(test)


def test_what_is_no_url_id_json_or_ascii_is_refused_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with gateway_of(echo) as (gateway, workers, client):
            workers[0].keeps_requests = False  # which would read their JSON
            admin = {"Authorization": f"Bearer {ADMIN}"}
            for body in (b"{", b"\xff", b"[" * 100_000, b"[]", b'{"url": 1}', b'{"url": "http://x:1", "id": []}'):
                answer = await client.post("/workers", data=body, headers=admin)
                assert answer.status == 400, body
            for url in (
                "",
                "x",
                "http://",
                "file:///etc/passwd",
                "http://x:99999",
                "http://user:key@x:1",
                "http://[x",
            ):
                answer = await client.post("/workers", json={"url": url}, headers=admin)
                assert (answer.status, "http://HOST:PORT" in await answer.text()) == (400, True), url
            assert len(gateway.servers) == 1
            assert (await client.post("/generate", data=b"[" * 100_000)).status == 200, "the worker's to refuse"
            key = b"POST /workers HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nAuthorization: Bearer \xff\r\n\r\n"
            assert b" 401 " in await said(client, key)
        assert "the request failed" not in caplog.text

    run(test)


@pytest.mark.parametrize("url", ["127.0.0.1:30001", "http://", "http://user:key@127.0.0.1:1", "http://x:y"])
def test_a_command_line_names_workers_by_address(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        checked_url(url)


def test_a_gateway_that_could_have_no_worker_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["gateway"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "--worker" in said
    assert "--admin-api-key" in said


def program_of(then: Callable[[web.StreamResponse], Awaitable[None]]) -> Answer:
    """A worker's answer: programs open, and go on as told."""

    async def answer(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if request.path != "/v1/programs":
            return web.json_response({})
        await request.content.read()  # of any size
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"type": "opened", "id": "r"}\n\n')
        await then(response)
        return response

    return answer


async def stays(response: web.StreamResponse) -> None:
    await asyncio.sleep(2 * PATIENCE)


@contextlib.asynccontextmanager
async def opened(client: aiohttp.ClientSession, headers: dict[str, str], **more: str) -> AsyncIterator[str]:
    """An open program's path."""
    body = {"program": {"v": 1, "name": "p", "seed": 1}, **more}
    async with client.post("/v1/programs", json=body, headers=headers) as events:
        assert events.status == 200, await events.text()
        line = await events.content.readuntil(b"\n\n")
        yield f"/v1/programs/{json.loads(line.partition(b'data: ')[2])['id']}"


def test_a_programs_key_may_be_any_text_and_its_segments_have_numbers() -> None:
    async def test() -> None:
        async with gateway_of(program_of(stays)) as (_, _, client):
            mine = {"Authorization": "Bearer clé"}
            async with opened(client, mine) as path:
                for number in ("2", [], 1.5, {}):
                    body = {"segment": {"nodes": []}, "number": number}
                    answer = await client.post(f"{path}/segments", json=body, headers=mine)
                    assert (answer.status, "number" in await answer.text()) == (400, True), number
                assert (await client.delete(path, headers={"Authorization": "Bearer clè"})).status == 404
                assert (await client.delete(path, headers=mine)).status == 200

    run(test)


def test_a_compressed_body_arrives_as_what_its_headers_say() -> None:
    async def test() -> None:
        async with gateway_of(echo) as (_, workers, client):
            data = gzip.compress(b'{"text": "x"}')
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            assert (await client.post("/generate", data=data, headers=headers)).status == 200
            assert workers[0].requests[0][1] == {"text": "x"}
            assert b" 200 " in await said(client, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not {"accept-encoding", "content-type"} & set(workers[0].requests[1][2]), "the client named none"

    run(test)


def test_a_worker_that_falls_silent_holds_no_request_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async def half(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        response = web.StreamResponse(status=503)
        response.content_length = 100
        await response.prepare(request)
        await response.write(b"busy")
        await asyncio.sleep(2 * PATIENCE)
        return response

    async def test() -> None:
        monkeypatch.setattr(replies, "READ_SECONDS", 0.1)
        monkeypatch.setattr(app, "TO_ALL_SECONDS", 0.1, raising=False)
        async with gateway_of(half, retries=1) as (_, workers, client):
            assert (await client.post("/generate", json={})).status == 503
            answer = await client.post("/flush_cache", headers={"X-Api-Key": "k"})
            assert (answer.status, workers[0].url in await answer.text()) == (503, True)

    run(test)


def test_who_asks_all_workers_is_known_to_each() -> None:
    async def test() -> None:
        async with gateway_of(echo, echo) as (_, workers, client):
            assert (await client.post("/flush_cache", headers={"X-Api-Key": "k"})).status == 200
            assert [worker.requests[-1][2]["x-api-key"] for worker in workers] == ["k", "k"]

    run(test)


async def begins(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    """The first event of a stream, and then nothing."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"text": "one"}\n\n')
    await asyncio.sleep(2 * PATIENCE)
    return response


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_of, "TIMEOUT", 0.5, raising=False)
    monkeypatch.setattr(workers_of, "SILENT_SECONDS", 0.3, raising=False)


@pytest.mark.parametrize("end", ["silence", "removal"])
def test_what_a_silent_or_removed_worker_has_not_begun_to_answer_is_answered_elsewhere(
    end: str, impatient: None
) -> None:
    async def hangs(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        await asyncio.sleep(2 * PATIENCE)
        return web.Response()

    async def test() -> None:
        async with gateway_of(hangs, echo) as (gateway, workers, client):
            asked = [asyncio.ensure_future(client.post("/generate", json={"text": "x"})) for _ in range(4)]
            await until(lambda: len(workers[0].requests) == 2)
            if end == "silence":
                workers[0].is_silent = True
            else:
                gateway.servers.remove(workers[0].url)
            assert [(await each).status for each in asked] == [200] * 4
            assert value(gateway, "retries_total", reason="silent") == 2
            assert not any(worker.in_flight for worker in gateway.fleet.workers)

    run(test)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_worker_that_a_cluster_misses_finishes_what_it_has_unless_it_is_silent(
    is_silent: bool, impatient: None
) -> None:
    async def slow(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        await asyncio.sleep(2 * PATIENCE if is_silent else 1.0)
        return await echo(request, worker)

    async def test() -> None:
        async with gateway_of(slow, echo) as (gateway, workers, client):
            asked = [asyncio.ensure_future(client.post("/generate", json={"text": "x"})) for _ in range(2)]
            await until(lambda: len(workers[0].requests) == 1)
            workers[0].is_silent = is_silent
            gateway.servers.remove(workers[0].url, now=False)
            assert (await client.post("/generate", json={"text": "x"})).headers["X-Sgl-Worker"] == workers[1].url
            answers = [await each for each in asked]
            assert {answer.status for answer in answers} == {200}
            named = {answer.headers["X-Sgl-Worker"] for answer in answers}
            assert named == ({workers[1].url} if is_silent else {worker.url for worker in workers})
            await until(lambda: not gateway.servers._leaving)

    run(test)


@pytest.mark.parametrize("path", ["/generate", "/api/chat"])
def test_a_stream_of_a_worker_that_falls_silent_ends_in_an_error_or_a_closed_connection(
    path: str, impatient: None
) -> None:
    async def test() -> None:
        async with gateway_of(begins) as (gateway, workers, client):
            async with client.post(path, json={"text": "x", "stream": True}) as answer:
                await answer.content.readuntil(b"\n\n")
                workers[0].is_silent = True
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    assert b"worker failed" in await answer.read()
            assert value(gateway, "cut_streams_total") == 1
            assert not gateway.servers[workers[0].url].is_up

    run(test)


def test_a_program_goes_on_elsewhere_when_its_worker_falls_silent(impatient: None) -> None:
    async def test() -> None:
        async with (
            gateway_of(program_of(stays), program_of(stays)) as (gateway, workers, client),
            opened(client, {}),
        ):
            next(worker for worker in workers if worker.requests).is_silent = True
            await until(lambda: all(worker.requests for worker in workers))
            assert value(gateway, "reopened_programs_total") == 1

    run(test)


@pytest.mark.parametrize("status", [200, 503])
def test_a_worker_that_answers_its_probes_keeps_what_it_has_however_long_it_takes(
    status: int, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503: it drains."""
    monkeypatch.setattr(workers_of, "TIMEOUT", PATIENCE)

    async def slow(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        await asyncio.sleep(1.5)
        return await echo(request, worker)

    async def test() -> None:
        async with gateway_of(slow, slow) as (_, workers, client):
            asked = asyncio.ensure_future(client.post("/generate", json={"text": "x"}))
            await until(lambda: any(worker.requests for worker in workers))
            for worker in workers:
                worker.is_healthy = status == 200
            assert (await asked).status == 200
            assert sum(len(worker.requests) for worker in workers) == 1

    run(test)


def test_a_worker_that_never_ends_an_event_or_a_refusal_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(response: web.StreamResponse) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * (1 << 20))

    async def refuses_for_ever(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        response = web.StreamResponse(status=503)
        await response.prepare(request)
        await endless(response)
        return response

    async def test() -> None:
        monkeypatch.setattr(programs, "MOST_EVENT_BYTES", 3 << 20)
        monkeypatch.setattr(programs, "MOST_FAILURES", 1)
        monkeypatch.setattr(replies, "READ_SECONDS", PATIENCE)
        async with gateway_of(program_of(endless), retries=0) as (gateway, _, client):
            async with client.post("/v1/programs", json={"program": {"v": 1, "name": "p", "seed": 1}}) as events:
                assert "more than 3145728 bytes" in await events.text()
            assert value(gateway, "reopened_programs_total") == 1
        async with gateway_of(refuses_for_ever, retries=0) as (_, _, client):
            assert (await client.post("/generate", json={})).status == 503

    run(test)


def test_a_program_whose_worker_was_removed_is_forgotten_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(programs, "GRACE_SECONDS", 0.1)
        async with gateway_of(program_of(stays)) as (gateway, workers, client):
            async with opened(client, {}):
                gateway.servers.remove(workers[0].url)
            await until(lambda: not gateway._programs.open)
            assert gateway._programs.held == 0

    run(test)


def test_a_program_goes_on_elsewhere_when_its_worker_is_removed_before_a_segment() -> None:
    async def test() -> None:
        async with (
            gateway_of(program_of(stays), program_of(stays)) as (gateway, workers, client),
            opened(client, {}) as path,
        ):
            first = next(worker for worker in workers if worker.requests)
            other = next(worker for worker in workers if worker is not first)
            gateway.servers.remove(first.url)
            answer = await client.post(f"{path}/segments", json={"segment": {"nodes": []}})
            assert answer.status == 200, await answer.text()
            await until(lambda: len(other.requests) == 2)
            assert other.requests[0][0] == "/v1/programs"

    run(test)


def test_programs_of_any_size_are_taken_and_what_is_kept_of_them_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        monkeypatch.setattr(programs, "MAX_BYTES", 12 << 20)
        monkeypatch.setattr(app, "PROGRAM_BYTES", 10 << 20, raising=False)
        async with gateway_of(program_of(stays)) as (gateway, workers, client):
            workers[0].keeps_requests = False
            async with opened(client, {}, more="x" * (5 << 20)) as path:
                assert gateway._programs.held > 5 << 20
                big = {"segment": {"nodes": [], "more": "x" * (4 << 20)}}
                assert (await client.post(f"{path}/segments", json=big)).status == 200
                assert (await client.post(f"{path}/segments", json=big)).status == 429
                assert (await client.post("/v1/programs", json=big)).status == 429
                answer = await client.post("/v1/programs", data=bytes((10 << 20) + 1))
                assert (answer.status, "bytes" in await answer.text()) == (413, True)
                await client.delete(path)
            assert gateway._programs.held == 0

    run(test)


def test_bodies_that_do_not_come_and_bodies_that_fill_the_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = asyncio.Event()

    async def hangs(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        await release.wait()
        return web.json_response({})

    async def test() -> None:
        monkeypatch.setattr(bodies, "HELD_BYTES", 1 << 20)
        monkeypatch.setattr(bodies, "MAX_BYTES", 2 << 20)
        async with gateway_of(hangs) as (gateway, workers, client):
            workers[0].keeps_requests = False
            half = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
            with monkeypatch.context() as patch:
                patch.setattr(bodies, "READ_SECONDS", 0.2)
                assert b" 408 " in await said(client, half)
            tasks = [asyncio.ensure_future(client.post("/generate", data=bytes(600_000))) for _ in range(2)]
            done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result().status for task in done] == [429]
            assert (await client.post("/generate", data=bytes((2 << 20) + 1))).status == 413
            small = asyncio.ensure_future(client.post("/generate", data=b"{}"))
            await until(lambda: sum(worker.in_flight for worker in gateway.fleet.workers) == 2)
            release.set()
            assert [(await task).status for task in (*left, small)] == [200, 200]
            assert (await client.post("/generate", data=bytes(600_000))).status == 200

    run(test)


def test_a_connection_to_a_worker_breaks_when_its_machine_has_vanished() -> None:
    async def test() -> None:
        async with (
            gateway_of(program_of(stays)) as (gateway, workers, _),
            gateway._session().post(workers[0].url + "/v1/programs") as answer,
        ):
            assert answer.connection is not None
            assert answer.connection.transport is not None
            its = answer.connection.transport.get_extra_info("socket")
            assert its.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert its.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60

    run(test)


def test_a_stored_response_is_found_beside_a_sessions_name_and_not_waited_for_when_it_is_gone() -> None:
    async def stores(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.json_response({"id": "resp_1" if len(worker.requests) == 1 else "resp_2"})

    async def test() -> None:
        async with gateway_of(stores, stores, worker_wait=PATIENCE) as (gateway, workers, client):
            await client.post("/v1/responses", json={"input": "x"})
            home, other = sorted(workers, key=lambda worker: -len(worker.requests))
            for name in "abc":
                body = {"input": "y", "previous_response_id": "resp_1"}
                await client.post("/v1/responses", json=body, headers={"X-Session-Id": name})
            assert len(home.requests) == 4
            gateway.servers.remove(home.url)
            assert (await client.get("/v1/responses/resp_1")).status == 200, "what the other worker says"
            assert len(other.requests) == 1

    run(test)


def test_deadlines_are_refused_by_the_name_that_they_came_by() -> None:
    async def test() -> None:
        async with gateway_of(echo) as (_, _, client):
            for text in ("nan", "inf", "-1", "0", "1e400", "1_0", "+1", ".", "1e", "1" * 5000):
                answer = await client.post("/generate", json={}, headers={"X-Sgl-Deadline-S": text})
                assert (answer.status, (await answer.json())["error"]["param"]) == (400, "X-Sgl-Deadline-S")

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {"internal_states": 3},
        {"internal_states": [{}], "max_total_tokens": 1},
        {**INFO, "max_total_tokens": float("nan")},
        {**INFO, "max_total_tokens": -1},
        {**INFO, "more": "x" * (2 << 20)},
        {**INFO, "internal_states": [{**STATE, "num_queue_reqs": 1e300}]},
    ],
)
def test_what_a_worker_says_of_itself_counts_if_it_can_be_read(said: object) -> None:
    async def test() -> None:
        async with gateway_of(echo) as (gateway, workers, client):
            workers[0].info = INFO
            worker = next(iter(gateway.fleet.workers))
            await until(lambda: (worker.others, worker.kv_usage) == (12, 0.75))
            about = (await (await client.get("/workers")).json())["workers"][0]
            assert (about["others"], about["kv_usage"]) == (12, 0.75)
            workers[0].info = said
            await until(lambda: (worker.others, worker.kv_usage) == (0, 0.0))
            assert (await client.post("/generate", json={"text": "x"})).status == 200
            assert gateway.servers[workers[0].url].is_up

    run(test)


NO_REQUESTS = {
    "no HTTP": (b"garbage\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "another version": (b"GET / HTTP/9.9\r\n\r\n", 400),
    "a long path": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 414),
    "a long header": (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    "no chunk": (b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
}


@pytest.mark.parametrize("sent", NO_REQUESTS)
def test_what_is_no_request_is_answered_with_an_error_as_servers_write_it(sent: str) -> None:
    data, status = NO_REQUESTS[sent]

    async def test() -> None:
        with listen("127.0.0.1", 0) as bound:
            async with serving(Gateway(workers=["http://127.0.0.1:1"]), bound, 1.0):
                reader, writer = await asyncio.open_connection(*bound.getsockname())
                writer.write(data)
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                assert int(head.split()[1]) == status
                assert json.loads(body)["error"]["message"]
                writer.close()

    run(test)
