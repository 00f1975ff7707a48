"""The flags of `sgl bench`, and from flags to a report."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sgl.bench import datasets, serving
from sgl.bench.datasets import Job
from sgl.errors import ConfigError

KINDS = {
    "serving": "load a server over HTTP: latencies, throughput, goodput",
    "offline": "throughput of the engine on one large batch",
    "latency": "milliseconds of a small batch's prompts and tokens",
}


def add_load(parser: argparse.ArgumentParser) -> None:
    """How a server is loaded."""
    group = parser.add_argument_group("the load")
    group.add_argument("--url", default="http://127.0.0.1:30000", help="where the server is [%(default)s]")
    text = "what it speaks; native is also /generate of the original's servers [%(default)s]"
    group.add_argument("--api", default="native", choices=tuple(serving.PATHS), help=text)
    group.add_argument("--model", default="default", help="the model's name, for servers that want one")
    group.add_argument("--api-key", help="sent as Authorization: Bearer")
    group.add_argument("--request-rate", type=float, default=0.0, help="requests a second [0: all at once]")
    text = "how requests are spread; trace: as the dataset says [%(default)s]"
    group.add_argument("--arrivals", default="poisson", choices=("poisson", "fixed", "trace"), help=text)
    group.add_argument("--max-concurrency", type=int, help="requests in flight at most")
    text = "a bound in milliseconds on ttft, tpot or e2e, for the goodput; may be repeated"
    group.add_argument("--slo", action="append", default=[], metavar="NAME=MS", help=text)


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """What is sent."""
    group = parser.add_argument_group("what is sent")
    kinds = ("random", "shared-prefix", "file")
    group.add_argument("--dataset", default="random", choices=kinds, help="[%(default)s]")
    group.add_argument("--dataset-path", help="JSON, JSON lines or CSV: conversations, prompts, schemas or a trace")
    group.add_argument("--num-prompts", type=int, default=100, help="[%(default)s]")
    group.add_argument("--input-len", type=int, default=128, help="words of a made-up prompt [%(default)s]")
    group.add_argument("--output-len", type=int, default=64, help="tokens of an answer [%(default)s]")
    group.add_argument(
        "--spread", type=float, default=0.0, help="0 to 1: how far made-up lengths stray [%(default)s]"
    )
    group.add_argument("--groups", type=int, default=8, help="prefixes of shared-prefix [%(default)s]")
    group.add_argument("--prefix-len", type=int, default=512, help="words of a shared prefix [%(default)s]")
    group.add_argument("--seed", type=int, default=0, help="of what is made up [%(default)s]")


def serving_report(options: argparse.Namespace, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Load the server. `progress` gets how many requests have ended, and how many there are."""
    jobs, bounds = _jobs(options), _slo(options.slo)
    load = serving.Load(
        url=options.url,
        api=options.api,
        model=options.model,
        api_key=options.api_key,
        rate=None if options.arrivals == "trace" else options.request_rate,
        is_poisson=options.arrivals == "poisson",
        max_concurrency=options.max_concurrency,
        seed=options.seed,
    )
    numbers = itertools.count(1)
    results, seconds = asyncio.run(serving.run(jobs, load, lambda: progress(next(numbers), len(jobs))))
    return serving.report(results, seconds, bounds)


def engine_report(options: argparse.Namespace, engine_options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure an engine of this process."""
    from sgl.bench import offline
    from sgl.runtime.engine import Engine

    jobs = _jobs(options)
    with Engine(**engine_options) as engine:
        return (offline.throughput if options.kind == "offline" else offline.latency)(engine, jobs)


def _jobs(options: argparse.Namespace) -> list[Job]:
    rng = random.Random(options.seed)
    count, output_len = options.num_prompts, options.output_len
    for name in ("num_prompts", "groups", "output_len"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} must be at least 1", option=name)
    if options.dataset == "random":
        return datasets.random_jobs(count, options.input_len, output_len, options.spread, rng)
    if options.dataset == "shared-prefix":
        groups, prefix_len = options.groups, options.prefix_len
        return datasets.shared_prefix_jobs(count, groups, prefix_len, options.input_len, output_len, rng)
    if options.dataset_path is None:
        raise ConfigError("--dataset file needs --dataset-path", option="dataset_path")
    return datasets.file_jobs(Path(options.dataset_path), count, output_len, rng)


def _slo(texts: list[str]) -> dict[str, float]:
    """Bounds in seconds."""
    bounds = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise ConfigError(f"--slo {text!r}: there are ttft, tpot and e2e", option="slo")
        try:
            bounds[name] = float(value) / 1000
        except ValueError:
            raise ConfigError(f"--slo {text!r}: write {name}=200 for 200 ms", option="slo") from None
    return bounds
