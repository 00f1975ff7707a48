"""The gateway before mock workers: tries, limits, deadlines, health, and answers that break off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sgl.errors import QueueFull
from sgl.runtime.gateway import limits, passing
from sgl.runtime.gateway.app import Gateway
from sgl.runtime.gateway.breaker import MOST_SECONDS, Breaker
from sgl.runtime.gateway.config import GatewayConfig
from sgl.runtime.gateway.workers import Server
from tests.fake_servers import listening
from tests.patience import PATIENCE

ADMIN = "admin-secret"
Answer = Callable[[web.Request, "MockWorker"], Awaitable[web.StreamResponse]]


class MockWorker:
    """A server that answers as it is told, and counts."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[tuple[str, Any, dict[str, str]]] = []
        self.is_healthy = self.keeps_requests = True
        self.is_silent = False
        self.info: Any = None
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.is_silent:
            await asyncio.sleep(2 * PATIENCE)
        if request.path == "/get_server_info":
            return web.json_response(self.info, status=404 if self.info is None else 200)
        if request.path == "/health":
            return web.json_response({}, status=200 if self.is_healthy else 503)
        if request.path == "/metrics":
            return web.Response(
                text='# HELP sgl:x_total An x.\n# TYPE sgl:x_total counter\nsgl:x_total{a="b"} 1.0\n'
            )
        if not self.keeps_requests:
            return await self.answer(request, self)
        data = await request.read()
        headers = {name.lower(): text for name, text in request.headers.items()}
        self.requests.append((request.path, json.loads(data) if data else None, headers))
        return await self.answer(request, self)


