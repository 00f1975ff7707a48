"""Two versions of sgl on one GPU, both up at once and measured in turn: medians, spread and ratio of each figure.

    python -m benchmarks.gpu.versions BEFORE MODEL [TOKENIZER] [--only W1,W3,…] [--reps 5] [--json FILE]
                                                            [--option NAME=VALUE …]

BEFORE is a checkout of the older version (`git worktree add BEFORE COMMIT`); the newer is the one that this is run in,
whose benchmarks measure both. MODEL is a folder with a config.json; weights are random. W6 and W7 need TOKENIZER. A
loss counts beyond the spread of one version, and beyond 2 %. Both engines must fit: OPTIONS gives each KV pages for
300,000 tokens, --option changes that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
OPTIONS = {"context_length": "8192", "max_total_tokens": "300000"}
UNCONSTRAINED = "W3,W4,W5,W2,W1,W9,host"
CONSTRAINED = "W6,W7 64,W7 256"
_READY = "figures: "  # what each answer of a worker begins with
Values = dict[str, list[float]]


class Version:
    """One version's engine in a process of its own."""

    def __init__(self, name: str, package: Path, arguments: list[str], folder: Path) -> None:
        """package: its folder sgl. folder: where the two meet, this version's sgl and today's benchmarks."""
        self.name = name
        folder.mkdir()
        (folder / "sgl").symlink_to(package.resolve(), target_is_directory=True)
        (folder / "benchmarks").symlink_to(REPOSITORY / "benchmarks", target_is_directory=True)
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        # The engine's own processes look at this folder last: nothing else may have a package sgl.
        path = os.pathsep.join([str(folder), *(each for each in others if each and not Path(each, "sgl").is_dir())])
        command = [sys.executable, "-m", "benchmarks.gpu.versions", *arguments, "--worker"]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.values: Values = {}
        self._answer()

    def measure(self, workload: str, rep: int) -> None:
        """Run one repetition and keep its figures."""
        assert self._process.stdin is not None
        print(json.dumps([workload, rep]), file=self._process.stdin, flush=True)
        for name, value in self._answer().items():
            self.values.setdefault(name, []).append(value)

    def close(self) -> None:
        """End its process."""
        self._process.communicate(timeout=60)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_READY):
                answer: dict[str, float] = json.loads(line.removeprefix(_READY))
                return answer
            print(f"[{self.name}] {line}", end="", flush=True)
        raise SystemExit(f"the engine {self.name} ended with status {self._process.wait()}")


def table(before: Values, after: Values) -> list[str]:
    """A line for each figure: medians, least and most, and the ratio of the medians."""
    lines = [f"{'':18} {'before':>28} {'after':>28} {'after/before':>12}"]
    for name, values in before.items():
        cells, medians = [], []
        for each in (values, after[name]):
            medians.append(statistics.median(each))
            cells.append(f"{_number(medians[-1])} ({_number(min(each))} to {_number(max(each))})")
        ratio = medians[1] / medians[0] if medians[0] else float("nan")
        lines.append(f"{name:18} {cells[0]:>28} {cells[1]:>28} {ratio:12.3f}")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _serve(model: Path, tokenizer: Path | None, options: dict[str, str]) -> None:
    """A worker: answers each [workload, repetition] on stdin with its figures."""
    from benchmarks.gpu.constrained import Constrained
    from benchmarks.gpu.prompts import random_ids
    from benchmarks.gpu.throughput import _flatten_weights
    from benchmarks.gpu.workloads import Workloads, cut_tokenizer
    from sgl import Engine
    from sgl.runtime.config import EngineConfig, parse_options
    from sgl.runtime.model.config import ModelConfig

    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = parse_options(EngineConfig, options)
        if tokenizer is None:
            given["skip_tokenizer_init"] = True
        else:
            cut_tokenizer(tokenizer, ModelConfig.from_pretrained(model).vocab_size, Path(folder))
            given["tokenizer_path"] = folder
        with Engine(model, load_format="dummy", **given) as engine:
            _flatten_weights(engine)
            workloads = Workloads(engine, model, None, reps=1)
            workloads.warm_up()
            bench = Constrained(engine, 1, random_ids())
            constrained: dict[str, Callable[[int], None]] = {
                "W6": lambda rep: bench.one_schema(),
                "W7 64": lambda rep: bench.own_schemas(64, rep * 64),
                "W7 256": lambda rep: bench.own_schemas(256, 10_000 + rep * 256),
            }
            print(f"{_READY}{{}}", flush=True)
            for line in sys.stdin:
                workload, rep = json.loads(line)
                if workload in constrained:
                    bench.rows.clear()
                    constrained[workload](rep)
                    figures = {row["name"]: row["slowdown"] for row in bench.rows}
                else:
                    figures = {figure.name: figure.value for figure in workloads.run([workload])}
                print(f"{_READY}{json.dumps(figures)}", flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path, nargs="?")
    parser.add_argument("--only", help="workloads, with commas between")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="every figure of every repetition, written after each")
    parser.add_argument("--option", action="append", default=[], help="of both engines, NAME=VALUE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        options = OPTIONS | dict(option.split("=", 1) for option in arguments.option)
        return _serve(arguments.model, arguments.tokenizer, options)
    if not (arguments.before / "sgl").is_dir():
        parser.error(f"{arguments.before} is no checkout of sgl: it has no folder sgl")
    default = UNCONSTRAINED + (f",{CONSTRAINED}" if arguments.tokenizer else "")
    paths = [str(each.resolve()) for each in (arguments.before, arguments.model, arguments.tokenizer) if each]
    shared = [*paths, *(f"--option={option}" for option in arguments.option)]
    with tempfile.TemporaryDirectory() as folder:
        packages = {"before": arguments.before / "sgl", "after": REPOSITORY / "sgl"}
        versions = [Version(name, its, shared, Path(folder) / name) for name, its in packages.items()]
        for rep in range(arguments.reps):
            for workload in (arguments.only or default).split(","):
                for version in versions[:: 1 if rep % 2 else -1]:
                    version.measure(workload, rep)
                if arguments.json:
                    arguments.json.write_text(json.dumps({each.name: each.values for each in versions}, indent=1))
        for version in versions:
            version.close()
    print("\n".join(table(*(version.values for version in versions))))
    return None


if __name__ == "__main__":
    main()
