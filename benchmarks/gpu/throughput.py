"""Throughput and latency on one GPU, beside what vLLM and SGLang took, as a table and as JSON.

    python -m benchmarks.gpu.throughput MODEL [--only W3,W4] [--reps 3] [--json FILE] [--option NAME=VALUE …]

MODEL is a folder with a config.json; weights are random. The peers' figures are of runs of their own on an H200
(2026-11-20, medians of two): not of this run, nor of this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from pathlib import Path

from benchmarks.gpu.workloads import Figure, Workloads
from sgl import Engine
from sgl.runtime.config import EngineConfig, parse_options
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.weights import checkpoint_tensors

# SGLang 0.5.15, vLLM 0.26.0, by the model's hidden size: Llama-3.1-8B and Qwen3-0.6B shapes.
RECORDED = {
    4096: {
        "W1 output": (9450, 9600),
        "W2 cold cache": (210, 231),
        "W2 warm cache": (245, 232),
        "W3 TTFT": (14.9, 16.4),
        "W3 TPOT": (4.90, 5.04),
        "W4 step of 64": (6.81, 6.75),
        "W4 step of 256": (14.5, 14.5),
        "W5 prefill": (42_200, 42_100),
    },
    1024: {
        "W1 output": (22_970, 24_690),
        "W3 TTFT": (7.4, 6.9),
        "W3 TPOT": (1.60, 1.63),
        "W4 step of 64": (2.96, 2.90),
        "W4 step of 256": (7.13, 7.17),
    },
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", default="W3,W4,W5,W2,W1")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--option", action="append", default=[], help="of the engine, NAME=VALUE")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = dict(option.split("=", 1) for option in arguments.option)
    options = {"context_length": 8192, **parse_options(EngineConfig, given)}
    began = time.perf_counter()
    with Engine(arguments.model, load_format="dummy", skip_tokenizer_init=True, **options) as engine:
        started = time.perf_counter() - began
        _flatten_weights(engine)
        workloads = Workloads(engine, arguments.model, arguments.reps)
        workloads.warm_up()
        print(f"ready after {started:.1f} s, warm after {time.perf_counter() - began:.1f} s", flush=True)
        recorded = RECORDED.get(ModelConfig.from_pretrained(arguments.model).hidden_size, {})
        figures = []
        print(f"{'':16} {'sgl':>10} {'of floor':>9} {'SGLang*':>9} {'vLLM*':>9} {'ratio':>6}")
        for figure in workloads.run(arguments.only.split(",")):
            figures.append(figure)
            print(_line(figure, recorded.get(figure.name)), flush=True)
        print("* recorded in other runs; ratio: how many times better than the better of the two")
        if arguments.json:
            rows = [dataclasses.asdict(figure) for figure in figures]
            body = {"config": dataclasses.asdict(engine.config), "ready_s": started, "figures": rows}
            arguments.json.write_text(json.dumps(body, indent=1))


def _flatten_weights(engine: Engine) -> None:
    """Every weight uniform in ±1e-3, as both peers make theirs: what is multiplied decides power and clocks."""
    model = engine._started.runner._model
    for tensor in checkpoint_tensors(model.config, model.weights).values():
        tensor.uniform_(-1e-3, 1e-3)


def _line(figure: Figure, peers: tuple[float, float] | None) -> str:
    digits = 2 if figure.is_time else 0
    text = f"{figure.name:16} {figure.value:10.{digits}f}"
    if figure.floor is None:
        text += f" {'':9}"
    else:
        text += f" {figure.floor / figure.value if figure.is_time else figure.value / figure.floor:9.0%}"
    if peers is None:
        return f"{text} {'':27}{figure.unit}"
    ratio = min(peers) / figure.value if figure.is_time else figure.value / max(peers)
    return f"{text} {peers[0]:9.{digits}f} {peers[1]:9.{digits}f} {ratio:6.2f} {figure.unit}"


if __name__ == "__main__":
    main()
