"""Replicas on Ray beside one GPU, and tensor parallelism through Ray beside `sgl serve`, over HTTP, in one run.

    python -m benchmarks.gpu.replicas MODEL TOKENIZER [--size 2] [--reps 3] [--parts routed,tp]
                                      [--policies cache_aware,round_robin] [--option NAME=VALUE …] [--json FILE]

MODEL and TOKENIZER are those of benchmarks.gpu.constrained; sgl[dist] is installed. The parts:

    routed  W2 of one `sgl serve` (512 requests, one shared prefix of 2,048 tokens), then SIZE times as many requests of
            SIZE prefixes, mixed, over SIZE replicas by each policy of --policies
    tp      W3's TPOT and W1 with tp_size=SIZE, by `sgl serve` and by `sgl cluster up`, twice each, alternating

Each request has a connection of its own; all are sent at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.cluster_faults import cluster
from benchmarks.gpu.flush import flush_cache
from benchmarks.gpu.served import CONTEXT_LENGTH, served
from benchmarks.gpu.workloads import Workloads, cut_tokenizer
from sgl.runtime.config import EngineConfig, parse_options
from sgl.runtime.model.config import ModelConfig

BARS = {"of one GPU": 1.9, "of round robin": 1.3}
COUNT, PREFIX, OWN, OUTPUT = 512, 2048, 64, 32
MOST_OFF = 0.01  # of tensor parallelism through Ray
_TIMEOUT = aiohttp.ClientTimeout(total=600)


class Requests(Workloads):
    """Workloads whose requests are each a POST /generate of its own."""

    def __init__(self, url: str, model: Path, reps: int) -> None:
        super().__init__(None, model, None, reps)  # type: ignore[arg-type]
        self._url = url

    def prefixes(self, number: int) -> dict[str, list[float]]:
        """Requests a second, with a cold cache and a warm one, of `number` times W2's, in a random order."""
        rates: dict[str, list[float]] = {"cold": [], "warm": []}
        for _ in range(self._reps):
            shared = [self._tokens(PREFIX) for _ in range(number)]
            self._flush()
            for values in rates.values():
                prompts = [shared[i % number] + self._tokens(OWN) for i in range(number * COUNT)]
                random.Random(len(values)).shuffle(prompts)
                values.append(len(prompts) / self._timed(prompts, [OUTPUT] * len(prompts), flush=False))
        return rates

    def _flush(self) -> None:
        flush_cache(self._url)

    def _generate(
        self, prompts: list[list[int]], params: list[dict[str, Any]]
    ) -> tuple[float, list[dict[str, Any]]]:
        bodies = [
            json.dumps({"input_ids": ids, "sampling_params": its}).encode()
            for ids, its in zip(prompts, params, strict=True)
        ]
        return asyncio.run(self._post(bodies))

    async def _post(self, bodies: list[bytes]) -> tuple[float, list[dict[str, Any]]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=_TIMEOUT) as session:

            async def one(body: bytes) -> dict[str, Any]:
                headers = {"Content-Type": "application/json"}
                async with session.post(f"{self._url}/generate", data=body, headers=headers) as answer:
                    if answer.status != 200:
                        raise SystemExit(f"{self._url}/generate: {answer.status} {await answer.text()}")
                    result: dict[str, Any] = await answer.json()
                    return result

            began = time.perf_counter()
            results = await asyncio.gather(*map(one, bodies))
            return time.perf_counter() - began, results


@contextlib.contextmanager
def clustered(arguments: argparse.Namespace, **options: Any) -> Iterator[str]:
    """The URL of a cluster that has these options."""
    with tempfile.TemporaryDirectory() as folder:
        cut_tokenizer(arguments.tokenizer, ModelConfig.from_pretrained(arguments.model).vocab_size, Path(folder))
        given = {"load_format": "dummy", "tokenizer_path": folder, "context_length": CONTEXT_LENGTH}
        given |= {"model_path": str(arguments.model), **options}
        given |= parse_options(EngineConfig, dict(option.split("=", 1) for option in arguments.option))
        with tempfile.TemporaryDirectory() as files, cluster(given, Path(files)) as its:
            yield its.url


def routed(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Requests a second, by who served them and the cache's state."""
    found = {}

    def measure(name: str, url: str, number: int) -> None:
        requests = Requests(url, arguments.model, arguments.reps)
        requests.warm_up()
        for state, rates in requests.prefixes(number).items():
            found[f"{name}, {state}"] = rates
            said = " ".join(f"{rate:.1f}" for rate in rates)
            print(f"{name:24} {state:5} {statistics.median(rates):7.1f} requests/s   {said}", flush=True)

    with served(str(arguments.model), arguments.tokenizer, arguments.option) as url:
        measure("one GPU", url, 1)
    for policy in arguments.policies.split(","):
        with clustered(arguments, replicas=arguments.size, routing_policy=policy) as url:
            measure(policy, url, arguments.size)
    for state in ("cold", "warm"):
        ours = statistics.median(found[f"cache_aware, {state}"])
        for name, bar in zip(("one GPU", "round_robin"), BARS.items(), strict=True):
            if (their := found.get(f"{name}, {state}")) is not None:
                print(f"{state}: cache_aware {ours / statistics.median(their):.2f} {bar[0]} (bar: {bar[1]})")
    return found


def tensor_parallel(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """W3's TPOT and W1 of either way."""
    found: dict[str, list[float]] = {}
    for way in ("serve", "ray") * 2:
        options = {"tp_size": arguments.size}
        if way == "ray":
            start = clustered(arguments, **options)
        else:
            given = [*arguments.option, f"tp_size={arguments.size}"]
            start = served(str(arguments.model), arguments.tokenizer, given)
        with start as url:
            requests = Requests(url, arguments.model, arguments.reps)
            requests.warm_up()
            for figure in requests.run(["W3", "W1"]):
                found.setdefault(f"{way}, {figure.name}", []).extend(figure.all)
                print(f"{way:5} {figure.name:10} {figure.value:9,.4g} {figure.unit}", flush=True)
    for name in ("W3 TPOT", "W1 output"):
        ray, alone = (statistics.median(found[f"{way}, {name}"]) for way in ("ray", "serve"))
        print(f"{name}: through Ray {ray / alone:.4f} of without (bar: within {MOST_OFF:.0%})")
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--size", type=int, default=2, help="GPUs")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--parts", default="routed,tp")
    parser.add_argument("--policies", default="cache_aware,round_robin")
    parser.add_argument("--option", action="append", default=[], help="of the engines, NAME=VALUE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts = {"routed": routed, "tp": tensor_parallel}
    found = {part: parts[part](arguments) for part in arguments.parts.split(",")}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
