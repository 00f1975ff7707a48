"""Output tokens per second on this CPU, beside `transformers` generate on the same checkpoint in the same run.

    python benchmarks/cpu_throughput.py [CHECKPOINT ...] [--requests 32] [--prefix 200] [--output 64]

Without a checkpoint, the embedded model. Two workloads, greedy, end-of-sequence ignored, float32:
  shared   N requests = a common prefix + 8 tokens of their own. transformers runs them one by one and as one padded
           batch; the better of the two counts. The bar is 3x.
  single   one such request. The bar is 1x.
Each side has a process of its own, with torch's default of threads: OpenMP's workers of one would slow the other down.
They run in turn. The engine's cache is flushed before each repetition, and so starts cold. Medians of the repetitions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sgl.runtime.config import EMBEDDED
from sgl.runtime.engine import Engine

OWN_TOKENS = 8
BAR = {"shared": 3.0, "single": 1.0}


class Result(NamedTuple):
    """Of one run of a workload."""

    seconds: float
    output_ids: list[list[int]]
    cached_share: float = 0.0


class Ours:
    """The engine."""

    def __init__(self, path: str, output: int) -> None:
        self._engine = Engine(
            path, skip_tokenizer_init=True, dtype="float32", device="cpu", speculative_algorithm="off"
        )
        self._params = {"temperature": 0.0, "max_new_tokens": output, "ignore_eos": True}

    def ours(self, prompts: list[list[int]]) -> Result:
        """All of them at once."""
        self._engine.flush_cache()
        start = time.perf_counter()
        results = self._engine.generate(input_ids=prompts, sampling_params=self._params)
        seconds = time.perf_counter() - start
        cached = sum(result["meta_info"]["cached_tokens"] for result in results)
        return Result(seconds, [result["output_ids"] for result in results], cached / sum(map(len, prompts)))


class Transformers:
    """The peer."""

    def __init__(self, path: str, output: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # every request runs to its full length
        self._output = output

    @torch.inference_mode()
    def one_batch(self, prompts: list[list[int]]) -> Result:
        """One padded batch (all prompts have one length, so nothing is wasted on padding)."""
        start = time.perf_counter()
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self._output,
            pad_token_id=0,
        )
        output_ids = [list(row) for row in out[:, ids.shape[1] :].tolist()]
        return Result(time.perf_counter() - start, output_ids)

    def one_by_one(self, prompts: list[list[int]]) -> Result:
        """Each prompt alone."""
        results = [self.one_batch([prompt]) for prompt in prompts]
        return Result(sum(its.seconds for its in results), [its.output_ids[0] for its in results])


_side: Ours | Transformers  # of a process


def _load(side: type[Ours] | type[Transformers], path: str, output: int) -> None:
    global _side
    _side = side(path, output)


def _run(mode: str, prompts: list[list[int]]) -> Result:
    result: Result = getattr(_side, mode)(prompts)
    return result


def measure(path: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both workloads on one checkpoint."""
    vocab_size = AutoConfig.from_pretrained(path).vocab_size
    rng = random.Random(0)
    prefix = [rng.randrange(3, vocab_size) for _ in range(args.prefix)]
    shared = [prefix + [rng.randrange(3, vocab_size) for _ in range(OWN_TOKENS)] for _ in range(args.requests)]
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, spawn, _load, (Ours, path, args.output)) as engine,
        ProcessPoolExecutor(1, spawn, _load, (Transformers, path, args.output)) as peer,
    ):
        sides = {"ours": engine, "one_by_one": peer, "one_batch": peer}
        for name, prompts in (("shared", shared), ("single", shared[:1])):
            modes = [mode for mode in sides if mode != "one_batch" or len(prompts) > 1]
            # In turn, so that a drift of the machine meets them all alike; the first is a warm-up.
            rounds = [
                {mode: sides[mode].submit(_run, mode, prompts).result() for mode in modes}
                for _ in range(args.repetitions + 1)
            ][1:]
            tokens = len(prompts) * args.output
            rates = {mode: tokens / statistics.median(its[mode].seconds for its in rounds) for mode in modes}
            mode = max(modes[1:], key=lambda mode: rates[mode])
            ratio = rates["ours"] / rates[mode]
            ours, theirs = (rounds[-1][its] for its in ("ours", mode))
            agree = sum(a == b for a, b in zip(ours.output_ids, theirs.output_ids, strict=True))
            rows.append({"checkpoint": Path(path).name, "workload": name, **rates, "ratio": ratio})
            print(
                f"{Path(path).name:>20} {name}: ours {rates['ours']:8.0f} tok/s, transformers "
                + ", ".join(f"{mode} {rates[mode]:.0f}" for mode in modes[1:])
                + f"; {ratio:.2f}x its {mode} (bar {BAR[name]:.0f}x); "
                f"cache hit rate {ours.cached_share:.2f}; same tokens in {agree} of {len(prompts)}"
            )
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
