"""What a gateway adds to the time to first token, and what it computes for a request: ours, and smg where it is
installed, before the same mock workers.

    python -m benchmarks.gateways [--rate 500] [--seconds 10] [--burst 256] [--smg PATH]

Two workers in a process of their own answer a chat with ten events, the first after 5 ms. Each way is asked at the
same rate, in turns: without a gateway, through ours, through smg. What is printed is the time until the first event
(added: beside the way without a gateway) and the CPU time of the gateway's process for a request, which other work on
the machine hardly changes. Clients and workers are bare protocols, so that two cores have room for a gateway.

With --burst, so many prompts of 100 to 1,024 ids are sent at once instead, each on a connection of its own, over and
over: when the last of them was at a worker, which answers none before."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

ROUNDS = 3
STARTING_SECONDS = 120.0
ANSWER_SECONDS = 30.0
MODEL = "mock"
FIRST_SECONDS, NEXT_SECONDS, EVENTS = 0.005, 0.002, 10
HELD_SECONDS, LEAST_IDS, MOST_IDS, BURSTS = 1.0, 100, 1024, 8  # of bursts
STATE = {"num_running_reqs": 0, "num_queue_reqs": 0, "kv_available_tokens": 100_000, "kv_evictable_tokens": 0}
ABOUT = {"model_path": MODEL, "served_model_name": MODEL, "context_length": 4096, "is_generation": True}
ABOUT |= {"max_total_tokens": 100_000, "tokenizer_path": MODEL, "version": "0", "tp_size": 1, "dp_size": 1}
ABOUT |= {"internal_states": [STATE]}
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "sglang"}]}
ASKED = {"model": MODEL, "stream": True, "max_tokens": EVENTS}
ASKED |= {"messages": [{"role": "user", "content": "Hello " * 40}]}
LAST = b"0\r\n\r\n"


def event(number: int) -> bytes:
    """A chunk with one of a chat's events."""
    choice = {"index": 0, "delta": {"content": f"word {number} "}, "finish_reason": None}
    data = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
    text = f"data: {json.dumps(data)}\n\n"
    return f"{len(text):x}\r\n{text}\r\n".encode()


