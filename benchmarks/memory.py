"""Resident memory over very many requests: after a warm-up it must stay flat, since only the page pool may grow.

    python benchmarks/memory.py CHECKPOINT [--requests 100000]

Requests have prompts of their own, some with a shared beginning, some with stop strings, logprobs, penalties or an
abort in the middle; they come in waves. Prints the resident set of every tenth of the way, the median after its
waves (the allocator keeps 10 to 50 MiB for the next one, now more, now less), and the growth per request over the
second half.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

from sgl.runtime.engine import Engine

WAVE = 500


def resident_mib() -> float:
    """Resident set of this process in MiB (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Run the waves and print one line for every tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="embedded")
    parser.add_argument("--requests", type=int, default=100_000)
    args = parser.parse_args()
    rng = random.Random(0)
    engine = Engine(args.checkpoint, device="cpu", max_total_tokens=16_384, speculative_algorithm="off")
    vocab = engine.get_tokenizer().vocab_size
    stems = [[rng.randrange(3, vocab) for _ in range(48)] for _ in range(50)]
    kinds = [{}, {"stop": "zq"}, {"presence_penalty": 0.5}, {"temperature": 0.8, "top_p": 0.9}]
    start, readings, waves, done = time.perf_counter(), [], [], 0
    while done < args.requests:
        prompts = [[*rng.choice(stems)[: rng.randrange(49)], rng.randrange(3, vocab)] for _ in range(WAVE)]
        params = [{"max_new_tokens": rng.randrange(1, 5), "temperature": 0.0, **rng.choice(kinds)} for _ in prompts]
        engine.generate(input_ids=prompts, sampling_params=params, return_logprob=rng.random() < 0.2)
        stream = engine.generate(input_ids=prompts[0], sampling_params={"max_new_tokens": 100}, stream=True)
        next(stream)
        stream.close()
        done += WAVE
        waves.append(resident_mib())
        if done % (args.requests // 10) == 0:
            readings.append((done, statistics.median(waves)))
            waves.clear()
            rate = done / (time.perf_counter() - start)
            print(f"{done:>8} requests: {readings[-1][1]:7.1f} MiB resident, {rate:.0f} requests/s", flush=True)
    middle = readings[len(readings) // 2 - 1]
    growth = readings[-1][1] - middle[1]
    print(
        f"growth over the last {done - middle[0]} requests: {growth:+.1f} MiB, "
        f"{growth * 2**20 / (done - middle[0]):+.1f} bytes a request; ledger: {engine.check_ledger() or 'clean'}"
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
