"""Host memory beside one GPU's: agents that come back, with their copies and without, and what copies cost others.

    python -m benchmarks.gpu.tiers MODEL [--agents 24] [--turns 8] [--traces FOLDER] [--requests 40] [--only off,on]
                                         [--peers KIT PARTS]

MODEL is a folder with a config.json; weights are random. The agents take turns, so that all others have come before one
comes back; together they have three times the tokens that the device's pages hold. A turn adds an observation, whose
length is drawn from what ReAct agents saw, and an answer. FOLDER has Mooncake's conversation_trace.jsonl and
synthetic_trace.jsonl, of which the first requests run with shorter prompts and answers. Figures are of two engines with
the same options but for `enable_hierarchical_cache`, each in a process of its own:

    agents   time to the first token from the second turn on; the bar is 0.35x
    W1       output tokens a second with more pages than are used; the bar is 0.98x
    traces   time to the first token, and seconds in all; the bar is 1x of either

--peers: the same agents with SGLang's and vLLM's copies, by the kit of benchmarks.gpu.peers; ours must be 1.1 times as
fast as the better.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import tier_peers
from benchmarks.gpu.deterministic import ADAPTERS
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.workloads import Workloads
from sgl import Engine
from sgl.runtime.batch import PageMoves

_POOL_TOKENS = 360_000
_HOST_GB = 32
_BLOCK = 512  # tokens of a trace's block
_LONGEST = 8192  # tokens of a trace's prompts
_CLIENTS = 4  # of traces


def main() -> None:
    """Run both engines, and print figures and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path)
    parser.add_argument("--agents", type=int, default=24)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--pool", type=int, default=_POOL_TOKENS, help="tokens of KV, for W1")
    parser.add_argument("--only", default="off,on")
    parser.add_argument("--host-gb", type=int, default=_HOST_GB)
    parser.add_argument("--peers", nargs=2, type=Path, metavar=("KIT", "PARTS"))
    parser.add_argument("--part", choices=("off", "on"), help="one of the engines, in this process")
    arguments = parser.parse_args()
    if arguments.part is not None:
        logging.basicConfig(level=logging.INFO)
        print(json.dumps(dict(_figures(arguments))))
        return
    found: dict[str, dict[str, float]] = {}
    for part in arguments.only.split(","):
        command = [sys.executable, "-m", "benchmarks.gpu.tiers", *sys.argv[1:], "--part", part]
        began = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[part] = json.loads(done.stdout.splitlines()[-1])
        print(f"{part}: {time.perf_counter() - began:.0f} s in all", flush=True)
    for peer in PEERS if arguments.peers else ():
        found[peer] = _of_peer(peer, *arguments.peers, arguments)
    names = list(dict.fromkeys(name for figures in found.values() for name in figures))
    print(f"{'':34} {'off':>12} {'on':>12} {'on / off':>9} {'SGLang':>12} {'vLLM':>12}")
    for name in names:
        off, on, *theirs = (found.get(part, {}).get(name) for part in ("off", "on", *PEERS))
        ratio = f"{on / off:9.3f}" if on is not None and off else " " * 9
        print(
            f"{name:34} {_shown(off):>12} {_shown(on):>12} {ratio} {' '.join(f'{_shown(its):>12}' for its in theirs)}"
        )


