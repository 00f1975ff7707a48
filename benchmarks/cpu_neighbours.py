"""What an engine on a CPU still does where other processes want the same cores.

    python benchmarks/cpu_neighbours.py [CHECKPOINT] [--seconds 15]

Batches of 32 prompts of 120 tokens with 24 tokens out, alone, beside a process that keeps one core busy, and two
engines at once. Prints batches a second, and how much that is of a fair share of what one engine does alone: of half a
core less beside the busy process, of all of it for the two engines together.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time

from sgl.machine_limits import num_processors
from sgl.runtime.config import EMBEDDED
from sgl.runtime.engine import Engine
from sgl.runtime.model.config import ModelConfig

BUSY = "while True: pass"


def serve(checkpoint: str, seconds: float) -> None:
    """Run batches for so long, after a first one; print how many a second."""
    rng = random.Random(0)
    vocab_size = ModelConfig.from_pretrained(checkpoint).vocab_size
    params = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0}
    with Engine(checkpoint, device="cpu", skip_tokenizer_init=True, speculative_algorithm="off") as engine:
        began, done = 0.0, 0
        while not began or time.perf_counter() - began < seconds:
            prompts = [[rng.randrange(3, vocab_size) for _ in range(120)] for _ in range(32)]
            engine.generate(input_ids=prompts, sampling_params=params)
            done, began = (done + 1, began) if began else (0, time.perf_counter())
        print(done / (time.perf_counter() - began))


def rates(checkpoint: str, seconds: float, engines: int) -> list[float]:
    """Of so many engines at once, each a process."""
    command = [sys.executable, __file__, checkpoint, "--serve", "--seconds", str(seconds)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(engines)]
    printed = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("an engine failed; what it said stands above")
    return [float(text) for text in printed]


def main() -> None:
    """Print a line for each situation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(EMBEDDED))
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.checkpoint, args.seconds)
        return
    [alone] = rates(args.checkpoint, args.seconds, 1)
    cores = num_processors()
    print(f"alone: {alone:.2f} batches/s on {cores} cores", flush=True)
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        [beside] = rates(args.checkpoint, args.seconds, 1)
    finally:
        busy.kill()
    print(
        f"beside a busy process: {beside:.2f} batches/s, {beside / (alone * (cores - 0.5) / cores):.0%} of its share"
    )
    both = sum(rates(args.checkpoint, args.seconds, 2))
    print(f"two engines: {both:.2f} batches/s together, {both / alone:.0%} of one alone")


if __name__ == "__main__":
    main()
