"""How many tokens of KV some memory holds, where layers with a window have a pool of pages of their own.

    python -m benchmarks.kv_pools [--gib 100] [--layers 34] [--every 6] [--kv-heads 4] [--head-dim 256] [--window 1024]
        [--context 131072] [--rows 512]

The defaults are the shape of Gemma 3 4B: each sixth layer sees everything. Prints the tokens of one pool for all
layers, then those of full and of windowed pages, and the ratio. Nothing is allocated; the numbers are exact.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from sgl.runtime.config import EngineConfig
from sgl.runtime.memory_plan import NO_DRAFTER, PoolSizes
from sgl.runtime.model.kv_cache import KVCache

PAGE_SIZE, STEP_TOKENS = 16, 8448
DEFAULTS = {
    "gib": 100,
    "layers": 34,
    "every": 6,
    "kv_heads": 4,
    "head_dim": 256,
    "window": 1024,
    "context": 131_072,
    "rows": 512,
}


class Shape:
    """What the plan asks of a model."""

    dtype = torch.bfloat16
    latent_dim = 0

    def __init__(self, its: argparse.Namespace) -> None:
        self.config, self.max_positions = self, its.context
        self.num_layers, self.num_kv_heads, self.head_dim = its.layers, its.kv_heads, its.head_dim
        self.windows = tuple(its.window if (layer + 1) % its.every else None for layer in range(its.layers))


def sizes(its: argparse.Namespace) -> tuple[int, int, int]:
    """Tokens of one pool, and of full and windowed pages."""
    shape: Any = Shape(its)
    available, most = its.gib * 2**30, its.rows * -(-its.context // PAGE_SIZE)
    pools = PoolSizes(EngineConfig(), shape, shape, PAGE_SIZE, its.rows, STEP_TOKENS, NO_DRAFTER)
    one = min(available // (KVCache.bytes_per_token(shape, shape.dtype) * PAGE_SIZE), most)
    num_pages = pools.num_pages(available, most)
    return one * PAGE_SIZE, num_pages * PAGE_SIZE, pools.num_windowed(num_pages, available) * PAGE_SIZE


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    one, full, windowed = sizes(parser.parse_args())
    print(f"one pool {one:,} tokens; two pools {full:,} full and {windowed:,} windowed: {full / one:.2f} times")


if __name__ == "__main__":
    main()
