"""Counters, gauges and histograms of one server, written in Prometheus' text format.

It knows numbers and names; the server tells it when something happened.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "sgl:"
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
        """The bound below which that share of all values lies; None before the first value."""
        wanted = share * sum(self.counts)
        if not wanted:
            return None
        reached = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            reached += count
            if reached >= wanted:
                return bound
        return self.bounds[-1]

    def lines(self, name: str) -> Iterator[str]:
        """The histogram in Prometheus' format."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {total}"


@dataclass
class ServerMetrics:
    """What the server counts itself; the engine's own numbers join them when they are read."""

    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    e2e_request_latency: Histogram = field(default_factory=Histogram)
    queue_time: Histogram = field(default_factory=Histogram)
    responses: dict[tuple[str, int], int] = field(default_factory=dict)  # by path and status
    open_requests: int = 0

    def answered(self, path: str, status: int) -> None:
        """A response left, or 499: the client did."""
        self.responses[path, status] = self.responses.get((path, status), 0) + 1

    def finished(self, meta: Mapping[str, Any]) -> None:
        """A generation ended; `meta` is its meta_info."""
        self.e2e_request_latency.observe(meta["e2e_latency"])
        self.queue_time.observe(meta["queue_time"])

    def text(self, model: str, engine: Mapping[str, Any]) -> str:
        """All of it in Prometheus' text format. `engine`: the engine's internal state, by name."""
        return "\n".join(self._lines(model, engine)) + "\n"

    def _lines(self, model: str, engine: Mapping[str, Any]) -> Iterator[str]:
        yield f"# TYPE {PREFIX}model_info gauge"
        yield f'{PREFIX}model_info{{model_name="{_escaped(model)}"}} 1'
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "queue_time"):
            yield f"# TYPE {PREFIX}{name}_seconds histogram"
            yield from getattr(self, name).lines(f"{PREFIX}{name}_seconds")
        yield f"# TYPE {PREFIX}http_responses_total counter"
        for (path, status), count in sorted(self.responses.items()):
            yield f'{PREFIX}http_responses_total{{path="{_escaped(path)}",status="{status}"}} {count}'
        yield from _number("http_open_requests", "gauge", self.open_requests)
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
}


def _number(name: str, kind: str, value: float) -> Iterator[str]:
    yield f"# TYPE {PREFIX}{name} {kind}"
    yield f"{PREFIX}{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
