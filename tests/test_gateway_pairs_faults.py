"""Two prefill and two decode servers behind a gateway: killed under load, they cost no answer and leave no page."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sgl.runtime.engine import Engine
from sgl.runtime.gateway.app import Gateway
from tests.house import REPOSITORY
from tests.patience import PATIENCE, wait_until
from tests.test_gateway import gateway_of, until, value
from tests.test_server_process import Served

pytestmark = pytest.mark.slow

_RNG = random.Random(7)
PROMPTS = [[_RNG.randrange(3, 300) for _ in range(_RNG.randrange(40, 200))] for _ in range(48)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
FLAGS = ("--device", "cpu", "--max-total-tokens", "4096", "--max-running-requests", "8", "--check-ledger")


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    with Engine("embedded", device="cpu", max_total_tokens=4096) as engine:
        return [each["output_ids"] for each in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


@pytest.fixture(params=["tcp", "cuda_ipc"])
def servers(request: pytest.FixtureRequest) -> Iterator[list[Served]]:
    """Two for prompts, then two for outputs."""
    flags = (*FLAGS, "--disaggregation-transport", request.param, "--disaggregation-buffer-mb", "64")
    with contextlib.ExitStack() as stack:

        def serve(mode: str) -> Served:
            server = Served(Path("embedded"), *flags, "--disaggregation-mode", mode)
            stack.callback(server.process.communicate)
            stack.callback(server.process.kill)
            return server

        with ThreadPoolExecutor() as pool:
            yield list(pool.map(serve, ["prefill", "prefill", "decode", "decode"]))


def state(server: Served) -> dict[str, Any]:
    info = server.get("/get_server_info").json()
    return {"max_total_tokens": info["max_total_tokens"], **info["internal_states"][0]}


def assert_nothing_is_held(server: Served) -> None:
    wait_until(lambda: not state(server)["transfer_used_tokens"], f"pages of the buffer are held: {state(server)}")
    wait_until(lambda: server.get("/get_server_info").json()["internal_states"][0]["num_running_reqs"] == 0)
    found = state(server)
    assert not found.get("num_transfer_leases")
    assert found["kv_available_tokens"] + found["kv_evictable_tokens"] == found["max_total_tokens"]


async def ready(gateway: Gateway, servers: list[Served]) -> None:
    for server in servers:
        gateway.servers.add(server.url)
    await until(lambda: len([its for its in gateway.servers.values() if its.mode]) == len(servers))


async def load(client: aiohttp.ClientSession, prompts: list[list[int]], done: list[int]) -> list[list[int]]:
    """The output of each, four at once. done: gets their numbers as they are answered."""
    room = asyncio.Semaphore(4)

    async def one(number: int) -> list[int]:
        body = {"input_ids": prompts[number], "sampling_params": GREEDY}
        async with room, client.post("/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            output: list[int] = (await answer.json())["output_ids"]
            done.append(number)
            return output

    return list(await asyncio.gather(*map(one, range(len(prompts)))))


def test_two_and_two_answer_like_one_engine_and_outlive_any_of_them(
    servers: list[Served], wanted: list[list[int]]
) -> None:
    async def test() -> None:
        options = {"min_prefill_tokens": 32, "routing_policy": "cache_aware", "probe_seconds": 0.2}
        async with gateway_of(**options) as (gateway, _, client):
            await ready(gateway, servers)
            found = await load(client, PROMPTS, [])
            assert found == wanted
            assert value(gateway, "pairs_total", outcome="paired") == len(PROMPTS)
            assert all(its.placed for its in gateway.fleet.workers)
            for server in servers:
                assert_nothing_is_held(server)
            pulled = sum(state(server)["transfer_pulled_tokens"] for server in servers[2:])
            size = servers[2].get("/get_server_info").json()["page_size"]
            assert pulled == sum((len(prompt) - 1) // size * size for prompt in PROMPTS)
            for victim, kill in ((0, "server"), (2, "server"), (1, "engine"), (3, "engine")):
                await _flush(client)
                done: list[int] = []
                loading = asyncio.ensure_future(load(client, PROMPTS, done))
                await until(lambda done=done, loading=loading: len(done) > 8 or loading.done())  # type: ignore[misc]
                process = servers[victim].process.pid if kill == "server" else servers[victim].engine_pids()[0]
                os.kill(process, signal.SIGKILL)
                assert await loading == wanted, (victim, kill)
                left = [servers[1], servers[3]] if victim else servers[1:]
                await until(lambda: len(gateway.servers.ready()) >= 2)
                for server in left[:1] + left[-1:]:
                    assert_nothing_is_held(server)

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


async def _flush(client: aiohttp.ClientSession) -> None:
    async with client.post("/flush_cache") as answer:
        assert answer.status < 500


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "two_engines.py",
            r"\d+ tokens in \d+ pages wait at 127.0.0.1\n(\d\d+) of \d+ tokens were not computed again: ",
        ),
        *(
            (
                f"behind_one_address.py --transport {transport}",
                r"the decode server answered, and computed \d\d? of \d\d+ prompt tokens\n.*outcome=\"paired\"} 1.0",
            )
            for transport in ("tcp", "cuda_ipc")
        ),
    ],
)
def test_the_examples_run(command: str, expected: str) -> None:
    name, *arguments = command.split()
    file = REPOSITORY / "examples" / "disaggregation" / name
    done = subprocess.run([sys.executable, file, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout), done.stdout
