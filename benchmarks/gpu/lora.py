"""LoRA adapters on one GPU: decode steps of 64 rows with 0, 1, 4 and 16 adapters of rank 16, and their ratio to the
model alone.

    python -m benchmarks.gpu.lora CONFIG [--targets q_proj,v_proj] [--reps 3] [--rows 64] [--quick]

CONFIG is a folder with a config.json; weights and adapters are random. Steps of all kinds alternate in one engine, and
medians are told. First an engine without adapters runs, to compare the model alone in both. Unless --quick, the
microseconds follow of each kernel of a layer by its parameters.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from sgl import Engine
from sgl.kernels.lora.rows import AdapterRows, block_of, most_tiles, tiled
from sgl.runtime.lora_options import LORA_TARGETS
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.lora import parts_of
from sgl.runtime.model.lora_products import decoder_modules

_PROMPT, _OUTPUT = 512, 256
_RANK = 16
_ALL = ",".join(LORA_TARGETS)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path)
    parser.add_argument("--targets", default=_ALL, help="names of modules, experts among them, separated by commas")
    parser.add_argument("--adapters", default="1,4,16")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", help="one of what is run, in a process of its own that has the whole GPU")
    parser.add_argument("--alone", type=float, default=0.0, help="milliseconds of the model alone, for that")
    arguments = parser.parse_args()
    if arguments.part is not None:
        _run(arguments)
        return
    given = [sys.executable, "-m", "benchmarks.gpu.lora", *sys.argv[1:], "--part"]
    alone = subprocess.run([*given, "alone"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    targets = arguments.targets.replace(",", ", ")
    print(f"{arguments.rows} rows, adapters of rank {_RANK} for {targets}")
    print(f"{'the model, without LoRA enabled':34} {float(alone):7.3f} ms", flush=True)
    for part in ("adapters", "kernels")[: 1 if arguments.quick else 2]:
        subprocess.run([*given, part, "--alone", alone], check=False)


def _run(arguments: argparse.Namespace) -> None:
    """A part: the model alone; with adapters; their kernels."""
    config = ModelConfig.from_pretrained(arguments.model)
    if arguments.part == "alone":
        with Engine(arguments.model, **_options(arguments)) as engine:
            print(_steps(engine, arguments, [0])[0])
    elif arguments.part == "kernels":
        _kernels(config, arguments.rows)
    else:
        with tempfile.TemporaryDirectory() as folder:
            adapter = _adapter(Path(folder), config, arguments.targets.split(","))
            _compare(arguments, adapter, arguments.alone)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "context_length": 2048,
        "cuda_graph_max_bs": arguments.rows,
    }


def _compare(arguments: argparse.Namespace, adapter: str, alone: float) -> None:
    numbers = [int(each) for each in arguments.adapters.split(",")]
    began, most = time.perf_counter(), max(numbers)
    paths = {f"adapter{i}": adapter for i in range(most)}
    with Engine(arguments.model, lora_paths=paths, max_loras_per_batch=most, **_options(arguments)) as engine:
        print(f"ready with {most} adapters after {time.perf_counter() - began:.1f} s", flush=True)
        steps = _steps(engine, arguments, [0, *numbers])
    print(f"{'the model, with LoRA enabled':34} {steps[0]:7.3f} ms, {alone / steps[0]:.3f}x the throughput")
    for number in numbers:
        text = f"{f'{number} adapters':34} {steps[number]:7.3f} ms, {steps[0] / steps[number]:.3f}x the throughput"
        print(text, flush=True)


def _steps(engine: Engine, arguments: argparse.Namespace, numbers: list[int]) -> dict[int, float]:
    """Milliseconds of a decode step by number of adapters, 0: none."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(_PROMPT)] for _ in range(arguments.rows)]
    found: dict[int, list[float]] = {number: [] for number in numbers}
    for rep in range(arguments.reps + 1):  # the first one warms up
        for number in numbers:
            names = [f"adapter{row % number}" if number else None for row in range(arguments.rows)]
            seconds = []
            for output in (1, _OUTPUT):
                engine.flush_cache()
                began = time.perf_counter()
                params = {"max_new_tokens": output, "temperature": 0.0, "ignore_eos": True}
                engine.generate(input_ids=prompts, sampling_params=params, lora_path=names if number else None)
                seconds.append(time.perf_counter() - began)
            if rep:
                found[number].append(1e3 * (seconds[1] - seconds[0]) / (_OUTPUT - 1))
    return {number: statistics.median(each) for number, each in found.items()}


