"""Programs before workers that are broken: they go on elsewhere; their clients get values or an error of ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web

import sgl
from sgl.errors import ProgramError, SglError
from sgl.runtime.gateway import programs
from sgl.runtime.gateway.programs import MOST_FAILURES
from tests.patience import PATIENCE
from tests.test_gateway import Answer, MockWorker, gateway_of, run, until, value
from tests.test_gateway_broken import EVENTS, JSON, OK, RawWorker, beside, chunk, endless, event, silent_after
from tests.test_gateway_hostile import opened, program_of, stays

OPENED = event(1, type="opened", id="r")
DONE = {"stream": 0, "index": 0, "text": "a", "value": "a", "meta": {}}
NO_EVENTS = {
    "a page": OK + b"Content-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
    "an object": JSON + b"Content-Length: 2\r\n\r\n{}",
    "no JSON": EVENTS + OPENED + chunk(b"data: {\n\n"),
    "a list": EVENTS + OPENED + chunk(b"data: []\n\n"),
    "deep nesting": EVENTS + OPENED + chunk(b"data: " + b"[" * 100_000 + b"\n\n"),
    "no type": EVENTS + OPENED + event(stream=0),
    "an unknown type": EVENTS + OPENED + event(type="hello"),
    "another id": EVENTS + event(1, type="opened", id="../../workers"),
    "no text": EVENTS + OPENED + event(type="delta", stream=0, index=0, text=1),
    "no place": EVENTS + OPENED + event(type="node_done", text="x"),
    "a text for a place": EVENTS + OPENED + event(**{**DONE, "type": "node_done", "stream": "0"}),
    "no error": EVENTS + OPENED + event(type="node_failed", stream=0, index=0, error="x"),
    "another row": EVENTS + OPENED + event(type="done", row=3),
    "the same again": EVENTS + OPENED + event(2, type="node_done", **DONE) + event(2, type="node_done", **DONE),
    "a gap": EVENTS + OPENED + event(3, type="done"),
    "an end too early": EVENTS + OPENED + b"0\r\n\r\n",
    "nothing more": silent_after(EVENTS + chunk(b": hello\n\n")),
    "an event without end": endless(EVENTS + OPENED + b"fffffff\r\ndata: ", bytes(1 << 16)),
}


@pytest.mark.parametrize("said", NO_EVENTS)
def test_a_program_goes_on_elsewhere_where_a_worker_sends_what_are_no_events(
    said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raw = RawWorker(programs=NO_EVENTS[said])

    async def ends(response: Any) -> None:
        await response.write(b'data: {"type": "node_done", "stream": 0, "index": 0, "text": "a", "value": "a", ')
        await response.write(b'"meta": {}}\n\ndata: {"type": "done"}\n\n')

    async def test() -> None:
        monkeypatch.setattr(programs, "OPENED_SECONDS", 1.0 if said == "nothing more" else PATIENCE)
        monkeypatch.setattr(programs, "MOST_EVENT_BYTES", 4 << 20)
        body = {"program": {"v": 1, "name": "p", "seed": 1}}
        async with beside(raw, program_of(ends)) as (gateway, workers, client):
            for _ in range(4):
                async with client.post("/v1/programs", json=body) as answer:
                    lines = (await answer.text()).splitlines()
                found = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
                assert [each["type"] for each in found] == ["opened", "node_done", "done"]
            again = value(gateway, "reopened_programs_total") + value(gateway, "retries_total", reason="no answer")
            assert raw.asked.count("programs") == again > 0
            await until(lambda: not any(worker.in_flight for worker in gateway.fleet.workers))
            assert len([each for each in workers[0].requests if each[0] == "/v1/programs"]) == 4
        assert "Traceback" not in caplog.text

    run(test)


def test_a_worker_that_refuses_what_another_took_ends_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = RawWorker(programs=b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\n{}")

    async def breaks(response: Any) -> None:
        response._req.transport.abort()

    async def test() -> None:
        async with gateway_of(program_of(breaks)) as (gateway, workers, client), raw:
            body = {"program": {"v": 1, "name": "p", "seed": 1}}
            events = await client.post("/v1/programs", json=body)
            await until(lambda: len(workers[0].requests) > 1)
            gateway.servers.add(raw.url)
            failed = next(line for line in (await events.text()).splitlines() if "node_failed" in line)
            assert "workers in a row failed" in json.loads(failed[6:])["error"]["message"]
            assert raw.asked.count("programs") > 0

    run(test)


class Failing:
    """Workers of one program that fail it, each in its turn as told, whichever it is."""

    def __init__(self, *turns: Answer | int) -> None:
        """turns: the last is all further ones', too. A number: it breaks off after so many events."""
        self.turns = [program_of(partial(self._break_off, its)) if isinstance(its, int) else its for its in turns]
        self.asked: list[str] = []  # addresses
        self.log: list[bytes] = []  # what the client has

    async def __call__(self, request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if request.path != "/v1/programs":
            return web.json_response({})
        self.asked.append(worker.url)
        [program] = self.gateway._programs.open.values()
        self.log = program.log
        return await self.turns[min(len(self.asked), len(self.turns)) - 1](request, worker)

    async def outcome(self, number: int) -> list[str]:
        """The types of the events of a program before so many workers."""
        async with gateway_of(*[self] * number, retries=0, breaker_failures=100) as (self.gateway, _, client):
            answer = await client.post("/v1/programs", json={"program": {"v": 1, "name": "p", "seed": 1}})
            lines = (await answer.text()).splitlines()
        return [json.loads(line[6:])["type"] for line in lines if line.startswith("data: ")]

    async def _break_off(self, number: int, response: Any) -> None:
        for index in range(number):
            data = json.dumps({**DONE, "type": "node_done", "index": index}).encode()
            await response.write(b"data: %b\n\n" % data)
        await until(lambda: len(self.log) > number)  # the first says that it is open
        response._req.transport.abort()


def refuses_with(status: int) -> Answer:
    async def refuses(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.json_response({}, status=status)

    return refuses


async def _ends(response: Any) -> None:
    await response.write(b'data: {"type": "done"}\n\n')


ends = program_of(_ends)
GIVEN_UP = ["opened", "node_failed", "done"]


@pytest.mark.parametrize("status", [404, 503])
def test_a_program_is_not_given_up_while_some_worker_has_not_failed_it(status: int) -> None:
    async def test() -> None:
        number = 2 * MOST_FAILURES
        failing = Failing(0, *[refuses_with(status)] * (number - 2), ends)
        assert await failing.outcome(number) == ["opened", "done"]
        assert len(failing.asked) == len(set(failing.asked)) == number, "it comes to none again"
        failing = Failing(0, refuses_with(status))
        assert await failing.outcome(number) == GIVEN_UP
        assert len(failing.asked) == len(set(failing.asked)) == number

    run(test)


@pytest.mark.parametrize("number", [2, 2 * MOST_FAILURES])
def test_a_program_that_ends_its_workers_comes_to_few_and_to_each_in_turn(number: int) -> None:
    async def test() -> None:
        failing = Failing(0)
        assert await failing.outcome(number) == GIVEN_UP
        assert len(failing.asked) == MOST_FAILURES + 1
        times = Counter(failing.asked).values()
        assert (len(times), max(times) - min(times)) == (min(number, MOST_FAILURES + 1), number == 2)

    run(test)


def test_a_program_with_news_from_each_worker_that_fails_it_is_not_given_up() -> None:
    async def test() -> None:
        number = 2 * MOST_FAILURES
        failing = Failing(*[1 + each // 4 for each in range(number)], ends)
        expected = ["opened", *["node_done"] * (number // 4), "done"]
        assert await failing.outcome(2) == expected
        assert all(its != then for its, then in pairwise(failing.asked)), "the one that failed is not the next"

    run(test)


def test_events_without_end_are_bounded_and_end_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = asyncio.Event()

    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS + OPENED)
        await begin.wait()
        for number in range(2, 1 << 30):
            about = {**DONE, "type": "node_done", "index": number, "text": "x" * 50_000}
            writer.write(event(number, **about))
            await writer.drain()

    raw = RawWorker(programs=flood)

    async def test() -> None:
        monkeypatch.setattr(programs, "MAX_BYTES", 8 << 20)
        async with beside(raw, program_of(stays)) as (gateway, _, client):
            async with contextlib.AsyncExitStack() as stack:
                paths = [await stack.enter_async_context(opened(client, {})) for _ in range(4)]
                begin.set()
                await until(lambda: len(gateway._programs.open) == 2)
                assert gateway._programs.held < 16 << 20
                left = [path for path in paths if path.rpartition("/")[2] in gateway._programs.open]
                segment = {"segment": {"nodes": []}, "number": 1}
                assert [(await client.post(f"{path}/segments", json=segment)).status for path in left] == [200, 200]
                gone = next(path for path in paths if path not in left)
                assert (await client.get(f"{gone}/events")).status == 404
            for path in left:
                await client.delete(path)
            assert gateway._programs.held == 0

    run(test)


def test_a_large_event_is_read_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {**DONE, "type": "node_done", "meta": {"ids": list(range(1_000_000))}}

    async def large(response: Any) -> None:
        await response.write(b'data: %b\n\ndata: {"type": "done"}\n\n' % json.dumps(about).encode())

    async def test() -> None:
        async with gateway_of(program_of(large)) as (gateway, _, client):
            calls: list[int] = []
            read = gateway._programs.events.read

            async def counted(function: Any, data: bytes, *more: Any) -> Any:
                calls.append(gateway._programs.events.num_reading)
                return await read(function, data, *more)

            monkeypatch.setattr(gateway._programs.events, "read", counted)
            answer = await client.post("/v1/programs", json={"program": {"v": 1, "name": "p", "seed": 1}})
            data = await answer.read()
            assert json.loads(data.split(b"\n\n")[1].partition(b"data: ")[2]) == about
            assert gateway._programs.events._processes._process is not None, "a process of its own"

    run(test)


def test_a_programs_deadline_holds_where_its_worker_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(programs, "DUE_SECONDS", 0.1)
        async with gateway_of(program_of(stays)) as (gateway, _, client):
            body = {"program": {"v": 1, "name": "p", "seed": 1, "deadline_s": 1.0}}
            lines = (await (await client.post("/v1/programs", json=body)).text()).splitlines()
            failed = json.loads(next(line for line in lines if "node_failed" in line)[6:])
            assert (failed["error"]["class"], "deadline_s" in failed["error"]["message"]) == (
                "RequestTimeout",
                True,
            )
            await until(lambda: not any(worker.in_flight for worker in gateway.fleet.workers))
            body["program"]["deadline_s"] = 10**400  # type: ignore[index]
            assert (await client.post("/v1/programs", json=body)).status == 200, "the worker's to refuse"

    run(test)


# ── what a program's client notices ─────────────────────────────────────────────────────────────────────────────────


@sgl.function
def greets(s: sgl.Stream) -> None:
    s += "hello" + sgl.gen("x", max_tokens=4)


def whole(body: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return JSON + b"Content-Length: %d\r\n\r\n%b" % (len(data), data)


RUNS = {"model_path": "m", "engine": "sgl", "programs": True}
CALLS = {"model_path": "m", "engine": "sgl"}
END = b"0\r\n\r\n"
NO_VALUES: dict[str, dict[str, bytes]] = {
    "an early end": {"programs": EVENTS + OPENED + event(2, type="done")},
    "an unanswered need": {
        "programs": EVENTS + OPENED + event(2, type="need", stream=0, index=1) + event(type="done")
    },
    "another node": {"programs": EVENTS + OPENED + event(2, type="node_done", **{**DONE, "index": 9})},
    "no text": {"generate": whole({"text": 3, "meta_info": {}})},
    "no meta info": {"generate": whole({"text": "x"})},
    "no events": {"generate": whole({"text": "x", "meta_info": {}})},
    "numbers": {"generate": EVENTS + chunk(b"data: 3\n\n") + END},
    "nesting": {"generate": EVENTS + chunk(b"data: " + b"[" * 100_000 + b"\n\n") + END},
    "an odd model": {"get_model_info": whole({"model_path": 3, "chat_template": {"a": 1}, "programs": 1})},
    "a deep model": {"get_model_info": whole(b"[" * 100_000)},
    "a page": {"get_model_info": OK + b"Content-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"},
}


@pytest.mark.parametrize("said", NO_VALUES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_program_over_a_broken_worker_ends_in_an_error_of_ours(said: str, stream: bool) -> None:
    answers = NO_VALUES[said]
    about = {"get_model_info": whole(RUNS if "programs" in answers else CALLS), "server_info": whole({})}
    raw = RawWorker(**{**about, **answers})

    def client(url: str) -> None:
        state = greets.run(backend=sgl.RuntimeEndpoint(url, timeout=20, max_retries=0), stream=stream)
        if stream:
            "".join(state.text_iter("x"))
        assert state["x"] == "x"
        assert (said, stream) == ("no events", False), "as it came"

    async def test() -> None:
        async with beside(raw, retries=0, worker_wait=0.5) as (_, _, its):
            is_well = (said, stream) == ("no events", False)
            with contextlib.nullcontext() if is_well else pytest.raises((ProgramError, SglError)):
                await asyncio.to_thread(client, str(its._base_url))

    run(test)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ([{"type": "delta", "text": "The cat sat on"}], {"type": "delta", "text": "A dog ran off and barked."}),
        (
            [{"type": "delta", "text": "The cat sat on"}],
            {**DONE, "type": "node_done", "text": "A dog", "value": "A dog"},
        ),
        ([{**DONE, "type": "node_done"}], {**DONE, "type": "node_done", "text": "b", "value": "b"}),
    ],
)
def test_a_program_whose_values_come_out_otherwise_elsewhere_ends_with_an_error(
    first: list[dict[str, Any]], again: dict[str, Any]
) -> None:
    lives = [first, [again, {"type": "done"}]]

    async def live(response: Any) -> None:
        is_first = len(lives) == 2
        for each in lives.pop(0):
            data = json.dumps({"stream": 0, "index": 0, **each}).encode()
            await response.write(b"data: %b\n\n" % data)
        if is_first:
            await until(lambda: len(log) == 2)
            response._req.transport.abort()

    async def test() -> None:
        async with gateway_of(program_of(live), program_of(live)) as (_, _, client):
            answer = await client.post("/v1/programs", json={"program": {"v": 1, "name": "p", "seed": 1}})
            log.extend([await answer.content.readuntil(b"\n\n") for _ in range(2)])
            rest = (await answer.text()).splitlines()
        failed, done = (json.loads(line[6:]) for line in rest if line.startswith("data: "))
        assert (failed["type"], failed["error"]["class"]) == ("node_failed", "BackendError")
        assert "come out otherwise" in failed["error"]["message"]
        assert done["type"] == "done"

    log: list[bytes] = []
    run(test)
