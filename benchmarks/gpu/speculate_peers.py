"""One request with drafts of which so many stand, simulated by SGLang's and vLLM's own switches.

The peer kit's bench.py makes one of these classes its engine. They do all there is to do when they are made, print a
row and end the process. This file runs beside the peers' packages, and imports nothing of sgl.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from typing import Any

PROMPT = 512  # tokens
CYCLE = 32  # tokens of a prompt that repeats itself, so that there is something to look up
REPS = 5  # and one that warms up


def prompt(seed: int) -> list[int]:
    """Of PROMPT tokens."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(CYCLE)] * (PROMPT // CYCLE)


class Simulated:
    """One engine."""

    name = ""

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        *,
        algorithm: str,
        drafts: int = 4,
        stand: int = 3,
        head: str = "",
        output: int = 256,
    ) -> None:
        """algorithm: off, ngram or eagle3. drafts: of a step, of which `stand` stand. head: the folder of an EAGLE-3
        head, whose weights are random, too."""
        self.start(model, algorithm, drafts, stand, head)
        rates, steps = [], []
        for rep in range(REPS + 1):
            self.generate(prompt(rep), 1)
            began, before = time.perf_counter(), self.steps()
            self.generate(prompt(rep), 1)
            first = time.perf_counter() - began
            between = self.steps()
            began = time.perf_counter()
            self.generate(prompt(rep), output)
            seconds = time.perf_counter() - began - first
            if rep:
                rates.append((output - 1) / seconds)
                steps.append(self.steps() - between - (between - before))
        row: dict[str, Any] = {"engine": self.name, "algorithm": algorithm, "rates": rates}
        row |= {"tokens_a_second": statistics.median(rates)}
        if any(steps):
            row["tokens_a_step"] = (output - 1) / statistics.median(steps)
        print("ROW", json.dumps(row), flush=True)
        self.close()
        raise SystemExit(0)

    def start(self, model: str, algorithm: str, drafts: int, stand: int, head: str) -> None:
        """The engine."""
        raise NotImplementedError

    def generate(self, prompt: list[int], number: int) -> None:
        """So many tokens, greedily."""
        raise NotImplementedError

    def steps(self) -> int:
        """Steps until now that verified drafts; 0: it does not say."""
        return 0

    def close(self) -> None:
        """End the engine."""


class SGLang(Simulated):
    """`SGLANG_SIMULATE_ACC_LEN`."""

    name = "sglang"
    _steps = 0

    def start(self, model: str, algorithm: str, drafts: int, stand: int, head: str) -> None:
        """See `Simulated`."""
        options: dict[str, Any] = {
            "model_path": model,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "random_seed": 0,
        }
        options |= {"skip_tokenizer_init": True, "context_length": 2048}
        if algorithm != "off":
            os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(stand + 1)  # which the import reads
            options |= {"speculative_num_draft_tokens": drafts + 1}
        if algorithm == "ngram":
            options |= {"speculative_algorithm": "NGRAM"}
            options |= {"speculative_ngram_min_bfs_breadth": 1, "speculative_ngram_max_bfs_breadth": 1}
        elif algorithm == "eagle3":
            options |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head}
            options |= {"speculative_num_steps": drafts, "speculative_eagle_topk": 1}
            options |= {"speculative_draft_load_format": "dummy"}
        import sglang

        self._engine = sglang.Engine(**options)

    def generate(self, prompt: list[int], number: int) -> None:
        """See `Simulated`."""
        params = {"temperature": 0.0, "max_new_tokens": number, "ignore_eos": True}
        result = self._engine.generate(input_ids=prompt, sampling_params=params)
        self._steps += result["meta_info"].get("spec_verify_ct", 0)

    def steps(self) -> int:
        """See `Simulated`."""
        return self._steps

    def close(self) -> None:
        """See `Simulated`."""
        self._engine.shutdown()


class VLLM(Simulated):
    """`rejection_sample_method`."""

    name = "vllm"

    def start(self, model: str, algorithm: str, drafts: int, stand: int, head: str) -> None:
        """See `Simulated`."""
        import vllm

        options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "seed": 0, "max_model_len": 2048}
        options |= {"enable_prefix_caching": True, "skip_tokenizer_init": True, "disable_log_stats": False}
        if algorithm != "off":
            drafted: dict[str, Any] = {"num_speculative_tokens": drafts, "rejection_sample_method": "synthetic"}
            drafted["synthetic_acceptance_length"] = float(stand + 1)
            if algorithm == "ngram":
                drafted |= {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
            else:
                drafted |= {"method": algorithm, "model": head}
            options["speculative_config"] = drafted
        self._engine = vllm.LLM(model=model, **options)
        self._params = vllm.SamplingParams

    def generate(self, prompt: list[int], number: int) -> None:
        """See `Simulated`."""
        params = self._params(temperature=0.0, max_tokens=number, ignore_eos=True, detokenize=False)
        self._engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)

    def steps(self) -> int:
        """See `Simulated`."""
        metrics = {metric.name: metric for metric in self._engine.get_metrics()}
        drafted = metrics.get("vllm:spec_decode_num_drafts")
        return 0 if drafted is None else int(drafted.value)
