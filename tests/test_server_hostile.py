"""A server among hostile and unlucky clients: malformed bodies, broken connections, slow readers and writers, huge
prompts, bytes that are no text. Each gets a 4xx where there is room for one, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sgl.runtime.engine import Engine
from tests.live_server import LiveServer, state_of
from tests.patience import PATIENCE

ENDLESS = {"text": "hello", "sampling_params": {"max_new_tokens": 480, "temperature": 0, "ignore_eos": True}}
READ_TIMEOUT = 3.0


@pytest.fixture
def server(engine: Engine, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """Proves, after each test, that nothing is left of what happened in it. A parameter is its read_timeout."""
    server = LiveServer(engine, read_timeout=getattr(request, "param", 60.0))
    yield server
    deadline = time.monotonic() + PATIENCE
    while server.service.metrics.open_requests or state_of(engine)["num_running_reqs"]:
        assert time.monotonic() < deadline, "a request goes on for nobody"
        time.sleep(0.005)
    answer = server.post("/generate", {**ENDLESS, "sampling_params": {"max_new_tokens": 2}})
    assert answer.status_code == 200
    server.close()
    assert engine.check_ledger() == []
    assert not engine._calls.rids


def request(body: bytes, path: str = "/generate", length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


async def exchange(url: str, data: bytes, *, half_close: bool = False, wait: float = PATIENCE) -> bytes:
    """All that the server answers until it closes or `wait` seconds have passed."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        async with asyncio.timeout(wait):
            writer.write(data)
            await writer.drain()
            if half_close:
                writer.write_eof()
            while piece := await reader.read(65536):
                answer += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return answer


def status(answer: bytes) -> str:
    return answer[9:12].decode() if answer.startswith(b"HTTP/1.") else "none"


def everyone(server: LiveServer, requests: list[bytes], **options: Any) -> list[bytes]:
    """The answers to all of them, a hundred at a time."""

    async def all_of_them() -> list[bytes]:
        slots = asyncio.Semaphore(100)

        async def one(data: bytes) -> bytes:
            async with slots:
                return await exchange(server.url, data, **options)

        return await asyncio.gather(*map(one, requests))

    return asyncio.run(all_of_them())


def test_a_thousand_malformed_bodies_get_a_4xx_each(server: LiveServer) -> None:
    """Well-formed HTTP around a body that is damaged, of the wrong shape, or no text; then the client has said all."""
    rng = random.Random(2)
    good = {
        "/generate": b'{"text": "hello", "sampling_params": {"max_new_tokens": 2, "regex": "a+"}, "stream": true}',
        "/v1/completions": b'{"prompt": "hello", "max_tokens": 2, "stop": ["x"], "logit_bias": {"3": 1}}',
        "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 2}',
        "/v1/programs": b'{"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": [], "final": true}}',
        "/tokenize": b'{"text": "hello"}',
    }
    requests = []
    while len(requests) < 1000:
        path = rng.choice(list(good))
        body = malformed(good[path], rng)
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            requests.append(
                request(body, path).replace(b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n")
            )
    statuses = Counter(map(status, everyone(server, requests)))
    assert statuses == {"400": 1000}


def malformed(good: bytes, rng: random.Random) -> bytes:
    data = bytearray(good)
    where = rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            data[where : where + 1] = rng.randbytes(1)
        case 1:
            del data[where:]
        case 2:
            data[where:where] = bytes([rng.choice((0x00, 0x22, 0x5C, 0x7D, 0xC3, 0xFF))])
        case 3:
            return rng.randbytes(rng.randrange(1, 60))
        case 4:
            return b"[" * rng.choice((10, 100_000))
    return bytes(data)


def test_half_closed_connections_get_a_400_and_are_not_computed_for(server: LiveServer, engine: Engine) -> None:
    body = json.dumps(ENDLESS).encode()
    generated = state_of(engine)["generated_tokens"]
    cases = [
        b"POST /gen",
        request(b"")[:-10],
        request(body)[:-5],
        request(body, length=10**9),
        request(body),
    ]
    for case, answer in zip(cases * 5, everyone(server, cases * 5, half_close=True), strict=True):
        assert answer.count(b"HTTP/1.1 ") == 1, "one answer a request"
        if status(answer) == "413":  # whichever is seen first
            assert case == request(body, length=10**9)
            continue
        assert status(answer) == "400", answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "client_closed"
    assert everyone(server, [b""], half_close=True) == [b""], "who asked nothing is told nothing"
    time.sleep(0.1)
    assert state_of(engine)["generated_tokens"] - generated < 5 * 100


@pytest.mark.parametrize("half_close", [True, False])
def test_what_is_no_http_gets_a_400_like_any_other(server: LiveServer, half_close: bool) -> None:
    """A client that also closes its side may be told of that instead: whichever is seen first."""
    for answer in everyone(
        server, [b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost x\r\n\r\n"] * 5, half_close=half_close
    ):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert status(answer) == "400", answer
        assert b"application/json" in head
        assert b"X-Request-Id: " in head
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] in (("bad_http", "client_closed") if half_close else ("bad_http",))


def test_streams_of_half_closed_connections_end(server: LiveServer) -> None:
    async def leave_after_the_first_event() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request(json.dumps({**ENDLESS, "stream": True}).encode()))
        await reader.readuntil(b"data: ")
        writer.write_eof()
        rest = await asyncio.wait_for(reader.read(), PATIENCE)
        assert b"HTTP/1.1 400" not in rest, "one answer a request"
        assert b"[DONE]" not in rest
        writer.close()

    asyncio.run(leave_after_the_first_event())


