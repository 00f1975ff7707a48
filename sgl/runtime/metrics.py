"""Counters, gauges and histograms of one server, and their Prometheus metric families."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

_STAGES = ("queue", "prefill", "decode")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Counts values by upper bounds. Six times as fast as prometheus-client's, since each streamed token is
    observed."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def quantile(self, share: float) -> float | None:
        """Estimates a quantile, linear between bounds; None before the first value."""
        wanted = share * sum(self.counts)
        if not wanted:
            return None
        reached, lower = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if reached + count >= wanted:
                return lower + (bound - lower) * (wanted - reached) / count
            reached, lower = reached + count, bound
        return lower

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, bounds spelled as Prometheus does."""
        return list(zip((*map(str, self.bounds), "+Inf"), itertools.accumulate(self.counts), strict=True))


class Throughput:
    """Tokens a second between two looks."""

    def __init__(self) -> None:
        self._latest: tuple[float, int] = (0.0, 0)  # time and count

    def of(self, generated: int) -> float:
        """Since the last call. `generated`: all so far."""
        now, (then, before) = time.monotonic(), self._latest
        self._latest = now, generated
        return max(0.0, (generated - before) / (now - then)) if then else 0.0


@dataclass
class ServerMetrics:
    """The server's own counts; a scrape adds the engine's."""

    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    e2e_request_latency: Histogram = field(default_factory=Histogram)
    queue_time: Histogram = field(default_factory=Histogram)
    stages: dict[str, Histogram] = field(default_factory=lambda: {stage: Histogram() for stage in _STAGES})
    responses: dict[tuple[str, int], int] = field(default_factory=dict)  # by path and status
    open_requests: int = 0
    startup_seconds: float = 0.0  # from the command to the ready line
    throughput: Throughput = field(default_factory=Throughput)

    def answered(self, path: str, status: int) -> None:
        """A response was sent; 499: the client left."""
        self.responses[path, status] = self.responses.get((path, status), 0) + 1

    def finished(self, meta: Mapping[str, Any]) -> None:
        """A generation ended; `meta` is its meta_info."""
        self.e2e_request_latency.observe(meta["e2e_latency"])
        self.queue_time.observe(meta["queue_time"])
        prefilled = meta["queue_time"] + meta["prefill_time"]
        seconds = (meta["queue_time"], meta["prefill_time"], max(0.0, meta["e2e_latency"] - prefilled))
        for histogram, spent in zip(self.stages.values(), seconds, strict=True):
            histogram.observe(spent)