async def echo(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    return web.json_response({"text": "hello", "path": request.path})


async def refuses(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    return web.json_response({"error": {"message": "starting"}}, status=503)


async def breaks(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def breaks_off(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    response = web.StreamResponse()
    is_lines = request.path == "/api/chat"
    response.content_type = "application/x-ndjson" if is_lines else "text/event-stream"
    await response.prepare(request)
    await response.write(b'{"text": "one"}\n{"te' if is_lines else b'data: {"text": "one"}\n\ndata: {"te')
    await asyncio.sleep(0.02)
    assert request.transport is not None
    request.transport.abort()
    return response


@contextlib.asynccontextmanager
async def gateway_of(
    *answers: Answer, **options: Any
) -> AsyncIterator[tuple[Gateway, list[MockWorker], aiohttp.ClientSession]]:
    workers = [MockWorker(answer) for answer in answers]
    for worker in workers:
        await worker.start()
    config = GatewayConfig.from_options(
        {"probe_seconds": 0.05, "retry_pause": 0.01, "routing_policy": "round_robin", **options}
    )
    gateway = Gateway(config, admin_api_key=ADMIN, workers=[worker.url for worker in workers])
    runner = web.AppRunner(gateway.app, handler_cancellation=True, shutdown_timeout=0.1)
    url = await listening(runner)
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(PATIENCE)) as client:
        try:
            yield gateway, workers, client
        finally:
            await client.close()
            await runner.cleanup()
            for worker in workers:
                await worker.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def value(gateway: Gateway, name: str, **labels: str) -> float:
    return gateway.metrics.registry.get_sample_value(f"sgl_gateway_{name}", labels) or 0.0


def test_requests_pass_unchanged_and_come_back_with_their_workers_name() -> None:
    async def test() -> None:
        async with gateway_of(echo, echo) as (gateway, workers, client):
            headers = {"traceparent": "00-1-2-03", "x-request-id": "mine", "authorization": "Bearer k"}
            for _ in range(4):
                async with client.post("/generate?a=b%20c", json={"text": "x"}, headers=headers) as answer:
                    assert answer.status == 200
                    assert await answer.json() == {"text": "hello", "path": "/generate"}
                    assert answer.headers["X-Sgl-Worker"] in {worker.url for worker in workers}
            assert [len(worker.requests) for worker in workers] == [2, 2]
            path, body, given = workers[0].requests[0]
            assert (path, body) == ("/generate", {"text": "x"})
            assert headers.items() <= given.items()
            assert value(gateway, "requests_total", path="/generate", status="200") == 4
            assert all(worker.in_flight == 0 == worker.work for worker in gateway.fleet.workers)

    run(test)


def test_a_workers_cookie_goes_to_its_client_and_into_no_other_request() -> None:
    async def sets_one(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.json_response({}, headers={"Set-Cookie": "whose=mine"})

    async def test() -> None:
        async with gateway_of(sets_one) as (gateway, workers, client):
            gateway.servers.remove(workers[0].url)
            gateway.servers.add(workers[0].url.replace("127.0.0.1", "localhost"))
            for _ in range(2):
                async with client.post("/generate", json={"text": "x"}) as answer:
                    assert answer.headers["Set-Cookie"] == "whose=mine"
            assert not any("cookie" in headers for _, _, headers in workers[0].requests)

    run(test)


@pytest.mark.parametrize("failing", [refuses, breaks])
def test_what_fails_before_its_first_byte_is_tried_at_another_worker(failing: Answer) -> None:
    async def test() -> None:
        async with gateway_of(failing, echo, breaker_failures=100) as (gateway, workers, client):
            for _ in range(6):
                async with client.post("/generate", json={"text": "x"}) as answer:
                    assert answer.status == 200
            assert workers[0].requests
            assert sum(
                sample.value
                for each in gateway.metrics.retries.collect()
                for sample in each.samples
                if sample.name.endswith("_total")
            ) == len(workers[0].requests)

    run(test)


def test_a_worker_that_keeps_failing_is_left_alone_and_its_last_answer_is_passed_on() -> None:
    async def test() -> None:
        async with gateway_of(refuses, retries=1, worker_wait=0.2, breaker_failures=2, breaker_seconds=60.0) as (
            _gateway,
            workers,
            client,
        ):
            async with client.post("/generate", json={"text": "x"}) as answer:
                assert (answer.status, (await answer.json())["error"]["message"]) == (503, "starting")
            async with client.post("/generate", json={"text": "x"}) as answer:
                assert answer.status == 503
                assert answer.headers["Retry-After"]
            assert len(workers[0].requests) == 2, "then its breaker is open"

    run(test)


def test_a_full_queue_of_one_worker_is_no_failure_of_it() -> None:
    async def full(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "7"})

    async def test() -> None:
        async with gateway_of(full, retries=2, breaker_failures=1) as (gateway, _, client):
            for _ in range(2):
                async with client.post("/generate", json={"text": "x"}) as answer:
                    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
            assert not any(server.breaker.is_open for server in gateway.servers.values())

    run(test)


@pytest.mark.parametrize("path", ["/generate", "/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_a_stream_cut_after_its_first_byte_ends_in_an_error_event_and_is_not_repeated(path: str) -> None:
    async def test() -> None:
        async with gateway_of(breaks_off, breaks_off) as (gateway, workers, client):
            text = b""
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async with client.post(path, json={"text": "x", "stream": True}) as answer:
                    async for part in answer.content.iter_any():
                        text += part
            last = text.strip().split(b"\n\n")[-1].split(b"data: ")[-1]
            assert "worker failed" in json.dumps(json.loads(last))
            assert b"[DONE]" not in text
            assert sum(len(worker.requests) for worker in workers) == 1
            assert value(gateway, "cut_streams_total") == 1

    run(test)


def test_an_answer_of_another_kind_that_is_cut_ends_in_a_closed_connection() -> None:
    async def test() -> None:
        async with gateway_of(breaks_off) as (gateway, _, client):
            with pytest.raises(aiohttp.ClientPayloadError):
                async with client.post("/api/chat", json={"messages": []}) as answer:
                    await answer.read()
            assert value(gateway, "cut_streams_total") == 1

    run(test)


def test_a_killed_worker_costs_no_request_and_comes_back() -> None:
    async def slow(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        await asyncio.sleep(0.03)
        return await echo(request, worker)

    async def test() -> None:
        async with gateway_of(slow, slow, worker_wait=PATIENCE) as (gateway, workers, client):

            async def one() -> int:
                async with client.post("/generate", json={"text": "x"}) as answer:
                    await answer.read()
                    return answer.status

            tasks = []
            for number in range(120):
                tasks.append(asyncio.ensure_future(one()))
                await asyncio.sleep(0.005)
                if number == 40:
                    port = int(workers[0].url.rpartition(":")[2])
                    await workers[0].stop()
            assert set(await asyncio.gather(*tasks)) == {200}
            await until(lambda: not gateway.servers[workers[0].url].is_up)
            again = MockWorker(slow)
            await again.start(port)
            await until(lambda: gateway.servers[workers[0].url].is_up)
            assert {await one() for _ in range(4)} == {200}
            assert again.requests
            await again.stop()

    run(test)


def test_a_worker_is_named_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with gateway_of(echo) as (gateway, workers, _):
            url = workers[0].url
            gateway.servers.add(url, "second")
            await workers[0].stop()
            await until(lambda: not any(server.is_up for server in gateway.servers.values()))
            assert f"worker {url} is down" in caplog.messages
            assert f"worker second at {url} is down" in caplog.messages

    run(test)


def test_without_a_worker_requests_wait_for_one_and_health_says_so() -> None:
    async def test() -> None:
        async with gateway_of(worker_wait=PATIENCE) as (_gateway, _, client):
            async with client.get("/health") as answer:
                assert answer.status == 503
            asked = asyncio.ensure_future(client.post("/generate", json={"text": "x"}))
            await asyncio.sleep(0.1)
            worker = MockWorker(echo)
            await worker.start()
            denied = await client.post("/workers", json={"url": worker.url})
            assert denied.status == 401
            admin = {"Authorization": f"Bearer {ADMIN}"}
            added = await client.post("/workers", json={"url": worker.url, "id": "w"}, headers=admin)
            assert [each["id"] for each in (await added.json())["workers"]] == ["w"]
            assert (await asked).status == 200
            async with client.get("/health") as answer:
                assert answer.status == 200
            await client.delete("/workers", params={"id": "w"}, headers=admin)
            async with client.get("/health") as answer:
                assert answer.status == 503, "it drains"
            await worker.stop()

    run(test)


def test_a_busy_worker_is_not_taken_for_a_dead_one_and_an_unready_one_gets_nothing() -> None:
    async def test() -> None:
        async with gateway_of(echo, echo) as (gateway, workers, client):
            workers[0].is_healthy = False
            await until(lambda: not gateway.servers[workers[0].url].is_up)
            for _ in range(3):
                assert (await client.post("/generate", json={"text": "x"})).status == 200
            assert not workers[0].requests
            workers[0].is_healthy = True
            await until(lambda: gateway.servers[workers[0].url].is_up)

    run(test)


def test_limits_refuse_with_429_and_say_when_to_come_again() -> None:
    goes_on = asyncio.Event()

    async def hangs(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        await goes_on.wait()
        return await echo(request, worker)

    async def test() -> None:
        async with gateway_of(hangs, max_in_flight=1, max_waiting=1) as (_, _, client):
            asked = [asyncio.ensure_future(client.post("/generate", json={"text": "x"})) for _ in range(3)]
            await until(lambda: any(each.done() for each in asked))
            goes_on.set()
            answers = await asyncio.gather(*asked)
            assert sorted(each.status for each in answers) == [200, 200, 429]
            refused = next(each for each in answers if each.status == 429)
            assert refused.headers["Retry-After"] == "1"
            assert (await refused.json())["error"]["type"] == "rate_limit_error"

    run(test)


async def checks_keys(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    given = key if kind.lower() == "bearer" else request.headers.get("X-Api-Key")
    return web.json_response({}, status=200 if given in ("a", "b") else 401)


def test_a_key_that_a_worker_has_accepted_has_a_limit_of_its_own_and_others_that_of_their_address() -> None:
    async def test() -> None:
        async with gateway_of(checks_keys, key_rate=0.01, key_burst=4) as (gateway, workers, client):
            await until(lambda: gateway.servers[workers[0].url].checks_keys is not None)

            async def statuses(number: int, **headers: str) -> list[int]:
                asked = [await client.post("/generate", json={}, headers=headers) for _ in range(number)]
                return [each.status for each in asked]

            assert await statuses(6, Authorization="Bearer a") == [200] * 5 + [429], (
                "the first counts for the address"
            )
            assert await statuses(1, Authorization="bearer b") == [200]
            assert await statuses(1, Authorization="Basic 1", **{"X-Api-Key": "x"}) == [401]
            assert await statuses(1, Authorization="Bearer other") == [401]
            assert await statuses(2, Authorization="Bearer yet another") == [429] * 2
            assert await statuses(5, **{"Authorization": "Basic 2", "X-Api-Key": "b"}) == [200] * 4 + [429]

    run(test)


@pytest.mark.parametrize("answer", [echo, refuses])
def test_a_client_with_a_new_key_each_time_has_the_limit_of_its_address(answer: Answer) -> None:
    async def test() -> None:
        async with gateway_of(answer, key_rate=0.01, key_burst=3, retries=0, breaker_failures=99) as (
            gateway,
            workers,
            client,
        ):
            await until(lambda: gateway.servers[workers[0].url].checks_keys is not None)
            headers = [{"Authorization": f"Bearer {number}"} for number in range(5)]
            asked = [await client.post("/generate", json={}, headers=each) for each in headers]
            assert [each.status == 429 for each in asked] == [False] * 3 + [True] * 2

    run(test)


def test_buckets_take_little_room_and_none_that_is_not_full_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUCKETS", 3)

    async def test() -> None:
        now = 0.0
        mine = limits.Limits(GatewayConfig(key_rate=1.0, key_burst=2), lambda: now)

        async def enters(key: str, address: str) -> bool:
            with contextlib.suppress(QueueFull):
                await mine.count(key, address)
                return True
            return False

        mine.accepted("k" * 100_000)
        assert [await enters("k" * 100_000, "10.0.0.1") for _ in range(3)] == [True, True, False]
        assert [await enters(str(i), f"2001:db8::{i}") for i in range(3)] == [True, True, False], "one site"
        assert await enters("", "10.0.0.2")
        assert [await enters("", f"10.0.1.{i}") for i in range(3)] == [True, True, False], "they share one"
        assert not await enters("k" * 100_000, "10.0.0.1")
        now = 2.5
        assert await enters("", "10.0.2.1")
        assert len(mine._buckets) == 3

    run(test)


def test_requests_that_wait_for_a_worker_are_so_many_and_sleep_until_there_is_one() -> None:
    async def test() -> None:
        async with gateway_of(max_waiting=5, worker_wait=PATIENCE) as (gateway, _, client):
            asked = [asyncio.ensure_future(client.post("/generate", json={"text": "x"})) for _ in range(8)]
            await until(lambda: sum(each.done() for each in asked) == 3)
            waiting = [each for each in asked if not each.done()]
            answers = [each.result() for each in asked if each.done()]
            assert [(each.status, each.headers["Retry-After"]) for each in answers] == [(429, "1")] * 3
            async with client.get("/metrics") as answer:
                assert "sgl_gateway_waiting_requests 5.0" in await answer.text()
            looks = 0
            ready = gateway.servers.ready

            def counted(*without: Any) -> list[Server]:
                nonlocal looks
                looks += 1
                return ready(*without)

            gateway.servers.ready = counted  # type: ignore[method-assign]
            await asyncio.sleep(0.3)
            assert not looks, "nobody looks again and again"
            worker = MockWorker(echo)
            await worker.start()
            gateway.servers.add(worker.url)
            assert {(await each).status for each in waiting} == {200}
            assert not gateway._limits.num_waiting
            await worker.stop()

    run(test)


def test_only_the_time_without_a_worker_counts_as_waiting_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 0.0
    monkeypatch.setattr(passing, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))

    async def hangs(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        await asyncio.sleep(2 * PATIENCE)
        return web.Response()

    async def test() -> None:
        nonlocal ahead
        async with gateway_of(hangs, worker_wait=PATIENCE) as (gateway, workers, client):
            asked = asyncio.ensure_future(client.post("/generate", json={"text": "x"}))
            await until(lambda: bool(workers[0].requests))
            ahead = 2 * PATIENCE
            gateway.servers.remove(workers[0].url)
            await until(lambda: gateway._limits.num_waiting == 1)
            other = MockWorker(echo)
            await other.start()
            gateway.servers.add(other.url)
            assert (await asked).status == 200
            await other.stop()

    run(test)


def test_a_request_for_one_worker_waits_for_that_one_and_no_other_waits_for_it() -> None:
    async def stores(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.json_response({"id": "resp_1"})

    async def test() -> None:
        async with gateway_of(stores, echo, breaker_failures=1, breaker_seconds=60.0) as (gateway, workers, client):
            await client.post("/v1/responses", json={"input": "x"})
            home = gateway.servers[workers[0].url]
            for end in ("mends", "goes"):
                home.failed()
                body = {"input": "y", "previous_response_id": "resp_1"}
                asked = [asyncio.ensure_future(client.post("/v1/responses", json=body)) for _ in range(3)]
                await until(lambda: gateway._limits.num_waiting == 3)
                assert (await client.post("/generate", json={"text": "x"})).status == 200
                assert gateway._limits.num_waiting == 3
                if end == "mends":
                    home.answered()
                else:
                    gateway.servers.remove(home.id)
                assert {(await each).status for each in asked} == {200 if end == "mends" else 503}
            assert not gateway.servers._turns

    run(test)


def test_of_those_that_wait_one_tries_a_worker_that_failed_until_it_is_well() -> None:
    at_once = most = 0

    async def fails(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once if len(worker.requests) < 5 else 0)
        await asyncio.sleep(0.02)
        at_once -= 1
        return await (refuses if len(worker.requests) < 5 else echo)(request, worker)

    async def test() -> None:
        options = {"retries": 100, "breaker_failures": 1, "breaker_seconds": 0.05}
        async with gateway_of(fails, **options) as (gateway, workers, client):
            gateway.servers[workers[0].url].failed()
            asked = [asyncio.ensure_future(client.post("/generate", json={"text": "x"})) for _ in range(30)]
            left = asyncio.ensure_future(client.post("/generate", json={"text": "x"}))
            await until(lambda: len(workers[0].requests) >= 4)
            left.cancel()
            assert {(await each).status for each in asked} == {200}
            assert most == 1

    run(test)


def test_a_requests_deadline_is_its_programs() -> None:
    """However often that is opened, sent segments or ended, and however long it waits to be read."""
    added = asyncio.Event()

    async def opened(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"type": "opened", "id": "x"}\n\n')
        return response

    async def dying(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if request.path != "/v1/programs":
            added.set()
            return web.json_response({"id": "x"})
        response = await opened(request)
        await added.wait()
        return response

    async def living(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if request.path != "/v1/programs":
            return web.json_response({"id": "x"})
        response = await opened(request)
        await asyncio.sleep(2 * PATIENCE)
        return response

    async def test() -> None:
        async with gateway_of(dying, living) as (gateway, [first, second], client):
            read = gateway._reader.read

            async def late(function: Any, *arguments: Any) -> Any:
                await asyncio.sleep(0.06)
                return await read(function, *arguments)

            gateway._programs.reader = SimpleNamespace(read=late)  # type: ignore[assignment]
            program = {"program": {"v": 1, "name": "p", "seed": 1}}
            headers = {"X-Sgl-Deadline-S": "500"}
            async with client.post("/v1/programs", json=program, headers=headers) as events:
                path = f"/v1/programs/{json.loads((await events.content.readuntil(b'}'))[12:])['id']}"
                async with client.post(path + "/segments", json={"segment": {}}, headers=headers) as taken:
                    assert taken.status == 200
                await until(lambda: len(sent(second, "/v1/programs/x/segments")) == 1)
                async with client.delete(path, headers=headers) as ended:
                    assert ended.status == 200
            await until(lambda: len(sent(second, "/v1/programs/x")) == 1)
            [before], [after] = (sent(worker, "/v1/programs") for worker in (first, second))
            assert 499.95 > before["program"]["deadline_s"] > after["program"]["deadline_s"] > 0
            assert all("x-sgl-deadline-s" not in got for *_, got in first.requests + second.requests)

    def sent(worker: MockWorker, path: str) -> list[Any]:
        return [body for where, body, _ in worker.requests if where == path]

    run(test)


def test_deadlines_travel_and_end_the_waiting() -> None:
    async def hangs(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        await asyncio.sleep(2 * PATIENCE)
        return await echo(request, worker)

    async def test() -> None:
        async with gateway_of(hangs) as (_, workers, client):
            asked = asyncio.ensure_future(client.post("/generate", json={"text": "x", "timeout": PATIENCE}))
            await until(lambda: bool(workers[0].requests))
            asked.cancel()
            left = float(workers[0].requests[0][2]["x-sgl-deadline-s"])
            assert 0 < left <= PATIENCE
            async with client.post("/generate", json={"text": "x", "timeout": 0.2}) as answer:
                assert answer.status == 408
            async with client.post("/generate", json={}, headers={"X-Sgl-Deadline-S": "soon"}) as answer:
                assert answer.status == 400

    run(test)


def test_metrics_are_the_gateways_and_each_workers() -> None:
    async def test() -> None:
        async with gateway_of(echo, echo) as (_gateway, workers, client):
            await client.post("/generate", json={"text": "x"})
            async with client.get("/metrics") as answer:
                families = {each.name: each for each in text_string_to_metric_families(await answer.text())}
            assert {sample.labels["worker"] for sample in families["sgl:x"].samples} == {
                worker.url for worker in workers
            }
            assert families["sgl_gateway_requests"].samples

    run(test)


def test_what_concerns_all_workers_reaches_all_and_a_stored_response_stays_where_it_is() -> None:
    async def stores(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.json_response({"id": f"resp_{worker.url[-5:]}", "object": "response"})

    async def test() -> None:
        async with gateway_of(stores, stores) as (_, workers, client):
            assert (await client.post("/flush_cache")).status == 200
            assert [len(worker.requests) for worker in workers] == [1, 1]
            first = await (await client.post("/v1/responses", json={"input": "x"})).json()
            home = next(worker for worker in workers if worker.url.endswith(first["id"][5:]))
            before = len(home.requests)
            for _ in range(3):
                await client.post("/v1/responses", json={"input": "y", "previous_response_id": first["id"]})
                await client.get(f"/v1/responses/{first['id']}")
            assert len(home.requests) == before + 6

    run(test)


def test_a_client_that_leaves_ends_its_request_at_the_worker() -> None:
    left = asyncio.Event()

    async def hangs(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        try:
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
        finally:
            left.set()
        return web.Response()

    async def test() -> None:
        async with gateway_of(hangs) as (gateway, workers, client):
            asked = asyncio.ensure_future(client.post("/generate", json={}))
            await until(lambda: bool(workers[0].requests))
            asked.cancel()
            await left.wait()
            await until(lambda: all(worker.in_flight == 0 for worker in gateway.fleet.workers))

    run(test)


@given(st.lists(st.sampled_from(["began", "began_to_answer", "succeeded", "failed", "left", "later"]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_breaker_lets_one_try_pass_at_a_time_and_never_waits_longer_than_its_bound(done: list[str]) -> None:
    now = 0.0
    breaker, in_a_row, trying, number = Breaker(3, 1.0, lambda: now), 0, False, 0
    for act in done:
        if act == "later":
            now += 1.0
            continue
        if act == "began":
            if not breaker.lets_pass:
                continue
            trying = breaker.is_open
        elif act == "failed":
            in_a_row += 1
            trying = False
        elif act == "succeeded":
            in_a_row, trying = 0, False
        elif act == "began_to_answer":
            in_a_row, trying = 2 if breaker.is_open else in_a_row, trying and not breaker.is_open
        else:
            trying = False
        if act == "began":
            number = breaker.began()
            assert bool(number) == trying
        else:
            getattr(breaker, act)(*([number] if act == "left" else []))
        assert breaker.is_open or in_a_row < 3
        if act == "succeeded":
            assert breaker.lets_pass
        if trying:
            assert not breaker.lets_pass, "one try at a time"
    breaker.left(number)
    now += MOST_SECONDS
    assert breaker.lets_pass