@pytest.mark.parametrize("server", [READ_TIMEOUT], indirect=True)
def test_slow_writers_get_a_408_and_silent_ones_are_closed(server: LiveServer) -> None:
    body = json.dumps(ENDLESS).encode()
    began = time.monotonic()
    slow, half_head, silent = everyone(server, [request(body)[:-5], b"POST /generate HT", b""])
    assert status(slow) == "408"
    assert (half_head, silent) == (b"", b"")
    assert time.monotonic() - began > READ_TIMEOUT * 0.9


def test_ten_megabyte_prompts_are_refused_soon(server: LiveServer) -> None:
    """As too long, in text and in ids, streamed or not, and many at once; others are served meanwhile."""
    text = "the cat sat on the mat. " * (10_000_000 // 24)
    ids = [5] * 2_000_000
    bodies = [
        {"text": text},
        {"text": "a" * 10_000_000, "stream": True},
        {"input_ids": ids},
        {"text": text[:-1] + "é"},
    ]
    requests = [request(json.dumps(body).encode()) for body in bodies] * 2
    chat = {"messages": [{"role": "user", "content": text}]}
    requests += [request(json.dumps(chat).encode(), "/v1/chat/completions")]
    requests += [request(json.dumps({"prompt": [text, text]}).encode(), "/v1/completions")]
    requests = [
        one.replace(b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n", 1) for one in requests
    ]
    for answer in everyone(server, requests):
        assert status(answer) == "400", answer[:500]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/v1/responses/input_tokens"]
)
@pytest.mark.parametrize("text", ["the cat sat on the mat. " * 100_000, "<s>" * 300_000])
def test_prompts_far_too_long_are_not_counted_to_their_end(server: LiveServer, path: str, text: str) -> None:
    """Neither for their number of tokens alone, nor where each word is a control token's name."""
    turns = [{"role": "user", "content": text}]
    answer = server.post(path, {"input" if "responses" in path else "messages": turns})
    assert answer.status_code == 400, answer.text[:500]
    assert "it has more than" in answer.json()["error"]["message"]


def test_a_chat_that_does_not_fit_is_counted_to_its_end(server: LiveServer, engine: Engine) -> None:
    """So that its client knows how much to leave out; an answer to it says the number, too."""
    text = "the cat sat on the mat. " * engine.config.context_length
    turns = [{"role": "user", "content": text}]
    number = server.post("/v1/messages/count_tokens", {"messages": turns}).json()["input_tokens"]
    assert number > 3 * engine.config.context_length
    few = [{"role": "user", "content": text[: len(text) // 3]}]
    number = server.post("/v1/messages/count_tokens", {"messages": few}).json()["input_tokens"]
    assert number > 2 * engine.config.context_length
    answer = server.post("/v1/chat/completions", {"messages": few})
    assert answer.status_code == 400
    assert f"it has {number} tokens" in answer.json()["error"]["message"], answer.text


def test_too_many_prompts_are_refused_before_any_is_encoded(
    server: LiveServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, **_: encoded.append(text))
    most = engine.config.max_requests_per_call
    for prompts, n, param in ((most + 1, 1, "prompt"), (most // 2 + 1, 2, "n")):
        answer = server.post("/v1/completions", {"prompt": ["a"] * prompts, "n": n})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not encoded


@pytest.mark.parametrize(
    "text",
    ['"\\ud800"', '"\\udfff\\ud800"', '"a\\u0000b"', '"\\uffff\\u200b\\u202e"', '"' + "\U0001f600" * 50 + '"'],
)
def test_odd_characters_are_served_or_refused(server: LiveServer, text: str) -> None:
    """Lone surrogates, NULs and others, as JSON escapes or as themselves, everywhere that takes text."""
    bodies = [
        ("/generate", f'{{"text": {text}, "sampling_params": {{"max_new_tokens": 2, "stop": {text}}}}}'),
        ("/generate", f'{{"text": "a", "rid": {text}, "sampling_params": {{"max_new_tokens": 2}}}}'),
        ("/generate", f'{{"text": "a", "extra_key": {text}, "sampling_params": {{"max_new_tokens": 2}}}}'),
        ("/generate", f'{{"text": "a", "sampling_params": {{"max_new_tokens": 2, "regex": {text}}}}}'),
        (
            "/generate",
            f'{{"text": "a", "sampling_params": {{"max_new_tokens": 9, "json_schema": {{"const": {text}}}}}}}',
        ),
        ("/v1/completions", f'{{"prompt": {text}, "max_tokens": 2, "echo": true, "logprobs": 1}}'),
        ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": {text}}}], "max_tokens": 2}}'),
        ("/v1/chat/completions", f'{{"model": {text}, "messages": [{{"role": "user", "content": "a"}}]}}'),
        ("/v1/chat/completions", f'{{{text}: 1, "messages": [{{"role": "user", "content": "a"}}]}}'),
        ("/tokenize", f'{{"text": {text}}}'),
    ]
    requests = [
        request(body.encode(), path).replace(b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n")
        for path, body in bodies
    ]
    statuses = [status(answer) for answer in everyone(server, requests)]
    assert set(statuses) <= {"200", "400", "404"}, list(zip(statuses, bodies, strict=True))


def test_invalid_utf8_and_wrong_declarations_are_refused(server: LiveServer) -> None:
    good = request(b'{"text": "a"}')
    requests = [
        request(b'{"text": "\xff\xfe"}'),
        request(b'{"text": "\xc3"}'),
        request('{"text": "a"}'.encode("utf-16")),
        good.replace(b"Host: localhost\r\n", b"Host: localhost\r\nContent-Encoding: gzip\r\n"),
        good.replace(b"Content-Length: 13", b"Content-Length: -1"),
        good.replace(b"Content-Length: 13", b"Transfer-Encoding: chunked").replace(b'{"text"', b"zz\r\n"),
        good.replace(b"HTTP/1.1", b"HTTP/9.9"),
        good.replace(b"Host: localhost", b"Host: localhost\r\nX: " + b"y" * 100_000),
    ]
    requests = [
        data.replace(b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n", 1) for data in requests
    ]
    assert {status(answer)[0] for answer in everyone(server, requests)} == {"4"}
