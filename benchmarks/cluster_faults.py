"""What clients notice when processes of a cluster are killed, one kind after the other, and when it is updated and
scaled.

    python -m benchmarks.cluster_faults [--rate R] [--replicas N] [--total N]

Two replicas of the embedded model on this machine; one in two requests streams. R: requests a second, half of what the
replicas sustain unless it is given. A request that fails before its first byte is sent again, as clients do; a stream
that ends without its end is cut.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from sgl.runtime.cluster.running import Running, running

TRIES = 40
PAUSE_SECONDS = 0.25
STARTING_SECONDS = 600.0
NEW_TOKENS = 8
ROLES = ("engine", "server", "replica", "rank", "router", "controller")


@dataclass(slots=True)
class Tally:
    """What became of requests."""

    answered: int = 0
    again: int = 0  # tries that failed before the first byte
    cut: int = 0  # streams, after it
    lost: int = 0  # never answered
    wrong: int = 0  # other texts than before
    slowest: float = 0.0  # seconds, with all tries
    errors: dict[str, int] = field(default_factory=dict)


class RunningCluster:
    """A cluster of this benchmark's own."""

    def __init__(self, known: Running, process: subprocess.Popen[bytes]) -> None:
        self._link = known.link()
        self.url = known.url
        self.process = process

    def status(self) -> dict[str, Any]:
        """See `Cluster.status`."""
        return self._link.get("/status")  # type: ignore[no-any-return]  # JSON

    def scale(self, replicas: int, kind: str = "worker") -> None:
        """Have so many replicas, worker or prefill."""
        self._link.post("/scale", {"replicas": replicas, "kind": kind}, seconds=60.0)

    def update(self, options: Mapping[str, Any]) -> int:
        """Have replicas with these options; their generation."""
        body = {"options": {"model_path": "embedded", "port": 0, **options}, "source": "update"}
        return int(self._link.post("/update", body, seconds=60.0)["generation"])

    def until(self, is_so: Callable[[dict[str, Any]], bool]) -> float:
        """Wait; returns seconds."""
        began = time.monotonic()
        while not is_so(self.status()):
            assert time.monotonic() - began < STARTING_SECONDS, self.status()
            time.sleep(0.1)
        return time.monotonic() - began

    def victim(self, role: str) -> int | None:
        """The process id of one of this kind; None: there is none."""
        status = self.status()
        if role in status["pids"]:
            return int(status["pids"][role])
        replica, server, *followers = status["workers"][0]["pids"]
        if role == "replica":
            return int(replica)
        if role == "server":
            return int(server)
        if role == "rank":
            return next(reversed(_descendants(followers[-1])), None) if followers else None
        return _engine_of(server)


def _engine_of(server: int) -> int:
    """The engine's process."""
    return next(pid for pid in _descendants(server) if Path(f"/proc/{pid}/comm").read_text() == "sgl engine\n")


def _descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for each in child.read_text().split():
                found += [int(each), *_descendants(int(each))]
    return found


