"""The flags of `sgl bench`, and from flags to what is sent and how."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from sgl.bench import datasets
from sgl.bench.datasets import Job
from sgl.bench.load import PATHS, Load
from sgl.errors import ConfigError
from sgl.lang.backends.http import with_scheme

KINDS = {
    "serving": "load a server over HTTP: latencies, throughput, goodput",
    "offline": "throughput of the engine on one large batch",
    "latency": "milliseconds of a small batch's prompts and tokens",
}


def add_load(parser: argparse.ArgumentParser, url: str) -> None:
    """How a server is loaded; `url` is the default."""
    group = parser.add_argument_group("the load")
    group.add_argument("--url", default=url, help="where the server is [%(default)s]")
    text = "what it speaks; native is also /generate of the original's servers [%(default)s]"
    group.add_argument("--api", default="native", choices=tuple(PATHS), help=text)
    group.add_argument("--model", default="default", metavar="NAME", help="for servers that want one [%(default)s]")
    group.add_argument("--api-key", metavar="KEY", help="sent as Authorization: Bearer")
    text = "requests a second [0: all at once]"
    group.add_argument("--request-rate", type=float, default=0.0, metavar="RATE", help=text)
    text = "how requests are spread; trace: as the dataset says [%(default)s]"
    group.add_argument("--arrivals", default="poisson", choices=("poisson", "fixed", "trace"), help=text)
    text = "how many times faster a trace is replayed than it was recorded [%(default)s]"
    group.add_argument("--trace-speed", type=float, default=1.0, metavar="FACTOR", help=text)
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests in flight at most")
    text = "requests that are sent before the measured ones, one after another [%(default)s]"
    group.add_argument("--warmup", type=int, default=1, metavar="N", help=text)
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[%(default)s]")
    text = "generate to the full length, past ends of text; OpenAI's own servers know no such field"
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "a bound in milliseconds on ttft, tpot or e2e, for the goodput; may be repeated"
    group.add_argument("--slo", action="append", default=[], metavar="NAME=MS", help=text)


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """What is sent."""
    group = parser.add_argument_group("what is sent")
    kinds = ("random", "generated-shared-prefix", "file")
    group.add_argument("--dataset", choices=kinds, help="[file with --dataset-path, else random]")
    text = (
        "JSON, JSON lines or CSV of conversations (ShareGPT's shape), prompts with or without schemas, or a trace "
        "of lengths; or a folder of JSON Schemas"
    )
    group.add_argument("--dataset-path", metavar="PATH", help=text)
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="[%(default)s]")
    text = "words of a made-up prompt [%(default)s]"
    group.add_argument("--input-len", type=int, default=128, metavar="N", help=text)
    text = "tokens of an answer, where the dataset does not say [%(default)s]"
    group.add_argument("--output-len", type=int, default=64, metavar="N", help=text)
    text = "0 to 1: how far made-up lengths stray [%(default)s]"
    group.add_argument("--spread", type=float, default=0.0, metavar="SHARE", help=text)
    text = "prefixes of generated-shared-prefix [%(default)s]"
    group.add_argument("--groups", type=int, default=8, metavar="N", help=text)
    text = "words of a shared prefix [%(default)s]"
    group.add_argument("--prefix-len", type=int, default=512, metavar="N", help=text)
    group.add_argument("--max-input-len", type=int, metavar="N", help="words after which prompts are cut off")
    group.add_argument("--max-output-len", type=int, metavar="N", help="tokens that no answer may exceed")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of what is made up [%(default)s]")


def load_of(options: argparse.Namespace) -> Load:
    """How the server is to be loaded. Raises ConfigError."""
    for name in ("request_rate", "warmup"):
        if getattr(options, name) < 0:
            raise ConfigError(f"{name} must not be negative", option=name)
    _at_least_one(options, "max_concurrency")
    return Load(
        url=with_scheme(options.url),
        api=options.api,
        model=options.model,
        api_key=options.api_key,
        rate=None if options.arrivals == "trace" else options.request_rate,
        is_poisson=options.arrivals == "poisson",
        max_concurrency=options.max_concurrency,
        warmup=options.warmup,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """What is to be sent. Raises ConfigError."""
    _at_least_one(options, "num_prompts", "groups", "output_len", "max_input_len", "max_output_len")
    if not 0 <= options.spread <= 1:
        raise ConfigError("spread must be from 0 to 1", option="spread")
    jobs = _full_jobs(options)
    if getattr(options, "arrivals", None) == "trace":
        if any(job.at is None for job in jobs):
            raise ConfigError(
                "--arrivals trace needs a --dataset-path that says when requests come", option="arrivals"
            )
        if options.trace_speed <= 0:
            raise ConfigError("trace_speed must be positive", option="trace_speed")
        jobs = [job.sent_at((job.at or 0.0) / options.trace_speed) for job in jobs]
    return [job.cut(options.max_input_len, options.max_output_len) for job in jobs]


def _full_jobs(options: argparse.Namespace) -> list[Job]:
    rng = random.Random(options.seed)
    count, output_len = options.num_prompts, options.output_len
    kind = options.dataset or ("random" if options.dataset_path is None else "file")
    if (kind == "file") != (options.dataset_path is not None):
        raise ConfigError("--dataset file and --dataset-path go together", option="dataset_path")
    if kind == "random":
        return datasets.random_jobs(count, options.input_len, output_len, options.spread, rng)
    if kind == "generated-shared-prefix":
        groups, prefix_len = options.groups, options.prefix_len
        return datasets.shared_prefix_jobs(count, groups, prefix_len, options.input_len, output_len, rng)
    return datasets.file_jobs(Path(options.dataset_path), count, output_len, rng)


def _at_least_one(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1", option=name)


def bounds_of(texts: list[str]) -> dict[str, float]:
    """Bounds of `--slo`, in seconds. Raises ConfigError."""
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
