"""A layer's mixture of experts on one GPU: microseconds by number of tokens, beside the machine's floor and beside
torch's grouped products.

    python -m benchmarks.gpu.moe [MODEL] [--bits 4] [--tokens 1,8,64] [--kernels] [--sweep] [--seconds 90]

MODEL is a folder with a config.json; without, the shape of Qwen3-30B-A3B, and `gpt-oss` that of gpt-oss-20b. --bits: 4
or 8, as quantised checkpoints have them; torch's products beside them stay in bfloat16. The floor is what it takes to
read the experts that the tokens chose, or to compute their products, whichever is longer. Layers follow each other in a
CUDA graph, so that none finds its weights in the cache. --kernels says what each kernel takes when none overlaps with
another, and what it reads; --sweep tries other tiles for 16 bits than those that sgl.kernels.moe chooses, for so many
seconds in all, and prints the best ones as that has them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.workloads import Machine
from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.norm import add_rms_norm, rms_norm
from sgl.kernels.moe import grouped_triton, packed_triton, single_triton
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.grouped_triton import Plan, Tiles
from sgl.kernels.moe.mixture import mixture, route
from sgl.kernels.moe.packed import PackedExperts
from sgl.kernels.moe.single_triton import Cut, Shape
from sgl.runtime.model.config import ModelConfig

TOKENS = "1,2,8,64,256,2048,8192"
GPT_OSS = "gpt-oss"
EPS = 1e-6
NUM_LAYERS = 4
REPLAYS = 11
Work = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, Experts], torch.Tensor | None]
"""A layer, of the residual, what the one before left to be added to it, and a norm; returns what it leaves."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=16)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=90.0)
    arguments = parser.parse_args()
    before = time.monotonic()
    layers = made(arguments.model)
    quantized = layers if arguments.bits == 16 else [packed(layer, arguments.bits) for layer in layers]
    machine = Machine.measure()
    print(f"{machine.bandwidth / 1e12:.2f} TB/s copied, {machine.matrix_rate / 1e12:.0f} TFLOP/s bf16")
    print(f"{'tokens':>7} {'experts':>8} {'µs':>9} {'floor':>9} {'of floor':>9} {'grouped_mm':>11} {'ratio':>6}")
    tokens = list(map(int, arguments.tokens.split(",")))
    for index, num_tokens in enumerate(tokens):
        x = torch.randn(num_tokens, layers[0].router.shape[1], dtype=torch.bfloat16, device="cuda")
        used, floor = floor_of(x, quantized, machine)
        work = single() if num_tokens == 1 else several()
        ours = timed(x, quantized, work)
        theirs = timed(x, layers, grouped)
        print(
            f"{num_tokens:7} {used:8.0f} {ours:9.1f} {floor:9.1f} {floor / ours:9.0%} {theirs:11.1f} "
            f"{theirs / ours:6.2f}",
            flush=True,
        )
        if arguments.kernels:
            for name, took in kernels(x, quantized, work):
                read = bytes_read(name, used, quantized[0])
                of_floor = f"{read / machine.bandwidth / took * 1e6:9.0%} of {read / 1e6:.1f} MB" if read else ""
                print(f"{'':16} {took:9.1f} {name:20} {of_floor}")
        if arguments.sweep and quantized is layers:
            left = arguments.seconds - (time.monotonic() - before)
            sweep(x, layers, time.monotonic() + left / (len(tokens) - index))


def made(model: Path | None) -> list[Experts]:
    """Layers of random experts."""
    num_experts, hidden, size, top_k, normalises = 128, 2048, 768, 8, True
    is_gpt_oss = model is not None and str(model) == GPT_OSS
    if is_gpt_oss:
        num_experts, hidden, size, top_k = 32, 2880, 2880, 4
    elif model is not None:
        config = ModelConfig.from_pretrained(model)
        if config.experts is None:
            raise SystemExit(f"{model} has no experts")
        experts, hidden = config.experts, config.hidden_size
        num_experts, size, top_k, normalises = (
            experts.num_experts,
            experts.intermediate_size,
            experts.top_k,
            experts.normalises,
        )

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, shape[-1] ** -0.5)

    def layer() -> Experts:
        experts = Experts(
            draw(num_experts, hidden),
            draw(num_experts, 2 * size, hidden),
            draw(num_experts, hidden, size),
            top_k,
            normalises,
        )
        if not is_gpt_oss:
            return experts
        biases = {"router_bias": (), "gate_up_bias": (2 * size,), "down_bias": (hidden,)}
        drawn = {name: draw(num_experts, *shape) for name, shape in biases.items()}
        return replace(experts, clamped=(1.702, 7.0), **drawn)

    return [layer() for _ in range(NUM_LAYERS)]


