"""What HTTP costs over the engine in the same process: time to first token, and a streamed token at 64 streams.

    python benchmarks/http_overhead.py [--model FOLDER] [--streams 64] [--tokens 64]

The smaller the model, the more of what is measured is the way of a token. The server's engine is in a process of its
own, as with `sgl serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sgl.cli.logs import configure_logging
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.server.engine_process import EngineProcess
from sgl.runtime.server.serve import listen, serving
from sgl.runtime.server.service import Service

LONE, WARM_UP = 60, 5  # requests that are alone, and those before them
ROUNDS = 12


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    engine_options: dict[str, Any] = {"model_path": options.model, "max_total_tokens": 65536}
    params = {"temperature": 0, "max_new_tokens": options.tokens, "ignore_eos": True}

    engine = Engine(**engine_options)
    configure = partial(configure_logging, "error", "text")
    handle = EngineProcess(EngineConfig.from_options(engine_options), configure=configure)
    await handle.start()
    async with serving(Service(ServerConfig(), handle), listen("127.0.0.1", 0)) as url:
        client = LeanClient(url, params)
        direct, http = await measured([partial(direct_stream, engine, params), client.stream], options.streams)
        client.close()
    engine.shutdown()
    await handle.close()

    print(f"{'median of rounds':24}{'engine':>12}{'HTTP':>12}{'added':>12}{'ratio':>8}{'least added':>14}")
    for name, unit, scale in (("first token, 1 stream", "ms", 1e3), ("a token, all streams", "us", 1e6)):
        (a, a_least), (b, b_least) = (
            (scale * statistics.median(way[name]), scale * min(way[name])) for way in (direct, http)
        )
        print(f"{name + ' [' + unit + ']':24}{a:12.3f}{b:12.3f}{b - a:12.3f}{b / a:8.2f}{b_least - a_least:14.3f}")


async def measured(ways: list[Any], num_streams: int) -> list[dict[str, list[float]]]:
    """For each way: seconds to the first token of each lone request, seconds a token of each round of all streams. The
    ways take turns, so that what else the machine does hits them alike; what it does only ever adds, so the least says
    what it costs undisturbed."""

    async def one(stream: Any, prompt: str) -> tuple[float, int]:
        began, first, count = time.perf_counter(), 0.0, 0
        async for event in stream(prompt):
            first = first or time.perf_counter() - began
            count = event["meta_info"]["completion_tokens"]  # an event may bring several
        return first, count

    found: list[dict[str, list[float]]] = [{"first token, 1 stream": [], "a token, all streams": []} for _ in ways]
    for number in range(-WARM_UP, LONE):
        for stream, costs in zip(ways, found, strict=True):
            first, _ = await one(stream, f"lone {number}")
            if number >= 0:
                costs["first token, 1 stream"].append(first)
    for number in range(-1, ROUNDS):
        for stream, costs in zip(ways, found, strict=True):
            began = time.perf_counter()
            results = await asyncio.gather(*(one(stream, f"{number} of stream {i}") for i in range(num_streams)))
            if number >= 0:
                seconds = time.perf_counter() - began
                costs["a token, all streams"].append(seconds / sum(count for _, count in results))
    return found


async def direct_stream(engine: Engine, params: dict[str, Any], prompt: str) -> AsyncIterator[Any]:
    async for event in await engine.async_generate(prompt, params, stream=True):
        yield event


class LeanClient:
    """Streams over kept-alive connections, and does no more than that takes: what a client library costs is its own
    affair, and several times what the server does for a token."""

    def __init__(self, url: str, params: dict[str, Any]) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._params = params
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def stream(self, prompt: str) -> AsyncIterator[Any]:
        connection = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        reader, writer = connection
        body = json.dumps({"text": prompt, "sampling_params": self._params, "stream": True}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        end = b"\n\n\r\n"  # of an event, and of the chunk that brings it
        while not (chunk := await reader.readuntil(end)).endswith(b"data: [DONE]" + end):
            yield json.loads(chunk[chunk.index(b"data: ") + 6 :])
        await reader.readuntil(b"0\r\n\r\n")  # the last chunk
        self._idle.append(connection)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


if __name__ == "__main__":
    asyncio.run(main())