def _adapter(folder: Path, config: ModelConfig, targets: list[str]) -> str:
    modules = {name: its for name, its in decoder_modules(config).shapes.items() if {*parts_of(name)} & {*targets}}
    tensors = {}
    for module, (wide, deep) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = (torch.randn(_RANK, deep) * 1e-3).bfloat16()
        tensors[f"base_model.model.{module}.lora_B.weight"] = (torch.randn(wide, _RANK) * 1e-3).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({name.rpartition(".")[2] for name in modules})
    fields = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return str(folder)


def _kernels(config: ModelConfig, num_rows: int) -> None:
    """Each kernel of a layer alone, as many as fit into a graph of 64 launches, over slots that no cache holds."""
    from sgl.kernels.lora import triton as kernels

    num_slots = 16
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {
        "qkv": (hidden, (heads, kv_heads, kv_heads)),
        "output": (heads, (hidden,)),
        "gate_up": (hidden, (intermediate, intermediate)),
        "down": (intermediate, (hidden,)),
    }
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    for number in (1, 4, 16):
        block = block_of(num_rows)
        slots = np.arange(num_rows, dtype=np.int32) % number
        order, tiles = (
            torch.from_numpy(its).cuda() for its in tiled(slots, block, most_tiles(num_rows, 16, block))
        )
        rows = AdapterRows(order, tiles, block)
        for name, (depth, parts) in shapes.items():
            copies = max(2, (128 << 20) // (32 * num_slots * (len(parts) * depth + sum(parts))))
            a = [torch.randn(num_slots, len(parts) * _RANK, depth, **options) for _ in range(copies)]
            b = [torch.randn(num_slots, sum(parts), _RANK, **options) for _ in range(copies)]
            x, out = torch.randn(num_rows, depth, **options), torch.zeros(num_rows, sum(parts), **options)
            for width, stages in product((128, 256), (2, 4)):
                kernels._WIDTH, kernels._SHRINK_STAGES = width, stages
                took = _microseconds([partial(kernels.shrink, x, each, rows, len(parts)) for each in a])
                print(f"{number:2} shrink {name:8} width {width} stages {stages}: {took:6.2f} us", flush=True)
            kernels._WIDTH, kernels._SHRINK_STAGES = 128, 4
            shrunk = kernels.shrink(x, a[0], rows, len(parts))
            for columns, warps in product((64, 128, 256), (2, 4)):
                kernels._NARROW = kernels._WIDE = columns
                kernels._EXPAND = {"num_warps": warps}
                took = _microseconds([partial(kernels.expand_, shrunk, each, out, rows, parts) for each in b])
                text = f"{number:2} expand {name:8} columns {columns} warps {warps}: {took:6.2f} us"
                if name == "gate_up":
                    gated = [partial(kernels.expand_silu_and_mul, shrunk, each, out, rows) for each in b]
                    text += f", with the gate {_microseconds(gated):6.2f} us"
                print(text, flush=True)
            kernels._NARROW, kernels._WIDE, kernels._EXPAND = 64, 128, {"num_warps": 4}


def _microseconds(launches: list[Callable[[], object]], count: int = 64) -> float:
    """Of one of these launches, within a graph of `count`."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launches[i % len(launches)]()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    return statistics.median(times)


if __name__ == "__main__":
    main()
