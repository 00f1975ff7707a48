"""The workers of a cluster: what they say of themselves, checked and kept in step with what Ray Serve says of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from sgl.runtime.gateway.reports import Load

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "draining", "failed"]
_SILENT_SECONDS = 10.0  # where all cores are busy, beats are late; who is dead, the router notices first
_MISSES = 2  # of Ray Serve's lists, the first of which may be older than the worker
_STOPPING = "STOPPING"
_BACK_SECONDS = 20.0  # in which one that was killed comes back


class Capabilities(msgspec.Struct, frozen=True):
    """What a worker serves."""

    model: str
    context_length: int
    max_total_tokens: int
    adapters: tuple[str, ...]
    grammar_backend: str
    takes_images: bool
    device: str
    ranks: int
    version: str
    mode: str | None = None  # prefill, or decode, where these are apart

    def differs(self, other: Capabilities) -> str | None:
        """Why clients could tell one worker from the other; None if they could not."""
        for name in ("model", "context_length", "grammar_backend", "takes_images"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} is {getattr(self, name)!r}, and the others' {getattr(other, name)!r}"
        return None


class Report(msgspec.Struct, frozen=True):
    """A worker's beat."""

    id: str
    generation: int
    state: State
    host: str = ""
    url: str | None = None
    pids: tuple[int, ...] = ()  # the replica's, then its servers'
    capabilities: Capabilities | None = None
    load: Load = Load()
    reason: str = ""  # of a failure


@dataclass(slots=True)
class Worker:
    """What is known of a worker."""

    report: Report
    heard: float  # seconds of the clock
    refused: str = ""  # why it may not serve
    misses: int = 0
    is_stopping: bool = False  # says Ray Serve

    @property
    def state(self) -> str:
        """For people."""
        if self.refused:
            return "refused"
        return "draining" if self.is_stopping else self.report.state


@dataclass(slots=True)
class Registry:
    """All workers, by their ids. Times are seconds of one clock."""

    workers: dict[str, Worker] = field(default_factory=dict)
    version: int = 0  # grows whenever `serving` changes
    last_failure: str | None = None
    """Why a worker did not start or was refused, until one serves."""
    _told: dict[str, str] = field(default_factory=dict)
    _left: dict[str, float] = field(default_factory=dict)  # hosts, and when a worker was last gone from there

    def hear(self, report: Report, now: float) -> None:
        """Take note of a beat."""
        was = self.workers[report.id].report.state if report.id in self.workers else None
        known = self.workers.setdefault(report.id, Worker(report, now))
        if was != "draining" or report.state == "draining":  # else it was overtaken
            if report.state == "ready" != was:
                known.refused = self._refusal(report)
                what = f"is refused: {known.refused}" if known.refused else f"serves at {report.url}"
                logger.log(logging.ERROR if known.refused else logging.INFO, "worker %s %s", report.id, what)
                self.last_failure = known.refused or None
            elif report.state == "failed" != was:
                logger.error("worker %s does not start: %s", report.id, report.reason)
                self.last_failure = report.reason
            known.report, known.heard = report, now
        self.tick(now)

    def compare(self, serve: Mapping[str, str], now: float) -> None:
        """Take note of Ray Serve's replicas: their states by id."""
        for name, worker in list(self.workers.items()):
            worker.is_stopping = serve.get(name) == _STOPPING
            worker.misses = 0 if name in serve else worker.misses + 1
            if worker.misses >= _MISSES:
                del self.workers[name]
                self._left[worker.report.host] = now
                logger.info("worker %s is gone", name)
        self._left = {host: left for host, left in self._left.items() if now - left < _BACK_SECONDS}
        self.tick(now)

    def is_calm(self, report: Report, now: float) -> bool:
        """Whether no other worker on its host is starting, or has just gone and will come back."""
        theirs = (each.report for each in self.workers.values() if each.report.id != report.id)
        are_starting = any(its.host == report.host and its.state in ("starting", "restarting") for its in theirs)
        return not are_starting and now - self._left.get(report.host, -math.inf) >= _BACK_SECONDS

    def serving(self, now: float) -> dict[str, str]:
        """The URLs of those that take requests."""
        return {
            name: worker.report.url
            for name, worker in self.workers.items()
            if worker.state == "ready" and worker.report.url and now - worker.heard < _SILENT_SECONDS
        }

    def draining(self) -> list[str]:
        """Those that finish what they have."""
        return [name for name, worker in self.workers.items() if worker.state == "draining"]

    def loads(self, now: float) -> list[Load]:
        """Of those that generate."""
        serving = [self.workers[name].report for name in self.serving(now)]
        return [its.load for its in serving if its.capabilities is None or its.capabilities.mode != "prefill"]

    def of(self, generation: int) -> list[Worker]:
        """Those of a generation."""
        return [worker for worker in self.workers.values() if worker.report.generation == generation]

    def failure(self, generation: int) -> str | None:
        """Why a worker of a generation did not start."""
        failed = (worker for worker in self.of(generation) if worker.state in ("failed", "refused"))
        return next((worker.refused or worker.report.reason for worker in failed), None)

    def table(self, now: float) -> list[dict[str, Any]]:
        """All that is known, as plain data."""
        return [
            {
                **msgspec.to_builtins(worker.report.load),
                **{name: its for name, its in msgspec.to_builtins(worker.report).items() if name != "load"},
                "state": worker.state,
                "silent_seconds": round(now - worker.heard, 1),
                "reason": worker.refused or worker.report.reason,
            }
            for worker in self.workers.values()
        ]

    def _refusal(self, report: Report) -> str:
        if report.url is None or report.capabilities is None:
            return "it does not say where it serves, and what"
        for worker in self.workers.values():
            theirs = worker.report.capabilities
            if worker.report.generation == report.generation and worker.state == "ready" and theirs is not None:
                return report.capabilities.differs(theirs) or ""
        return ""

    def tick(self, now: float) -> None:
        """Notice who has been silent."""
        serving = self.serving(now)
        if serving != self._told:
            self._told = serving
            self.version += 1
