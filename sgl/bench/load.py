"""A load, and what one of its requests saw."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from sgl.bench.datasets import Job
from sgl.errors import ConfigError
from sgl.runtime.config import PositiveFloat

NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
URL = "http://127.0.0.1:30000"
Api = Literal["native", "openai", "openai-chat"]
PATHS: dict[Api, str] = {"native": "/generate", "openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(slots=True)
class Measured:
    """One request's times, in seconds since it was sent."""

    sent: float = 0.0  # since the benchmark's start
    events: list[tuple[float, int]] = field(default_factory=list)  # (seconds, tokens)
    latency: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        """Seconds to the first token, or None."""
        return self.events[0][0] if self.events else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with tokens."""
        return [after - before for (before, _), (after, _) in itertools.pairwise(self.events)]

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first, or None."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.latency - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a server is loaded: the flags of `sgl bench serving`."""

    url: str = URL
    """Where the server is."""
    api: Api = "native"
    """What it speaks; native is also /generate of the original's servers."""
    model: str = "default"
    """For servers that want one."""
    api_key: str | None = None
    """Sent as Authorization: Bearer."""
    request_rate: NonNegativeFloat = 0.0
    """Requests a second; 0: all at once."""
    arrivals: Literal["poisson", "fixed", "trace"] = "poisson"
    """How requests are spread; trace: as the dataset says."""
    trace_speed: PositiveFloat = 1.0
    """How many times faster a trace is replayed than it was recorded."""
    max_concurrency: PositiveInt | None = None
    """Requests in flight at most."""
    warmup: NonNegativeInt = 1
    """Requests that are sent before the measured ones, one after another."""
    temperature: NonNegativeFloat = 0.0
    """Of every request."""
    ignore_eos: bool = True
    """Generate to the full length, past ends of text; OpenAI's own servers know no such field."""


def arrivals(jobs: Sequence[Job], load: Load, rng: random.Random) -> list[float]:
    """When to send each request, in seconds after the start. Raises ConfigError."""
    if load.arrivals == "trace":
        if any(job.at is None for job in jobs):
            message = "--arrivals trace needs a --dataset-path that says when requests come"
            raise ConfigError(message, option="arrivals")
        return [(job.at or 0.0) / load.trace_speed for job in jobs]
    if load.request_rate == 0:
        return [0.0] * len(jobs)
    times, now = [], 0.0
    for _ in jobs:
        times.append(now)
        now += rng.expovariate(load.request_rate) if load.arrivals == "poisson" else 1 / load.request_rate
    return times
