"""Counters, gauges and histograms of one server, written in Prometheus' text format.

It knows numbers and names; the server tells it when something happened.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "sgl:"
_STAGES = ("queue", "prefill", "decode")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Counts of values by upper bounds, and their sum."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def quantile(self, share: float) -> float | None:
        """About what that share of all values lies below, as if they lay evenly between two bounds; None before the
        first value."""
        wanted = share * sum(self.counts)
        if not wanted:
            return None
        reached, lower = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if reached + count >= wanted:
                return lower + (bound - lower) * (wanted - reached) / count
            reached, lower = reached + count, bound
        return lower

    def lines(self, name: str, label: str = "") -> Iterator[str]:
        """The histogram in Prometheus' format."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label and label + ","}le="{bound}"}} {total}'
        labels = label and f"{{{label}}}"
        yield f"{name}_sum{labels} {self.sum}"
        yield f"{name}_count{labels} {total}"


@dataclass
class ServerMetrics:
    """What the server counts itself; the engine's own numbers join them when they are read."""

    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    e2e_request_latency: Histogram = field(default_factory=Histogram)
    queue_time: Histogram = field(default_factory=Histogram)
    stages: dict[str, Histogram] = field(default_factory=lambda: {stage: Histogram() for stage in _STAGES})
    responses: dict[tuple[str, int], int] = field(default_factory=dict)  # by path and status
    open_requests: int = 0
    startup_seconds: float = 0.0  # from the command to the ready line
    _generated: tuple[float, int] = (0.0, 0)  # when the throughput was last asked for, and the tokens until then

    def answered(self, path: str, status: int) -> None:
        """A response left, or 499: the client did."""
        self.responses[path, status] = self.responses.get((path, status), 0) + 1

    def finished(self, meta: Mapping[str, Any]) -> None:
        """A generation ended; `meta` is its meta_info."""
        self.e2e_request_latency.observe(meta["e2e_latency"])
        self.queue_time.observe(meta["queue_time"])
        prefilled = meta["queue_time"] + meta["prefill_time"]
        seconds = (meta["queue_time"], meta["prefill_time"], max(0.0, meta["e2e_latency"] - prefilled))
        for histogram, spent in zip(self.stages.values(), seconds, strict=True):
            histogram.observe(spent)

    def text(self, model: str, max_total_tokens: int, engine: Mapping[str, Any]) -> str:
        """All of it in Prometheus' text format. `engine`: the engine's internal state, by name; max_total_tokens:
        what its KV holds."""
        return "\n".join(self._lines(model, max_total_tokens, engine)) + "\n"

    def throughput(self, generated: int) -> float:
        """Generated tokens a second since this was last asked for; `generated`: all of them up to now."""
        now, (then, before) = time.monotonic(), self._generated
        self._generated = now, generated
        return max(0.0, (generated - before) / (now - then)) if then else 0.0

    def _lines(self, model: str, max_total_tokens: int, engine: Mapping[str, Any]) -> Iterator[str]:
        yield f"# TYPE {PREFIX}model_info gauge"
        yield f'{PREFIX}model_info{{model_name="{_escaped(model)}"}} 1'
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "queue_time"):
            yield f"# TYPE {PREFIX}{name}_seconds histogram"
            yield from getattr(self, name).lines(f"{PREFIX}{name}_seconds")
        yield f"# TYPE {PREFIX}per_stage_req_latency_seconds histogram"
        for stage, histogram in self.stages.items():
            yield from histogram.lines(f"{PREFIX}per_stage_req_latency_seconds", f'stage="{stage}"')
        yield f"# TYPE {PREFIX}http_requests_total counter"
        for (path, status), count in sorted(self.responses.items()):
            yield f'{PREFIX}http_requests_total{{path="{_escaped(path)}",status="{status}"}} {count}'
        used = max_total_tokens - engine["kv_available_tokens"] - engine["kv_evictable_tokens"]
        gauges = {
            "http_requests_active": self.open_requests,
            "startup_time_seconds": self.startup_seconds,
            "max_total_num_tokens": max_total_tokens,
            "num_used_tokens": used,
            "token_usage": used / max_total_tokens,
            "gen_throughput": self.throughput(engine["generated_tokens"]),
        }
        for name, value in gauges.items():
            yield from _number(name, "gauge", value)
        for name in _ENGINE_GAUGES:
            yield from _number(name, "gauge", engine[name])
        for name, exported in _ENGINE_COUNTERS.items():
            yield from _number(exported, "counter", engine[name])


_ENGINE_GAUGES = (
    "num_running_reqs",
    "num_queue_reqs",
    "kv_available_tokens",
    "kv_evictable_tokens",
    "cache_hit_rate",
)
_ENGINE_COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "cached_tokens": "cached_tokens_total",
    "generated_tokens": "generation_tokens_total",
    "finished": "num_requests_total",
    "aborted": "num_aborted_requests_total",
    "retractions": "num_retracted_requests_total",
    "steps": "num_steps_total",
    "forced_tokens": "jump_forward_tokens_total",
    "host_masks": "host_token_masks_total",
    "device_masks": "device_token_masks_total",
    "evicted_tokens": "evicted_tokens_total",
}


def _number(name: str, kind: str, value: float) -> Iterator[str]:
    yield f"# TYPE {PREFIX}{name} {kind}"
    yield f"{PREFIX}{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
