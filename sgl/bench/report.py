"""A server benchmark's figures by name, for JSON."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sgl.bench.load import Measured
from sgl.errors import ConfigError
from sgl.numerals import decimal

PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}


def report(results: Sequence[Measured], seconds: float, slo: Mapping[str, float]) -> dict[str, Any]:
    """A run's figures. `slo`: goodput's bounds in seconds for ttft, tpot, e2e."""
    done = [result for result in results if result.error is None]
    prompt_tokens, output_tokens = (
        sum(getattr(r, name) for r in done) for name in ("prompt_tokens", "output_tokens")
    )
    tpots = [tpot for result in done if (tpot := result.time_per_output_token) is not None]
    summary: dict[str, Any] = {
        "requests": len(results),
        "failed": len(results) - len(done),
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "mean_concurrency": sum(result.latency for result in done) / seconds,
        "input_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "input_tokens_per_second": prompt_tokens / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "cache_hit_rate": sum(r.cached_tokens for r in done) / prompt_tokens if prompt_tokens else 0.0,
        "ttft_ms": _summary([r.first_token for r in done if r.first_token is not None]),
        "tpot_ms": _summary(tpots),
        "itl_ms": _summary([gap for r in done for gap in r.gaps]),
        "e2e_ms": _summary([r.latency for r in done]),
    }
    if slo:
        kept = sum(_keeps(result, slo) for result in done)
        summary["slo_ms"] = {name: 1000 * bound for name, bound in slo.items()}
        summary["goodput_share"] = kept / len(results)
        summary["goodput_requests_per_second"] = kept / seconds
    errors = Counter(result.error for result in results if result.error is not None)
    return {**summary, "errors": [f"{count} x {text}" for text, count in errors.most_common(5)]}


def bounds_of(texts: list[str]) -> dict[str, float]:
    """The bounds of `--slo`, in seconds. Raises ConfigError."""
    bounds = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise ConfigError(f"--slo {text[:99]!r}: there are ttft, tpot and e2e", option="slo")
        milliseconds = decimal(value)
        if milliseconds is None or milliseconds == math.inf:
            raise ConfigError(f"--slo {text[:99]!r}: write {name}=200 for 200 ms", option="slo")
        bounds[name] = milliseconds / 1000
    return bounds


def _keeps(result: Measured, slo: Mapping[str, float]) -> bool:
    values = {"ttft": result.first_token, "tpot": result.time_per_output_token, "e2e": result.latency}
    return all((values[name] or 0.0) <= bound for name, bound in slo.items())


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in ms."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    found = {"mean": statistics.fmean(ordered)}
    for name, percent in PERCENTILES.items():
        found[name] = ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]
    return {name: 1000 * value for name, value in found.items()}
