"""What constraints cost a step on a CPU: 32 requests, each output constrained, beside the same lengths unconstrained.

    python benchmarks/constrained_cpu.py [CHECKPOINT] [--requests 32] [--output 64] [--repetitions 7]

Without a checkpoint, a random model of the embedded model's shape and a tokenizer of 415 tokens. Jump-forward is
off, so that both sides sample every token. `warm`: all masks were computed by an earlier repetition; the bar is 1.05.
`cold`: another pattern each time, so nothing is known of it, its compilation included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sgl import Engine
from tests.tiny_models import byte_tokenizer, tiny_checkpoint

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
FIELDS = '"[A-Za-z ]{{{low},100000}}"'


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    path = Path(args.checkpoint or tiny_checkpoint(Path(tempfile.mkdtemp()), **SHAPE))
    if not args.checkpoint:
        byte_tokenizer(415).save_pretrained(path)
    with Engine(path, disable_jump_forward=True) as engine:
        fresh = itertools.count(args.output * 6)

        def seconds(**constraint: str) -> float:
            params = {
                "max_new_tokens": args.output,
                "ignore_eos": True,
                "temperature": 0.8,
                "seed": 1,
                **constraint,
            }
            begin = time.perf_counter()
            results = engine.generate(
                prompt=[f"record {i}: " for i in range(args.requests)], sampling_params=params
            )
            elapsed = time.perf_counter() - begin
            assert all(len(result["output_ids"]) == args.output for result in results)
            return elapsed / args.output * 1e3

        times: dict[str, list[float]] = {"free": [], "warm": [], "cold": []}
        warm = FIELDS.format(low=args.output * 5)
        for repetition in range(args.repetitions + 1):
            for name, constraint in (
                ("free", {}),
                ("warm", {"regex": warm}),
                ("cold", {"regex": FIELDS.format(low=next(fresh))}),
            ):
                elapsed = seconds(**constraint)
                if repetition:
                    times[name].append(elapsed)
    free = statistics.median(times["free"])
    print(f"free: {free:.2f} ms a step of {args.requests} rows")
    for name, bar in (("warm", "bar 1.05x"), ("cold", "no bar")):
        median = statistics.median(times[name])
        print(f"constrained, {name}: {median:.2f} ms a step, {median / free:.3f}x ({bar})")


if __name__ == "__main__":
    main()
