"""Several GPUs beside one: tensor parallelism, several engines under one server, and both peers at the same tensor
parallelism, in one table.

    python -m benchmarks.gpu.parallel MODEL TOKENIZER --out FOLDER [--peers KIT PARTS] [--size 2] [--reps 3]
                                      [--parts one,tp,wide,dp,peers] [--only W3,W4,W1,W2,W7] [--option NAME=VALUE …]
    python -m benchmarks.gpu.parallel --table FOLDER

MODEL and TOKENIZER are those of benchmarks.gpu.constrained. The parts:

    one    W3, W4, W1, W2 and W7's new schemas on one GPU
    tp     the same with tp_size=SIZE
    wide   W3 of a made-up model in Qwen2.5-32B's shape, on one GPU and on SIZE
    dp     W1 and W2 over HTTP: one engine, then SIZE engines under SIZE times as many requests and under as many
    peers  W3, W4, W1 and W7 of SGLang and vLLM, tensor parallel on SIZE GPUs

SIZE times as many requests come from SIZE clients at once, each with one call of what the single client sends: W1's
lengths, and W2's prefix, which is everybody's. Each engine's share is then what the one engine had, if the server
divides the lists well. One call for all would exceed the 2 million values that a body may have.

Each engine runs in a process of its own, one after another. What it measured is in FOLDER/rows.jsonl at once
(peers.jsonl for the peers), and the next invocation adds to it: the latest figure counts. Weights are the engine's own
dummy weights on one GPU and on several, not the peers' uniform ±1e-3 which benchmarks.gpu.throughput copies: it can
reach those of rank 0 only. Nothing uses NVLink multicast.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import peers
from benchmarks.gpu.constrained import Constrained, bounded
from benchmarks.gpu.flush import flush_cache
from benchmarks.gpu.parallel_table import PEER_ROWS, ROWS, table
from benchmarks.gpu.prompts import random_ids
from benchmarks.gpu.served import served
from benchmarks.gpu.workloads import Figure, Workloads, cut_tokenizer
from sgl import Engine
from sgl.runtime.config import EngineConfig, parse_options
from sgl.runtime.model.config import ModelConfig

OFFLINE, OVER_HTTP, OF_PEERS = ("W3", "W4", "W1", "W2"), ("W2", "W1"), ("W3", "W4", "W1", "W7")
CONTEXT_LENGTH = 8192
WARM_SCHEMAS = 16  # of requests before W7
WIDE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27_648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "eos_token_id": 151_643,
    "torch_dtype": "bfloat16",
}
# 65 GB of weights leave an H100 little else: few rows, and one request at a time.
WIDE_OPTIONS = {"context_length": 2048, "max_running_requests": 8}


@dataclass(frozen=True, slots=True)
class Bench:
    """What the command line asks for, and where figures go."""

    model: Path
    tokenizer: Path
    out: Path
    kit: tuple[Path, Path] | None  # the peers' kit and its parts
    size: int
    reps: int
    only: tuple[str, ...]
    counts: tuple[int, ...]  # of W7's requests
    options: tuple[str, ...]
    engines: tuple[str, ...] = peers.PEERS

    def engine(self, gpus: int, model: Path | None = None, **options: Any) -> Engine:
        """One of ours on that many GPUs; the command line's options override these."""
        given = parse_options(EngineConfig, dict(option.split("=", 1) for option in self.options))
        options = {"load_format": "dummy", "context_length": CONTEXT_LENGTH, **options, **given}
        return Engine(model or self.model, tp_size=gpus, **options)

    def record(self, of: str, gpus: int, figure: Figure, load: int = 1, **more: Any) -> None:
        """Add a figure to the rows."""
        row = {"of": of, "gpus": gpus, "load": load, "name": figure.name, "value": figure.value}
        row |= {"unit": figure.unit, "all": figure.all, **more}
        row |= {"size": self.size, "hidden_size": ModelConfig.from_pretrained(self.model).hidden_size}
        with (self.out / ROWS).open("a", encoding="utf-8") as file:
            print(json.dumps(row), file=file)
        said = f"{figure.name} {figure.value:,.4g} {figure.unit}"
        say(f"{of}, {gpus} GPU(s), load x{load}: {said}   {' '.join(f'{value:,.4g}' for value in figure.all)}")

    def ready(self, of: str, gpus: int, began: float) -> None:
        """Record how long a start took since `began`, and on what."""
        seconds = time.perf_counter() - began
        device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None  # a server has it, not we
        self.record(of, gpus, Figure("ready", seconds, "s", None, (seconds,)), device=device)


