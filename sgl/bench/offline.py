"""The engine alone: throughput of a large batch; latency of a small one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from sgl.bench.datasets import Job
from sgl.runtime.engine import Engine

_ROUNDS = 5


def throughput(engine: Engine, jobs: Sequence[Job]) -> dict[str, Any]:
    """All jobs in one call, after a short warm-up."""
    engine.generate(jobs[0].prompt, {"max_new_tokens": 2})
    engine.flush_cache()
    params = [{"max_new_tokens": job.max_tokens, "temperature": 0.0, "ignore_eos": True} for job in jobs]
    began = time.perf_counter()
    results = engine.generate([job.prompt for job in jobs], params)
    seconds = time.perf_counter() - began
    metas = [result["meta_info"] for result in results]
    prompt_tokens, output_tokens, cached = (
        sum(meta[name] for meta in metas) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    )
    return {
        "requests": len(jobs),
        "seconds": seconds,
        "requests_per_second": len(jobs) / seconds,
        "input_tokens_per_second": prompt_tokens / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "cache_hit_rate": cached / prompt_tokens,
    }


def latency(engine: Engine, jobs: Sequence[Job]) -> dict[str, Any]:
    """One batch: ms of prompts and of each later token; medians of rounds with an empty cache."""
    first, rest = [], []
    for _ in range(_ROUNDS + 1):
        engine.flush_cache()
        began = time.perf_counter()
        params = [{"max_new_tokens": job.max_tokens, "temperature": 0.0, "ignore_eos": True} for job in jobs]
        firsts: dict[int, float] = {}
        for event in engine.generate([job.prompt for job in jobs], params, stream=True):
            firsts.setdefault(event["index"], time.perf_counter() - began)
        total = time.perf_counter() - began
        first.append(max(firsts.values()))
        rest.append((total - first[-1]) / max(1, max(job.max_tokens for job in jobs) - 1))
    return {
        "batch_size": len(jobs),
        "prefill_ms": 1000 * statistics.median(first[1:]),
        "decode_ms_per_token": 1000 * statistics.median(rest[1:]),
        "output_tokens_per_second": len(jobs) / statistics.median(rest[1:]),
    }
