"""Agents that come back, and SGLang and vLLM with their copies of KV in host memory.

The peer kit's bench.py makes one of these classes its engine. They do all there is to do when they are made, print a
row and end the process. This file runs beside the peers' packages, and imports nothing of sgl.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

FIRST, ANSWER = 4096, 64  # tokens of an agent's first prompt, and of its answers
GENERATED = 8  # of these; the others are drawn, since decoding alone takes longer than what is measured
OBSERVED = (41, 64, 88, 103, 117, 131, 148, 170, 205, 262, 390, 610)
"""Tokens of ReAct agents' observations on HotpotQA, by twelfths."""


def pool_tokens(agents: int, turns: int) -> int:
    """A third of what the agents have at last."""
    return agents * (FIRST + turns * (ANSWER + sum(OBSERVED) // len(OBSERVED))) // 3


def run_agents(
    first_token: Callable[[list[int], int], tuple[float, list[int]]], agents: int, turns: int
) -> dict[str, float]:
    """Agents in turns. first_token: of a prompt, seconds to its first token and all of so many tokens."""
    rng = random.Random(0)
    texts = [[rng.randrange(10_000) for _ in range(FIRST)] for _ in range(agents)]
    seconds: list[float] = []
    began = time.perf_counter()
    for turn in range(turns):
        for text in texts:
            text += [rng.randrange(10_000) for _ in range(rng.choice(OBSERVED))]
            first, ids = first_token(text, GENERATED)
            text += ids + [rng.randrange(10_000) for _ in range(ANSWER - len(ids))]
            if turn:
                seconds.append(first)
    return {
        "agents: first token p50, ms": 1e3 * statistics.median(seconds),
        "agents: first token p95, ms": 1e3 * statistics.quantiles(seconds, n=20)[-1],
        "agents: all, s": time.perf_counter() - began,
    }


class Agents:
    """Of one engine."""

    def __init__(self, model: str, tokenizer: str | None = None, *, agents: int, turns: int, host_gb: int) -> None:
        """As the kit makes it; host_gb: of copies."""
        self.start(model, pool_tokens(agents, turns), host_gb)
        prompt = list(range(100, 612))
        for _ in range(3):  # compiles
            self.first_token(prompt, GENERATED)
        print("ROW", json.dumps(run_agents(self.first_token, agents, turns)), flush=True)
        self.close()
        raise SystemExit(0)

    def start(self, model: str, num_tokens: int, host_gb: int) -> None:
        """The engine, with KV for so many tokens."""
        raise NotImplementedError

    def first_token(self, prompt: list[int], number: int) -> tuple[float, list[int]]:
        """See `run_agents`."""
        raise NotImplementedError

    def close(self) -> None:
        """End the engine."""


class SGLang(Agents):
    """`enable_hierarchical_cache`."""

    def start(self, model: str, num_tokens: int, host_gb: int) -> None:
        """See `Agents`."""
        import sglang

        options: dict[str, Any] = {"model_path": model, "load_format": "dummy", "dtype": "bfloat16"}
        options |= {"skip_tokenizer_init": True, "context_length": 16_384, "max_total_tokens": num_tokens}
        self._engine = sglang.Engine(**options, enable_hierarchical_cache=True, hicache_size=host_gb)

    def first_token(self, prompt: list[int], number: int) -> tuple[float, list[int]]:
        """See `run_agents`."""
        params = {"temperature": 0.0, "max_new_tokens": number, "ignore_eos": True}
        began, first, ids = time.perf_counter(), 0.0, []
        for event in self._engine.generate(input_ids=prompt, sampling_params=params, stream=True):
            first = first or time.perf_counter() - began
            ids = event["output_ids"]
        return first, list(ids)

    def close(self) -> None:
        """See `Agents`."""
        self._engine.shutdown()


class VLLM(Agents):
    """`kv_offloading_size`. Its offline engine has no streams: a call of one token is timed, and another has all."""

    def start(self, model: str, num_tokens: int, host_gb: int) -> None:
        """See `Agents`."""
        import vllm

        options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True}
        options |= {
            "max_model_len": 16_384,
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": num_tokens // 16,
        }
        options |= {"kv_offloading_size": host_gb, "kv_offloading_backend": "native"}
        self._engine = vllm.LLM(model=model, **options, disable_hybrid_kv_cache_manager=True)
        self._params = vllm.SamplingParams

    def first_token(self, prompt: list[int], number: int) -> tuple[float, list[int]]:
        """See `run_agents`."""
        began = time.perf_counter()
        self._answer(prompt, 1)
        first = time.perf_counter() - began
        return first, self._answer(prompt, number)

    def _answer(self, prompt: list[int], number: int) -> list[int]:
        params = self._params(temperature=0.0, max_tokens=number, ignore_eos=True, detokenize=False)
        (result,) = self._engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(result.outputs[0].token_ids)
