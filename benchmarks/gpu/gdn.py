"""A layer of gated delta nets between its projections on one GPU: microseconds of decodes and prompts, beside the
machine's floor and beside the same formulas in torch.

    python -m benchmarks.gpu.gdn [MODEL] [--rows 1,16,64,256] [--prompts 1x512,1x4096,8x1024] [--kernels]

MODEL is a folder with a config.json; without, the shape of Qwen3.5-35B-A3B. The floor of decodes is what it takes to
read and write the states of all rows; that of prompts, the products within chunks and with the state. Layers follow
each other, of decodes in a CUDA graph, so that none finds its states in the cache. --kernels says what each kernel
takes.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from benchmarks.gpu.workloads import Machine
from sgl.kernels.gdn import ops
from sgl.kernels.gdn.rows import CHUNK, NORM_EPS, Rows
from sgl.runtime.model.gdn.config import HybridConfig

NUM_LAYERS = 4
REPLAYS = 11


@dataclass(frozen=True)
class Shape:
    """Of a layer."""

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4

    @property
    def channels(self) -> int:
        """Queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Layer:
    """Random weights and inputs, and the states of `num_slots` sequences."""

    def __init__(self, shape: Shape, num_tokens: int, num_slots: int) -> None:
        self.shape = shape
        values = shape.value_heads * shape.value_dim
        self.inputs = draw(num_tokens, shape.channels + values + 2 * shape.value_heads)
        self.weight = draw(shape.width, shape.channels)
        self.a_log, self.dt_bias = (draw(shape.value_heads, dtype=torch.float32) for _ in range(2))
        self.norm = draw(shape.value_dim)
        self.convolved = draw(num_slots, shape.width - 1, shape.channels)
        sizes = num_slots, shape.value_heads, shape.key_dim, shape.value_dim
        self.states = draw(*sizes, dtype=torch.float32)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """qkv, gate, beta, decay."""
        heads = self.shape.value_heads
        sizes = [self.shape.channels, heads * self.shape.value_dim, heads, heads]
        return torch.split(self.inputs, sizes, 1)

    def run(self, rows: Rows) -> torch.Tensor:
        """As a model does."""
        qkv, gate, beta, decay = self.parts()
        qkv = ops.convolve(qkv, self.weight, self.convolved, rows)
        read = ops.delta_rule(qkv, (beta, decay), self.a_log, self.dt_bias, self.states, rows)
        return ops.gated_norm(read, gate, self.norm, 1e-6)

    def run_in_torch(self, rows: Rows) -> torch.Tensor:
        """The delta rule alone, of rows of the same length, by the reference's formulas."""
        shape = self.shape
        qkv, _, beta, decay = self.parts()
        width, shared = shape.key_heads * shape.key_dim, shape.value_heads // shape.key_heads
        query, key, value = torch.split(qkv.float(), [width, width, qkv.shape[1] - 2 * width], 1)
        query, key = (
            functional.normalize(its.view(len(qkv), -1, shape.key_dim), dim=-1, eps=NORM_EPS).repeat_interleave(
                shared, 1
            )
            for its in (query, key)
        )
        value = value.view(len(qkv), -1, shape.value_dim)
        step, g = ops.gates(beta, decay, self.a_log, self.dt_bias)
        if not rows.lens:
            state, read = ops.recurrent(self.states[rows.slots], query, key, value, step, g)
            self.states[rows.slots] = state
            return read
        for row, length in enumerate(rows.lens):
            its = slice(row * length, (row + 1) * length)
            parts = query[its], key[its], value[its], step[its], g[its]
            self.states[row], read = ops.chunked(self.states[row], *parts)
        return read


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--prompts", default="1x512,1x4096,8x1024")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    shape = shape_of(arguments.model)
    machine = Machine.measure()
    print(f"{machine.bandwidth / 1e12:.2f} TB/s copied, {machine.matrix_rate / 1e12:.0f} TFLOP/s bf16")
    print(f"{'rows':>5} {'tokens':>7} {'µs':>9} {'floor':>9} {'of floor':>9} {'torch':>9} {'ratio':>6}")
    lengths = [(int(rows), 1) for rows in arguments.rows.split(",")]
    lengths += [(int(its.partition("x")[0]), int(its.partition("x")[2])) for its in arguments.prompts.split(",")]
    for num_rows, length in lengths:
        layers = [Layer(shape, num_rows * length, num_rows) for _ in range(NUM_LAYERS)]
        rows = rows_of(num_rows, length)
        ours = timed([partial(layer.run, rows) for layer in layers], in_graph=length == 1)
        theirs = timed([partial(layer.run_in_torch, rows) for layer in layers], in_graph=False)
        floor = floor_of(shape, num_rows, length, machine)
        print(
            f"{num_rows:5} {length:7} {ours:9.1f} {floor:9.1f} {floor / ours:9.0%} {theirs:9.1f} {theirs / ours:6.2f}",
            flush=True,
        )
        if arguments.kernels:
            for name, took in kernels(layers, rows):
                print(f"{'':13} {took:9.1f} {name}")


def shape_of(model: Path | None) -> Shape:
    """Of a checkpoint's layers."""
    if model is None:
        return Shape()
    its = HybridConfig.from_pretrained(model)
    return Shape(its.key_heads, its.value_heads, its.key_dim, its.value_dim, its.conv_width)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers."""
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def rows_of(num_rows: int, length: int) -> Rows:
    """So many rows of the same number of tokens."""
    slots, lens = np.arange(num_rows, dtype=np.int32), np.full(num_rows, length, np.int32)
    slots_there, starts, chunks, firsts = (torch.from_numpy(its).cuda() for its in Rows.arrays(slots, lens))
    num_single = Rows.count_single(lens)
    return Rows(slots_there, num_single, starts, chunks, firsts, tuple(lens[num_single:].tolist()))


def floor_of(shape: Shape, num_rows: int, length: int, machine: Machine) -> float:
    """Microseconds that a layer takes at least."""
    state = shape.value_heads * shape.key_dim * shape.value_dim
    num_bytes = num_rows * (
        2 * 4 * state + 2 * length * (2 * shape.channels + 3 * shape.value_heads * shape.value_dim)
    )
    # with the state: read, predicted and written; within a chunk: keys and queries with keys, and values
    both = shape.key_dim + shape.value_dim
    flops = 2 * num_rows * length * (3 * state + shape.value_heads * CHUNK * (2 * shape.key_dim + 2 * both) // 2)
    return 1e6 * max(num_bytes / machine.bandwidth, flops / machine.matrix_rate * (length > 1))


def timed(work: list[Callable[[], torch.Tensor]], *, in_graph: bool) -> float:
    """Microseconds a layer, the median of some runs."""

    def run() -> None:
        for each in work:
            each()

    run()
    torch.cuda.synchronize()
    replay: Callable[[], None] = run
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for before, after in events:
        before.record()
        replay()
        after.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(before.elapsed_time(after) for before, after in events) / len(work)


def kernels(layers: list[Layer], rows: Rows) -> Iterator[tuple[str, float]]:
    """Kernels by name, and the microseconds of each in a layer."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for layer in layers:
            layer.run(rows)
        torch.cuda.synchronize()
    total: Counter[str] = Counter()
    for event in profiled.events():
        total[event.name] += int(1e3 * event.device_time_total)
    for name, took in total.most_common(8):
        yield name[:60], took / 1e3 / len(layers)


if __name__ == "__main__":
    main()
