"""Bodies of every kind of size: what is wrong with one is said after a bounded amount of work, in a process of its own
where that is much, and no small body ever waits for a large one."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from pydantic import ValidationError

from sgl.errors import InvalidRequest
from sgl.runtime.engine import Engine
from sgl.runtime.server import bodies, body_process
from sgl.runtime.server.bodies import MAX_DEPTH, MAX_KEYS, MAX_OBJECTS, MAX_TEXTS, MAX_VALUES, load_json, parse
from sgl.runtime.server.body_process import BodyProcesses
from sgl.runtime.server.native import AbortBody, DetokenizeBody, GenerateBody, TokenizeBody
from sgl.runtime.server.programs import ProgramBody, SegmentBody
from sgl.runtime.server.protocol import ChatBody, CompletionBody
from tests.live_server import LiveServer, served
from tests.patience import PATIENCE
from tests.test_server_hostile import exchange, request, status

MODELS = [AbortBody, ChatBody, CompletionBody, DetokenizeBody, GenerateBody, ProgramBody, SegmentBody, TokenizeBody]
MANY = 300_000
SHORT = {"max_new_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[LiveServer]:
    with served(engine) as server:
        yield server
    assert server.service.reader._held == 0


def refused(data: bytes, model: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(data, model)
    return error.value


def put(template: str, inside: str) -> str:
    return template.replace("%s", inside)


def many(item: str, count: int = MANY) -> str:
    return "[" + ",".join([item] * count) + "]"


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (GenerateBody, put('{"input_ids": %s}', many('""'))),
        (GenerateBody, put('{"input_ids": %s}', many('[""]', 60_000))),
        (GenerateBody, put('{"input_ids": %s}', many('[1, ""]', 60_000))),
        (GenerateBody, put('{"text": %s}', many("1"))),
        (GenerateBody, put('{"text": "a", "sampling_params": %s}', many("1"))),
        (GenerateBody, put('{"text": "a", "rid": %s}', many("1"))),
        (GenerateBody, put('{"text": "a", "token_ids_logprob": %s}', many("[1.5]", 60_000))),
        (CompletionBody, put('{"prompt": %s}', many("1.5"))),
        (CompletionBody, put('{"prompt": "a", "stop": %s}', many("1"))),
        (
            CompletionBody,
            put('{"prompt": "a", "logit_bias": {%s}}', ",".join(f'"{i}": "x"' for i in range(60_000))),
        ),
        (CompletionBody, put('{"prompt": "a", %s}', ",".join(f'"{i}": 1' for i in range(60_000)))),
        (ChatBody, put('{"messages": %s}', many("{}", 9_000))),
        (ChatBody, put('{"messages": [{"role": "user", "content": %s}]}', many("1", 9_000))),
        (ChatBody, put('{"messages": [{"role": "user"}], "tools": %s}', many("1", 9_000))),
        (TokenizeBody, put('{"text": %s}', many("1"))),
        (DetokenizeBody, put('{"tokens": %s}', many('""'))),
        (ProgramBody, put('{"program": {}, "rows": %s}', many("1", 9_000))),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value[:40],
)
def test_the_first_mistake_ends_the_search_for_others(
    model: Any, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million errors at a time took gigabytes: of each list, no more than one a form that it may have is noted."""
    counts = []

    def noted(error: ValidationError, known: list[str]) -> InvalidRequest:
        counts.append(error.error_count())
        return as_invalid_request(error, known)

    as_invalid_request = bodies.as_invalid_request
    monkeypatch.setattr(bodies, "as_invalid_request", noted)
    assert str(refused(body.encode(), model))
    is_object = '{"0"' in body or '"1": 1' in body  # objects are bounded by their fields
    assert counts[0] <= (MAX_KEYS if is_object else 12)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 100_000, f"more than {MAX_DEPTH} deep"),
        (b'{"x":' * 100_000, f"more than {MAX_DEPTH} deep"),
        (b'{"text": ' + b"1" * 1_000_000 + b"}", "digits"),
        (b'{"x": ' + b"1" * 1_500 + b"}", "digits"),
        (b'{"x": -' + b"9" * 4_299 + b"}", "digits"),
        (b'{"x": NaN}', "not JSON"),
        (b'{"x": [Infinity]}', "not JSON"),
        (b'{"x": [{"y": -1e999}]}', "finite"),
        (b'{"x": [1, 1e400]}', "finite"),
        (b"[1]", "a list"),
        (b"5", "a number"),
        (b"null", "null"),
        (b"", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"x": "\xff"}', "not JSON"),
        (b'{"x": "\\ud800"}', "half of a surrogate pair"),
        ('{"text": "a"}'.encode("utf-16"), "not JSON"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(MAX_KEYS + 1)) + b"}", f"{MAX_KEYS} are the most"),
        (b'{"x": [' + b"[]," * MAX_VALUES + b"[]]}", f"{MAX_VALUES} are the most"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_no_body_may_be_is_said_with_its_limit(model: Any, data: bytes, words: str) -> None:
    assert words in str(refused(data, model))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("5", "a valid string or a valid list"),
        (many('"a"', MAX_TEXTS + 1), f"at most {MAX_TEXTS} items"),
        ("[5]", "stop.0: Input should be a valid string"),
    ],
    ids=["number", "many", "item"],
)
def test_what_may_be_of_several_kinds_is_told_of_all_of_them(field: str, words: str) -> None:
    body = put('{"messages": [{"role": "user", "content": "a"}], "stop": %s}', field)
    assert words in str(refused(body.encode(), ChatBody))


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"type": "function", "name": "f"}, "tool_choice.function: Field required"),
        ({"type": "function", "function": {}}, "tool_choice.function.name: Field required"),
        ({"type": "mcp"}, "tool_choice: the type 'mcp' is not supported here, but function, custom, allowed_tools"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools: Field required"),
        ("any", "tool_choice: Input should be 'auto', 'none' or 'required'"),
        (5, "tool_choice: Input should be 'auto', 'none' or 'required'"),
    ],
)
def test_a_choice_of_tools_is_told_by_its_type(choice: Any, words: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tool_choice": choice}
    assert str(refused(json.dumps(body).encode(), ChatBody)) == words


def test_commas_of_a_text_are_no_values() -> None:
    text = ',":[{\\' * (MAX_VALUES // 2)
    assert parse(json.dumps({"text": text}).encode(), GenerateBody).text == text


def test_lists_have_their_ends_in_the_description(server: LiveServer) -> None:
    """Every list of every body, and what is longer is refused by its limit."""
    described = server.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    left = [item.get("requestBody") for path in described["paths"].values() for item in path.values()]
    sent: set[str] = set()
    while left:
        new = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(left.pop()))) - sent
        left += [schemas[name] for name in new]
        sent |= new

    def lists(schema: Any) -> Iterator[Any]:
        if isinstance(schema, dict):
            if schema.get("type") == "array":
                yield schema
            for item in schema.values():
                yield from lists(item)
        elif isinstance(schema, list):
            for item in schema:
                yield from lists(item)

    bodies = {name: schema for name, schema in schemas.items() if name in sent}
    found = [each for schema in bodies.values() for each in lists(schema)]
    assert len(found) > 10
    assert all("maxItems" in each for each in found)
    messages = many('{"role": "user", "content": "a"}', MAX_OBJECTS + 1)
    assert str(MAX_OBJECTS) in str(refused(put('{"messages": %s}', messages).encode(), ChatBody))


