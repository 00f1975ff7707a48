"""A sum over ranks with the addition and norm behind it: NCCL and a norm, FlashInfer's kernel, ours that reads the
others' memory.

    python -m benchmarks.gpu.sums [--size 2] [--hidden 4096] [--tokens 256,512,1024,2048,4096,8192]

Medians over runs of 20 sums in a row, in microseconds, and the bandwidth of ours: bytes that a rank receives in a
second. Nothing uses NVLink multicast.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial

import torch
from torch import multiprocessing

from benchmarks.gpu import peers
from sgl.kernels import fused_reduction
from sgl.kernels.collectives import Collectives, Folder

SUMS, RUNS = 20, 7


def median_us(run: Callable[[], object], meet: Callable[[], object]) -> float:
    """Of one of many in a row."""
    took = []
    for _ in range(RUNS + 2):
        meet()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(SUMS):
            run()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) * 1000 / SUMS)
    return statistics.median(took[2:])


def sum_and_norm(ranks: Collectives, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """As a model does, whose product is where the ranks want it."""
    room = ranks.room(len(x))
    ranks.add_rms_norm(x if room is None else room, residual, weight, 1e-5)


def rank_main(rank: int, given: argparse.Namespace, folder: str) -> None:
    """Measure; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    meeting, dtype, hidden = Folder(folder), torch.bfloat16, given.hidden
    most = max(given.tokens)
    few_bytes = fused_reduction._MOST_BYTES
    nccl = Collectives(meeting, "nccl", rank, given.size, device)
    fused_reduction._MOST_BYTES = max(few_bytes, given.fused_tokens * hidden * 2)
    fused = Collectives(meeting, "fused", rank, given.size, device)
    fused.fuse(hidden, dtype, 0)
    fused_reduction._MOST_BYTES = 0
    ours = Collectives(meeting, "ours", rank, given.size, device)
    ours._fuse_many(hidden, dtype, most)
    if not rank:
        print("| tokens | NCCL and norm, us | FlashInfer, us | ours, us | to the better | of ours, GB/s |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
    weight = torch.ones(hidden, dtype=dtype, device=device)
    zero = torch.zeros(1, device=device)
    for tokens in given.tokens:
        residual = torch.zeros(tokens, hidden, dtype=dtype, device=device)
        x = torch.randn(tokens, hidden, device=device).to(dtype) / 64
        took = []
        for each in (nccl, fused, ours):
            if each is fused and tokens > each.fused_tokens:
                took.append(float("inf"))
                continue

            took.append(median_us(partial(sum_and_norm, each, x, residual, weight), lambda: nccl.sum(zero)))
        if not rank:
            moved = 2 * (given.size - 1) / given.size * x.nbytes
            cells = [*(f"{value:.1f}" for value in took), f"{took[2] / min(took[:2]):.2f}"]
            print(f"| {' | '.join([str(tokens), *cells, f'{moved / took[2] / 1000:.0f}'])} |", flush=True)
    for each in (nccl, fused, ours):
        each.close()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--fused-tokens", type=int, default=8192, help="up to which FlashInfer's kernel is tried")
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[256, 512, 1024, 2048, 4096, 8192],
    )
    given = parser.parse_args()
    os.environ.update(peers.WITHOUT_MULTICAST)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (given, folder), nprocs=given.size)


if __name__ == "__main__":
    main()
