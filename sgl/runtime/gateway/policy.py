"""Which of several workers gets a request. A policy is a pure function of what the fleet knows.

`cache_aware` asks when the request would be done: what a worker has to do, and of the request what it has not computed
yet, by the worker's rate. So requests with the same beginning meet until it costs less to compute the beginning once
more elsewhere, and an empty worker wins by having nothing to do, never by an empty cache. Only a few workers are
compared: those that have most of the beginning, the session's, and a few by chance.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from sgl.errors import ConfigError
from sgl.runtime.server.placement import GENERATED

RoutingPolicy = Literal["cache_aware", "round_robin", "random", "power_of_two", "prefix_hash"]

AFFINITY = 1.5
"""A session stays where it was while that takes at most so many times as long as the best place."""
SAMPLED = 2
LOST = 10.0
"""What computing a token again costs besides: room in another cache, and time of whoever comes next."""
CROWDED = 1.25
"""Times the mean work: up to that, a worker's queue matters little beside what it has computed."""
LITTLE = 0.15
FULL = 0.9
"""Part of a worker's KV pages in use from which on it is avoided: it would retract or drop what others need."""

_HASHED_BLOCKS = 4


@dataclass(slots=True)
class Demand:
    """What is known of a request or a program before it is sent. Work is counted in prompt tokens to compute."""

    blocks: Sequence[int] = ()
    """Hashes of the beginning: each of one more block than the one before."""
    block_tokens: int = 1
    prompt: float = 0.0  # tokens
    generated: float = 0.0  # tokens
    session: str | None = None
    requests: int = 1  # of an engine

    @property
    def work(self) -> float:
        """Where nothing of it is computed."""
        return self.prompt + GENERATED * self.generated


@dataclass(slots=True)
class Window:
    """What a worker has done since a measurement began."""

    at: float = 0.0  # the last event
    busy: float = 0.0  # seconds with work
    in_flight: float = 0.0  # requests, times seconds
    done: float = 0.0


@dataclass(slots=True, eq=False)
class Worker:
    """What is known of a worker."""

    id: str
    work: float = 0.0  # sent there and not done
    in_flight: int = 0  # requests
    running: int = 0  # of an engine, of those
    others: int = 0  # requests of an engine that came from elsewhere
    unknown: int = 0  # such requests at the last look
    elsewhere: float = 0.0  # the others' work, about
    rate: float = 1.0  # work a second
    kv_usage: float = 0.0  # part of its pages in use, 0 to 1
    placed: int = 0  # requests, since the start
    is_draining: bool = False
    about: dict[str, object] = field(default_factory=dict)
    window: Window = field(default_factory=Window)

    @property
    def queued(self) -> float:
        """All that it has to do."""
        return self.work + self.elsewhere

    def seconds(self, work: float, usual: float = 0.0) -> float:
        """Until it has done so much more; what it has to do before counts little up to `usual` seconds."""
        crowded = max(0.0, self.kv_usage - FULL) / (1 - FULL)
        ahead = self.queued / self.rate
        ahead = max(0.0, ahead - usual) + LITTLE * min(ahead, usual)
        return (ahead + work / self.rate) * (1 + crowded)


class Policy(ABC):
    """Chooses a worker."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    @abstractmethod
    def choose(
        self, demand: Demand, workers: Sequence[Worker], found: Callable[[], Mapping[str, int]], home: Worker | None
    ) -> Worker:
        """One of the workers, which are several. found: blocks that workers have of the beginning. home: the worker
        that had the session's last request."""


class CacheAware(Policy):
    """See the head of this file."""

    def choose(
        self, demand: Demand, workers: Sequence[Worker], found: Callable[[], Mapping[str, int]], home: Worker | None
    ) -> Worker:
        has = found()
        generated = GENERATED * demand.generated
        usual = CROWDED * sum(its.queued / its.rate for its in workers) / len(workers)
        most = max(has.values(), default=0) * demand.block_tokens

        def seconds(worker: Worker) -> float:
            saved = has.get(worker.id, 0) * demand.block_tokens
            lost = LOST * min(most - saved, demand.prompt)
            return worker.seconds(max(0.0, demand.prompt - saved) + lost + generated, usual)

        options = {worker.id: worker for worker in self._rng.sample(workers, min(SAMPLED, len(workers)))}
        if has:
            holders = [worker for worker in workers if worker.id in has]
            if holders:
                longest = max(has[worker.id] for worker in holders)
                best = min((its for its in holders if has[its.id] == longest), key=lambda its: its.seconds(0))
                least = min(holders, key=seconds)
                options |= {best.id: best, least.id: least}
        chosen = min(options.values(), key=lambda its: (seconds(its), its.placed, its.id))
        if home is not None and home is not chosen and seconds(home) <= AFFINITY * seconds(chosen):
            return home
        return chosen


class RoundRobin(Policy):
    """In turn."""

    _turn = -1

    def choose(
        self, demand: Demand, workers: Sequence[Worker], found: Callable[[], Mapping[str, int]], home: Worker | None
    ) -> Worker:
        self._turn += 1
        return workers[self._turn % len(workers)]


class Random(Policy):
    """By chance."""

    def choose(
        self, demand: Demand, workers: Sequence[Worker], found: Callable[[], Mapping[str, int]], home: Worker | None
    ) -> Worker:
        return self._rng.choice(workers)


class PowerOfTwo(Random):
    """The one of two by chance that has fewer requests."""

    def choose(
        self, demand: Demand, workers: Sequence[Worker], found: Callable[[], Mapping[str, int]], home: Worker | None
    ) -> Worker:
        return min(self._rng.sample(workers, 2), key=lambda its: its.in_flight + its.others)


class PrefixHash(Policy):
    """By a hash of the first blocks, or the session's name: the same worker as long as there is one, and no other
    request's worker changes when one comes or goes. One with much more to do than the mean is passed over."""

    def choose(
        self, demand: Demand, workers: Sequence[Worker], found: Callable[[], Mapping[str, int]], home: Worker | None
    ) -> Worker:
        key = demand.session or ",".join(map(str, demand.blocks[:_HASHED_BLOCKS]))
        most = CROWDED * (sum(worker.queued for worker in workers) + demand.work) / len(workers)
        ranked = sorted(
            workers, key=lambda its: hashlib.blake2b(f"{key}@{its.id}".encode(), digest_size=8).digest()
        )
        return next((worker for worker in ranked if worker.queued <= most), ranked[0])


_POLICIES: dict[RoutingPolicy, Callable[[random.Random], Policy]] = {
    "cache_aware": CacheAware,
    "round_robin": RoundRobin,
    "random": Random,
    "power_of_two": PowerOfTwo,
    "prefix_hash": PrefixHash,
}


def policy_named(name: str, rng: random.Random | None = None) -> Policy:
    """A policy by its name. Raises ConfigError."""
    made = _POLICIES.get(name)  # type: ignore[call-overload]
    if made is None:
        raise ConfigError(f"routing_policy is one of {', '.join(get_args(RoutingPolicy))}, not {name!r}")
    policy: Policy = made(rng or random.Random())
    return policy