_HISTOGRAMS = {
    "time_to_first_token": "Seconds from a streamed call to the first token of each of its outputs.",
    "inter_token_latency": "Seconds between two events of an output that is streamed.",
    "e2e_request_latency": "Seconds of whole requests.",
    "queue_time": "Seconds that requests waited for their first step.",
}
_GAUGES = {
    "http_requests_active": "HTTP requests that are not answered yet.",
    "startup_time_seconds": "Seconds from the command to the ready line.",
    "max_total_num_tokens": "Tokens that the KV cache can hold.",
    "num_used_tokens": "Tokens of KV that requests use.",
    "token_usage": "Share of the KV cache that requests use, 0 to 1.",
    "gen_throughput": "Generated tokens a second since this was last asked for.",
    "num_running_reqs": "Requests that take part in the engine's steps.",
    "num_queue_reqs": "Requests that wait for a row.",
    "is_paused": "Engines whose generations are paused.",
    "kv_available_tokens": "Tokens of KV that are free.",
    "kv_evictable_tokens": "Tokens of KV that only the prefix cache keeps, and gives up where there is need.",
    "hicache_host_total_tokens": "Tokens of KV that host memory has room for.",
    "hicache_host_used_tokens": "Tokens of KV of which host memory has copies.",
    "hicache_host_total_states": "Recurrent states that host memory has room for.",
    "hicache_host_used_states": "Recurrent states of which host memory has copies.",
    "hicache_file_used_bytes": "Bytes of files with copies of KV and states.",
    "transfer_total_tokens": "Tokens of KV that the buffer for transfers between engines has room for.",
    "transfer_used_tokens": "Tokens of KV in that buffer.",
    "num_transfer_leases": "Prompts whose pages wait there for a decode engine.",
    "cache_hit_rate": "Share of all prompts' tokens that were found in the prefix cache, 0 to 1.",
}
_COUNTERS = {
    "prompt_tokens_total": ("prompt_tokens", "Tokens of prompts."),
    "cached_tokens_total": ("cached_tokens", "Tokens of prompts that were found in the prefix cache."),
    "generation_tokens_total": ("generated_tokens", "Generated tokens."),
    "num_requests_total": ("finished", "Requests that ended by themselves."),
    "num_aborted_requests_total": ("aborted", "Requests that were aborted."),
    "num_retracted_requests_total": ("retractions", "Times that a running request had to give up its KV."),
    "num_steps_total": ("steps", "Steps of the engine."),
    "jump_forward_tokens_total": ("forced_tokens", "Tokens to which a constraint left no alternative."),
    "spec_drafted_tokens_total": ("drafted_tokens", "Drafts that steps verified."),
    "spec_accepted_tokens_total": ("verified_tokens", "Drafts that stood: tokens that took no step of their own."),
    "host_token_masks_total": ("host_masks", "Token masks of constrained rows that the host computed."),
    "device_token_masks_total": ("device_masks", "Token masks of constrained rows that the device computed."),
    "evicted_tokens_total": ("evicted_tokens", "Tokens of KV that the prefix cache gave up."),
    "hicache_saved_tokens_total": ("host_saved_tokens", "Tokens of KV that were copied to host memory."),
    "hicache_loaded_tokens_total": ("host_loaded_tokens", "Tokens of KV that came back from there."),
    "hicache_written_tokens_total": ("file_written_tokens", "Tokens of KV that were written to files."),
    "hicache_read_tokens_total": ("file_read_tokens", "Tokens of KV that were read from files."),
    "hicache_saved_states_total": ("host_saved_states", "Recurrent states that were copied to host memory."),
    "hicache_loaded_states_total": ("host_loaded_states", "Recurrent states that came back from there."),
    "hicache_written_states_total": ("file_written_states", "Recurrent states that were written to files."),
    "hicache_read_states_total": ("file_read_states", "Recurrent states that were read from files."),
    "hicache_loads_total": ("num_loads", "Prefixes that were loaded."),
    "hicache_declined_loads_total": ("num_declined_loads", "Prompts whose copies it was faster to compute again."),
    "hicache_late_reads_total": ("num_late_reads", "Reads from files that were not waited for any longer."),
    "hicache_failed_writes_total": ("num_failed_writes", "Writes to files that the disk refused."),
    "transfers_offered_total": ("num_transfers_offered", "Prompts whose pages were offered to decode engines."),
    "transfers_refused_total": ("num_transfers_refused", "Prompts that the buffer had no room for."),
    "transfers_expired_total": ("num_transfers_expired", "Offers whose time was up."),
    "transfer_offered_tokens_total": ("transfer_offered_tokens", "Tokens of KV that were offered."),
    "transfer_sent_tokens_total": ("transfer_sent_tokens", "Tokens of KV that decode engines took."),
    "transfer_sent_bytes_total": ("transfer_sent_bytes", "Bytes of these."),
    "transfers_pulled_total": ("num_transfers_pulled", "Pulls of prompts' pages from prefill engines."),
    "transfers_failed_total": (
        "num_transfers_failed",
        "Pulls of which nothing arrived: the prompts were computed.",
    ),
    "transfer_pulled_tokens_total": ("transfer_pulled_tokens", "Tokens of KV that arrived."),
    "transfer_pulled_bytes_total": ("transfer_pulled_bytes", "Bytes of these."),
    "transfer_pull_seconds_total": ("transfer_pull_seconds", "Seconds that they were under way, added up."),
}
_RANKS: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str]] = {
    "rank_steps_total": (CounterMetricFamily, "steps", "Steps that a rank has begun."),
    "rank_busy_seconds_total": (
        *(CounterMetricFamily, "busy_seconds"),
        "Seconds that a rank's host has spent on what rank 0 told it; on a CPU, computing is part of it.",
    ),
    "rank_waiting_seconds_total": (
        *(CounterMetricFamily, "waiting_seconds"),
        "Seconds between these while steps went on: waiting for rank 0, and rank 0's other work.",
    ),
    "rank_exchange_seconds_total": (
        *(CounterMetricFamily, "exchange_seconds"),
        "Of a rank's busy seconds on a CPU, those in which it waited for what other ranks computed.",
    ),
    "rank_memory_bytes": (
        *(GaugeMetricFamily, "memory_bytes"),
        "Bytes of its device that a rank's process has taken, or of the machine's memory without one.",
    ),
}
# SGLang's servers have these, too.
_SGLANG = """time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds queue_time_seconds
max_total_num_tokens num_used_tokens token_usage gen_throughput num_running_reqs num_queue_reqs kv_available_tokens
kv_evictable_tokens hicache_host_total_tokens hicache_host_used_tokens
cache_hit_rate prompt_tokens_total cached_tokens_total generation_tokens_total num_requests_total
num_aborted_requests_total num_retracted_requests_total"""

