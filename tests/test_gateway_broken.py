"""A gateway before workers that are broken: they speak no HTTP, lie, break off, or never end."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from sgl.runtime.gateway import replies
from sgl.runtime.gateway.app import Gateway
from tests.patience import PATIENCE
from tests.test_gateway import MockWorker, breaks_off, echo, gateway_of, run, until, value

OK = b"HTTP/1.1 200 OK\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
OPEN_ENDED = OK + b"Content-Type: text/event-stream\r\n\r\n"
JSON = OK + b"Content-Type: application/json\r\nConnection: close\r\n"  # or it may be used again as it closes
Then = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int | None = None, **data: Any) -> bytes:
    head = b"" if number is None else b"id: %d\n" % number
    return chunk(b"%bdata: %b\n\n" % (head, json.dumps(data).encode()))


class RawWorker:
    """Answers in plain bytes. Where it is not told how, it is well and says nothing of itself."""

    def __init__(self, **answers: Then | bytes) -> None:
        """answers: by the path's last part; bytes are the answer, after which the connection closes."""
        self.answers = {"health": JSON + b"Content-Length: 2\r\n\r\n{}", **answers}
        self.asked: list[str] = []
        self.url = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> RawWorker:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = next(
                (line[15:] for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0
            )
            await reader.readexactly(int(length))
            name = head.split()[1].rpartition("/")[2]
            self.asked.append(name)
            no = b"HTTP/1.1 404 No\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            then = self.answers.get(name, no)
            if isinstance(then, bytes):
                writer.write(then)
            else:
                await then(writer)
            await writer.drain()
        writer.close()


def endless(head: bytes, piece: bytes, pause: float = 0.0) -> Then:
    async def then(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return then


def silent_after(data: bytes) -> Then:
    async def then(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await asyncio.sleep(2 * PATIENCE)

    return then


@contextlib.asynccontextmanager
async def beside(
    raw: RawWorker, *others: Any, **options: Any
) -> AsyncIterator[tuple[Gateway, list[MockWorker], aiohttp.ClientSession]]:
    """A gateway before it and others."""
    async with raw, gateway_of(*others, **options) as (gateway, workers, client):
        gateway.servers.add(raw.url)
        yield gateway, workers, client


NO_ANSWERS = {
    "no HTTP": b"\x00\xff\x13 hello\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "HTTP/0.9": b'{"text": "x"}',
    "nothing": b"",
    "half a head": OK + b"Content-Le",
    "a huge header": OK + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "many headers": OK + b"X: a\r\n" * 20_000 + b"Content-Length: 2\r\n\r\n{}",
    "endless headers": endless(OK, b"X: a\r\n" * 100, 0.001),
    "controls in a header": OK + b"X: a\x01b\x7f\r\nContent-Length: 2\r\n\r\n{}",
    "status 0": b"HTTP/1.1 000 X\r\nContent-Length: 2\r\n\r\n{}",
    "status 999": b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\n{}",
    "another protocol instead": b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
    "somewhere else": b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
    "a negative length": OK + b"Content-Length: -2\r\n\r\n{}",
    "an endless length": OK + b"Content-Length: 99999999999999999999999999\r\n\r\n{}",
    "more than its length": OK + b"Content-Length: 2\r\n\r\n{}{}{}",
    "a page": OK + b"Content-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>",
    "no JSON": OK + b"Content-Type: application/json\r\nContent-Length: 8\r\n\r\n\x00garbage",
    "no events": EVENTS + chunk(b"<html>") + b"0\r\n\r\n",
    "an empty stream": EVENTS + b"0\r\n\r\n",
    "no chunk": EVENTS + b"zz\r\nhello",
    "an endless refusal": endless(b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(bytes(1 << 16))),
    "a refusal with a bad header": b"HTTP/1.1 503 X\r\nX: \x01\r\nContent-Length: 2\r\n\r\n{}",
}


GOOD_ANSWERS = {
    "compressed": (
        OK + b"Content-Type: application/json\r\nContent-Encoding: gzip\r\n",
        gzip.compress(b'{"text": "a"}'),
    ),
    "a BOM": (OK + b"Content-Type: application/json\r\n", b'\xef\xbb\xbf{"text": "a"}'),
    "words": (b"HTTP/1.1 400 X\r\nContent-Type: application/json\r\n", b"a wrong body"),
}


@pytest.mark.parametrize("said", GOOD_ANSWERS)
def test_what_servers_and_what_stands_before_them_answer_is_passed_on(said: str) -> None:
    head, body = GOOD_ANSWERS[said]
    raw = RawWorker(generate=head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def test() -> None:
        async with beside(raw, echo, breaker_failures=1, breaker_seconds=60.0) as (gateway, workers, client):
            gateway.servers.remove(workers[0].url)
            for _ in range(3):
                async with client.post("/generate", json={"text": "x"}) as answer:
                    assert answer.status == int(head.split()[1])
                    assert b"a" in await answer.read()

    run(test)


@pytest.mark.parametrize("said", NO_ANSWERS)
def test_what_no_server_would_answer_is_a_failure_that_another_worker_makes_good(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw = RawWorker(generate=NO_ANSWERS[said])

    async def test() -> None:
        async with beside(raw, echo, breaker_failures=2, breaker_seconds=60.0) as (gateway, workers, client):
            for _ in range(6):
                async with client.post("/generate", json={"text": "x"}) as answer:
                    assert (answer.status, (await answer.json())["text"]) == (200, "hello")
            assert raw.asked.count("generate") == 2, "then its breaker is open"
            assert not any(worker.in_flight for worker in gateway.fleet.workers)
            gateway.servers.remove(workers[0].url)
            gateway.servers[raw.url].began_to_answer()
            alone = await client.post("/generate", json={"text": "x"}, headers={"X-Sgl-Deadline-S": "0.5"})
            assert alone.status in (503, 408)
            assert (await alone.json())["error"]["message"]
        assert "the request failed" not in caplog.text

    run(test)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "/get_server_info answers 401; see worker_api_key"),
        (JSON + b"Content-Length: 1\r\n\r\n[", "/get_server_info answers 200; it may be no server of sgl"),
    ],
)
def test_the_log_says_why_a_worker_is_not_understood(
    answer: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with beside(RawWorker(get_server_info=answer)):
            await until(lambda: said in caplog.text)

    run(test)


def test_a_worker_that_breaks_off_every_answer_soon_gets_no_more() -> None:
    """It is done with each at once, and so it would have had all of them."""

    async def test() -> None:
        options = {"routing_policy": "cache_aware", "breaker_failures": 3, "breaker_seconds": 60.0}
        async with gateway_of(breaks_off, echo, **options) as (gateway, workers, client):
            for number in range(30):
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    await (await client.post("/generate", json={"text": f"{number} " * 200, "stream": True})).read()
            assert len(workers[0].requests) == 3
            assert gateway.servers[workers[0].url].breaker.is_open

    run(test)


@pytest.mark.parametrize("pause", [None, 0.0, 0.05])
def test_a_stream_that_breaks_off_within_an_event_ends_with_whole_events(pause: float | None) -> None:
    """pause: between parts of a stream whose end is that of its connection."""
    parts = [b'data: {"text": "one"}\n\nda', b'ta: {"text": "two"}\r\n\r\n', b'data: {"te']

    async def until_closed(writer: asyncio.StreamWriter) -> None:
        writer.write(OPEN_ENDED)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause or 0.0)

    raw = RawWorker(generate=EVENTS + b"".join(map(chunk, parts)) if pause is None else until_closed)

    async def test() -> None:
        async with beside(raw) as (gateway, _, client):
            text = b""
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async with client.post("/generate", json={"text": "x", "stream": True}) as answer:
                    async for part in answer.content.iter_any():
                        text += part
            found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: ")]
            assert [each.get("text") for each in found] == ["one", "two", None]
            assert "worker failed" in found[2]["error"]["message"]
            assert value(gateway, "cut_streams_total") == 1

    run(test)


def test_a_stream_that_ends_with_its_connection_after_a_whole_event_passes_as_it_is() -> None:
    data = b'data: {"text": "one"}\n\ndata: [DONE]\n\n'

    async def test() -> None:
        async with beside(RawWorker(generate=OPEN_ENDED + data)) as (gateway, _, client):
            assert await (await client.post("/generate", json={"text": "x", "stream": True})).read() == data
            assert value(gateway, "cut_streams_total") == 0

    run(test)


def half_closes(data: bytes) -> Then:
    """Says that, and that it says no more, but leaves the connection open."""

    async def then(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        writer.write_eof()
        await asyncio.sleep(PATIENCE)

    return then


def test_a_worker_that_half_closes_its_connection_has_broken_off() -> None:
    raw = RawWorker(
        generate=half_closes(b""),
        completions=half_closes(EVENTS + event(text="one") + b"5\r\nda"),
        embeddings=half_closes(JSON + b"Content-Length: 100\r\n\r\n{"),
    )

    async def test() -> None:
        async with beside(raw, echo, breaker_failures=100) as (gateway, _, client):
            while "generate" not in raw.asked:  # before its first byte another one answers
                assert (await client.post("/generate", json={"text": "x"})).status == 200
            assert value(gateway, "retries_total", reason="disconnected") == 1
            gateway.servers.remove(next(each.id for each in gateway.fleet.workers if each.id != raw.url))
            answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
            assert await answer.content.readline() == b'data: {"text": "one"}\n'
            assert await answer.content.readline() == b"\n"
            assert b"the worker failed after its answer had begun" in await answer.content.readline()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
            answer = await client.post("/v1/embeddings", json={"input": "x"})
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
            assert value(gateway, "cut_streams_total") == 2

    run(test)


@pytest.mark.parametrize("size", [10, 10 << 20])
def test_events_of_any_size_pass_and_an_unfinished_last_one_too(size: int) -> None:
    data = b'data: {"text": "%b"}\n\ndata: end' % (b"x" * size)
    raw = RawWorker(generate=EVENTS + chunk(data) + b"0\r\n\r\n")

    async def test() -> None:
        async with beside(raw) as (_, _, client):
            assert await (await client.post("/generate", json={"text": "x", "stream": True})).read() == data

    run(test)


def test_an_answer_that_stalls_and_a_stream_beyond_its_deadline_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = RawWorker(
        generate=silent_after(JSON + b"Content-Length: 100\r\n\r\n{"),
        completions=endless(EVENTS, event(text="x"), 0.01),
    )

    async def test() -> None:
        monkeypatch.setattr("sgl.runtime.gateway.passing.STALL_SECONDS", 0.2)
        monkeypatch.setattr("sgl.runtime.gateway.passing.DUE_SECONDS", 0.1)
        async with beside(raw) as (gateway, _, client):
            with pytest.raises(aiohttp.ClientPayloadError):
                await (await client.post("/generate", json={"text": "x"})).read()
            body = {"prompt": "x", "stream": True, "timeout": 1.0}
            text = b""
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async for part in (await client.post("/v1/completions", json=body)).content.iter_any():
                    text += part
            assert b"worker failed" in text
            assert value(gateway, "cut_streams_total") == 2
            await until(lambda: not any(worker.in_flight for worker in gateway.fleet.workers))

    run(test)


def test_what_is_asked_of_all_workers_is_read_within_limits_and_of_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other: list[str] = []
    secret = RawWorker(secret=JSON + b"Content-Length: 2\r\n\r\n{}")
    raw = RawWorker(
        metrics=endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", chunk(b"x" * 65536)),
        flush_cache=endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", chunk(b"x" * 65536)),
    )

    async def test() -> None:
        async with secret, beside(raw, echo) as (_, workers, client):
            for name in ("health", "get_server_info", "metrics"):
                raw.answers[name] = b"HTTP/1.1 302 X\r\nLocation: %b/secret\r\n\r\n" % secret.url.encode()
                await until(lambda name=name: name == "metrics" or raw.asked.count(name) > 2)  # type: ignore[misc]
            text = await (await client.get("/metrics")).text()
            assert f'sgl:x_total{{a="b",worker="{workers[0].url}"}}' in text
            answer = await client.post("/flush_cache", headers={"X-Api-Key": "k"})
            assert (answer.status, raw.url in await answer.text()) == (503, True)
            assert secret.asked == other == []
            raw.answers["metrics"] = endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", chunk(b"x" * 65536))
            assert f'worker="{workers[0].url}"' in await (await client.get("/metrics")).text()

    run(test)


@pytest.mark.parametrize(
    "text",
    ["# TYPE x counter\nx{", "x{=} 1\n", '# TYPE a b\na{b="\\', "x 1 2 3 4\n", "# HELP\n# TYPE\n", "\x00 1\n"],
)
def test_a_workers_broken_metrics_hide_no_others(text: str) -> None:
    raw = RawWorker(metrics=OK + b"Content-Length: %d\r\n\r\n%b" % (len(text), text.encode()))

    async def test() -> None:
        async with beside(raw, echo) as (_, workers, client):
            answer = await client.get("/metrics")
            assert (answer.status, f'worker="{workers[0].url}"' in await answer.text()) == (200, True)

    run(test)


@pytest.mark.parametrize("number", [b"1" * 400, b"1e999", b"-1", b'"x"', b"1" * 9000])
def test_no_number_that_a_worker_says_of_itself_ends_looking_at_it(number: bytes) -> None:
    said = b'{"internal_states": [{"num_running_reqs": %b}], "max_total_tokens": %b}' % (number, number)
    raw = RawWorker(get_server_info=JSON + b"Content-Length: %d\r\n\r\n%b" % (len(said), said))

    async def test() -> None:
        async with beside(raw, echo) as (gateway, _, _):
            await until(lambda: raw.asked.count("get_server_info") > 3)
            assert gateway.servers[raw.url].is_up
            raw.answers["health"] = b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"
            await until(lambda: not gateway.servers[raw.url].is_up)

    run(test)


def test_a_name_that_is_never_resolved_holds_up_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def stuck(host: Any, *arguments: Any, **more: Any) -> Any:
            if host == "stuck.invalid":
                await asyncio.sleep(2 * PATIENCE)
            return await real(host, *arguments, **more)

        monkeypatch.setattr(loop, "getaddrinfo", stuck)
        async with gateway_of(echo) as (gateway, _, client):
            gateway._session()._timeout = aiohttp.ClientTimeout(total=None, connect=1.0, sock_connect=PATIENCE)
            gateway.servers.add("http://stuck.invalid:80")
            for _ in range(4):
                assert (await client.post("/generate", json={"text": "x"})).status == 200

    run(test)


def test_whole_events_are_found_whatever_ends_them() -> None:
    assert [replies.up_to_last_event(data) for data in (b"", b"a", b"a\n\nb", b"a\r\n\r\nb", b"a\n\n")] == [
        0,
        0,
        3,
        5,
        3,
    ]


def test_a_gateway_ends_though_looking_at_a_worker_fails_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError as error:
            raise RuntimeError("broken") from error

    async def test() -> None:
        async with gateway_of(echo):
            await asyncio.sleep(0.1)

    monkeypatch.setattr("sgl.runtime.gateway.workers.Servers._look_once", broken)
    run(test)


def test_adapters_are_those_of_the_workers_that_there_are_and_no_endless_list() -> None:
    counts = ("kv_available_tokens", "kv_evictable_tokens", "num_running_reqs", "num_queue_reqs")
    info = {"max_total_tokens": 10, "internal_states": [dict.fromkeys(counts, 0)]}
    names = [f"{number}" + "x" * 300 for number in range(2000)]
    bodies = [json.dumps({**info, "lora_paths": [{"lora_name": each} for each in its]}) for its in (names, ["a"])]
    answers = [JSON + f"Content-Length: {len(body)}\r\n\r\n{body}".encode() for body in bodies]

    async def test() -> None:
        async with (
            RawWorker(get_server_info=answers[0]) as one,
            RawWorker(get_server_info=answers[1]) as two,
            gateway_of(echo) as (gateway, _, _),
        ):
            gateway.servers.add(one.url, "one")
            gateway.servers.add(two.url, "two")
            await until(lambda: len(gateway.servers.adapters) == 1001)
            assert "a" in gateway.servers.adapters
            assert max(map(len, gateway.servers.adapters)) == 256
            gateway.servers.remove("one")
            assert gateway.servers.adapters == {"a"}

    run(test)
