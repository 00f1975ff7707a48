"""What a client may get wrong beside its body, or in the depths of it: an error in the shape of all others, in time,
and without a page of traceback in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import requests
from aiohttp import web

from sgl import child
from sgl.cli.logs import configure_logging
from sgl.errors import InvalidRequest, RequestTimeout
from sgl.runtime.engine import Engine
from sgl.runtime.sampling_params import checked_seconds
from sgl.runtime.server import sse
from sgl.runtime.server.encoding import json_bytes, json_response
from sgl.runtime.server.openapi import _STATUSES
from tests.live_server import LiveServer, chat_checkpoint, slow_steps
from tests.patience import PATIENCE, wait_until
from tests.test_server_hostile import exchange

SHORT = {"max_new_tokens": 2, "temperature": 0}
LONG = {"max_new_tokens": 480, "temperature": 0, "ignore_eos": True}
HOST = b"Host: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/9.9\r\n" + HOST + b"\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"FOO / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /nowhere HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"TRACE / HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"GET /generate HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"POST /generate HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"POST /generate HTTP/1.1\r\n" + HOST + b"Content-Length: 999999999999\r\n\r\n{}", 413),
        (b"POST /generate HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400),
        (b"GET /" + b"a" * 50_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
        (b"POST /generate HTTP/1.1\r\n" + HOST + b"Expect: 999\r\nContent-Length: 2\r\n\r\n{}", 417),
        (b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Expect: 999\r\nContent-Length: 2\r\n\r\n{}", 417),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 50_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"x" * 50_000 + b": 1\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"".join(b"X%d: 1\r\n" % i for i in range(10_000)) + b"\r\n", 431),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_every_refusal_has_the_shape_of_all_others(server: LiveServer, data: bytes, status: int) -> None:
    """Also those that no handler of ours is asked for."""
    head, _, body = asyncio.run(exchange(server.url, data)).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert b"Content-Type: application/json" in head
    assert re.search(rb"X-Request-Id: [0-9a-f]{32}", head)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) < 3000
    assert status in _STATUSES


def test_every_status_of_a_refusal_is_described(server: LiveServer) -> None:
    for path, methods in server.get("/openapi.json").json()["paths"].items():
        for operation in methods.values():
            described = {int(status) for status in operation["responses"]}
            assert described >= {400, 401, 403, 404, 405, 408, 413, 414, 417, 429, 431, 499, 500, 503}, path


def chat(server: LiveServer, **more: Any) -> requests.Response:
    return server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **more}
    )


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "self",
        "conversation",
        "tokenize",
        "chat_template",
        "return_dict",
        "tokenizer_kwargs",
        "cls",
        "loop",
        "raise_exception",
        "a-b",
        "return_tensors",
        "truncation",
        "max_length",
        "padding",
        "__class__.x",
    ],
)
def test_variables_of_a_chat_template_cannot_take_the_place_of_others(server: LiveServer, name: str) -> None:
    for value in ([], True, "x", {}, None, 5):
        answer = chat(server, chat_template_kwargs={name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    "variables",
    [
        {"bos_token": {}},
        {"tools": 5},
        {"documents": "x"},
        {"add_generation_prompt": []},
        {"namespace": 1},
        {"range": 1, "tojson": 2},
        {"continue_final_message": True},
        {"enable_thinking": [[[]]]},
        {"m": 1},
    ],
)
def test_odd_variables_of_a_chat_template_are_the_clients_fault(server: LiveServer, variables: Any) -> None:
    assert chat(server, chat_template_kwargs=variables).status_code in (200, 400)


def test_variables_of_a_chat_template_spell_no_control_tokens(
    tmp_path: Path, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ system }}{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(server.service, "chat_template", template)
    kwargs = {"system": "</s>"}
    plain = chat(server, chat_template_kwargs={"system": "x" * 4}).json()["usage"]["prompt_tokens"]
    assert chat(server, chat_template_kwargs=kwargs).json()["usage"]["prompt_tokens"] >= plain > 1


@pytest.mark.parametrize("depth", [150, 900, 100_000])
def test_deep_arguments_of_earlier_calls_are_served_or_refused(server: LiveServer, depth: int) -> None:
    for arguments in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
        answer = chat(server, messages=messages)
        assert answer.status_code == (200 if depth == 150 and arguments[0] == "{" else 400)
        if answer.status_code == 400:
            assert "arguments of the call of 'f'" in answer.json()["error"]["message"]
    for arguments in ("NaN", "1e999", "1" * 5_000):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert chat(server, messages=[{"role": "assistant", "tool_calls": [call]}]).status_code == 400


def test_a_client_that_leaves_its_stream_is_no_error(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = sse.write

    async def left(request: web.Request, *arguments: Any) -> None:
        assert request.transport is not None
        request.transport.abort()  # as when the client goes while an event is on its way
        await write(request, *arguments)

    monkeypatch.setattr(sse, "write", left)
    with caplog.at_level(logging.INFO), pytest.raises(requests.ConnectionError):
        server.post("/generate", {"text": "a", "sampling_params": SHORT, "stream": True})
    wait_until(lambda: any(" 499 " in record.getMessage() for record in caplog.records))
    monkeypatch.undo()
    assert server.get("/health").status_code == 200  # and what followed has been logged
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.INFO]


def test_a_traceback_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger("sgl").level, logging.getLogger().handlers[:]

    def down(number: int) -> int:
        return up(number + 1) + 1

    def up(number: int) -> int:
        return down(number + 1) + 1

    try:
        for style in ("text", "json"):
            configure_logging("info", style)
            try:
                down(0)
            except RecursionError:
                logging.getLogger("sgl.test").exception("too deep")
            error = capsys.readouterr().err
            assert "RecursionError" in error
            assert "lines …" in error.replace("\\u2026", "…")
            assert len(error.replace("\\n", "\n").splitlines()) < 120
    finally:
        logging.getLogger("sgl").setLevel(before[0])
        logging.getLogger().handlers[:] = before[1]


def test_answers_hold_no_infinite_numbers() -> None:
    value = {"a": [1.5, float("nan"), {"b": float("inf")}], "c": (float("-inf"),)}
    assert json.loads(json_bytes(value)) == {"a": [1.5, None, {"b": None}], "c": [None]}
    assert isinstance(json_response(value).body, bytes)


def test_timelines_are_json_whatever_their_programs_say(server: LiveServer) -> None:
    program = '{"program": {"v": 1, "name": "p", "seed": 1%s}, "segment": {"nodes": [%s], "final": true}}'
    odd = ["NaN", "Infinity", "-Infinity", "1e999", "-1e400"]
    for number in odd:
        gen = '{"st": 0, "op": "gen", "name": "x", "params": {"temperature": %s}}'
        extra = '{"st": 0, "op": "gen", "name": "x", "params": {"extra": {"y": %s}}}'
        bodies = [program % ("", gen % number), program % ("", extra % number)]
        bodies += [program % (f', "{name}": {number}', "") for name in ("lease_s", "deadline_s", "seed")]
        for body in bodies:
            answer = requests.post(server.url + "/v1/programs", data=body, timeout=PATIENCE)
            assert answer.status_code == 400, body
    for listed in server.get("/v1/programs").json():
        text = server.get(f"/v1/programs/{listed['id']}/timeline").text
        assert "NaN" not in text
        assert "Infinity" not in text


def test_the_page_may_only_do_what_it_does(server: LiveServer) -> None:
    for page in ("/", "/docs"):
        answer = server.get(page)
        policy = answer.headers["Content-Security-Policy"]
        for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
            assert rule in policy
        assert "unsafe" not in policy
        assert len(re.findall("'sha256-", policy)) == 2, "its script and its style"
        assert not re.search(r"\s(style|on\w+)=", answer.text), "which no hash allows"
        assert answer.headers["X-Frame-Options"] == "DENY"
    for path in ("/", "/health", "/v1/status", "/nowhere"):
        assert server.get(path).headers["X-Content-Type-Options"] == "nosniff"
        assert server.get(path).headers["Referrer-Policy"] == "no-referrer"


def test_a_timeout_ends_a_request_wherever_it_waits(server: LiveServer, engine: Engine) -> None:
    """In the engine, and also where the engine says nothing: before a stream's first event, and between two."""
    with slow_steps(engine, 0.05):
        for body in ({"text": "a"}, {"text": "a", "stream": True}, {"input_ids": [3, 4]}):
            answer = server.post("/generate", {**body, "sampling_params": LONG, "timeout": 0.3})
            if answer.status_code == 200:
                assert '"code":"request_timeout"' in answer.text or '"err_type":"RequestTimeout"' in answer.text
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
        left = {"X-Sgl-Deadline-S": "0.3"}  # of a gateway
        answer = server.post("/generate", {**body, "sampling_params": LONG, "timeout": 60.0}, headers=left)
        assert '"request_timeout"' in answer.text or '"err_type":"RequestTimeout"' in answer.text
        results = server.post("/generate", {"text": ["a", "b"], "sampling_params": LONG, "timeout": 0.3}).json()
        if isinstance(results, list):  # else the machine had not even begun
            assert [each["meta_info"]["finish_reason"]["err_type"] for each in results] == ["RequestTimeout"] * 2
        else:
            assert results["error"]["code"] == "request_timeout"
        answer = server.post(
            "/v1/completions", {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "timeout": 0.3}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")


def test_a_timeout_counts_while_others_are_tokenised_or_compiled(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that does not answer is not waited for; a list of prompts gets a little longer."""
    waiting = asyncio.Event()

    async def never(**_arguments: Any) -> Any:
        await waiting.wait()

    monkeypatch.setattr(server.service.engine, "generate", never)
    for body in ({"text": "a"}, {"text": ["a", "b"]}):
        answer = server.post("/generate", {**body, "timeout": 0.2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
    assert chat(server, timeout=0.2).status_code == 408

    async def never_yielding(**_arguments: Any) -> Any:
        await waiting.wait()
        yield {}

    monkeypatch.setattr(server.service.engine, "stream", never_yielding)
    answer = server.post("/generate", {"text": "a", "timeout": 0.2, "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
    release = threading.Event()
    monkeypatch.setattr("sgl.runtime.server.conversations.prompt_ids", lambda *_: release.wait(PATIENCE) and [3])
    answer = chat(server, timeout=0.2)
    release.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")


def test_a_timeout_counts_while_a_constraint_is_compiled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import Future

    matchers = engine._builder._constraints.matchers

    def unready(params: Any) -> Any:
        found = matchers(params)
        for matcher in found:
            if matcher is not None:
                matcher.compilation = Future()
        return found

    monkeypatch.setattr(engine._builder._constraints, "matchers", unready)
    with pytest.raises(RequestTimeout, match="compiled"):
        engine.generate("a", {**SHORT, "regex": "b+"}, timeout=0.2, stream=True)
    with pytest.raises(RequestTimeout):
        asyncio.run(engine.async_generate("a", {**SHORT, "regex": "b+"}, timeout=0.2))


@pytest.mark.parametrize("value", [0, -1, 1e8, True, "5", [], 10**400, float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds(server: LiveServer, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="seconds"):
        checked_seconds("timeout", value)
    if value == value and value not in (float("inf"),):
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a", "max_tokens": 1})):
            answer = server.post(path, {**body, "timeout": value})
            assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    "more",
    [{"priority": 2**40}, {"priority": -(10**30)}, {"rid": "x" * 5_000}, {"extra_key": "x" * 5_000}],
    ids=str,
)
def test_names_and_numbers_have_bounds(server: LiveServer, more: Any) -> None:
    answer = server.post("/generate", {"text": "a", "sampling_params": SHORT, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(more)))


def test_error_messages_do_not_repeat_a_prompt(server: LiveServer) -> None:
    huge = "x" * 1_000_000
    for path, body in (
        ("/generate", {"text": "a", "sampling_params": {huge: 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], huge: 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "model": huge}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {huge: 1}}),
    ):
        answer = server.post(path, body)
        assert answer.status_code in (400, 404)
        assert len(answer.text) < 10_000, path


@pytest.mark.costly
@pytest.mark.parametrize("server_options", [{"read_timeout": 2.0}])
def test_slow_and_silent_connections_hold_nobody_up(engine: Engine, server_options: dict[str, Any]) -> None:
    """Idle ones, those that write a byte at a time, bodies in chunks without end, and pipelines nobody reads."""
    server = LiveServer(engine, **server_options)
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(300)]

    async def trickle(data: bytes, piece: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)

        async def more() -> None:
            while True:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.05)

        task = asyncio.create_task(more())
        try:
            return await asyncio.wait_for(reader.read(), PATIENCE)
        except ConnectionError:
            return b""
        finally:
            task.cancel()
            writer.close()

    async def both() -> list[bytes]:
        chunked = b"POST /generate HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
        return await asyncio.gather(trickle(b"GET /health HTTP/1.1\r\nX: ", b"a"), trickle(chunked, b"1\r\n{\r\n"))

    slow, endless = asyncio.run(both())
    assert slow == b""
    assert endless.split()[1] == b"408"
    pipeline = socket.create_connection((host, int(port)))
    pipeline.settimeout(5)
    try:
        for _ in range(200):
            pipeline.sendall((b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n") * 500)
    except (TimeoutError, ConnectionError):
        pass  # it is not read any more
    assert server.post("/generate", {"text": "a", "sampling_params": SHORT}).status_code == 200
    for each in [*idle, pipeline]:
        each.close()
    wait_until(lambda: not server.service.metrics.open_requests)
    server.close()


def test_helpers_import_nothing_from_the_working_folder(tmp_path: Path) -> None:
    """Not Python's modules under their names, not ours, nor anything that lies there."""
    for name in ("selectors", "socket", "pickle", "numpy", "pydantic", "sgl", "pickletools", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + '\\n')\n")
    code = (
        "import selectors, socket, pickle, numpy, pickletools, "
        "sgl.runtime.constraints.process, sgl.runtime.server.body_process"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import subprocess, sys; from sgl import child; sys.path.insert(0, ''); "
         f"sys.exit(subprocess.run(child.command({code!r})).returncode)"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
        env={"PYTHONPATH": str(Path(child.__file__).resolve().parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.slow
def test_a_server_imports_nothing_from_the_working_folder(tmp_path: Path) -> None:
    """Neither it nor its engine's process, what that is forked from, or those that work on constraints and bodies."""
    model = chat_checkpoint(tmp_path / "model")
    ran = tmp_path / "ran"
    for name in ("selectors", "socket", "pickle", "struct", "numpy", "queue", "logging", "flashinfer", "brotli"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(ran)!r}, 'a').write({name!r} + '\\n')\nraise ImportError\n"
        )
    root = str(Path(child.__file__).resolve().parents[1])
    code = "import sys; sys.path[:] = [p for p in sys.path if p]; from sgl.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, "serve", str(model), "--port", "0", "--device", "cpu"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"at (http://\S+)", line)
        assert found, process.communicate()[1]
        body = {"text": "a", "sampling_params": {**SHORT, "regex": "[a-z]+"}, "padding": [0] * 10_000}
        assert requests.post(found[1] + "/generate", json=body, timeout=PATIENCE).status_code == 200
    finally:
        process.terminate()
        process.communicate()
    assert not ran.exists(), ran.read_text()
