"""What constraints cost on one GPU: W6, one JSON Schema for 64 requests, and W7, a schema of its own for each of 64 and
256, beside the same lengths unconstrained.

    python -m benchmarks.gpu.constrained MODEL TOKENIZER [--only W6,W7] [--reps 3] [--json FILE] [--peers ROWS.jsonl]
                                                         [--trained] [--option NAME=VALUE …]

MODEL is a folder with a config.json; weights and prompts are random. TOKENIZER is a folder with a byte-level
tokenizer.json, cut to the model's vocabulary where it is larger. With --trained, MODEL's own weights are loaded,
TOKENIZER is used whole, and prompts ask in its chat template for such an object. Slowdown: how many times longer a
token takes under a schema. W7's schemas bound strings and arrays, and documents end by themselves; `new` schemas were
never seen and are compiled within the time, `seen` ones come again. --peers has what benchmarks.gpu.peers measured on
this machine; without, their figures are of runs of their own on an H200 (2026-11-20): not of this run, nor of this
machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import peers
from benchmarks.gpu.prompts import Prompts, random_ids, requests_for_json
from benchmarks.gpu.throughput import _flatten_weights
from benchmarks.gpu.workloads import Machine, Workloads, cut_tokenizer
from sgl import Engine
from sgl.runtime.config import EngineConfig, parse_options
from sgl.runtime.model.config import ModelConfig

CAVEAT = (
    "Weights are random: they pick rare tokens of many bytes, which hurts the peers' masks more than real text "
    "would."
)
TRAINED = "Weights are the model's own, prompts ask for such objects, and free rows go on behind their texts' end."
ROWS, MOST_TOKENS = 64, 256  # of W6; of any output
BARS = {"W6 first": 1.05, "W6 warm": 1.01}
BARS |= {f"W7 {count} {state}": bar for count in (64, 256) for state, bar in (("new", 1.10), ("seen", 1.03))}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string"},
        "active": {"type": "boolean"},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "email", "active", "score", "tags"],
    "additionalProperties": False,
}


def bounded(number: int) -> dict[str, Any]:
    """A schema for each number, whose shortest and longest documents both end well before 256 tokens."""
    properties: dict[str, Any] = {
        f"id_{number}": {"type": "integer", "minimum": 0, "maximum": 9999},
        f"name_{number}": {"type": "string", "minLength": 4, "maxLength": 16},
        f"kind_{number}": {"type": "string", "enum": ["alpha", "beta", "gamma", f"k{number}"]},
        f"active_{number}": {"type": "boolean"},
        f"level_{number}": {"type": "integer", "minimum": -100, "maximum": 100},
        f"tags_{number}": {
            "type": "array",
            "items": {"type": "string", "maxLength": 8},
            "minItems": 1,
            "maxItems": 4,
        },
    }
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


class Constrained:
    """Runs W6 and W7 on an engine."""

    def __init__(self, engine: Engine, reps: int, prompts: Prompts) -> None:
        self.engine = engine
        self.reps = reps
        self.prompts = prompts
        self.rows: list[dict[str, Any]] = []

    def run(
        self, lengths: list[int], schemas: list[dict[str, Any]], *, free: bool = False
    ) -> tuple[float, list[dict[str, Any]]]:
        """Seconds and results for prompts of these schemas; free ones generate exactly these lengths."""
        prompts = self.prompts(schemas)
        params: list[dict[str, Any]] = [{"temperature": 0.0, "max_new_tokens": length} for length in lengths]
        for its, schema in zip(params, schemas, strict=True):
            its |= {"ignore_eos": True} if free else {"json_schema": schema}
        began = time.perf_counter()
        results = self.engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - began, results

    def one_schema(self) -> None:
        """W6: 64 requests under one schema, then the same lengths free; the first repetition compiles it."""
        self.engine.flush_cache()
        for rep in range(self.reps + 1):
            self._compare("W6 first" if not rep else "W6 warm", [PERSON] * ROWS)

    def own_schemas(self, count: int, first: int, *, with_seen: bool = True) -> None:
        """W7: every request under its own schema, then the same lengths free; other schemas each time they are new."""
        for rep in range(self.reps):
            schemas = [bounded(first + rep * count + i) for i in range(count)]
            self.engine.flush_cache()
            self._compare(f"W7 {count} new", schemas)
        for _ in range(self.reps if with_seen else 0):
            self._compare(f"W7 {count} seen", schemas)

    def _compare(self, name: str, schemas: list[dict[str, Any]]) -> None:
        before = self._counters()
        seconds, results = self.run([MOST_TOKENS] * len(schemas), schemas)
        counted = {key: value - before[key] for key, value in self._counters().items()}
        made = [len(result["output_ids"]) for result in results]
        assert all(result["meta_info"]["finish_reason"]["type"] == "stop" for result in results), "all end in time"
        for result in results:
            json.loads(result["text"])
        free_seconds, _ = self.run(made, schemas, free=True)
        row = {
            "name": name,
            "slowdown": seconds / free_seconds,
            "seconds": seconds,
            "free_seconds": free_seconds,
            "tokens": sum(made),
            "longest": max(made),
            **counted,
        }
        self.rows.append(row)
        print(
            "  ",
            json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}),
            flush=True,
        )

    def _counters(self) -> dict[str, int]:
        names = ("steps", "forced_tokens", "host_masks", "device_masks")
        [state] = self.engine.get_server_info()["internal_states"]
        return {name: state[name] for name in names}

    def table(self, of_peers: peers.Figures, where: str, bars: dict[str, float], caveat: str) -> list[str]:
        """A line for each figure: the median of its repetitions."""
        lines = [f"{'slowdown':12} {'sgl':>7} {'bar':>6} {'SGLang':>8} {'vLLM':>6} {'ratio':>6}"]
        for name in dict.fromkeys(row["name"] for row in self.rows):
            value = statistics.median(row["slowdown"] for row in self.rows if row["name"] == name)
            bar = bars.get(name)
            line = f"{name:12} {value:7.3f} {'' if bar is None else f'{bar:.2f}':>6}"
            if name in of_peers:
                line += "".join(f" {their:7.2f}" for their in of_peers[name])
                line += f" {min(of_peers[name]) / value:6.2f}"
            lines.append(line if bar is None else f"{line} {'ok' if value <= bar else 'MISSED'}")
        return [*lines, f"SGLang and vLLM: {where}; ratio: the better of the two over ours", caveat]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--only", default="W6,W7")
    parser.add_argument("--counts", default="64,256", help="of requests in W7")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", type=Path, metavar="ROWS", help="what benchmarks.gpu.peers measured here")
    parser.add_argument("--trained", action="store_true", help="MODEL's own weights, and prompts that are texts")
    parser.add_argument("--option", action="append", default=[], help="of the engine, NAME=VALUE")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = dict(option.split("=", 1) for option in arguments.option)
    options = {"context_length": 8192, **parse_options(EngineConfig, given)}
    config = ModelConfig.from_pretrained(arguments.model)
    of_peers, where = peers.figures_for(config.hidden_size, arguments.peers)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.trained:
            options["tokenizer_path"] = str(arguments.tokenizer)
        else:
            cut_tokenizer(arguments.tokenizer, config.vocab_size, Path(folder))
            options |= {"load_format": "dummy", "tokenizer_path": folder}
        with Engine(arguments.model, **options) as engine:
            prompts = requests_for_json(engine.tokenizer) if arguments.trained else random_ids()
            print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
            if not arguments.trained:
                _flatten_weights(engine)
            Workloads(engine, arguments.model, Machine.measure()).warm_up()
            bench = Constrained(engine, arguments.reps, prompts)
            if "W6" in arguments.only:
                bench.one_schema()
            if "W7" in arguments.only:
                for k, count in enumerate(map(int, arguments.counts.split(","))):
                    bench.own_schemas(count, 10_000 * k)
            options = dataclasses.asdict(engine.config)
    bars, caveat = ({}, TRAINED) if arguments.trained else (BARS, CAVEAT)
    print("\n".join(bench.table(of_peers, where, bars, caveat)))
    if arguments.json:
        body = {"config": options, "rows": bench.rows, "peers": of_peers, "peers_ran": where, "caveat": caveat}
        arguments.json.write_text(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
