"""Servers that are not there, say nothing, or say nonsense: one typed error, soon, and no page of tracebacks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.errors import BackendError, ProgramError, RequestTimeout, ServerUnreachable
from sgl.lang.backends import http, server
from tests.fake_servers import FakeServer
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
HEAD = """
import asyncio, sgl
@sgl.function
def program(s, x=""):
    s += "a" + x + sgl.gen("y")
"""
SCRIPTS = {
    "an endpoint": "sgl.RuntimeEndpoint('{url}')",
    "a run": "print(program.run(backend=sgl.OpenAI('m', base_url='{url}'))['y'])",
    "a run that is waited for": "program.run(backend=sgl.OpenAI('m', base_url='{url}'), use_thread=False)",
    "a streamed run": "list(program.run(backend=sgl.OpenAI('m', base_url='{url}'), stream=True).text_iter())",
    "a batch": "program.run_batch([('b',), ('c',)], backend=sgl.OpenAI('m', base_url='{url}'))",
}
COMMANDS = {
    "run": ["run", "--url", "{url}", __file__],
    "trace": ["trace", "--url", "{url}", "--output", "{folder}/page.html", __file__],
    "chat": ["chat", "--url", "{url}"],
    "bench": ["bench", "serving", "--url", "{url}", "--num-prompts", "2"],
}


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL that nobody listens at, nor will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes | None], str]]:
    """Makes servers that answer every connection with so many bytes and close it; with None, say nothing for ever."""
    ends: list[socket.socket] = []

    def serve(answer: bytes | None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        ends.append(listener)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    end, _ = listener.accept()
                    ends.append(end)
                    if answer is not None:
                        end.recv(65536)
                        end.sendall(answer)
                        end.close()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for end in ends:
        end.close()


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Another interpreter's work."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        input="hello\n",
        cwd=ROOT,
        env=environment,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.costly
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_server_that_is_not_there_costs_few_lines(name: str, nobody: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS[name].format(url=nobody) + "\n")
    ran = python(str(script))
    lines = ran.stderr.strip().splitlines()
    assert ran.returncode == 1
    assert len(lines) <= 15, ran.stderr
    last = next(line for line in reversed(lines) if line.startswith("sgl.errors."))  # a note may follow
    assert nobody in last
    assert "`sgl serve" in last
    assert "aiohttp" not in ran.stderr


@pytest.mark.costly
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_in_one_line_that_there_is_no_server(name: str, nobody: str, tmp_path: Path) -> None:
    ran = python("-m", "sgl", *(word.format(url=nobody, folder=tmp_path) for word in COMMANDS[name]))
    [line] = ran.stderr.strip().splitlines()
    assert ran.returncode == 1
    assert line.startswith(f"sgl: {nobody} cannot be reached: there is no server")
    assert "`sgl serve" in line


def test_the_error_has_a_class_of_its_own_and_no_chain(nobody: str) -> None:
    with pytest.raises(ServerUnreachable, match="refused") as raised:
        sgl.RuntimeEndpoint(nobody, max_retries=0)
    assert (raised.value.url, raised.value.retryable) == (nobody, True)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


@sgl.function
def program(s: Any, x: str = "") -> None:
    s += "a" + x + sgl.gen("y")


def test_every_read_of_a_program_says_so(nobody: str) -> None:
    state = program.run(backend=sgl.OpenAI("m", base_url=nobody, max_retries=0))
    for read in (state.text, state.sync, lambda: state["y"], lambda: list(state.text_iter())):
        with pytest.raises(ProgramError, match="there is no server") as raised:
            read()
        assert isinstance(raised.value.__cause__, ServerUnreachable)

    async def main() -> None:
        with pytest.raises(ProgramError, match="there is no server"):
            await program.arun(backend=sgl.OpenAI("m", base_url=nobody, max_retries=0))

    asyncio.run(main())


def test_a_host_that_takes_no_connection_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.1)
    with contextlib.ExitStack() as ends:
        full = ends.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # as many as wait to be accepted; what comes then, the kernel leaves unanswered
            client = ends.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        with pytest.raises(ServerUnreachable, match=r"no connection within 0\.1 s"):
            sgl.RuntimeEndpoint(f"http://127.0.0.1:{full.getsockname()[1]}")


def test_a_server_that_never_answers_is_given_up(
    answering: Callable[[bytes | None], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FIRST_SECONDS", 0.2)
    url = answering(None)
    with pytest.raises(RequestTimeout, match=r"did not answer within 0\.2 s") as raised:
        sgl.RuntimeEndpoint(url)
    assert raised.value.__cause__ is None
    with pytest.raises(ProgramError, match=r"did not answer within 0\.1 s"):
        program.run(backend=sgl.OpenAI("m", base_url=url, timeout=0.1))["y"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"", "cannot be reached"),
        (b"\x16\x03\x01 no HTTP at all\r\n\r\n", "cannot be reached"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be reached"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "answers no JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "no server of this protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "broke off"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "a server of this protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", "broke off"),
    ],
)
def test_what_is_no_server_of_ours_is_a_backend_error(
    answering: Callable[[bytes | None], str], answer: bytes, told: str
) -> None:
    with pytest.raises(BackendError, match=told) as raised:
        sgl.RuntimeEndpoint(answering(answer), max_retries=0)
    assert raised.value.__cause__ is None


def test_a_server_that_dies_in_the_middle_of_a_stream_is_told_of() -> None:
    def events(path: str, body: Any) -> Any:
        return [{"text": "one ", "meta_info": {}}, {"text": "one two ", "meta_info": {}}]

    with FakeServer(events) as fake:
        backend = sgl.RuntimeEndpoint(fake.url, max_retries=0)
        fake.failures = [1]
        state = program.run(backend=backend, stream=True)
        with pytest.raises(ProgramError, match="broke off its answer") as raised:
            list(state.text_iter())
        assert isinstance(raised.value.__cause__, BackendError)
        json.dumps(fake.requests)


if __name__ == "__main__":
    raise SystemExit("`sgl run` came to the file though there is no server")
