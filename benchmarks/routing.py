"""Routing policies over recorded traffic in virtual time: hit rate and balance, beside an oracle.

    python -m benchmarks.routing TRACES [--requests 100000] [--workers 4 16 64] [--policies …] [--events late]

TRACES: a folder with mooncake/{conversation,synthetic}_trace.jsonl (requests with hashes of their blocks of 512 tokens;
github.com/kvcache-ai/Mooncake) and azure_llm/AzureLLMInferenceTrace_{conv,code}.csv (lengths only; github.com/Azure/
AzurePublicDataset). Copies of the Mooncake traces run side by side, each with hashes of its own, so that their number
makes up the requests; time is stretched until the fleet is busy for `--load` of it.

A worker computes one request after the other, 16,000 prompt tokens a second, a generated one counting as four, and
keeps the `--room` blocks that it used last. The oracle is one cache with the room of all workers together: no placement
finds more. Columns: prompt tokens found computed, the same as a part of the oracle's; work of the busiest worker by the
mean; mean and p99 seconds to the first token; and their ratios to cache_aware's. `smg` is a model of that router's
cache-aware policy: the longest match if it is over 0.3 of the prompt, else the smallest tree, and the shortest queue
where queues differ by more than 64 and 1.5 times.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from sgl.runtime.gateway.fleet import Fleet
from sgl.runtime.gateway.policy import FULL, POLICIES, Choice, Demand, Worker
from sgl.runtime.gateway.reports import Load
from sgl.runtime.server.placement import GENERATED

RATE = 16_000.0  # prompt tokens a second
BLOCK = 512
NAMES = ("cache_aware", "round_robin", "random", "power_of_two", "prefix_hash", "smg")
LATE_SECONDS = 5.0


@dataclass(slots=True)
class Arrival:
    """A request: when, its blocks' hashes, and its lengths in tokens."""

    seconds: float
    blocks: list[int]
    prompt: int
    generated: int


def mooncake(folder: Path, names: Sequence[str], number: int, seed: int = 0) -> list[Arrival]:
    """Copies of the traces, each with hashes of its own, begun within an hour."""
    traces = [
        [json.loads(line) for line in (folder / "mooncake" / f"{name}_trace.jsonl").open(encoding="utf-8")]
        for name in names
    ]
    rng, found, copy = random.Random(seed), list[Arrival](), 0
    while len(found) < number:
        for trace in traces:
            copy += 1
            start = rng.uniform(0, 3600)
            found += [
                Arrival(
                    start + its["timestamp"] / 1000,
                    [copy << 32 | block for block in its["hash_ids"]],
                    its["input_length"],
                    its["output_length"],
                )
                for its in trace
            ]
    found.sort(key=lambda its: its.seconds)
    return found[:number]


