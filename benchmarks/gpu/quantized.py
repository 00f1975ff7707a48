"""Four bits beside sixteen on one GPU: products by rows, and an engine's steps, with ratios.

    python -m benchmarks.gpu.quantized MODEL [--only products,tune,engine] [--reps 3] [--quantization int4]
                                             [--json FILE]

MODEL is a folder with a config.json; weights are random, rounded to four bits in groups of 128. `products` times a
layer's matrices with cuBLAS in bfloat16, with our kernels and, where it is installed, with humming-kernels: as CUDA
graphs, over so many copies that none is in a cache. `tune` times single products by programs of different sizes.
`engine` runs W3 and W4 of benchmarks.gpu.throughput with and without quantization.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.workloads import Workloads
from sgl import Engine
from sgl.kernels.layers import grouped_single_triton, grouped_triton, single_triton
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.runtime.model.config import ModelConfig

ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
SPREAD = 300 << 20  # bytes of copies that are read in turn: more than a cache has
BARS = {"W3 TPOT": 1.9}  # ms; 8 billion weights on an H200
Product = Callable[[torch.Tensor], object]


def shapes(model: Path) -> dict[str, tuple[int, int]]:
    """[n, k] of a layer's matrices."""
    config = ModelConfig.from_pretrained(model)
    hidden, middle, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return {
        "qkv": (heads + 2 * config.num_kv_heads * config.head_dim, hidden),
        "output": (hidden, heads),
        "gate_up": (2 * middle, hidden),
        "down": (hidden, middle),
    }


def microseconds(products: list[Product], x: torch.Tensor) -> float:
    """Of one product on the GPU: the median of ten replays of a graph with all of them."""
    for product in products[:2]:
        product(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(products))
    return statistics.median(times[2:])


def humming_product(matrix: GroupedMatrix) -> Product:
    """The same matrix in humming-kernels. Raises ImportError, and what it raises for matrices that it does not take."""
    from sgl.kernels.layers.grouped_humming import HummingProduct

    return HummingProduct(matrix, torch.bfloat16)