@contextlib.contextmanager
def cluster(options: Mapping[str, Any], folder: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Any]:
    """A cluster on free ports, with its files in a folder."""
    file = folder / "cluster.yaml"
    file.write_text(json.dumps({"model_path": "embedded", "port": 0, **options}))  # JSON is YAML
    command = [sys.executable, "-m", "sgl", "cluster", "up", str(file)]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            env={**environment, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline().decode()
        assert "http://" in line, (folder / "log").read_text()
        tempfile.tempdir, before = str(folder), tempfile.tempdir
        try:
            known = next(each for each in running() if each.pid == process.pid)
        finally:
            tempfile.tempdir = before
        yield RunningCluster(known, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STARTING_SECONDS)


async def load(
    url: str, rate: float, stop: Callable[[int], bool], texts: dict[int, str] | None = None, prompts: int = 50
) -> Tally:
    """Send requests at a rate until `stop(number sent)`. texts: of earlier answers by prompt, or to be filled."""
    tally, known = Tally(), {} if texts is None else texts
    timeout = aiohttp.ClientTimeout(total=STARTING_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = []
        began = time.monotonic()
        while not stop(len(tasks)):
            number = len(tasks)
            tasks.append(asyncio.ensure_future(_request(session, url, number, number % prompts, tally, known)))
            await asyncio.sleep(max(0.0, began + (number + 1) / rate - time.monotonic()))
        await asyncio.gather(*tasks)
    return tally


async def _request(
    session: aiohttp.ClientSession, url: str, number: int, prompt: int, tally: Tally, texts: dict[int, str]
) -> None:
    began = time.monotonic()
    body = {
        "text": f"Story {prompt}: once upon a time",
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0},
        "stream": bool(number % 2),
    }
    for _ in range(TRIES):
        has_begun, error = False, ""
        try:
            async with session.post(f"{url}/generate", json=body) as answer:
                if answer.status != 200:
                    error = str(answer.status)
                elif body["stream"]:
                    text, is_whole = "", False
                    async for line in answer.content:
                        has_begun = True
                        if line.strip() == b"data: [DONE]":
                            is_whole = True
                        elif line.startswith(b"data: "):
                            event = json.loads(line[6:])
                            error = "error event" if "error" in event else error
                            text = event.get("text", text)
                    error = error or ("" if is_whole else "ended early")
                else:
                    text = (await answer.json())["text"]
        except (aiohttp.ClientError, ConnectionError) as failure:
            error = type(failure).__name__
        if not error:
            tally.answered += 1
            tally.wrong += texts.setdefault(prompt, text) != text
            break
        tally.errors[error] = tally.errors.get(error, 0) + 1
        if has_begun:
            tally.cut += 1
            break
        tally.again += 1
        await asyncio.sleep(PAUSE_SECONDS)
    else:
        tally.lost += 1
    tally.slowest = max(tally.slowest, time.monotonic() - began)


def killed(of: RunningCluster, role: str, rate: float, texts: dict[int, str]) -> tuple[Tally, float] | None:
    """Kill one under load; what became of the requests, and the seconds until all replicas served again. None: there
    is none of this kind."""
    replicas = of.status()["replicas"]
    of.until(lambda status: _is_whole(status, replicas))
    victim = of.victim(role)
    if victim is None:
        return None
    recovery = 0.0

    async def run() -> Tally:
        nonlocal recovery
        is_over = asyncio.Event()
        loading = asyncio.ensure_future(load(of.url, rate, lambda _: is_over.is_set(), texts))
        await asyncio.sleep(3.0)
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        await asyncio.sleep(1.0)
        await asyncio.to_thread(
            of.until, lambda status: _is_whole(status, replicas) and _is_another(of, role, victim)
        )
        recovery = time.monotonic() - began
        await asyncio.sleep(3.0)
        is_over.set()
        return await loading

    return asyncio.run(run()), recovery


def _is_whole(status: dict[str, Any], replicas: int) -> bool:
    ready = [worker for worker in status["workers"] if worker["state"] == "ready" and worker["silent_seconds"] < 2]
    return len(ready) == replicas == status["serving"] and status["pids"]["controller"] is not None


def _is_another(of: RunningCluster, role: str, victim: int) -> bool:
    return not Path(f"/proc/{victim}").exists() and (role in ("engine", "rank") or of.victim(role) != victim)


def scaled(of: RunningCluster, rate: float, total: int, texts: dict[int, str]) -> Tally:
    """1 → 2 → 1 replicas while `total` requests are sent."""
    of.scale(1)
    of.until(lambda status: _is_whole(status, 1))

    async def run() -> Tally:
        loading = asyncio.ensure_future(load(of.url, rate, lambda sent: sent >= total, texts))
        for replicas in (2, 1):
            await asyncio.sleep(2.0)
            await asyncio.to_thread(of.scale, replicas)
            await asyncio.to_thread(of.until, lambda status, wanted=replicas: _is_whole(status, wanted))
        return await loading

    return asyncio.run(run())


def updated(
    of: RunningCluster, rate: float, options: Mapping[str, Any], texts: dict[int, str], role: str | None = None
) -> tuple[Tally, float]:
    """All replicas are replaced by ones with these options, one by one, under load, or that is undone; and the seconds
    that it took. role: one of before is killed once the first new one is starting."""
    seconds = 0.0

    async def run() -> Tally:
        nonlocal seconds
        is_over = asyncio.Event()
        loading = asyncio.ensure_future(load(of.url, rate, lambda _: is_over.is_set(), texts))
        generation = await asyncio.to_thread(of.update, options)

        def has(status: dict[str, Any]) -> list[bool]:
            return [worker["generation"] == generation for worker in status["workers"]]

        def is_done(status: dict[str, Any]) -> bool:
            is_undone = (status["undone"] or {}).get("generation") == generation and not any(has(status))
            return _is_whole(status, status["replicas"]) and (is_undone or all(has(status)))

        if role is not None:
            await asyncio.to_thread(of.until, lambda status: any(has(status)))
            victim = of.victim(role)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
        seconds = await asyncio.to_thread(of.until, is_done)
        is_over.set()
        return await loading

    return asyncio.run(run()), seconds


def sustained(of: RunningCluster) -> float:
    """Requests a second of 16 clients who each send one after the other."""
    count = 0

    async def run() -> float:
        async def client(session: aiohttp.ClientSession, number: int) -> None:
            nonlocal count
            tally = Tally()
            while time.monotonic() < end:
                await _request(session, of.url, count, count % 50, tally, {})
                count += 1

        began = time.monotonic()
        end = began + 10.0
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(client(session, number) for number in range(16)))
        return count / (time.monotonic() - began)

    return asyncio.run(run())


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--total", type=int, default=2000, help="requests while it is scaled")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts of a replica, and its ranks")
    parser.add_argument("--roles", nargs="*", default=ROLES)
    given = parser.parse_args()
    ranks = {"tp_size": given.nnodes, "nnodes": given.nnodes}
    options = {"device": "cpu", "replicas": given.replicas, "max_total_tokens": 16384, **ranks}
    with tempfile.TemporaryDirectory() as folder, cluster(options, Path(folder)) as of:
        texts: dict[int, str] = {}
        most = sustained(of)
        rate = given.rate or most / 2
        print(
            f"{given.replicas} replicas of {given.nnodes} ranks sustain {most:.1f} requests/s; sent are {rate:.1f}/s"
        )
        print(
            f"{'killed':12} {'answered':>8} {'again':>6} {'cut':>5} {'lost':>5} {'wrong':>5} {'slowest':>8} {'back':>6}"
        )

        def show(name: str, tally: Tally, seconds: float) -> None:
            print(
                f"{name:12} {tally.answered:8} {tally.again:6} {tally.cut:5} {tally.lost:5} {tally.wrong:5} "
                f"{tally.slowest:7.1f}s {seconds:5.1f}s  {tally.errors or ''}",
                flush=True,
            )

        for role in given.roles:
            found = killed(of, role, rate, texts)
            if found is not None:
                show(role, *found)
        show("(bad update)", *updated(of, rate, {**options, "model_path": "/nowhere"}, texts))
        show("(update)", *updated(of, rate, {**options, "max_total_tokens": 8192}, texts))
        if given.total:
            show("(1→2→1)", scaled(of, rate / 2, given.total, texts), 0.0)


if __name__ == "__main__":
    main()