def say(text: str) -> None:
    """Print it with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def offline(bench: Bench, gpus: int) -> None:
    """W3, W4, W1 and W2 of an engine in this process."""
    began = time.perf_counter()
    with bench.engine(gpus, skip_tokenizer_init=True) as engine:
        bench.ready("engine", gpus, began)
        workloads = Workloads(engine, bench.model, None, bench.reps)
        workloads.warm_up()
        for figure in workloads.run([name for name in OFFLINE if name in bench.only]):
            bench.record("engine", gpus, figure)


def schemas(bench: Bench, gpus: int) -> None:
    """W7's new schemas; an engine with a tokenizer."""
    began = time.perf_counter()
    vocab_size = ModelConfig.from_pretrained(bench.model).vocab_size
    with tempfile.TemporaryDirectory() as folder:
        cut_tokenizer(bench.tokenizer, vocab_size, Path(folder))
        with bench.engine(gpus, tokenizer_path=folder) as engine:
            bench.ready("schemas", gpus, began)
            Workloads(engine, bench.model, None).warm_up()
            constrained = Constrained(engine, bench.reps, random_ids())
            others = [bounded(1_000_000 + i) for i in range(WARM_SCHEMAS)]
            constrained.run([256] * len(others), others)  # as W6 comes before W7 in benchmarks.gpu.constrained
            for k, count in enumerate(bench.counts):
                constrained.own_schemas(count, 10_000 * k, with_seen=False)
                rows = [row for row in constrained.rows if row["name"] == f"W7 {count} new"]
                values = tuple(row["slowdown"] for row in rows)
                figure = Figure(f"W7 {count} new", statistics.median(values), "times", None, values)
                bench.record("schemas", gpus, figure, rows=rows)