def copies(matrix: GroupedMatrix) -> list[GroupedMatrix]:
    """Enough that none stays in a cache."""
    count = max(2, SPREAD // matrix.values.nbytes)
    return [GroupedMatrix(matrix.values.clone(), matrix.scales.clone(), None) for _ in range(count)]


def products(model: Path) -> list[dict[str, Any]]:
    """A line for each matrix and number of rows; µs."""
    found = []
    print(f"{'µs':16} {'bf16':>8} {'ours':>8} {'unpacked':>8} {'humming':>8}   bf16/ours  bf16/humming")
    for name, (n, k) in shapes(model).items():
        dense = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5
        matrix = GroupedMatrix.rounded(dense)
        several = copies(matrix)
        plain = [dense.clone() for _ in range(max(2, SPREAD // dense.nbytes))]
        try:
            began = time.perf_counter()
            of_humming = [humming_product(each) for each in several]
            of_humming[0](torch.zeros(1, k, dtype=torch.bfloat16, device="cuda"))
            print(f"humming's kernels of {name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
        except Exception as error:  # whatever it is, the other columns are worth having
            print(f"humming cannot multiply with {name}: {error!r:.500}", flush=True)
            of_humming = []
        for rows in ROWS:
            x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
            expected = functional.linear(x.float(), matrix.dequantized(torch.float32))
            ways: dict[str, list[Product]] = {
                "bf16": [lambda x, its=its: functional.linear(x, its) for its in plain],
                "ours": [lambda x, its=its: grouped_triton.linear(x, its, None) for its in several],
                "unpacked": [
                    lambda x, its=its: functional.linear(x, grouped_triton.dequantized(its, x.dtype))
                    for its in several
                ],
                "humming": of_humming,
            }
            if rows == 1:
                ways["ours"] = [
                    lambda x, its=its: single_triton.project(x, None, 0.0, its, None) for its in several
                ]
            times: dict[str, Any] = {"matrix": name, "n": n, "k": k, "rows": rows}
            for way, each in ways.items():
                if each:
                    if way != "bf16":
                        error = (each[0](x).float() - expected).norm() / expected.norm()  # type: ignore[attr-defined]
                        times[f"{way} error"] = error.item()
                    times[way] = microseconds(each, x)
            found.append(times)
            cells = " ".join(f"{times[way]:8.1f}" if way in times else f"{'':8}" for way in ways)
            ratios = " ".join(f"{times['bf16'] / times[way]:11.2f}" for way in ("ours", "humming") if way in times)
            errors = ", ".join(f"{way} {times[f'{way} error']:.4f}" for way in ways if f"{way} error" in times)
            print(f"{name:9} {rows:6} {cells} {ratios}   errors: {errors}", flush=True)
        del several, plain, of_humming, ways
        torch.cuda.empty_cache()
    return found


def tune(model: Path) -> list[dict[str, Any]]:
    """Single products, by rows and units of a program, and programs a multiprocessor of those that go on; µs, the least
    first."""
    found = []
    names = ("_ROWS", "_MOST_PROGRAMS", "_UNITS", "_LEAST_PROGRAMS")
    kept = {name: getattr(grouped_single_triton, name) for name in names}

    def choose(*values: int) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(grouped_single_triton, name, value)

    for name, (n, k) in shapes(model).items():
        several = copies(GroupedMatrix.rounded(torch.randn(n, k, dtype=torch.bfloat16, device="cuda")))
        x, norm = torch.randn(1, k, dtype=torch.bfloat16, device="cuda"), torch.ones(k, device="cuda").bfloat16()
        times = {}
        for rows, units in itertools.product((4, 8, 16), (64, 128)):
            for most in (2, 3, 4, 6) if k <= 32 * units else (0,):
                choose(rows, most, units, 1)
                if name == "gate_up":
                    ways = [
                        lambda x, its=its, norm=norm: single_triton.project_gated(x, norm, 1e-5, its, None)
                        for its in several
                    ]
                else:
                    given = norm if name == "qkv" else None
                    ways = [
                        lambda x, its=its, given=given: single_triton.project(x, given, 1e-5, its, None)
                        for its in several
                    ]
                times[rows, units, most] = microseconds(ways, x)
        choose(*kept.values())
        best = sorted(times.items(), key=lambda its: its[1])
        floor = several[0].values.nbytes / 4.3e12 * 1e6
        print(f"{name} [{n}, {k}], {floor:.1f} µs at 4.3 TB/s; rows x units, programs: ", end="")
        print(", ".join(f"{its[0]} x {its[1]}, {its[2]}: {value:.1f}" for its, value in best), flush=True)
        found += [{"matrix": name, "tile": its, "us": value} for its, value in best]
    return found


def engine(model: Path, quantization: str, reps: int) -> dict[str, dict[str, float]]:
    """W3 and W4 in both; ms."""
    found: dict[str, dict[str, float]] = {}
    for way in (None, quantization):
        began = time.perf_counter()
        options: dict[str, Any] = {"context_length": 4096, "max_total_tokens": 220_000}
        with Engine(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            quantization=way,  # type: ignore[arg-type]
            **options,
        ) as running:
            print(f"{way or 'bf16'}: ready after {time.perf_counter() - began:.1f} s", flush=True)
            workloads = Workloads(running, model, None, reps)
            workloads.warm_up()
            found[way or "bf16"] = {figure.name: figure.value for figure in workloads.run(["W3", "W4", "W5"])}
        del running, workloads
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    before, after = found["bf16"], found[quantization]
    print(f"{'':16} {'bf16':>10} {quantization:>10} {'ratio':>6}")
    for name, value in before.items():
        bar = f"   bar {BARS[name]}" if name in BARS else ""
        print(f"{name:16} {value:10.2f} {after[name]:10.2f} {after[name] / value:6.2f}{bar}")
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", default="products,engine")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    ways: dict[str, Callable[[], Any]] = {
        "engine": lambda: engine(arguments.model, arguments.quantization, arguments.reps),
        "products": lambda: products(arguments.model),
        "tune": lambda: tune(arguments.model),
    }
    with torch.inference_mode():
        found = {name: ways[name]() for name in arguments.only.split(",")}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), **found}, indent=1))


if __name__ == "__main__":
    main()
