"""Programs through the gateway: values that they have alone, whatever happens to their workers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
from aiohttp import web

import sgl
from sgl.lang.backends.engine import EngineBackend
from sgl.runtime.engine import Engine
from sgl.runtime.gateway.app import Gateway
from sgl.runtime.gateway.config import GatewayConfig
from sgl.runtime.gateway.policy import Window
from tests.fake_servers import listening
from tests.house import REPOSITORY
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint
from tests.patience import PATIENCE
from tests.test_gateway import MockWorker
from tests.test_gateway_broken import NO_ANSWERS, RawWorker
from tests.test_gateway_broken_programs import NO_EVENTS


class Flaky:
    """A worker that passes everything on to a server, and breaks connections of programs at random."""

    def __init__(self, url: str, rate: float, seed: int) -> None:
        self.url, self.rate, self.rng = url, rate, random.Random(seed)
        self.broken = self.opened = 0

    async def answer(self, request: web.Request, worker: MockWorker) -> web.StreamResponse:
        body = await request.read()
        headers = {
            name: text
            for name, text in request.headers.items()
            if name.lower() in ("content-type", "authorization")
        }
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.url + request.raw_path, data=body, headers=headers) as theirs,
        ):
            response = web.StreamResponse(status=theirs.status)
            response.content_type = theirs.content_type
            await response.prepare(request)
            is_program = request.path == "/v1/programs"
            self.opened += is_program
            async for part in theirs.content.iter_any():
                if is_program and self.rng.random() < self.rate:
                    self.broken += 1
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write(part)
            await response.write_eof()
            return response


class Setup:
    """An engine, its server, two flaky workers before it and a gateway before these."""

    def __init__(self, folder: Path) -> None:
        self.engine = Engine(str(folder), **OPTIONS)
        self.server = LiveServer(self.engine)
        self.flaky = [Flaky(self.server.url, 0.0, seed) for seed in range(2)]
        self.loop = asyncio.new_event_loop()
        self.url = ""
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # which ends what is left, and the loop
            runner.run(self._serve())

    async def _serve(self) -> None:
        workers = [MockWorker(flaky.answer) for flaky in self.flaky]
        for worker in workers:
            worker.keeps_requests = False
            await worker.start()
        config = GatewayConfig.from_options({"breaker_seconds": 0.01, "retry_pause": 0.01, "probe_seconds": 0.1})
        self.gateway = Gateway(config, workers=[worker.url for worker in workers])
        runner = web.AppRunner(self.gateway.app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = await listening(runner)
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()
        for worker in workers:
            await worker.stop()

    def mend(self) -> None:
        """Both workers are thought to be well, and equally fast, whatever happened before."""

        async def mend() -> None:
            for server in self.gateway.servers.values():
                server.breaker.succeeded()
            while any(worker.in_flight for worker in self.gateway.fleet.workers):
                await asyncio.sleep(0.01)
            for worker in self.gateway.fleet.workers:
                worker.rate, worker.window = 1.0, Window(self.gateway.fleet.clock())

        asyncio.run_coroutine_threadsafe(mend(), self.loop).result(PATIENCE)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        self.server.close()
        self.engine.shutdown()


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(chat_checkpoint(tmp_path_factory.mktemp("tiny")))
    yield setup
    setup.close()


@sgl.function
def agent(s: sgl.ProgramState, topic: str) -> None:
    s += "About " + topic + ":" + sgl.gen("first", max_tokens=6, temperature=1.0)
    if len(s["first"]) % 2:  # observed: another segment
        s += " odd"
    branches = s.fork(3)
    branches += sgl.gen("thought", max_tokens=5, temperature=1.0)
    branches.join("concate_and_append")
    s += sgl.select("which", ["yes", "no"]) + sgl.gen("end", max_tokens=4, temperature=0.7)


def values(s: Any) -> tuple[Any, ...]:
    return s["first"], s["which"], s["end"], s.text()


@pytest.mark.costly
@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_programs_have_the_values_that_they_have_alone_although_their_workers_fail(
    setup: Setup, rate: float
) -> None:
    topics = [f"number {i}" for i in range(12)]
    alone = [
        values(agent.run(topic, backend=EngineBackend(setup.engine), seed=i)) for i, topic in enumerate(topics)
    ]
    for flaky in setup.flaky:
        flaky.rate = rate
        flaky.broken = flaky.opened = 0
    backend = sgl.RuntimeEndpoint(setup.url)
    running = [agent.run(topic, backend=backend, seed=i, stream=i % 2 == 0) for i, topic in enumerate(topics)]
    assert [values(s) for s in running] == alone
    broken = sum(flaky.broken for flaky in setup.flaky)
    assert (broken > 0) == (rate > 0)
    assert all(flaky.opened for flaky in setup.flaky), "both have some"


def test_the_rows_of_a_batch_go_to_several_workers_and_outlive_them(setup: Setup) -> None:
    for flaky in setup.flaky:
        flaky.rate, flaky.opened = 0.05, 0
    nodes = [
        {"st": 0, "op": "text", "text": "Hello "},
        {"st": 0, "op": "arg", "name": "x"},
        {"st": 0, "op": "gen", "name": "y", "params": {"max_tokens": 8, "temperature": 1.0}},
    ]
    rows = [{"args": {"x": str(i)}, "seed": i} for i in range(24)]
    body = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": nodes, "final": True}, "rows": rows}

    def outcome(url: str) -> dict[int, str]:
        text = requests.post(url + "/v1/programs", json=body, timeout=PATIENCE).text
        events = [json.loads(part.partition("data: ")[2]) for part in text.strip().split("\n\n")]
        assert [event["type"] for event in events].count("done") == 24
        done = [event for event in events if event["type"] == "node_done"]
        assert len(done) == 24, "each once"
        return {event["row"]: event["text"] for event in done}

    expected = outcome(setup.server.url)
    setup.mend()
    assert outcome(setup.url) == expected
    assert all(flaky.opened for flaky in setup.flaky)


def test_a_program_is_its_openers_alone_and_mistakes_are_the_workers_to_tell(setup: Setup) -> None:
    for flaky in setup.flaky:
        flaky.rate = 0.0
    answer = requests.post(setup.url + "/v1/programs", json={"program": {"v": 1}}, timeout=PATIENCE)
    assert answer.status_code == 400
    body = {"program": {"v": 1, "name": "p", "seed": 1}}
    with requests.post(setup.url + "/v1/programs", json=body, stream=True, timeout=PATIENCE) as events:
        opened = json.loads(next(line for line in events.iter_lines() if line.startswith(b"data: "))[6:])
        path = f"{setup.url}/v1/programs/{opened['id']}"
        others = {"Authorization": "Bearer other"}
        assert requests.delete(path, headers=others, timeout=PATIENCE).status_code == 404
        segment = {"nodes": [{"st": 0, "op": "nonsense"}]}
        assert requests.post(path + "/segments", json={"segment": segment}, timeout=PATIENCE).status_code == 400
        assert requests.get(path + "/timeline", timeout=PATIENCE).json()["name"] == "p"
        part = setup.gateway._programs.open[opened["id"]].parts[0]
        remote, part.remote = part.remote, None  # its worker died, and no other has it yet
        answer = requests.get(path + "/timeline", timeout=PATIENCE)
        assert answer.status_code == 404
        assert "at no worker" in answer.json()["error"]["message"]
        part.remote = remote
        assert requests.delete(path, timeout=PATIENCE).json() == {"id": opened["id"]}
    assert requests.get(path + "/events", timeout=PATIENCE).status_code == 404


@pytest.mark.slow
def test_programs_have_their_values_beside_workers_that_are_broken_in_every_way(setup: Setup) -> None:
    topics = [f"number {i}" for i in range(12)]
    alone = [
        values(agent.run(topic, backend=EngineBackend(setup.engine), seed=i)) for i, topic in enumerate(topics)
    ]
    lies = [said for name, said in NO_EVENTS.items() if name != "the same again"]  # a value that could be one
    raws = [RawWorker(programs=said, generate=said) for said in [*lies, *NO_ANSWERS.values()][::2]]

    async def add() -> None:
        for raw in raws:
            await raw.__aenter__()
            setup.gateway.servers.add(raw.url)

    async def remove() -> None:
        for raw in raws:
            setup.gateway.servers.remove(raw.url)
            await raw.__aexit__()

    for flaky in setup.flaky:
        flaky.rate = 0.0
    setup.mend()
    backend = sgl.RuntimeEndpoint(setup.url)
    asyncio.run_coroutine_threadsafe(add(), setup.loop).result(PATIENCE)
    try:
        running = [agent.run(topic, backend=backend, seed=i, stream=i % 2 == 0) for i, topic in enumerate(topics)]
        assert [values(s) for s in running] == alone
        assert sum(raw.asked.count("programs") for raw in raws) > len(topics) / 2
    finally:
        asyncio.run_coroutine_threadsafe(remove(), setup.loop).result(PATIENCE)
    setup.mend()


def test_a_scripts_program_is_told_as_answered_although_the_script_ends_at_once(
    setup: Setup, tmp_path: Path
) -> None:
    """499, which is for clients that leave, it was in two of three times."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(url=setup.url))
    setup.mend()
    before = _left(setup)
    for _ in range(3):
        assert subprocess.check_output(
            [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
    setup.mend()
    assert _left(setup) == before


SCRIPT = """
import sgl

@sgl.function
def greets(s):
    s += "hello" + sgl.gen("x", max_tokens=4)

print("said", greets.run(backend=sgl.RuntimeEndpoint("{url}"))["x"])
"""


def _left(setup: Setup) -> float:
    samples = (its for family in setup.gateway.metrics.requests.collect() for its in family.samples)
    return sum(its.value for its in samples if its.name.endswith("_total") and its.labels["status"] == "499")
