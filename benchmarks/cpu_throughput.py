"""Output tokens per second on this CPU, beside `transformers` generate on the same checkpoint in the same run.

    python benchmarks/cpu_throughput.py [CHECKPOINT ...] [--requests 32] [--prefix 200] [--output 64]

Without a checkpoint, the embedded model. Two workloads, greedy, end-of-sequence ignored, float32, all of torch's
threads for both:
  shared   N requests = a common prefix + 8 tokens of their own. transformers runs them one by one and as one padded
           batch; the better of the two counts. The bar is 3x.
  single   one such request. The bar is 1x.
The engine's cache is flushed before each repetition, and so starts cold. Medians of the repetitions.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sgl.runtime.config import EMBEDDED
from sgl.runtime.engine import Engine

OWN_TOKENS = 8
BAR = {"shared": 3.0, "single": 1.0}


def median_seconds(runs: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Medians of `repetitions` of each run, taken in turn so that a drift of the machine meets them all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repetition:  # the first is a warm-up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(its) for name, its in times.items()}


class Transformers:
    """The peer."""

    def __init__(self, path: str, output: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # every request runs to its full length
        self._output = output
        self.vocab_size = int(self._model.config.vocab_size)

    @torch.inference_mode()
    def batch(self, prompts: list[list[int]]) -> list[list[int]]:
        """One padded batch (all prompts have one length, so nothing is wasted on padding)."""
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self._output,
            pad_token_id=0,
        )
        return [list(row) for row in out[:, ids.shape[1] :].tolist()]

    def one_by_one(self, prompts: list[list[int]]) -> list[list[int]]:
        """Each prompt alone."""
        return [self.batch([prompt])[0] for prompt in prompts]


def measure(path: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both workloads on one checkpoint."""
    peer = Transformers(path, args.output)
    rng = random.Random(0)
    prefix = [rng.randrange(3, peer.vocab_size) for _ in range(args.prefix)]
    shared = [prefix + [rng.randrange(3, peer.vocab_size) for _ in range(OWN_TOKENS)] for _ in range(args.requests)]
    engine = Engine(path, skip_tokenizer_init=True, dtype="float32", device="cpu")
    params = {"temperature": 0.0, "max_new_tokens": args.output, "ignore_eos": True}

    rows = []
    for name, prompts in (("shared", shared), ("single", shared[:1])):
        hits: list[float] = []
        collected: list[list[int]] = []

        def ours(prompts: list[list[int]] = prompts, hits: list[float] = hits, out: Any = collected) -> None:
            engine.flush_cache()
            results = engine.generate(input_ids=prompts, sampling_params=params)
            cached = sum(result["meta_info"]["cached_tokens"] for result in results)
            hits.append(cached / sum(map(len, prompts)))
            out[:] = [result["output_ids"] for result in results]

        runs: dict[str, Callable[[], Any]] = {"ours": ours, "one by one": partial(peer.one_by_one, prompts)}
        if len(prompts) > 1:
            runs["one batch"] = partial(peer.batch, prompts)
        seconds = median_seconds(runs, args.repetitions)
        tokens = len(prompts) * args.output
        rates = {mode: tokens / time for mode, time in seconds.items()}
        mode, best = max(((m, r) for m, r in rates.items() if m != "ours"), key=lambda pair: pair[1])
        agree = sum(a == b for a, b in zip(collected, peer.batch(prompts), strict=True))
        rows.append({"checkpoint": Path(path).name, "workload": name, **rates, "ratio": rates["ours"] / best})
        print(
            f"{Path(path).name:>20} {name}: ours {rates['ours']:8.0f} tok/s, transformers "
            + ", ".join(f"{m} {r:.0f}" for m, r in rates.items() if m != "ours")
            + f"; {rates['ours'] / best:.2f}x its {mode} (bar {BAR[name]:.0f}x); "
            f"cache hit rate {statistics.median(hits):.2f}; same tokens in {agree} of {len(prompts)}"
        )
    engine.shutdown()
    return rows


def main() -> None:
    """Print a line for each checkpoint and workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", default=[str(EMBEDDED)])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=200)
    parser.add_argument("--output", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row for path in args.checkpoints for row in measure(path, args)]
    if args.json:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "results": rows}, indent=2))


if __name__ == "__main__":
    main()