def test_token_ids_that_cannot_fit_are_refused_where_they_are_read(server: LiveServer) -> None:
    """A million of them reach neither the server's process nor the engine's."""
    passed = []
    engine = server.service.engine
    generate = engine.generate
    engine.generate = lambda **arguments: passed.append(arguments) or generate(**arguments)  # type: ignore
    try:
        for path, name in (("/generate", "input_ids"), ("/v1/completions", "prompt")):
            for ids in ([5] * 100_000, [[5], [5] * 100_000]):
                error = server.post(path, {name: ids}).json()["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", name)
                assert "it has 100000 tokens" in error["message"]
    finally:
        engine.generate = generate  # type: ignore[method-assign]
    assert not passed


def test_json_inside_of_a_text_has_the_same_limits() -> None:
    assert load_json('{"a": [1, 2.5, "x"]}', "it") == {"a": [1, 2.5, "x"]}
    for text, words in (
        ("[" * 900 + "]" * 900, "deep"),
        ("NaN", "JSON"),
        ("1e999", "finite"),
        ("{", "it is not JSON"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            load_json(text, "it")


def test_bodies_of_every_size_are_read(server: LiveServer) -> None:
    """The same answers at once and from a process of their own."""
    for size in (10, 300_000, 2_000_000):
        spaces = " " * size
        data = put('{"text": "hello", %s"sampling_params": {"max_new_tokens": 2, "temperature": 0}}', spaces)
        answer = requests.post(server.url + "/generate", data=data, timeout=PATIENCE)
        assert answer.json()["meta_info"]["completion_tokens"] == 2
        wrong = put('{"text": "hello", %s"sampling_params": {"max_tokens": 2}}', spaces)
        answer = requests.post(server.url + "/generate", data=wrong, timeout=PATIENCE)
        assert "did you mean 'max_new_tokens'" in answer.json()["error"]["message"]
        wrong = put('{"text": 5, %s"sampling_params": {}}', spaces)
        answer = requests.post(server.url + "/generate", data=wrong, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text")
    several = server.post("/generate", {"text": ["a"] * 5_000, "sampling_params": {**SHORT, "max_new_tokens": 0}})
    assert len(several.json()) == 5_000


def test_the_process_that_reads_may_die(server: LiveServer) -> None:
    body = {"text": "hello", "sampling_params": SHORT, "padding": [0] * 10_000}
    assert server.post("/generate", body).status_code == 200
    process = server.service.reader._processes._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE)
    assert server.post("/generate", body).status_code == 200


def test_thousands_of_objects_are_not_made_on_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small steps of another thread let others in between."""
    threads = []

    def loads(data: bytes) -> Any:
        threads.append(threading.get_ident())
        return pickle.loads(data)

    monkeypatch.setattr(body_process, "pickle", SimpleNamespace(loads=loads, dumps=pickle.dumps))
    messages = [{"role": "user", "content": "a"}] * 5_000
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(threads) == 1
    assert threads[0] != server._thread.ident


def test_what_imports_map_is_not_a_bodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of libraries do, where there are many processors."""
    (tmp_path / "large_import.py").write_text(
        "import mmap\nmapped = mmap.mmap(-1, 5 << 30, flags=mmap.MAP_PRIVATE)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    processes = BodyProcesses(("large_import",))

    async def read() -> int:
        return await processes.run(asyncio.Semaphore(1), len, bytes(300 << 20))

    try:
        assert asyncio.run(read()) == 300 << 20
    finally:
        processes.close()


def test_small_bodies_pass_large_ones(server: LiveServer) -> None:
    """While all places of large bodies are taken."""
    reader = server.service.reader
    loop = server._loop

    async def take() -> None:
        for _ in range(2):
            await reader._slots[True].acquire()

    asyncio.run_coroutine_threadsafe(take(), loop).result(PATIENCE)
    large = {"text": "x" * 2_000_000}
    late: list[Any] = []
    thread = threading.Thread(target=lambda: late.append(server.post("/generate", large)))
    thread.start()
    try:
        while not reader._held:
            time.sleep(0.001)
        for padding in (0, 10_000):  # at once, and in a process of its own
            body = {"text": "hello", "sampling_params": SHORT, "padding": [0] * padding}
            assert server.post("/generate", body).status_code == 200
        assert not late
    finally:
        for _ in range(2):
            loop.call_soon_threadsafe(reader._slots[True].release)
        thread.join(PATIENCE)
    assert late[0].json()["error"]["code"] == "context_length_exceeded"


def test_many_long_bodies_at_once_are_refused_for_now(engine: Engine) -> None:
    """What all hold together is bounded; those that are refused may come again."""
    server = LiveServer(engine, max_request_bytes=1_000_000, read_timeout=2 * PATIENCE)

    async def send() -> bytes:
        start = request(b"x" * 900_000, length=950_000)
        waiting = [asyncio.create_task(exchange(server.url, start)) for _ in range(7)]
        while server.service.reader._held < 7 * 900_000:
            await asyncio.sleep(0.001)
        last = [asyncio.create_task(exchange(server.url, start)) for _ in range(2)]  # for one there may be room
        answered, _ = await asyncio.wait(last, return_when=asyncio.FIRST_COMPLETED)
        small = await exchange(server.url, request(b"{}").replace(b"Host: l", b"Connection: close\r\nHost: l"))
        assert status(small) == "400"
        for task in (*waiting, *last):
            task.cancel()
        return answered.pop().result()

    refused_one = asyncio.run(send())
    assert status(refused_one) == "429"
    assert b"Retry-After" in refused_one
    while server.service.reader._held:
        time.sleep(0.001)
    server.close()


def test_compressed_bodies_end_where_others_do(engine: Engine) -> None:
    server = LiveServer(engine, max_request_bytes=1_000_000)
    bomb = gzip.compress(b" " * 50_000_000)
    headers = {"Content-Encoding": "gzip"}
    answer = requests.post(server.url + "/generate", data=bomb, headers=headers, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
    data = gzip.compress(json.dumps({"text": "a", "sampling_params": SHORT}).encode())
    assert requests.post(server.url + "/generate", data=data, headers=headers, timeout=PATIENCE).status_code == 200
    assert server.service.reader._held == 0
    server.close()


def test_after_a_body_that_cannot_be_read_its_connection_ends_and_says_so(server: LiveServer) -> None:
    with requests.Session() as session:
        for _ in range(3):
            answer = session.post(
                server.url + "/generate", data=b"no gzip", headers={"Content-Encoding": "gzip"}, timeout=PATIENCE
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("the body cannot be read: Can not decode")
            assert answer.headers["Connection"] == "close"
            assert session.get(server.url + "/v1/models", timeout=PATIENCE).headers.get("Connection") is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_given_back(server: LiveServer) -> None:
    """Of hostile bodies this process holds nothing but their bytes, and those no longer than it reads them."""

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    hostile = [put('{"input_ids": %s}', many('""', 600_000)), put('{"messages": %s}', many("{}", 600_000))]
    paths = ["/generate", "/v1/chat/completions"]
    before = None
    for _ in range(4):
        for path, data in zip(paths, hostile, strict=True):
            assert requests.post(server.url + path, data=data, timeout=PATIENCE).status_code == 400
        before = before or resident()
    assert resident() - before < 200_000
