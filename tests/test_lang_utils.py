"""Helpers that existing programs import: files, HTTP, server processes, the arguments of benchmark scripts."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.compat import utils
from sgl.compat.test_utils import add_common_sglang_args_and_parse, select_sglang_backend
from sgl.errors import BackendError, ConfigError
from sgl.lang.backends.launch import Runtime
from tests.fake_servers import FakeServer
from tests.lang_mocks import MockBackend
from tests.patience import PATIENCE

SERVER = textwrap.dedent(
    """
    import json, sys, http.server
    port = int(sys.argv[sys.argv.index("--port") + 1])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"model_path": "fake", "argv": sys.argv[1:]})
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
            if body and body.get("stream"):
                texts = ["one", "one two", "one two three" + "!" * int(body["text"])]
                events = [b"data: " + json.dumps({"text": text}).encode() + b"\\n\\n" for text in texts]
                if body["text"] == "-1":
                    events[1:] = [b'data: {"error": {"message": "no memory"}}\\n\\n']
                self.send(b"".join([*events, b"data: [DONE]\\n\\n"]))
            else:
                self.answer({"text": "hi", "meta_info": {"completion_tokens": 1}, "got": body})
        def answer(self, data):
            self.send(json.dumps(data).encode())
        def send(self, data):
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        def log_message(self, *args): pass
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n# a comment\n\n[2]\n')
    assert list(utils.read_jsonl(path)) == [{"a": 1}, [2]]

    @sgl.function
    def program(s, x):
        s += x + sgl.gen("y")

    states = program.run_batch([("one ",), ("two ",)], backend=MockBackend(lambda *_: "!"))
    utils.dump_state_text(tmp_path / "states.txt", [*states, "plain"])
    text = (tmp_path / "states.txt").read_text()
    assert all(shown in text for shown in ("one !", "two !", "plain", " 2 "))


def test_urls_and_requests(tmp_path: Path) -> None:
    assert utils.normalize_base_url("localhost", 80) == "http://localhost:80"
    assert utils.normalize_base_url("https://x/", None) == "https://x"
    assert utils.normalize_base_url("http://x:1", 80) == "http://x:1"
    with FakeServer(lambda path, body: {"got": body}, model_info={"ok": 1}) as server:
        assert utils.http_request(server.url + "/x").json() == {"ok": 1}
        posted = utils.http_request(server.url + "/x", json={"a": 1}, api_key="k")
        assert (posted.status_code, posted.json()) == (200, {"got": {"a": 1}})
        assert server.headers[-1]["Authorization"] == "Bearer k"
        first = utils.download_and_cache_file(server.url + "/file.json", tmp_path / "f")
        assert utils.download_and_cache_file("http://127.0.0.1:9/f", tmp_path / "f") == first
        assert Path(first).read_text() == '{"ok": 1}'
        utils.wait_for_server(server.url, timeout=PATIENCE)
    with pytest.raises(BackendError, match="not ready"):
        utils.wait_for_server("http://127.0.0.1:9", timeout=0.3)


def test_highlights_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    utils.print_highlight("text")
    assert capsys.readouterr().out == "text\n"


def test_a_server_process_is_started_and_stopped(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    process, port = utils.launch_server_cmd(f"{sys.executable} {script} \\\n --name x")
    try:
        utils.wait_for_server(f"http://127.0.0.1:{port}", timeout=PATIENCE, process=process)
    finally:
        utils.terminate_process(process)
    assert process.poll() is not None
    with pytest.raises(BackendError, match="ended with code"):
        utils.wait_for_server("http://127.0.0.1:9", timeout=PATIENCE, process=process)


def test_a_runtime_is_a_server_process_and_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    monkeypatch.setattr(Runtime, "command", (sys.executable, str(script)))
    runtime = sgl.Runtime(model_path="m", launch_timeout=PATIENCE, port=31000, api_key="k", skip_server_warmup=True)
    try:
        argv = runtime.endpoint.model_info["argv"]
        assert "--skip-server-warmup" in argv
        assert argv[argv.index("--model-path") + 1] == "m"

        @sgl.function
        def program(s):
            s += sgl.gen("x")

        assert program.run(backend=runtime)["x"] == "hi"
        answer = json.loads(runtime.generate("hello", {"temperature": 0}))
        assert answer["got"] == {"text": "hello", "sampling_params": {"temperature": 0}}

        async def read(number: int) -> list[str]:
            return [piece async for piece in runtime.async_generate(str(number))]

        assert asyncio.run(read(0)) == ["one", " two", " three"]
        assert sum(map(len, asyncio.run(read(10**6)))) == 13 + 10**6, "a line may be long"
        with pytest.raises(BackendError, match="failed while streaming: no memory"):
            asyncio.run(read(-1))
    finally:
        runtime.shutdown()
        runtime.shutdown()
    assert runtime.pid is None
    monkeypatch.setattr(Runtime, "command", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(BackendError, match="code 3"):
        sgl.Runtime(model_path="m", port=31000)


def test_benchmark_scripts_choose_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    def parsed(*argv: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["script", *argv])
        return add_common_sglang_args_and_parse(argparse.ArgumentParser())

    with FakeServer(lambda path, body: {}) as server:
        host, port = server.url.rsplit(":", 1)
        backend = select_sglang_backend(parsed("--host", host, "--port", port))
        assert isinstance(backend, sgl.RuntimeEndpoint)
    assert isinstance(select_sglang_backend(parsed("--backend", "gpt-4o")), sgl.OpenAI)
    with pytest.raises(ConfigError, match="no backend"):
        select_sglang_backend(parsed("--backend", "other"))
    assert parsed().result_file == "result.jsonl"
