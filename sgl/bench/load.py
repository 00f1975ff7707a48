"""How a server is loaded, and what a request of the load saw: plain values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sgl.bench.datasets import Job

Api = Literal["native", "openai", "openai-chat"]
PATHS: dict[Api, str] = {"native": "/generate", "openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(slots=True)
class Measured:
    """What one request saw; times in seconds from when it was sent."""

    sent: float = 0.0  # since the start of the benchmark
    events: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens it brought
    latency: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        """When it came; None if none did."""
        return self.events[0][0] if self.events else None

    @property
    def gaps(self) -> list[float]:
        """Between events that brought tokens."""
        return [after - before for (before, _), (after, _) in itertools.pairwise(self.events)]

    @property
    def time_per_output_token(self) -> float | None:
        """After the first; None where there is no second."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.latency - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Load:
    """How requests are sent. rate: requests a second, 0 for all at once, None for the times of a trace."""

    url: str
    api: Api = "native"
    model: str = "default"
    api_key: str | None = None
    rate: float | None = 0.0
    is_poisson: bool = True
    max_concurrency: int | None = None
    warmup: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout: float = 3600.0
    seed: int = 0


def arrivals(jobs: Sequence[Job], load: Load) -> list[float]:
    """When each request is sent, in seconds after the start."""
    if load.rate is None:
        return [job.at or 0.0 for job in jobs]
    if load.rate == 0:
        return [0.0] * len(jobs)
    rng, times, now = random.Random(load.seed), [], 0.0
    for _ in jobs:
        times.append(now)
        now += rng.expovariate(load.rate) if load.is_poisson else 1 / load.rate
    return times
