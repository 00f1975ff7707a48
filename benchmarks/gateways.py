"""What a gateway adds to the time to first token: ours, and smg where it is installed, before the same mock workers.

    python -m benchmarks.gateways [--rate 500] [--seconds 10] [--smg PATH]

Two workers in a process of their own answer a chat with ten events, the first after 5 ms. Each way is asked at the
same rate, in turns: without a gateway, through ours, through smg. What is printed is the time until the first event;
added is that beside the way without a gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

ROUNDS = 3
STARTING_SECONDS = 120.0
MODEL = "mock"
ABOUT = {"model_path": MODEL, "served_model_name": MODEL, "context_length": 4096, "is_generation": True}
ABOUT |= {"max_total_tokens": 100_000, "tokenizer_path": MODEL, "version": "0", "tp_size": 1, "dp_size": 1}
STATE = {"num_running_reqs": 0, "num_queue_reqs": 0, "kv_available_tokens": 100_000, "kv_evictable_tokens": 0}


async def answer(request: web.Request) -> web.StreamResponse:
    """A chat's events."""
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await asyncio.sleep(0.005)
    await response.prepare(request)
    for number in range(10):
        choice = {"index": 0, "delta": {"content": f"word {number} "}, "finish_reason": None}
        data = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
        await response.write(f"data: {json.dumps(data)}\n\n".encode())
        await asyncio.sleep(0.002)
    await response.write(b"data: [DONE]\n\n")
    return response


async def serve(ports: list[int]) -> None:
    """Both workers, until killed."""

    async def tell(request: web.Request) -> web.Response:
        return web.json_response({**ABOUT, "internal_states": [STATE]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "sglang"}]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/{path:.*}", tell)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for port in ports:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def asked(urls: list[str], rate: float, seconds: float) -> tuple[list[float], int]:
    """Seconds until the first event of each request, and failures. The requests come at their times, whatever became
    of those before."""
    found: list[float] = []
    failed = 0
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": 10,
        "messages": [{"role": "user", "content": "Hello " * 40}],
    }

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(url: str, at: float) -> None:
            nonlocal failed
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            began = time.perf_counter()
            try:
                async with session.post(url + "/v1/chat/completions", json=body) as theirs:
                    await theirs.content.readany()
                    found.append(time.perf_counter() - began)
                    async for _ in theirs.content.iter_any():
                        pass
                    failed += theirs.status != 200
            except aiohttp.ClientError:
                failed += 1

        start = time.perf_counter() + 0.2
        times = [start + number / rate for number in range(round(rate * seconds))]
        await asyncio.gather(*(one(urls[i % len(urls)], at) for i, at in enumerate(times)))
    return found, failed


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as its:
        its.bind(("127.0.0.1", 0))
        return int(its.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    """A process within the context."""
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.kill()
            process.wait()


async def ready(url: str) -> None:
    """Wait until a chat is answered there."""
    began = time.monotonic()
    while time.monotonic() - began < STARTING_SECONDS:
        found, failed = await asked([url], 10, 0.1)
        if found and not failed:
            return
        await asyncio.sleep(0.5)
    raise SystemExit(f"nobody answers at {url}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--smg", default=shutil.which("smg"))
    parser.add_argument("--ports", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ports:
        await serve(options.ports)
    ports = [free_port(), free_port()]
    workers = [f"http://127.0.0.1:{port}" for port in ports]
    ours, theirs = free_port(), free_port()
    ways = {"without": workers, "sgl gateway": [f"http://127.0.0.1:{ours}"]}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        again = [sys.executable, "-m", "benchmarks.gateways", "--ports", *map(str, ports)]
        stack.enter_context(running(again, folder))
        await ready(workers[0])
        flags = [word for url in workers for word in ("--worker", url)]
        stack.enter_context(running([sys.executable, "-m", "sgl", "gateway", "--port", str(ours), *flags], folder))
        if options.smg is None:
            print("smg is not installed: pip install smg, in an environment of its own, and --smg PATH")
        else:
            ways["smg"] = [f"http://127.0.0.1:{theirs}"]
            flags = ["--port", str(theirs), "--prometheus-port", str(free_port()), "--worker-urls", *workers]
            stack.enter_context(running([options.smg, "launch", "--log-level", "error", *flags], folder))
        for urls in ways.values():
            await ready(urls[0])
        seen: dict[str, list[float]] = {name: [] for name in ways}
        failures = dict.fromkeys(ways, 0)
        for _ in range(ROUNDS):
            for name, urls in ways.items():
                found, failed = await asked(urls, options.rate, options.seconds / ROUNDS)
                seen[name] += found
                failures[name] += failed
    report(seen, failures, options.rate)


def report(seen: dict[str, list[float]], failures: dict[str, int], rate: float) -> None:
    """Figure, comparison and ratio."""

    def quantiles(name: str) -> Any:
        return 1000 * np.quantile(seen[name], (0.5, 0.99))

    base = quantiles("without")
    print(f"{rate:g} requests a second; ms to the first event")
    print(f"{'':14}{'p50':>8}{'p99':>8}{'added':>9}{'added':>9}{'answered':>10}{'failed':>8}")
    for name in seen:
        p50, p99 = quantiles(name)
        added = quantiles(name) - base
        counts = f"{len(seen[name]):10}{failures[name]:8}"
        print(f"{name:14}{p50:8.2f}{p99:8.2f}{added[0]:9.2f}{added[1]:9.2f}{counts}")
    if "smg" in seen:
        ratio = quantiles("sgl gateway") / quantiles("smg")
        print(f"ours by smg's: p50 {ratio[0]:.2f}, p99 {ratio[1]:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