def packed(layer: Experts, bits: int) -> Experts:
    """In as many bits: gpt-oss's in MXFP4, others in groups or blocks of 128."""

    def random(matrices: torch.Tensor) -> PackedExperts:
        lead, k = matrices.shape[:2], matrices.shape[2]
        if layer.clamped is not None:
            exponents = torch.full((*lead, k // 32), 118, dtype=torch.uint8, device="cuda")
            blocks = torch.randint(0, 256, (*lead, k // 32, 16), dtype=torch.uint8, device="cuda")
            of_blocks = PackedExperts.of_e2m1(blocks, exponents)
            assert of_blocks is not None
            return of_blocks
        if bits == 4:
            return PackedExperts.rounded(matrices)
        scales = torch.full((*lead, k // 128), 1.0, device="cuda")
        return PackedExperts(matrices.to(torch.float8_e4m3fn), scales)

    gate_up, down = layer.unpacked
    return replace(layer, gate_up=random(gate_up), down=random(down))


def floor_of(x: torch.Tensor, layers: list[Experts], machine: Machine) -> tuple[float, float]:
    """Experts that are used in a layer, and microseconds that it takes at least."""
    used = 0.0
    for experts in layers:
        logits = functional.linear(normed(x), experts.router).float()
        used += len(route(logits, experts)[1].unique()) / len(layers)
    matrices = layers[0].gate_up, layers[0].down
    flops = 2 * len(x) * layers[0].top_k * sum(its.numel() for its in matrices) / len(matrices[0])
    read = used * sum(its.nbytes for its in matrices) / len(matrices[0])
    return used, 1e6 * max(read / machine.bandwidth, flops / machine.matrix_rate)


def normed(x: torch.Tensor) -> torch.Tensor:
    """By a norm of ones."""
    return rms_norm(x, torch.ones_like(x[0]), EPS)


def single(cut: Cut | None = None) -> Work:
    """One token, with the norm before and the sum after."""

    def work(residual: torch.Tensor, rest: torch.Tensor | None, norm: torch.Tensor, experts: Experts) -> None:
        single_triton.mixture_add_(residual, norm, EPS, experts, None, residual, cut)

    return work


def several(plan: Plan | None = None) -> Work:
    """Several tokens, of which the next norm adds the parts."""

    def work(
        residual: torch.Tensor, rest: torch.Tensor | None, norm: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        x = add_rms_norm(rest, residual, norm, EPS)
        return mixture(x, experts) if plan is None else grouped_triton.mixture(x, experts, None, plan)

    return work


def grouped(
    residual: torch.Tensor, rest: torch.Tensor | None, norm: torch.Tensor, experts: Experts
) -> torch.Tensor:
    """The same by torch's grouped products, in shapes that follow from the number of tokens."""
    x = add_rms_norm(rest, residual, norm, EPS)
    weights, ids = route(functional.linear(x, experts.router).float(), experts)
    flat = ids.flatten()
    order = flat.argsort()
    index = torch.arange(len(experts.down), device=x.device)
    ends = torch.searchsorted(flat[order], index, right=True).to(torch.int32)
    tokens = order // experts.top_k
    gate_up, down = experts.unpacked
    gated = silu_and_mul(functional.grouped_mm(x[tokens], gate_up.transpose(1, 2), offs=ends))
    products = functional.grouped_mm(gated, down.transpose(1, 2), offs=ends)
    placed = torch.empty_like(products)
    placed[order] = products * weights.flatten()[order, None].to(x.dtype)
    return placed.view(len(x), experts.top_k, -1).sum(1)


def captured(x: torch.Tensor, layers: list[Experts], work: Work) -> torch.cuda.CUDAGraph:
    """All layers, one after the other, as a decoder runs them."""
    norm = torch.ones_like(x[0])

    def run() -> None:
        residual, rest = x.clone(), None
        for experts in layers:
            rest = work(residual, rest, norm, experts)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def timed(x: torch.Tensor, layers: list[Experts], work: Work) -> float:
    """Microseconds a layer, the median of some replays."""
    graph = captured(x, layers, work)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for _ in range(3):
        graph.replay()
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    took = statistics.median(before.elapsed_time(after) for before, after in events)
    return 1e3 * took / len(layers)


def kernels(x: torch.Tensor, layers: list[Experts], work: Work) -> Iterator[tuple[str, float]]:
    """Kernels by name, and the microseconds of each in a layer, each begun when the one before has ended."""
    alone = {"overlap": lambda device: {"overlaps": False}}
    modules = single_triton, grouped_triton, packed_triton
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.multiple(module, **alone))
        graph = captured(x, layers, work)
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    total: Counter[str] = Counter()
    for event in profiled.events():
        total[event.name] += int(1e3 * event.device_time_total)
    for name, took in total.most_common(8):
        yield name[:60], took / 1e3 / REPLAYS / len(layers)


def bytes_read(kernel: str, used: float, layer: Experts) -> float:
    """Of matrices, by a kernel for so many experts."""
    matrices = {"_gated": (layer.gate_up,), "_gate_up": (layer.gate_up,), "_down": (layer.down,)}
    matrices["_product"] = (layer.gate_up, layer.down)
    if kernel in matrices:
        return used * sum(its.nbytes for its in matrices[kernel]) / len(layer.down)
    return layer.router.nbytes if kernel in ("_choose", "_router") else 0.0


class Candidate(NamedTuple):
    """Other tiles of one kernel, beside those that are chosen for the others."""

    kernel: str
    tiles: Shape | Tiles
    work: Work


def plans(num_tokens: int, layer: Experts) -> Iterator[Candidate]:
    """Of several tokens."""
    pairs = num_tokens * layer.top_k / len(layer.down)
    chosen = grouped_triton.choose(pairs, 2)
    heights = [size for size in (16, 32, 64, 128) if min(128, pairs) / 2 <= size <= max(16, 4 * pairs)]
    few = ((64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 4), (32, 128, 4, 4), (32, 256, 4, 3), (64, 256, 8, 3))
    many = ((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 5))
    for (rows, columns, warps, stages), tokens in product(few if pairs < 32 else many, heights):
        tiles = Tiles(tokens, rows, columns, warps, stages)
        wide = tiles._replace(rows=2 * rows)
        yield Candidate("gate_up", tiles, several(Plan(tiles, chosen.down)))
        yield Candidate("down", wide, several(Plan(chosen.gate_up, wide)))


def cuts(layer: Experts) -> Iterator[Candidate]:
    """Of a single token: from 16 to 128 numbers in a thread at a time."""
    chosen, slots = single_triton.cut_of(layer), layer.num_used
    (hidden, size), fewest = layer.down.shape[1:], {"gate_up": 32}
    most = {"router": hidden, "gate_up": hidden, "down": size}
    for rows, warps, block in product((1, 2, 4, 8), (1, 2, 4, 8), (2048, 1024, 512, 256)):
        for kernel, times in (("gate_up", 2), ("down", slots), ("router", 1)):
            if fewest.get(kernel, 16) <= rows * times * block // (32 * warps) <= 128 and block < 2 * most[kernel]:
                shape = Shape(rows, block, warps)
                if kernel != "router" or block == chosen.router.block:
                    yield Candidate(kernel, shape, single(chosen._replace(**{kernel: shape})))


def sweep(x: torch.Tensor, layers: list[Experts], deadline: float) -> None:
    """Print the fastest tiles that are found before the deadline, by time.monotonic, and then the best ones together.
    Those that the GPU has no room for are left out."""
    single_token = len(x) == 1
    candidates = list(cuts(layers[0]) if single_token else plans(len(x), layers[0]))

    def compiles(candidate: Candidate) -> bool:
        try:
            candidate.work(x.clone(), None, torch.ones_like(x[0]), layers[0])
        except OutOfResources:
            return False
        return True

    found: list[tuple[float, Candidate]] = []
    with ThreadPoolExecutor(8) as pool:
        for first in range(0, len(candidates), 8):
            some = candidates[first : first + 8]
            able = list(pool.map(compiles, some))
            torch.cuda.synchronize()
            found += [(timed(x, layers, its.work), its) for its, is_able in zip(some, able, strict=True) if is_able]
            if time.monotonic() > deadline:
                print(f"{'':16} {len(candidates) - first - len(some)} of {len(candidates)} not tried")
                break
    found.sort(key=lambda its: its[0])
    best = single_triton.cut_of(layers[0]) if single_token else grouped_triton.choose(_pairs(x, layers[0]), 2)
    for kernel in best._fields:
        its = [(took, candidate.tiles) for took, candidate in found if candidate.kernel == kernel]
        for took, tiles in its[:5]:
            print(f"{'':16} {took:9.1f} {kernel} {tuple(tiles)}", flush=True)
        if its:
            best = best._replace(**{kernel: its[0][1]})
    work = single(best) if isinstance(best, Cut) else several(best)
    tiles = ", ".join(f"{type(each).__name__}{tuple(each)}" for each in best)
    print(f"{'':16} {timed(x, layers, work):9.1f} {type(best).__name__}({tiles})", flush=True)


def _pairs(x: torch.Tensor, layer: Experts) -> float:
    """Of a token and its expert, for each expert."""
    return len(x) * layer.top_k / len(layer.down)


if __name__ == "__main__":
    main()
