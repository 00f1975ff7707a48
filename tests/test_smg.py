"""smg from PyPI before a server of ours, by HTTP and by gRPC; skipped where it is not on the PATH."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from sgl.runtime.engine import Engine
from tests.live_server import served
from tests.patience import PATIENCE, wait_until
from tests.ports import free_port

SMG = shutil.which("smg")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SMG is None, reason="smg is not on the PATH: pip install smg, in an environment of its own"),
]
CHAT = {"model": "embedded", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}


@pytest.fixture(params=["http", "grpc"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URLs of smg and of the server behind it."""
    if request.param == "grpc":
        pytest.importorskip("smg_grpc_proto")
    assert SMG is not None
    options = {"served_model_name": "embedded", **({"grpc_port": 0} if request.param == "grpc" else {})}
    with Engine("embedded", device="cpu", max_total_tokens=8192) as engine, served(engine, **options) as server:
        worker = server.url if request.param == "http" else f"grpc://127.0.0.1:{server.service.grpc_port}"
        port = free_port()
        command = [SMG, "launch", "--worker-urls", worker, "--port", str(port)]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--prometheus-port", str(free_port())], cwd=tmp_path, stdout=log, stderr=log
            )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(url))
            yield url, server.url
        finally:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        return requests.post(url + "/v1/chat/completions", json=CHAT, timeout=PATIENCE).status_code == 200
    except requests.ConnectionError:
        return False


def test_chats_are_those_of_the_server(pair: tuple[str, str]) -> None:
    through, direct = (
        requests.post(url + "/v1/chat/completions", json=CHAT, timeout=PATIENCE).json()["choices"][0]
        for url in pair
    )
    assert through["message"]["content"] == direct["message"]["content"]
    assert through["finish_reason"] == direct["finish_reason"]
    events = requests.post(pair[0] + "/v1/chat/completions", json={**CHAT, "stream": True}, timeout=PATIENCE).text
    assert events.rstrip().endswith("data: [DONE]")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {**CHAT, "max_tokens": 40, "response_format": wanted}
    found = requests.post(pair[0] + "/v1/chat/completions", json=body, timeout=PATIENCE).json()
    assert found["choices"][0]["message"]["content"].startswith('{"a":')