class Worker(asyncio.Protocol):
    """One connection to a worker."""

    HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    PARTS = (HEAD + event(0), *map(event, range(1, EVENTS)), b"e\r\ndata: [DONE]\n\n\r\n" + LAST)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        length = next(
            (line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b"0"
        )
        if not end or len(body) < int(length):
            return
        self._buffer = b""
        if head.startswith(b"POST /v1/chat/completions"):
            asyncio.get_running_loop().call_later(FIRST_SECONDS, self._send, 0)
            return
        if head.startswith(b"POST /generate"):
            asyncio.get_running_loop().call_later(HELD_SECONDS, self._say, {"arrived": time.perf_counter()})
            return
        self._say(MODELS if head.startswith(b"GET /v1/models") else ABOUT)

    def _say(self, data: dict[str, Any]) -> None:
        text = json.dumps(data)
        about = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length:"
        self._transport.write(f"{about} {len(text)}\r\n\r\n{text}".encode())

    def _send(self, number: int) -> None:
        self._transport.write(self.PARTS[number])
        if number + 1 < len(self.PARTS):
            asyncio.get_running_loop().call_later(NEXT_SECONDS, self._send, number + 1)


async def serve(ports: list[int]) -> None:
    """Both workers, until killed."""
    for port in ports:
        await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", port, backlog=2048)
    gc.disable()
    await asyncio.Event().wait()


class Client(asyncio.Protocol):
    """One connection of a client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def ask(self, request: bytes) -> asyncio.Future[tuple[float, bool]]:
        """Send a request. When its first event came, and whether all of the answer did."""
        self._first: float | None = None
        self._text = b""
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        self._text += data
        if self._first is None and b"data:" in data:
            self._first = time.perf_counter()
        if self._text.endswith(LAST) or not self._text.startswith(b"HTTP/1.1 200"):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if hasattr(self, "done"):
            self._end()

    def _end(self) -> None:
        if not self.done.done():
            is_whole = self._text.startswith(b"HTTP/1.1 200") and self._text.count(b"data:") == EVENTS + 1
            self.done.set_result((self._first or time.perf_counter(), is_whole))


async def asked(urls: list[str], rate: float, seconds: float) -> tuple[list[float], int]:
    """Seconds until the first event of each request, and failures. The requests come at their times, whatever became
    of those before."""
    found: list[float] = []
    failed = 0
    loop = asyncio.get_running_loop()
    free: dict[str, list[Client]] = {url: [] for url in urls}
    body = json.dumps(ASKED)

    async def one(url: str, at: float) -> None:
        nonlocal failed
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        began, where = time.perf_counter(), urlsplit(url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                client = free[url].pop() if free[url] else None
                if client is None or client.transport.is_closing():
                    client = (await loop.create_connection(Client, str(where.hostname), where.port or 0))[1]
                first, is_whole = await client.ask(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        except (OSError, TimeoutError):
            failed += 1
            return
        found.append(first - began)
        failed += not is_whole
        if is_whole:
            free[url].append(client)

    start = time.perf_counter() + 0.2
    times = [start + number / rate for number in range(round(rate * seconds))]
    await asyncio.gather(*(one(urls[i % len(urls)], at) for i, at in enumerate(times)))
    for client in (each for clients in free.values() for each in clients):
        client.transport.close()
    return found, failed


async def burst(url: str, bodies: list[bytes]) -> list[float]:
    """Seconds until each body was at a worker, since the first was sent, in order."""
    loop, where = asyncio.get_running_loop(), urlsplit(url)
    head = f"POST /generate HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"

    def asked(body: bytes) -> socket.socket:
        its = socket.create_connection((str(where.hostname), where.port or 0))
        its.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        its.setblocking(False)
        return its

    async def answer(its: socket.socket) -> float:
        with its:
            text = b""
            while not text.endswith(b"}"):
                if not (part := await loop.sock_recv(its, 1 << 16)):
                    raise ConnectionError(f"the answer ends with {text[-200:]!r}")
                text += part
        return float(json.loads(text.partition(b"\r\n\r\n")[2])["arrived"])

    began = time.perf_counter()
    async with asyncio.timeout(ANSWER_SECONDS):
        arrived = await asyncio.gather(*map(answer, [asked(body) for body in bodies]))
    return sorted(each - began for each in arrived)


def cpu_seconds(process: int | None) -> float:
    """Of a process and its children, until now; 0 where the system does not tell."""
    its = Path(f"/proc/{process}")
    if process is None or not its.exists():
        return 0.0
    fields = (its / "stat").read_text().rpartition(")")[2].split()
    children = [int(each) for task in its.glob("task/*/children") for each in task.read_text().split()]
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as its:
        its.bind(("127.0.0.1", 0))
        return int(its.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[int]:
    """A process within the context: its id."""
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process.pid
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
    parser.add_argument("--burst", type=int, help="prompts at once, in place of chats at a rate")
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
        command = [sys.executable, "-m", "sgl", "gateway", "--port", str(ours), *flags]
        processes = {"sgl gateway": stack.enter_context(running(command, folder))}
        if options.smg is None:
            print("smg is not installed: pip install smg, in an environment of its own, and --smg PATH")
        else:
            ways["smg"] = [f"http://127.0.0.1:{theirs}"]
            flags = ["--port", str(theirs), "--prometheus-port", str(free_port()), "--worker-urls", *workers]
            command = [options.smg, "launch", "--log-level", "error", *flags]
            processes["smg"] = stack.enter_context(running(command, folder))
        for urls in ways.values():
            await ready(urls[0])
        if options.burst:
            await bursts(ways, processes, options.burst)
            return
        seen: dict[str, list[float]] = {name: [] for name in ways}
        failures, spent = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
        for _ in range(ROUNDS):
            for name, urls in ways.items():
                before = cpu_seconds(processes.get(name))
                found, failed = await asked(urls, options.rate, options.seconds / ROUNDS)
                spent[name] += cpu_seconds(processes.get(name)) - before
                seen[name] += found
                failures[name] += failed
    report(seen, failures, spent, options.rate)


async def bursts(ways: dict[str, list[str]], processes: dict[str, int], number: int) -> None:
    """Print when the first, the middle and the last one were at a worker: medians of several bursts."""
    rng = np.random.default_rng(0)
    params = {"max_new_tokens": MOST_IDS, "ignore_eos": True}
    times: dict[str, list[Any]] = {name: [] for name in ways}
    spent = dict.fromkeys(ways, 0.0)
    for _ in range(BURSTS):
        prompts = [rng.integers(0, 30_000, rng.integers(LEAST_IDS, MOST_IDS)).tolist() for _ in range(number)]
        bodies = [json.dumps({"input_ids": ids, "sampling_params": params}).encode() for ids in prompts]
        for name, urls in ways.items():
            before = cpu_seconds(processes.get(name))
            times[name].append(1000 * np.quantile(await burst(urls[0], bodies), (0, 0.5, 1)))
            spent[name] += cpu_seconds(processes.get(name)) - before
    print(f"{number} requests at once; ms until they were at a worker, CPU ms of each")
    print(f"{'':14}{'first':>8}{'middle':>8}{'last':>8}{'CPU':>8}")
    for name, found in times.items():
        row = (*np.median(found, axis=0), 1000 * spent[name] / BURSTS / number)
        print(f"{name:14}" + "".join(f"{value:8.2f}" for value in row))


def report(seen: dict[str, list[float]], failures: dict[str, int], spent: dict[str, float], rate: float) -> None:
    """Figure, comparison and ratio."""

    def quantiles(name: str) -> Any:
        return 1000 * np.quantile(seen[name], (0.5, 0.99))

    base = quantiles("without")
    print(f"{rate:g} requests a second; ms to the first event")
    print(f"{'':14}{'p50':>8}{'p99':>8}{'added':>9}{'added':>9}{'CPU ms':>9}{'answered':>10}{'failed':>8}")
    for name in seen:
        p50, p99 = quantiles(name)
        added = quantiles(name) - base
        cpu = 1000 * spent[name] / len(seen[name])
        counts = f"{len(seen[name]):10}{failures[name]:8}"
        print(f"{name:14}{p50:8.2f}{p99:8.2f}{added[0]:9.2f}{added[1]:9.2f}{cpu:9.2f}{counts}")
    if "smg" in seen:
        ratio = quantiles("sgl gateway") / quantiles("smg")
        print(f"ours by smg's: p50 {ratio[0]:.2f}, p99 {ratio[1]:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
