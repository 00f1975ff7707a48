"""sgl's own layers beside transformers' modules, of the same shape on one GPU: a line a figure, with the ratio.

    python -m benchmarks.gpu.fallback MODEL [MODEL …] [--only W3,W4,W1] [--reps 3] [--option NAME=VALUE …]

MODEL is a folder with a config.json of a family that has layers of sgl's own; weights are random. One engine runs after
the other in this process. ratio: how fast transformers' modules are, sgl's layers being 1.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.workloads import Figure, Workloads
from sgl import Engine
from sgl.runtime.config import EngineConfig, parse_options

BAR = 0.9  # of a Llama


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--only", default="W3,W4,W1")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--option", action="append", default=[], help="of the engines, NAME=VALUE")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = dict(option.split("=", 1) for option in arguments.option)
    options = {"context_length": 4096, **parse_options(EngineConfig, given)}
    for model in arguments.models:
        names = arguments.only.split(",")
        native = _figures(model, "sgl", names, arguments.reps, options)
        others = _figures(model, "transformers", names, arguments.reps, options)
        print(f"{model}\n{'':18} {'sgl':>10} {'transformers':>13} {'ratio':>6}")
        for ours, theirs in zip(native, others, strict=True):
            print(line(ours, theirs), flush=True)


def _figures(
    model: Path, impl: Literal["sgl", "transformers"], names: list[str], reps: int, options: dict[str, Any]
) -> list[Figure]:
    began = time.perf_counter()
    with Engine(
        model, load_format="dummy", skip_tokenizer_init=True, model_impl=impl, max_running_requests=256, **options
    ) as engine:
        for tensor in engine._started.runner._model.weights.tensors():
            if tensor.dim() > 1 and tensor.is_floating_point():  # what is multiplied decides power and clocks
                tensor.uniform_(-1e-3, 1e-3)
        workloads = Workloads(engine, model, None, reps)
        workloads.warm_up()
        print(f"{impl}: warm after {time.perf_counter() - began:.1f} s", flush=True)
        return list(workloads.run(names))


def line(ours: Figure, theirs: Figure) -> str:
    """A row of the table."""
    ratio = ours.value / theirs.value if ours.is_time else theirs.value / ours.value
    digits, kept = 0 if ours.value >= 100 else 2, "" if ratio >= BAR else f"  below {BAR:g}"
    numbers = f"{ours.value:10.{digits}f} {theirs.value:13.{digits}f} {ratio:6.2f}"
    return f"{ours.name:18} {numbers} {ours.unit}{kept}"


if __name__ == "__main__":
    main()
