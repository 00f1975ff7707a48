"""What HTTP costs over the engine in the same process: time to first token, and a streamed token at 64 streams.

    python benchmarks/http_overhead.py [--model FOLDER] [--streams 64] [--tokens 64] [--process]

The smaller the model, the more of what is measured is the way of a token. `--process` puts the engine in a process of
its own, as `sgl serve` does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sgl.cli.logs import configure_logging
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.server.local import LocalEngine
from sgl.runtime.server.process import EngineProcess
from sgl.runtime.server.serve import listen, serving
from sgl.runtime.server.service import Service

ROUNDS = 5


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--process", action="store_true")
    options = parser.parse_args()
    engine_options: dict[str, Any] = {"model_path": options.model, "max_total_tokens": 65536}
    params = {"temperature": 0, "max_new_tokens": options.tokens, "ignore_eos": True}

    engine = Engine(**engine_options)
    handle: Any = LocalEngine(engine)
    direct = await measured(partial(direct_stream, handle, params), options.streams)
    if options.process:
        engine.shutdown()
        handle = EngineProcess(
            EngineConfig.from_options(engine_options), configure=partial(configure_logging, "error", "text")
        )
        await handle.start()
    service = Service(ServerConfig(), handle)
    async with (
        serving(service, listen("127.0.0.1", 0)) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        http = await measured(partial(http_stream, client, url, params), options.streams)
    await handle.close()

    print(f"{'':24}{'engine':>12}{'HTTP':>12}{'added':>12}{'ratio':>8}")
    for name, unit, scale in (("first token, 1 stream", "ms", 1e3), ("a token, all streams", "us", 1e6)):
        a, b = direct[name] * scale, http[name] * scale
        print(f"{name + ' [' + unit + ']':24}{a:12.3f}{b:12.3f}{b - a:12.3f}{b / a:8.2f}")


async def measured(stream: Any, num_streams: int) -> dict[str, float]:
    """Median of rounds: seconds to the first token of a lone request, seconds a token of all streams together."""

    async def one(prompt: str) -> tuple[float, int]:
        began, first, count = time.perf_counter(), 0.0, 0
        async for event in stream(prompt):
            first = first or time.perf_counter() - began
            count = event["meta_info"]["completion_tokens"]  # an event may bring several
        return first, count

    await asyncio.gather(*(one(f"warm {i}") for i in range(num_streams)))
    firsts = sorted([(await one(f"lone request number {i}"))[0] for i in range(4 * ROUNDS)])
    costs = []
    for round_number in range(ROUNDS):
        began = time.perf_counter()
        results = await asyncio.gather(*(one(f"{round_number} of stream {i}") for i in range(num_streams)))
        costs.append((time.perf_counter() - began) / sum(count for _, count in results))
    return {"first token, 1 stream": firsts[len(firsts) // 2], "a token, all streams": sorted(costs)[ROUNDS // 2]}


async def direct_stream(handle: LocalEngine, params: dict[str, Any], prompt: str) -> AsyncIterator[Any]:
    async for event in handle.stream(prompt=prompt, sampling_params=params):
        yield event


async def http_stream(
    client: aiohttp.ClientSession, url: str, params: dict[str, Any], prompt: str
) -> AsyncIterator[Any]:
    body = {"text": prompt, "sampling_params": params, "stream": True}
    async with client.post(url + "/generate", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


if __name__ == "__main__":
    asyncio.run(main())
