"""The workers that take requests: what each has to do, how fast it does it, and who gets the next request.

A worker's rate is measured: the work that it did by the time during which it had any, while it had about as much to do
as the others, since little work is done slowly on a worker that batches. So no worker is left out because it was left
out before."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from sgl.errors import EngineDead
from sgl.runtime.gateway.index import PrefixIndex
from sgl.runtime.gateway.policy import POLICIES, Choice, Demand, RoutingPolicy, Window, Worker
from sgl.runtime.gateway.reports import Load
from sgl.runtime.server.placement import GENERATED

SESSIONS = 100_000  # remembered

_WINDOW_SECONDS = 5.0  # with work, of one measurement
_SLOWLY = 0.05  # share of the latest request in the usual work of one
_SMOOTHED = 0.3  # share of the latest measurement in a rate
_APART = 4.0  # a rate's factor from the mean, at most


class Ticket:
    """A request's place at a worker: counts as its work until `end`."""

    __slots__ = ("_fleet", "_generated", "_prompt", "_requests", "found_tokens", "worker")

    def __init__(
        self, fleet: Fleet, worker: Worker, prompt: float, generated: float, found_tokens: float, requests: int
    ) -> None:
        self.worker = worker
        self.found_tokens = found_tokens  # of its prompt, computed there
        self._fleet: Fleet | None = fleet
        self._prompt, self._generated, self._requests = prompt, generated, requests
        fleet.meet(worker, 0.0)
        worker.work += prompt + generated
        worker.in_flight += 1
        worker.running += requests
        worker.placed += 1
        fleet.turn = worker.turn = fleet.turn + 1

    def first_byte(self) -> None:
        """Its prompt is computed: only what it generates is left to do. Idempotent."""
        if self._prompt and self._fleet is not None:
            self._fleet.meet(self.worker, self._prompt)
            self.worker.work -= self._prompt
            self._prompt = 0.0

    def computed_elsewhere(self) -> None:
        """Its prompt is not for this worker to compute. Idempotent."""
        self.worker.work -= self._prompt
        self._prompt = 0.0

    def end(self) -> None:
        """It has ended, for any reason. Idempotent."""
        if self._fleet is not None:
            self._fleet.meet(self.worker, self._generated)
            self.worker.work = max(0.0, self.worker.work - self._prompt - self._generated)
            self.worker.in_flight -= 1
            self.worker.running -= self._requests
            self._fleet = None


class Fleet:
    """The workers. Single-threaded."""

    def __init__(
        self,
        routing_policy: RoutingPolicy = "cache_aware",
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.index = PrefixIndex(clock)
        self._policy = POLICIES[routing_policy]
        self._rng = rng or random.Random()
        self._workers: dict[str, Worker] = {}
        self.turn = 0  # requests that were placed
        self._is_measured = False
        self._usual = 0.0  # work of a request
        self._homes: OrderedDict[str, str] = OrderedDict()  # of sessions, the one used longest ago first

    @property
    def workers(self) -> Collection[Worker]:
        """All of them."""
        return self._workers.values()

    def add(self, worker_id: str) -> Worker:
        """One more, with the mean rate of the others."""
        rates = [worker.rate for worker in self._workers.values()]
        worker = self._workers[worker_id] = Worker(worker_id, rate=sum(rates) / len(rates) if rates else 1.0)
        return worker

    def remove(self, worker_id: str) -> None:
        """It is gone. Idempotent."""
        self._workers.pop(worker_id, None)
        self.index.forget(worker_id)

    def report(self, worker: Worker, load: Load) -> None:
        """A worker says what it has to do: what others than this gateway sent, and its KV pages, count from now on."""
        worker.kv_usage = load.kv_usage
        others, worker.unknown = worker.unknown, max(0, load.requests - worker.running)
        worker.others = min(others, worker.unknown)  # twice in a row: requests come and go meanwhile
        worker.elsewhere = worker.others * self._usual

    def route(self, demand: Demand, among: Iterable[Worker] | None = None) -> Ticket:
        """Choose a worker that does not drain. among: those that may be; None: all. Raises EngineDead."""
        workers = [its for its in (self.workers if among is None else among) if not its.is_draining]
        if not workers:
            raise EngineDead("no worker takes requests: they are starting, draining, or gone")
        home = None if demand.session is None else self._workers.get(self._homes.get(demand.session, ""))
        blocks = self.index.found(demand.blocks)
        found = {its.id: blocks[its.id] for its in workers if its.id in blocks}
        worker = workers[0]
        if len(workers) > 1:
            worker = self._policy(Choice(demand, workers, found, home if home in workers else None, self._rng))
        self.index.sent(worker.id, demand.blocks)
        if demand.session is not None:
            self._homes[demand.session] = worker.id
            self._homes.move_to_end(demand.session)
            if len(self._homes) > SESSIONS:
                self._homes.popitem(last=False)
        computed = min(demand.prompt, float(found.get(worker.id, 0) * demand.block_tokens))
        left, generated, requests = demand.prompt - computed, GENERATED * demand.generated, max(1, demand.requests)
        self._usual += _SLOWLY * ((left + generated) / requests - self._usual)
        return Ticket(self, worker, left, generated, computed, requests)

    def meet(self, worker: Worker, done: float) -> None:
        """A request comes to a worker, or so much of its work is done."""
        now, window = self.clock(), worker.window
        if worker.in_flight:
            window.busy += now - window.at
            window.in_flight += worker.in_flight * (now - window.at)
            window.done += done
        window.at = now
        if window.busy < _WINDOW_SECONDS or self._workers.get(worker.id) is not worker:  # it is gone
            return
        among = [its for its in self._workers.values() if its.in_flight]
        usual = sum(its.in_flight for its in among) / max(1, len(among))
        if 2 * window.in_flight / window.busy >= usual:
            self._measure(worker, window.done / window.busy)
        worker.window = Window(now)

    def _measure(self, worker: Worker, rate: float) -> None:
        if not self._is_measured:  # the first measurement is the best guess of all others
            self._is_measured = True
            for its in self._workers.values():
                its.rate = rate
        mean = sum(its.rate for its in self._workers.values()) / len(self._workers)
        rate = min(max(rate, mean / _APART), mean * _APART)
        worker.rate += _SMOOTHED * (rate - worker.rate)
