"""Decodes in JAX beside our CUDA path, of the same shape on one GPU: milliseconds a step, and the ratio.

    python -m benchmarks.gpu.jax MODEL [--rows 64] [--prompt 512] [--steps 128] [--reps 3]

MODEL is a folder with a config.json; weights are random. Each engine has a process of its own, one after the other,
since XLA keeps what it took of the device. A step's time is what so many more of them take, prompts being cached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sgl import Engine

BAR = 1.5  # times our CUDA path
_FIRST_STEPS = 8


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--device", help="measure this one alone, and print JSON")
    arguments = parser.parse_args()
    if arguments.device:
        print(json.dumps(_measured(arguments)), flush=True)
        return
    found = {}
    for device in ("cuda", "jax"):
        command = [sys.executable, "-m", "benchmarks.gpu.jax", *sys.argv[1:], "--device", device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[device] = json.loads(done.stdout.splitlines()[-1])
        its = found[device]
        print(f"{device:5} {its['ms']:8.2f} ms a step, warm after {its['warm']:.0f} s", flush=True)
    ratio = found["jax"]["ms"] / found["cuda"]["ms"]
    print(f"jax takes {ratio:.2f} times as long (bar: {BAR})")


def _measured(arguments: argparse.Namespace) -> dict[str, float]:
    rows, prompt, steps = arguments.rows, arguments.prompt, arguments.steps
    prompts = [[(row * 7919 + at * 31) % 1000 + 10 for at in range(prompt)] for row in range(rows)]
    options: dict[str, Any] = {"max_running_requests": rows, "context_length": prompt + steps + 64}
    began = time.perf_counter()
    with Engine(
        arguments.model, load_format="dummy", skip_tokenizer_init=True, device=arguments.device, **options
    ) as engine:

        def seconds(number: int) -> float:
            start = time.perf_counter()
            engine.generate(
                input_ids=prompts,
                sampling_params={"temperature": 0.0, "max_new_tokens": number, "ignore_eos": True},
            )
            return time.perf_counter() - start

        for number in (_FIRST_STEPS, _FIRST_STEPS + steps) * 2:  # compiles, and caches the prompts
            seconds(number)
        warm = time.perf_counter() - began
        few, many = (
            min(seconds(number) for _ in range(arguments.reps)) for number in (_FIRST_STEPS, _FIRST_STEPS + steps)
        )
    return {"ms": (many - few) / steps * 1e3, "warm": warm}


if __name__ == "__main__":
    main()
