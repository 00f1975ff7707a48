"""A gateway's metrics, and those of its workers, each with its name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from sgl.runtime.gateway.kv_follower import Followed
from sgl.runtime.gateway.policy import Worker
from sgl.runtime.gateway.workers import Servers

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_COUNTED: tuple[str, ...] = (
    "requests",
    "sent",
    "retries",
    "refused",
    "cut_streams",
    "reopened_programs",
    "prompt_tokens",
)
_COUNTED += ("found_tokens", "open_requests", "waiting_requests")
_OF_WORKERS: dict[str, tuple[str, Callable[[Worker], float]]] = {
    "worker_requests": ("Requests at a worker.", lambda its: its.in_flight),
    "worker_work_tokens": ("Work at a worker, in prompt tokens.", lambda its: its.work),
    "worker_other_requests": ("Requests at a worker from elsewhere.", lambda its: its.others),
    "worker_kv_usage": ("Part of a worker's KV pages in use.", lambda its: its.kv_usage),
}
_OF_STREAMS: dict[str, tuple[str, Callable[[Followed], float]]] = {
    "worker_kv_blocks": ("Blocks that a worker tells it has.", lambda its: its.blocks),
    "worker_kv_batches": ("Batches of a worker's KV events.", lambda its: its.batches),
    "worker_kv_gaps": ("Gaps in a worker's KV events.", lambda its: its.gaps),
}


class GatewayMetrics:
    """In a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry, "namespace": "sgl_gateway"}
        self.requests = Counter("requests", "Answered requests.", ["path", "status"], **own)  # type: ignore[arg-type]
        self.sent = Counter("sent", "Requests sent to a worker, with tries.", ["worker"], **own)  # type: ignore[arg-type]
        self.retries = Counter("retries", "Further tries before the first byte.", ["reason"], **own)  # type: ignore[arg-type]
        self.refused = Counter("refused", "Requests refused by the gateway.", ["reason"], **own)  # type: ignore[arg-type]
        self.cut = Counter("cut_streams", "Answers whose worker failed after their first byte.", **own)  # type: ignore[arg-type]
        self.reopened = Counter("reopened_programs", "Programs opened again at another worker.", **own)  # type: ignore[arg-type]
        self.pairs = Counter("pairs", "Prompts that a prefill worker was to compute.", ["outcome"], **own)  # type: ignore[arg-type]
        self.open = Gauge("open_requests", "Requests that are being answered.", **own)  # type: ignore[arg-type]
        self.waiting = Gauge("waiting_requests", "Requests that wait for others to end, or for a worker.", **own)  # type: ignore[arg-type]
        self.workers = Gauge("workers", "Workers by state.", ["state"], **own)  # type: ignore[arg-type]
        told = {**_OF_WORKERS, **_OF_STREAMS}
        self.of_workers = {name: Gauge(name, text, ["worker"], **own) for name, (text, _) in told.items()}  # type: ignore[arg-type]
        self.prompt = Counter("prompt_tokens", "Prompt tokens sent, as far as is known.", **own)  # type: ignore[arg-type]
        self.found = Counter("found_tokens", "Of those, sent to where they are computed.", **own)  # type: ignore[arg-type]
        self.first_byte = Histogram("first_byte_seconds", "Until an answer began.", buckets=_SECONDS, **own)  # type: ignore[arg-type]

    def forget(self, worker: str) -> None:
        """It has left, as many do in a year: what was sent there counts under no name."""
        child = self.sent.labels(worker)
        [found] = child.collect()
        self.sent.labels("").inc(found.samples[0].value)
        self.sent.remove(worker)

    def tell(self, servers: Servers) -> None:
        """What is known now of the workers that there are."""
        self.workers.labels("ready").set(len(servers.ready()))
        self.workers.labels("known").set(len(servers))
        for gauge in self.of_workers.values():
            gauge.clear()
        for name, (_, value) in _OF_WORKERS.items():
            for its in servers.values():
                self.of_workers[name].labels(its.id).set(value(its.worker))
        for name, (_, number) in _OF_STREAMS.items():
            for worker, followed in servers.kv.workers.items():
                self.of_workers[name].labels(worker).set(number(followed))

    def counts(self) -> dict[str, int]:
        """What the page shows, each in one number."""
        found = {each.name.removeprefix("sgl_gateway_"): each.samples for each in self.registry.collect()}
        return {
            name: int(sum(its.value for its in found[name] if not its.name.endswith("_created")))
            for name in _COUNTED
        }


def text_of(metrics: GatewayMetrics, of_workers: Mapping[str, str]) -> bytes:
    """In Prometheus' format. of_workers: the workers' own texts by name."""
    return generate_latest(metrics.registry) + generate_latest(_Merged(of_workers))


class _Merged(CollectorRegistry):
    """The workers' metrics with a label each."""

    def __init__(self, of_workers: Mapping[str, str]) -> None:
        super().__init__()
        self._of_workers = of_workers

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for worker, text in self._of_workers.items():
            with contextlib.suppress(ValueError):  # of what a dying worker sent
                for family in text_string_to_metric_families(text):
                    merged = families.setdefault(
                        family.name, Metric(family.name, family.documentation, family.type)
                    )
                    for sample in family.samples:
                        merged.add_sample(sample.name, {**sample.labels, "worker": worker}, sample.value)
        return families.values()
