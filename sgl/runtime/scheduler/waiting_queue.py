"""The waiting queue: who is admitted next, fairly between calls and with bounded waits.

Priority comes first, then rank, then the policy. Rank depends on how many of the same call waited on arrival: 0 for
the first `SHARE`, 1 for as many again, then for twice as many each time. A call thus waits for about twice its own
number of another's requests, and a call of 10^5 never blocks a single one.

A request is *overtaken* when a later one of another call is admitted before it. After `patience` times the oldest
goes first, and nobody may pass.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator
from contextlib import closing
from heapq import heappop, heappush
from itertools import count

from sgl.runtime.cache.node import Edge, Node, Watcher
from sgl.runtime.config import SchedulePolicy
from sgl.runtime.scheduler.memory import RowMemory
from sgl.runtime.scheduler.order import Order
from sgl.runtime.scheduler.request import Request

DEFAULT_PATIENCE = 256
SHARE = 64
"""Waiting requests of one call that get rank 0."""
_MATCHES_A_ROUND = 64
_LOOK_AHEAD = 4  # requests without room whose loads begin
_MUCH_GARBAGE = 64  # tolerated dead heap entries


class WaitingQueue(Watcher):
    """Requests without a row; `candidates` yields them in order."""

    def __init__(self, policy: SchedulePolicy, memory: RowMemory, patience: int = DEFAULT_PATIENCE) -> None:
        self._policy = policy
        self._memory = memory
        self._patience = patience
        self._requests: dict[int, Request] = {}  # by order of arrival
        self._numbers = count(1)
        self._arrivals: list[int] = []  # a heap of orders, including some that left
        self._orders = [Order(policy, memory)]  # by rank
        self._of_call: dict[Hashable, int] = {}  # waiting requests of each call
        self._waiting_for_grammar: dict[int, Request] = {}  # nothing to compute yet
        self._num_waiting_for_grammar = 0
        self._overtaken = 0  # how often the oldest requests were

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def num_waiting_for_grammar(self) -> int:
        """Waiting requests whose grammar is not ready."""
        return self._num_waiting_for_grammar

    def add(self, request: Request) -> None:
        """Append a request, or return a retracted one to its old place. Idempotent."""
        if request.order in self._requests:
            return
        request.order = request.order or next(self._numbers)
        request.asked_len = -1
        self._requests[request.order] = request
        self._num_waiting_for_grammar += request.waits_for_grammar
        self._note_arrival(request)
        number = 0
        if request.call is not None:
            number = self._of_call.get(request.call, 0)
            self._of_call[request.call] = number + 1
        if request.waits_in is None:
            rank = (number // SHARE).bit_length()
            while rank >= len(self._orders):
                self._orders.append(Order(self._policy, self._memory))
            request.waits_in = self._orders[rank]
        request.waits_in.place(request)

    def remove(self, request: Request) -> None:
        """Remove a request that is not admitted."""
        self._memory.left_queue(request)
        oldest = self._round(self._oldest())
        del self._requests[request.order]
        self._num_waiting_for_grammar -= request.waits_for_grammar
        if self._waiting_for_grammar.pop(request.uid, None) is None:
            request.waits_in.leave(request)
        if request.call is not None:
            self._of_call[request.call] -= 1
            if not self._of_call[request.call]:
                del self._of_call[request.call]
        if self._round(self._oldest()) != oldest:
            self._overtaken = 0

    def admitted(self, request: Request) -> None:
        """Remove a request that got a row; count whom it overtook."""
        self.remove(request)
        oldest = self._oldest()
        if (
            oldest is not None
            and oldest.tick < request.tick
            and (request.call is None or request.call != oldest.call)
        ):
            self._overtaken += 1

    def grammar_is_ready(self, request: Request) -> None:
        """The request's constraint is compiled."""
        request.waits_for_grammar = False
        if request.order in self._requests:
            self._num_waiting_for_grammar -= 1
            if self._waiting_for_grammar.pop(request.uid, None) is not None:
                self._note_arrival(request)
                request.waits_in.place(request)

    def renew(self, request: Request) -> None:
        """What the policy goes by has changed for this request."""
        if request.group is not None:
            request.waits_in.leave(request)
            request.waits_in.place(request)

    def is_aged(self, request: Request) -> bool:
        """Whether nobody may pass this request."""
        return self._overtaken >= self._patience and self._round(request) == self._round(self._oldest())

    def candidates(self) -> Generator[Request, None, None]:
        """Requests that could run if they had a row, best first. Take each (`admitted`) or pass it over before the
        next; close the iterator before anything else changes."""
        matches_left = _MATCHES_A_ROUND
        orders = list(self._orders)
        for order in orders:
            matches_left = order.begin_round(matches_left)
        passed_over: list[Request] = []
        try:
            while (request := self._best()) is not None:
                order = request.waits_in
                if order.is_misplaced(request) and matches_left:
                    matches_left -= 1
                    order.leave(request)
                    order.place(request)
                    continue
                owner = self._memory.computed_by(request)
                if owner is not None:
                    order.set_aside(request, owner)
                    continue
                if request.waits_for_grammar and self._can_compute_nothing(request):
                    order.leave(request)
                    self._waiting_for_grammar[request.uid] = request
                    continue
                yield request
                if request.group is not None:
                    order.leave(request)
                    passed_over.append(request)
        finally:
            for request in passed_over:
                request.waits_in.place(request)
            for order in orders:
                order.end_round()

    def look_ahead(self) -> None:
        """Begin loads and pulls for those that come next, for whom there is no room now."""
        memory = self._memory
        if (memory.tiers is None and memory.transfers is None) or not self._requests:
            return
        with closing(self.candidates()) as candidates:
            for number, request in enumerate(candidates, 1):
                if number == _LOOK_AHEAD or self.is_aged(request):
                    break

    # ── what the cache tells ────────────────────────────────────────────────────────────────────────────────────

    def grown(self, node: Node, edge: Edge) -> None:
        for order in self._orders:
            order.grown(node, edge)

    def split(self, node: Node, upper: Node) -> None:
        for order in self._orders:
            order.split(node, upper)

    # ── who is next ─────────────────────────────────────────────────────────────────────────────────────────────

    def _best(self) -> Request | None:
        if self._overtaken >= self._patience:
            oldest = self._oldest()
            if oldest is not None and oldest.waits_in.takes_part(oldest):
                return oldest
        found: Request | None = None
        for order in self._orders:
            request = order.best()
            if request is not None and (found is None or request.priority > found.priority):
                found = request
                if self._policy != "priority":
                    break
        return found

    def _can_compute_nothing(self, request: Request) -> bool:
        """Without its grammar: it was retracted, or only its last known token is uncached."""
        cached_len = self._memory.current_match(request).length
        return request.num_retractions > 0 or cached_len == request.num_known - 1

    def _note_arrival(self, request: Request) -> None:
        heappush(self._arrivals, request.order)
        if len(self._arrivals) > 2 * len(self._requests) + _MUCH_GARBAGE:
            self._arrivals = sorted(self._requests)

    def _oldest(self) -> Request | None:
        """The first arrival that does not wait for its grammar."""
        arrivals = self._arrivals
        while arrivals:
            request = self._requests.get(arrivals[0])
            if request is not None and request.uid not in self._waiting_for_grammar:
                return request
            heappop(arrivals)
        return None

    @staticmethod
    def _round(request: Request | None) -> tuple[Hashable, ...] | None:
        """Requests that age together: arrivals of one scheduling round, of a large call `SHARE` of them."""
        if request is None:
            return None
        if request.call is None:
            return (request.tick,)
        return request.tick, request.call, request.order // SHARE