_Family = type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]


@dataclass(frozen=True)
class Scrape(Collector):
    """All metric families at one moment. `engine`: the engine's internal state by name."""

    server: ServerMetrics
    model: str
    max_total_tokens: int
    engine: Mapping[str, Any]

    def collect(self) -> Iterator[Metric]:
        """Each family under `sgl:`, and under `sglang:` where SGLang has it."""
        theirs = _SGLANG.split()
        for kind, name, text, labels, samples in self._families():
            for prefix in ("sgl:", "sglang:") if name in theirs else ("sgl:",):
                family = kind(prefix + name, text, labels=["model_name", *labels])
                for values, *numbers in samples:
                    family.add_metric([self.model, *values], *numbers)
                yield family

    def _families(self) -> Iterator[tuple[_Family, str, str, tuple[str, ...], list[tuple[Any, ...]]]]:
        """Kind, name, text, labels and samples (label values and the arguments of `add_metric`) of each."""
        server, engine = self.server, self.engine
        yield GaugeMetricFamily, "model_info", "1; its label names the model.", (), [((), 1)]
        for name, text in _HISTOGRAMS.items():
            histogram: Histogram = getattr(server, name)
            yield HistogramMetricFamily, f"{name}_seconds", text, (), [((), histogram.buckets(), histogram.sum)]
        name, text = "per_stage_req_latency_seconds", "Seconds of requests in queue, prefill and decode."
        stages = [((stage,), spent.buckets(), spent.sum) for stage, spent in server.stages.items()]
        yield HistogramMetricFamily, name, text, ("stage",), stages
        responses = [((path, str(status)), count) for (path, status), count in sorted(server.responses.items())]
        text = "HTTP requests by endpoint and by the status of their answer; 499: the client left."
        yield CounterMetricFamily, "http_requests_total", text, ("path", "status"), responses
        used = self.max_total_tokens - engine["kv_available_tokens"] - engine["kv_evictable_tokens"]
        values = {
            **engine,
            "hicache_host_total_tokens": engine["host_total_tokens"],
            "hicache_host_used_tokens": engine["host_used_tokens"],
            "hicache_host_total_states": engine["host_total_states"],
            "hicache_host_used_states": engine["host_used_states"],
            "hicache_file_used_bytes": engine["file_used_bytes"],
            "http_requests_active": server.open_requests,
            "startup_time_seconds": server.startup_seconds,
            "max_total_num_tokens": self.max_total_tokens,
            "num_used_tokens": used,
            "token_usage": used / self.max_total_tokens,
            "gen_throughput": server.throughput.of(engine["generated_tokens"]),
        }
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily, name, text, (), [((), values[name])]
        for name, (source, text) in _COUNTERS.items():
            yield CounterMetricFamily, name, text, (), [((), values[source])]
        for name, (rank_kind, source, text) in _RANKS.items():
            samples = [((str(its["engine"]), str(its["rank"])), its[source]) for its in engine["ranks"]]
            yield rank_kind, name, text, ("engine", "rank"), samples