def wide(bench: Bench, gpus: int) -> None:
    """W3 of the wide model."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(WIDE))
        with bench.engine(gpus, Path(folder), skip_tokenizer_init=True, **WIDE_OPTIONS) as engine:
            bench.ready("wide", gpus, began)
            for _ in Workloads(engine, folder, None, 1).single_stream():  # warms up
                pass
            for figure in Workloads(engine, folder, None, bench.reps).single_stream():
                bench.record("wide", gpus, figure)


class OverHttp(Workloads):
    """Workloads over POST /generate: a call of the single load from each of `load` clients at once, timed from the
    first body's first byte to the last answer's last."""

    def __init__(self, url: str, bench: Bench, load: int) -> None:
        super().__init__(None, bench.model, None, bench.reps, load=load)  # type: ignore[arg-type]
        self._url = url
        self.shares: list[list[int]] = []
        """Tokens that each engine generated, by run, since this was cleared."""

    def _flush(self) -> None:
        flush_cache(self._url)

    def _generate(
        self, prompts: list[list[int]], params: list[dict[str, Any]]
    ) -> tuple[float, list[dict[str, Any]]]:
        each = len(prompts) // self._load
        bodies = [
            json.dumps({"input_ids": prompts[i : i + each], "sampling_params": params[i : i + each]}).encode()
            for i in range(0, len(prompts), each)
        ]
        before = self._generated()
        with ThreadPoolExecutor(len(bodies)) as clients:
            began = time.perf_counter()
            answers = list(clients.map(self._post, bodies))
            took = time.perf_counter() - began
        self.shares.append([now - then for now, then in zip(self._generated(), before, strict=True)])
        return took, [result for answer in answers for result in json.loads(answer)]

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(f"{self._url}/generate", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as response:
                answer: bytes = response.read()
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{self._url}/generate: {error.code} {error.read().decode()[:1000]}") from None
        return answer

    def _generated(self) -> list[int]:
        with urllib.request.urlopen(f"{self._url}/server_info") as response:
            return [state["generated_tokens"] for state in json.load(response)["internal_states"]]


def over_http(bench: Bench, gpus: int) -> None:
    """W2 and W1 of that many engines under one server: under as many times the load, then under the single load."""
    began = time.perf_counter()
    options = [*bench.options, f"dp_size={gpus}"]
    with served(str(bench.model), bench.tokenizer, options) as url:
        bench.ready("server", gpus, began)
        for load in dict.fromkeys((gpus, 1)):
            workloads = OverHttp(url, bench, load)
            if load == gpus:
                workloads.warm_up()
            workloads.shares.clear()
            for figure in workloads.run([name for name in OVER_HTTP if name in bench.only]):
                bench.record("server", gpus, figure, load, shares=workloads.shares)
                if figure.name != "W2 cold cache":  # W2's two figures come from the same calls
                    workloads.shares.clear()


def of_peers(bench: Bench, gpus: int) -> None:
    """The peers; the second also if the first fails."""
    assert bench.kit is not None
    workloads, failed = ",".join(name for name in OF_PEERS if name in bench.only), []
    for peer in bench.engines:
        say(f"{peer}: {workloads}")
        try:
            tokenizer = bench.tokenizer if "W7" in bench.only else None
            rows = bench.out / PEER_ROWS
            peers.run(*bench.kit, bench.model, tokenizer, workloads, (peer,), rows, gpus)
        except SystemExit as error:
            failed.append(str(error))
    if failed:
        raise SystemExit("; ".join(failed))


JOBS: dict[str, Callable[[Bench, int], None]] = {
    "offline": offline,
    "schemas": schemas,
    "wide": wide,
    "over_http": over_http,
    "of_peers": of_peers,
}


def jobs(parts: list[str], bench: Bench) -> list[tuple[str, int]]:
    """What runs in a process of its own each, and on how many GPUs."""
    table: dict[str, list[tuple[str, int]]] = {
        "one": [("offline", 1), ("schemas", 1)],
        "tp": [("offline", bench.size), ("schemas", bench.size)],
        "wide": [("wide", 1), ("wide", bench.size)],
        "dp": [("over_http", 1), ("over_http", bench.size)],
        "peers": [("of_peers", bench.size)],
    }
    needed = {"offline": OFFLINE, "schemas": ("W7",), "wide": ("W3",), "over_http": OVER_HTTP, "of_peers": OF_PEERS}
    if unknown := set(parts) - set(table):
        raise SystemExit(f"no parts {', '.join(sorted(unknown))}: there are {', '.join(table)}")
    if unknown := set(bench.only) - {*OFFLINE, *OF_PEERS}:
        raise SystemExit(f"no workloads {', '.join(sorted(unknown))} here")
    return [job for part in parts for job in table[part] if set(bench.only) & set(needed[job[0]])]


def main() -> None:
    """Run the parts and print the table; status 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("tokenizer", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--peers", nargs=2, type=Path, metavar=("KIT", "PARTS"))
    parser.add_argument("--engine", nargs="+", choices=peers.PEERS, default=peers.PEERS, help="of the part peers")
    parser.add_argument("--parts", help="one,tp,wide,dp and, with --peers, peers")
    parser.add_argument("--only", default="W3,W4,W1,W2,W7")
    parser.add_argument("--counts", default="64,256", help="of requests in W7")
    parser.add_argument("--size", type=int, default=2, help="GPUs")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--option", action="append", default=[], help="of our engine, NAME=VALUE")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="only print the table of what was measured")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.table:
        print("\n".join(table(given.table)))
        return
    if not (given.model and given.tokenizer and given.out):
        parser.error("MODEL, TOKENIZER and --out are needed, or --table")
    if given.size < 2:
        parser.error("--size must be at least 2")
    parts = (given.parts or f"one,tp,wide,dp{',peers' if given.peers else ''}").split(",")
    if "peers" in parts and not given.peers:
        parser.error("the part peers needs --peers KIT PARTS")
    only, counts = tuple(given.only.split(",")), tuple(int(count) for count in given.counts.split(","))
    kit = (given.peers[0], given.peers[1]) if given.peers else None
    options, engines = tuple(given.option), tuple(given.engine)
    bench = Bench(
        given.model, given.tokenizer, given.out, kit, given.size, given.reps, only, counts, options, engines
    )
    if given.job:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        JOBS[given.job](bench, given.gpus)
        return
    wanted, failed = jobs(parts, bench), []
    bench.out.mkdir(parents=True, exist_ok=True)
    for name, gpus in wanted:
        say(f"{name}, {gpus} GPU(s)")
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.parallel",
            *sys.argv[1:],
            "--job",
            name,
            "--gpus",
            str(gpus),
        ]
        if status := subprocess.run(command, env={**os.environ, **peers.WITHOUT_MULTICAST}).returncode:
            failed.append(f"{name} with {gpus} GPU(s) ended with status {status}")
            say(failed[-1])
    say("done")
    print("\n".join(table(bench.out)))
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