def _of_peer(peer: str, kit: Path, parts: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Figures of its agents; none if it fails, which is said."""
    with tempfile.TemporaryDirectory() as beside:
        shutil.copy(tier_peers.__file__, beside)
        command = ["bash", str(kit / "on_gpu.sh"), peer, str(parts), "--model", str(arguments.model.resolve())]
        for name in ("agents", "turns", "host_gb"):
            command += ["--opt", f"{name}={getattr(arguments, name)}"]
        environment = {"PYTHONPATH": beside, "ADAPTER": f"tier_peers:{ADAPTERS[peer]}", "OUT": f"{beside}/out"}
        done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not rows:
        print(f"{peer} ended with status {done.returncode}:\n{done.stdout}", flush=True)
    found: dict[str, float] = rows[0] if rows else {}
    return found


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def _figures(arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_total_tokens": arguments.pool,
        "context_length": 16_384,
    }
    if arguments.part == "on":
        options |= {"enable_hierarchical_cache": True, "hicache_size": arguments.host_gb}
    began = time.perf_counter()
    with Engine(arguments.model, **options) as engine:
        yield "start, s", time.perf_counter() - began
        workloads = Workloads(engine, arguments.model, None, reps=1)
        workloads.warm_up()
        tiers = engine._scheduler.memory.tiers
        if tiers is not None:
            yield "pages that came back wrong", _wrong_pages(engine)
            yield "compute, us a token", 1e6 * tiers.rates.compute.seconds
            yield "load, us a token", 1e6 * tiers.rates.load.seconds
        yield from ((figure.name, figure.value) for figure in workloads.run(["W1"]))
        with _FewerPages(engine, tier_peers.pool_tokens(arguments.agents, arguments.turns)):
            yield from tier_peers.run_agents(
                partial(_first_token, engine), arguments.agents, arguments.turns
            ).items()
            yield from _traces(engine, arguments)
        if tiers is not None:
            yield from engine._loop.call(tiers.state).items()
            yield "compute at the end, us a token", 1e6 * tiers.rates.compute.seconds
            yield "load at the end, us a token", 1e6 * tiers.rates.load.seconds
        problems = engine.check_ledger()
        assert not problems, problems


class _FewerPages:
    """Within it, the engine has pages for about so many tokens: the benchmark holds the others."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._engine = engine
        self._pages = num_tokens // engine._scheduler.memory.page_size

    def __enter__(self) -> None:
        pool = self._engine._scheduler.memory.pool
        assert self._engine.flush_cache(), "nothing runs"
        taken = self._engine._loop.call(lambda: pool.alloc(max(0, pool.num_free - self._pages)))
        assert taken is not None, "they are free"
        self._taken = taken

    def __exit__(self, *_: object) -> None:
        self._engine._loop.call(lambda: self._engine._scheduler.memory.pool.free(self._taken))


def _wrong_pages(engine: Engine) -> int:
    """Pages of random numbers that are not the same after the way to host memory and into other pages."""
    runner, memory = engine._started.runner, engine._scheduler.memory
    host = runner.host
    assert host is not None, "there is host memory"
    number = min(300, (len(host.memory) - 1) // 2)

    def check() -> int:
        pages = memory.pool.alloc(2 * number)
        assert pages is not None, "nothing else is there"
        cache = host._cache
        chosen = torch.from_numpy(pages.astype(np.int64)).to(cache.device)
        shape = (cache.shape[0], number, cache.shape[2])
        cache[:, chosen[:number]] = torch.randint(0, 256, shape, dtype=torch.uint8, device=cache.device)
        others = np.random.default_rng(0).permutation(len(host.memory) - 1)[:number].astype(np.int32) + 1
        nothing = np.empty((0, 2), np.int32)
        runner.move(PageMoves(np.stack((pages[:number], others), axis=1), nothing))
        moved = runner.move(PageMoves(nothing, np.stack((others, pages[number:]), axis=1)))
        while not moved.is_loaded():
            time.sleep(1e-4)
        same = (cache[:, chosen[:number]] == cache[:, chosen[number:]]).all(dim=2).all(dim=0)
        cache[:, chosen] = 0
        memory.pool.free(pages)
        return number - int(same.sum())

    return engine._loop.call(check)


def _first_token(engine: Engine, prompt: list[int], output: int) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens."""
    params = {"max_new_tokens": output, "temperature": 0.0, "ignore_eos": True}
    began, first, ids = time.perf_counter(), None, []
    for event in engine.generate(input_ids=prompt, sampling_params=params, stream=True):
        first = first or time.perf_counter() - began
        ids = event["output_ids"]
    assert first is not None, "it generated something"
    return first, ids


def _traces(engine: Engine, arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    for path in sorted(arguments.traces.rglob("*_trace.jsonl")) if arguments.traces else ():
        assert engine.flush_cache(), "nothing runs"
        requests = list(_requests(path, arguments.requests))
        with ThreadPoolExecutor(_CLIENTS) as pool:
            began = time.perf_counter()
            prompts, outputs = zip(*requests, strict=True)
            seconds = [first for first, _ in pool.map(partial(_first_token, engine), prompts, outputs)]
            yield f"{path.stem}: all, s", time.perf_counter() - began
        yield f"{path.stem}: first token p50, ms", 1e3 * statistics.median(seconds)
        yield f"{path.stem}: first token mean, ms", 1e3 * statistics.mean(seconds)


def _requests(path: Path, number: int) -> Iterator[tuple[list[int], int]]:
    """Prompts in which a block's hash decides its tokens, and lengths of outputs."""
    with path.open() as lines:
        for line, _ in zip(lines, range(number), strict=False):
            request = json.loads(line)
            ids: list[int] = []
            for block in request["hash_ids"]:
                rng = random.Random(block)
                ids += [rng.randrange(10_000) for _ in range(_BLOCK)]
            length = min(request["input_length"], _LONGEST)
            yield ids[: max(length, 1)], max(1, min(request["output_length"] // 16, tier_peers.ANSWER))


if __name__ == "__main__":
    main()
