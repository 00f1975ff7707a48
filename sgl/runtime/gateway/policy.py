"""Which of several workers gets a request. A policy is a pure function of what the fleet knows.

`cache_aware` asks when the request would be done: what a worker has to do, and of the request what it has not computed
yet, by the worker's rate. So requests with the same beginning meet until it costs less to compute the beginning once
more elsewhere, and an empty worker wins by having nothing to do, never by an empty cache. Only a few workers are
compared: those that have most of the beginning, the session's, and a few by chance.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that it names, of those that some worker has."""


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
    turn: int = 0  # of all that were placed anywhere, the last one's number
    is_draining: bool = False
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


@dataclass(slots=True, frozen=True)
class Choice:
    """Of one of several workers."""

    demand: Demand
    workers: Sequence[Worker]
    found: Mapping[str, int]
    """Blocks of the beginning that workers have, by their ids."""
    home: Worker | None
    """The worker that had the session's last request."""
    rng: random.Random


def _cache_aware(its: Choice) -> Worker:
    demand, workers, found = its.demand, its.workers, its.found
    usual = CROWDED * sum(each.queued / each.rate for each in workers) / len(workers)
    most = max(found.values(), default=0) * demand.block_tokens

    def seconds(worker: Worker) -> float:
        saved = found.get(worker.id, 0) * demand.block_tokens
        lost = LOST * min(most - saved, demand.prompt)
        return worker.seconds(max(0.0, demand.prompt - saved) + lost + GENERATED * demand.generated, usual)

    options = its.rng.sample(workers, min(SAMPLED, len(workers)))
    if holders := [worker for worker in workers if worker.id in found]:
        longest = max(found.values())
        options.append(min((each for each in holders if found[each.id] == longest), key=lambda it: it.seconds(0)))
        options.append(min(holders, key=seconds))
    chosen = min(options, key=lambda it: (seconds(it), it.placed, it.id))
    is_near = its.home is not None and seconds(its.home) <= AFFINITY * seconds(chosen)
    return its.home if its.home is not None and is_near else chosen


def _prefix_hash(its: Choice) -> Worker:
    """By the first blocks, or the session's name: no other request's worker changes when one comes or goes. One with
    much more to do than the mean is passed over."""
    demand, workers = its.demand, its.workers
    key = demand.session or ",".join(map(str, demand.blocks[:_HASHED_BLOCKS]))
    work = demand.prompt + GENERATED * demand.generated
    most = CROWDED * (sum(worker.queued for worker in workers) + work) / len(workers)
    ranked = sorted(workers, key=lambda it: hashlib.blake2b(f"{key}@{it.id}".encode(), digest_size=8).digest())
    return next((worker for worker in ranked if worker.queued <= most), ranked[0])


Policy = Callable[[Choice], Worker]
POLICIES: dict[RoutingPolicy, Policy] = {
    "cache_aware": _cache_aware,
    # who had none for longest: requests go now to all, now to prefill workers, now to the one that they are for
    "round_robin": lambda its: min(its.workers, key=lambda it: it.turn),
    "random": lambda its: its.rng.choice(its.workers),
    "power_of_two": lambda its: min(its.rng.sample(its.workers, 2), key=lambda it: it.in_flight + it.others),
    "prefix_hash": _prefix_hash,
}
