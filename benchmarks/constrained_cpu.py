"""What constraints cost on a CPU: 32 JSON documents, each under a six-field schema, beside the same lengths free.

    python -m benchmarks.constrained_cpu [CHECKPOINT] [--requests 32] [--repetitions 10]

The embedded model by default. Jump-forward is off, so that both sides sample every token; the documents end by
themselves, and the free requests then generate just as many tokens each. `warm`: the schema was seen before; the bar
is 1.05. `cold`: a schema that nobody has seen, its compilation included. `jumping`: as warm, with jump-forward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

from sgl import Engine


def schema(number: int) -> str:
    """Six fields, named for the number."""
    properties: dict[str, Any] = {
        f"name_{number}": {"type": "string", "minLength": 20, "maxLength": 60},
        f"note_{number}": {"type": "string", "minLength": 20, "maxLength": 80},
        f"kind_{number}": {"enum": ["red", "green", "blue"]},
        f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 9999},
        f"done_{number}": {"type": "boolean"},
        f"tags_{number}": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    }
    closed = {"required": list(properties), "additionalProperties": False}
    return json.dumps({"type": "object", "properties": properties, **closed})


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="embedded")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    prompts = [f"A record of number {i} as JSON: " for i in range(args.requests)]
    base = {"temperature": 0.8, "seed": 1, "max_new_tokens": 400}

    def run(engine: Engine, each: list[dict[str, Any]]) -> tuple[float, list[int]]:
        begin = time.perf_counter()
        results = engine.generate(prompt=prompts, sampling_params=each)
        return time.perf_counter() - begin, [len(result["output_ids"]) for result in results]

    def without(lengths: list[int]) -> list[dict[str, Any]]:
        return [{**base, "max_new_tokens": length, "ignore_eos": True} for length in lengths]

    known: dict[str, list[int]] = {}
    ratios: dict[str, list[float]] = {"warm": [], "cold": [], "jumping": []}
    fresh = itertools.count(1)
    for names, no_jumps in ((("warm", "cold"), True), (("jumping",), False)):
        # One after the other: OpenMP's workers of two engines would make those of both sleep.
        with Engine(args.checkpoint, disable_jump_forward=no_jumps, speculative_algorithm="off") as engine:
            for repetition, name in itertools.product(range(args.repetitions + 1), names):
                each = [{**base, "json_schema": schema(next(fresh) if name == "cold" else 0)}] * len(prompts)
                if name == "cold" or repetition % 2 == 0:
                    constrained, known[name] = run(engine, each)
                    free, _ = run(engine, without(known[name]))
                else:  # which runs first makes one in a hundred
                    free, _ = run(engine, without(known[name]))
                    constrained, _ = run(engine, each)
                if repetition:
                    ratios[name].append(constrained / free)
    for name, bar in (("warm", "bar 1.05x"), ("cold", "no bar"), ("jumping", "no bar")):
        print(f"{args.requests} documents, {name}: {statistics.median(ratios[name]):.3f}x the free time ({bar})")


if __name__ == "__main__":
    main()