def azure(folder: Path, number: int) -> list[Arrival]:
    """Lengths without hashes: nothing is shared."""
    found: list[Arrival] = []
    copy = 0
    while len(found) < number:
        for name in ("conv", "code"):
            with (folder / "azure_llm" / f"AzureLLMInferenceTrace_{name}.csv").open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            first = datetime.fromisoformat(rows[0]["TIMESTAMP"][:26])
            for row in rows:
                seconds = (datetime.fromisoformat(row["TIMESTAMP"][:26]) - first).total_seconds()
                copy += 1
                found.append(Arrival(seconds, [copy], int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    found.sort(key=lambda its: its.seconds)
    return found[:number]


class Cache:
    """The blocks used last."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def found(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are kept."""
        for number, block in enumerate(blocks):
            if block not in self.blocks:
                return number
        return len(blocks)

    def use(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Keep these; returns which are new and which were dropped for them."""
        new = [block for block in blocks if block not in self.blocks]
        for block in reversed(blocks):  # what is dropped goes from the end
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        dropped = [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - self.room)]
        return new, dropped


class Smg:
    """A model of smg's policy of the same name; see the head of this file."""

    def __init__(self) -> None:
        self._sizes: dict[str, set[int]] = {}

    def __call__(self, its: Choice) -> Worker:
        """See `Policy`."""
        demand, workers, has = its.demand, its.workers, its.found
        most, least = max(its.in_flight for its in workers), min(its.in_flight for its in workers)
        best = max(workers, key=lambda its: has.get(its.id, 0))
        if most - least > 64 and most > 1.5 * least:
            chosen = min(workers, key=lambda its: its.in_flight)
        elif demand.blocks and has.get(best.id, 0) > 0.3 * len(demand.blocks):
            chosen = best
        else:
            chosen = min(workers, key=lambda its: len(self._sizes.get(its.id, ())))
        self._sizes.setdefault(chosen.id, set()).update(demand.blocks)
        return chosen


@dataclass
class Result:
    """Of one run."""

    hit_rate: float
    balance: float
    mean: float
    p99: float


def oracle(arrivals: Sequence[Arrival], room: int) -> tuple[float, float]:
    """The hit rate of one cache, and the work that is left, in prompt tokens."""
    cache, hit, work = Cache(room), 0, 0.0
    for its in arrivals:
        found = min(cache.found(its.blocks) * BLOCK, its.prompt)
        cache.use(its.blocks)
        hit += found
        work += its.prompt - found + GENERATED * its.generated
    return hit / sum(its.prompt for its in arrivals), work


class Simulation:
    """One policy, some workers."""

    def __init__(
        self,
        name: str,
        speeds: Sequence[float],
        room: int,
        events: str,
        seed: int = 0,
        pressed: Callable[[str, float], Load] | None = None,
        is_told: bool = True,
    ) -> None:
        """pressed: what others have at a worker at a time. Above FULL of its pages, requests take up to four times as
        long there: what they computed is dropped and computed again. is_told: workers report that each second."""
        self.now = 0.0
        rng = random.Random(seed)
        self.fleet = Fleet(rng=rng, clock=lambda: self.now)
        self.fleet._policy = Smg() if name == "smg" else POLICIES[name]
        self.caches = {f"worker {i}": Cache(room) for i in range(len(speeds))}
        self.speeds = dict(zip(self.caches, speeds, strict=True))
        self.free_at = dict.fromkeys(self.caches, 0.0)
        self.done = dict.fromkeys(self.caches, 0.0)
        self.events = events
        for worker in self.caches:
            self.fleet.add(worker)
            self.fleet.index.set_room(worker, room)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._pressed = pressed
        if pressed is not None and is_told:
            self._report()

    def _report(self) -> None:
        assert self._pressed is not None
        for worker in self.fleet.workers:
            load = self._pressed(worker.id, self.now)
            self.fleet.report(worker, replace(load, running=load.running + worker.running))
        self._at(self.now + 1.0, self._report)

    def run(self, arrivals: Sequence[Arrival], stretch: float) -> Result:
        """All of them."""
        hit, waits = 0, []
        for its in arrivals:
            self._until(its.seconds * stretch)
            ticket = self.fleet.route(Demand(its.blocks, BLOCK, its.prompt, its.generated))
            worker = ticket.worker.id
            found = min(self.caches[worker].found(its.blocks) * BLOCK, its.prompt)
            hit += found
            work, speed = its.prompt - found + GENERATED * its.generated, RATE * self.speeds[worker]
            if self._pressed is not None:
                speed /= 1 + 3 * max(0.0, self._pressed(worker, self.now).kv_usage - FULL) / (1 - FULL)
            start = max(self.now, self.free_at[worker])
            first = start + (its.prompt - found) / speed
            self.free_at[worker] = start + work / speed
            self.done[worker] += work / self.speeds[worker]
            waits.append(first - self.now)
            self._store(worker, its.blocks)
            self._at(first, ticket.first_byte)
            self._at(self.free_at[worker], ticket.end)
        waits.sort()
        mean = sum(self.done.values()) / len(self.done)
        return Result(
            hit / sum(its.prompt for its in arrivals),
            max(self.done.values()) / mean,
            sum(waits) / len(waits),
            waits[int(0.99 * len(waits))],
        )

    def _store(self, worker: str, blocks: Sequence[int]) -> None:
        """What the worker computes it keeps, and tells at the end of its queue, or later."""
        new, dropped = self.caches[worker].use(blocks)
        if self.events != "none":
            index, late = self.fleet.index, LATE_SECONDS if self.events == "late" else 0.0
            self._at(
                self.free_at[worker] + late, lambda: (index.stored(worker, new), index.removed(worker, dropped))
            )

    def _at(self, when: float, action: Callable[[], object]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, action))  # type: ignore[misc]

    def _until(self, when: float) -> None:
        while self._queue and self._queue[0][0] <= when:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = when


def measure(
    name: str, arrivals: Sequence[Arrival], speeds: Sequence[float], room: int, load: float, events: str = "exact"
) -> tuple[Result, float]:
    """A policy's result, and the oracle's hit rate."""
    rate, work = oracle(arrivals, room * len(speeds))
    seconds = arrivals[-1].seconds - arrivals[0].seconds
    stretch = work / RATE / sum(speeds) / load / seconds
    return Simulation(name, speeds, room, events).run(arrivals, stretch), rate


def main() -> None:
    """Print a table for each workload and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--policies", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--workloads", nargs="+", default=["conversation", "synthetic", "azure"])
    parser.add_argument("--room", type=int, default=4096, help="blocks that a worker keeps")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--events", default="exact", choices=["exact", "late", "none"])
    args = parser.parse_args()
    for workload in args.workloads:
        arrivals = (
            azure(args.traces, args.requests)
            if workload == "azure"
            else mooncake(args.traces, [workload], args.requests)
        )
        for number in args.workers:
            base: Result | None = None
            print(f"{workload}, {len(arrivals)} requests, {number} workers, events {args.events}")
            for name in args.policies:
                result, best = measure(name, arrivals, [1.0] * number, args.room, args.load, args.events)
                base = base or result
                part = f"{result.hit_rate / best:6.3f} of oracle" if best else "                "
                print(
                    f"  {name:<13}hits {result.hit_rate:.3f} {part}   max/mean {result.balance:5.2f}"
                    f"   first token mean {result.mean:7.2f} s p99 {result.p99:7.2f} s"
                    f"   {result.mean / base.mean:5.2f}x {result.p99 / base.p99:5.2f}x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
