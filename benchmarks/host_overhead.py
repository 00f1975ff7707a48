"""What the host spends on a decode step of 256 streaming requests, without a model.

    python benchmarks/host_overhead.py [--rows 256] [--steps 400] [--json FILE]

Counts everything between two forward passes: scheduling, packing into index arrays, taking in the sampled tokens,
detokenising and one streamed event a request. The runner only packs and returns tokens that were drawn before.
Repeats with 10^2 … 10^5 nodes in the radix cache: the cost must not depend on them. The bar is 0.5 ms a step.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path

import numpy as np

from sgl.grammar.vocabulary.token_table import TokenTable
from sgl.kernels.attention.base import AttentionStep
from sgl.runtime.batch import Batch, StepResult, TokenMasks
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.submission import Output, Submission
from sgl.runtime.loop.thread import EngineThread
from sgl.runtime.runner.pack import pack
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Limits
from sgl.runtime.text.detokenizer import ByteDetokenizer
from sgl.runtime.text.output import TextOutput
from sgl.runtime.text.stop import StopMatcher

BAR_MS = 0.5
VOCAB = 32_000
PAGE_SIZE = 16
PROMPT_LEN = 512


class DrawnTokens:
    """A pending step whose result is known."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        """See PendingStep."""
        return self._result


class PackingRunner:
    """Packs every batch as the model runner does, and answers with random tokens."""

    def __init__(self, rows: int, max_pages: int) -> None:
        self._page_table = np.zeros((rows, max_pages), np.int32)
        self._tokens = np.random.default_rng(0).integers(10, VOCAB, (64, rows), dtype=np.int32)
        self._step = 0

    def forward(self, batch: Batch) -> DrawnTokens:
        """See Runner."""
        writes = batch.page_writes
        self._page_table[writes[:, 0], writes[:, 1]] = writes[:, 2]
        pack(batch, AttentionStep(batch.q_lens, batch.kv_lens, self._page_table[batch.rows]), PAGE_SIZE)
        self._step += 1
        tokens = np.where(batch.samples, self._tokens[self._step % 64, : len(batch)], np.int32(-1))
        return DrawnTokens(StepResult(tokens))

    def sample(self, launched: DrawnTokens, masks: TokenMasks | None = None) -> DrawnTokens:
        """See Runner."""
        return launched


def token_table() -> TokenTable:
    """Words, and one token in ten that ends in the middle of a character."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij klmnop", k=rng.randint(1, 7))).encode() for _ in range(VOCAB)]
    euro = "€".encode()
    for i in range(0, VOCAB, 10):
        words[i] = euro[:2] if i % 20 else euro[2:]
    return TokenTable(words, frozenset(), first="keep", invalid="replace")


def prepare(rows: int, cached_nodes: int, output_len: int, *, stops: bool) -> EngineLoop:
    """A loop with `rows` requests that decode, above a cache of `cached_nodes` nodes."""
    context = PROMPT_LEN + output_len + PAGE_SIZE
    max_pages = -(-context // PAGE_SIZE)
    num_pages = rows * max_pages + cached_nodes + 2
    pool = PagePool(num_pages, PAGE_SIZE)
    scheduler = Scheduler(Limits(rows, context, 1 << 20), pool)
    rng = np.random.default_rng(1)
    for _ in range(cached_nodes):  # one page each, all different
        key = rng.integers(0, VOCAB, PAGE_SIZE, dtype=np.int32).tobytes()
        pages = pool.alloc(1)
        assert pages is not None
        scheduler.memory.cache.insert(key, pages)
    delivered: list[Output] = []

    def deliver(outputs: list[Output]) -> None:
        delivered[:] = outputs

    loop = EngineLoop(EngineThread(), scheduler, PackingRunner(rows, max_pages), deliver, run_ahead=True)
    table = token_table()
    params = SamplingParams(max_new_tokens=output_len, ignore_eos=True, stop=("\n\nUser:",) if stops else ())
    for uid in range(rows):
        prompt = rng.integers(0, VOCAB, PROMPT_LEN, dtype=np.int32)
        request = Request(uid, prompt, params, seed=uid, max_new_tokens=output_len)
        matcher = StopMatcher(params.stop) if stops else None
        text = TextOutput(ByteDetokenizer(table, prompt), matcher)
        loop._add({uid: Submission(request, text, stream=True)})
    loop._slicer.run_for(math.inf)
    return loop


def measure(rows: int, cached_nodes: int, steps: int, *, stops: bool = False) -> dict[str, float]:
    """Median and 90th percentile of a step in ms."""
    loop = prepare(rows, cached_nodes, steps + 20, stops=stops)
    for _ in range(10):
        loop.step()
        loop._flush()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loop._take_arrivals()
        loop._expire()
        loop.step()
        loop._flush()
        times.append((time.perf_counter() - start) * 1e3)
    assert loop.scheduler.num_running == rows
    return {
        "cached_nodes": cached_nodes,
        "median_ms": statistics.median(times),
        "p90_ms": sorted(times)[int(0.9 * len(times))],
    }


def main() -> None:
    """Print one line for each size of the cache, and the comparison with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for cached_nodes in (100, 1_000, 10_000, 100_000):
        result = measure(args.rows, cached_nodes, args.steps)
        results.append(result)
        ratio = result["median_ms"] / BAR_MS
        print(
            f"{args.rows} rows, {cached_nodes:>7} cached nodes: {result['median_ms']:.3f} ms a step "
            f"(p90 {result['p90_ms']:.3f}); bar {BAR_MS} ms, ratio {ratio:.2f}"
        )
    with_stops = measure(args.rows, 1_000, args.steps, stops=True)
    print(f"{args.rows} rows that also look for a stop string: {with_stops['median_ms']:.3f} ms a step")
    flat = results[-1]["median_ms"] / results[0]["median_ms"]
    print(f"10^5 nodes against 10^2: {flat:.2f}x")
    if args.json:
        args.json.write_text(
            json.dumps({"rows": args.rows, "results": results, "with_stops": with_stops}, indent=2)
        )


if __name__ == "__main__":
    main()
