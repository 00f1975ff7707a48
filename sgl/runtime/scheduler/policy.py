"""The waiting queue: who is admitted next.

It orders requests and bounds every wait; it does not know whether a request fits. A request is *overtaken* when
one that arrived in a later round is admitted before it. Whoever was overtaken `patience` times goes first, in
order of arrival, and then nobody may pass.

No operation looks at all that wait. Requests whose cached prefix ends at the same tree node and that need the same
page next form a group: what the cache stores or evicts, and who computes that page, concerns a group as a whole. So a
change of the tree marks one group as stale, and its members are matched again a few each round, the oldest first; a
group whose next page a running request computes is set aside until that is done. Beyond `_MATCHES_A_ROUND`
stale requests, "longest prefix" therefore means the longest that is known so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Protocol, TypeAlias

from sgl.runtime.cache.radix import Edge, Match, Node
from sgl.runtime.config import SchedulePolicy
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.subtrees import Subtrees

DEFAULT_PATIENCE = 256
_MATCHES_A_ROUND = 64
_MUCH_GARBAGE = 64  # entries of a heap that are over, before anybody minds

_ORDER_BITS = 48
_ORDER = (1 << _ORDER_BITS) - 1

Rank: TypeAlias = int  # what the policy looks at, and behind it the order of arrival: the lowest goes first
Key: TypeAlias = tuple[Node, int, Edge | None]  # of a match: its node and length, and the page that comes next


class Prefixes(Protocol):
    """What the queue asks of the memory."""

    def current_match(self, request: Request) -> Match:
        """The longest cached prefix that a waiting request may use."""

    def computed_by(self, request: Request) -> int | None:
        """The uid of a running request that is about to put the next tokens of this one into the tree."""

    def is_in_flight(self, uid: int) -> bool:
        """Whether that request is still about to."""


class Group:
    """Waiting requests with one cached prefix and one page that comes next. Heaps hold ranks, which say whose they are:
    numbers are quick to compare, and garbage collections pass them over."""

    __slots__ = ("arrivals", "blocked_by", "is_stale", "key", "length", "members", "size", "stamp")

    def __init__(self, key: Key, *, by_priority: bool) -> None:
        self.key = key
        self.length = key[1]  # tokens of the prefix; a lower bound if it is stale
        self.members: list[int] = []  # a heap of ranks, with some that have left
        self.arrivals: list[int] = [] if by_priority else self.members  # the same by arrival alone
        self.size = 0
        self.is_stale = False
        self.blocked_by: int | None = None  # who computes the next page
        self.stamp = 0  # of its valid entries in the queue's heaps; 0: it is in none


class WaitingQueue:
    """Requests without a row; `candidates` gives them in the policy's order."""

    def __init__(self, policy: SchedulePolicy, prefixes: Prefixes, patience: int = DEFAULT_PATIENCE) -> None:
        self._policy = policy
        self._prefixes = prefixes
        self._patience = patience
        self._requests: dict[int, Request] = {}  # by order of arrival
        self._orders = count(1)
        self._stamps = count(1)
        self._arrivals: list[int] = []  # a heap of their orders, with some that have left
        self._groups: dict[Key, Group] = {}
        self._offered: dict[int, Group] = {}  # those that are not set aside, by stamp
        self._by_policy: list[tuple[Rank, int]] = []  # heaps of their ranks and stamps, with some that are over
        self._by_arrival: list[tuple[Rank, int]] = []
        self._subtrees: Subtrees[Group] | None = Subtrees() if policy == "dfs-weight" else None
        self._stale: deque[Group] = deque()
        self._blocked: dict[int, list[Group]] = {}  # by who computes their next page
        self._waiting_for_grammar: dict[int, Request] = {}  # those that cannot go on before they are let go
        self._num_waiting_for_grammar = 0
        self._overtaken = 0  # how often the oldest round was

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def num_waiting_for_grammar(self) -> int:
        """How many of them are held."""
        return self._num_waiting_for_grammar

    def add(self, request: Request) -> None:
        """Append a request, or give a retracted one its old place back. One that waits already stays where it is."""
        if request.order in self._requests:
            return
        request.order = request.order or next(self._orders)
        self._requests[request.order] = request
        self._num_waiting_for_grammar += request.waits_for_grammar
        heappush(self._arrivals, request.order)
        if len(self._arrivals) > 2 * len(self._requests) + _MUCH_GARBAGE:
            self._arrivals = sorted(self._requests)
        self._place(request)

    def remove(self, request: Request) -> None:
        """Take out a request that leaves for another reason than admission."""
        oldest = self._oldest_tick()
        del self._requests[request.order]
        self._num_waiting_for_grammar -= request.waits_for_grammar
        if self._waiting_for_grammar.pop(request.uid, None) is None:
            self._leave(request)
        if self._oldest_tick() != oldest:
            self._overtaken = 0

    def admitted(self, request: Request) -> None:
        """Take out a request that was given a row, and remember whom it overtook."""
        self.remove(request)
        oldest = self._oldest_tick()
        if oldest is not None and oldest < request.tick:
            self._overtaken += 1

    def grammar_is_ready(self, request: Request) -> None:
        """A request that is held may go on."""
        request.waits_for_grammar = False
        if request.order in self._requests:
            self._num_waiting_for_grammar -= 1
            if self._waiting_for_grammar.pop(request.uid, None) is not None:
                self._place(request)

    def is_aged(self, request: Request) -> bool:
        """Whether the request waited so long that nobody may pass it any more."""
        return self._overtaken >= self._patience and request.tick == self._oldest_tick()

    def candidates(self) -> Generator[Request, None, None]:
        """Requests that could go on if they had a row, next first. Whoever takes one from here has it `admitted` before
        the next, or passes it over for this round; close the iterator before anything else changes."""
        self._unblock()
        budget = self._match_again(_MATCHES_A_ROUND)
        passed_over: list[Request] = []
        if self._subtrees is not None:
            self._subtrees.freeze()
        try:
            while (found := self._best()) is not None:
                group, request = found
                match = self._prefixes.current_match(request)
                if key_of(match) != group.key:
                    group.length = match.length  # what is true of one is likely of all
                    if budget:
                        budget -= 1
                        self._leave(request)
                        self._place(request)
                        continue
                owner = self._prefixes.computed_by(request)
                if owner is not None:
                    self._set_aside(group, owner)
                    continue
                if request.waits_for_grammar and (request.num_retractions or match.length == request.num_known - 1):
                    self._leave(request)  # it has given way, or nothing is left to compute
                    self._waiting_for_grammar[request.uid] = request
                    continue
                yield request
                if request.group is not None:
                    self._leave(request)
                    passed_over.append(request)
        finally:
            for request in passed_over:
                self._place(request)
            if self._subtrees is not None:
                self._subtrees.thaw()

    # ── what the cache tells ────────────────────────────────────────────────────────────────────────────────────

    def grown(self, node: Node, edge: Edge) -> None:
        """A node was added below this one: whoever waits for that page has a longer prefix now."""
        group = self._groups.get((node, node.length, edge))
        if group is not None:
            group.length = max(group.length, group.key[1] + 1)
            if not group.is_stale:
                group.is_stale = True
                self._stale.append(group)
            group.blocked_by = None
            self._offer(group)

    def split(self, node: Node, upper: Node) -> None:
        """A node was split: `upper` is new, above it."""
        if self._subtrees is not None:
            self._subtrees.split(node, upper)

    # ── groups ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, request: Request) -> None:
        """Put a request into its group."""
        key = key_of(self._prefixes.current_match(request))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, by_priority=self._policy == "priority")
        self._join(group, request)
        if self._subtrees is not None:
            self._subtrees.weigh(key[0], 1)
        if group.blocked_by is None and (
            group.size == 1
            or self._first(group, group.members) is request
            or self._first(group, group.arrivals) is request
        ):
            self._offer(group)

    def _leave(self, request: Request) -> None:
        """Take a request out of its group."""
        group = request.group
        assert group is not None, "a request that waits is held, or in a group"
        request.group = None
        group.size -= 1
        if group.members and group.members[0] & _ORDER == request.order:
            heappop(group.members)
        if not group.size:
            self._withdraw(group)
            del self._groups[group.key]
        if self._subtrees is not None:
            self._subtrees.weigh(group.key[0], -1)

    def _join(self, group: Group, request: Request) -> None:
        request.group = group
        group.size += 1
        if self._policy == "priority":
            heappush(group.arrivals, request.order)
            heappush(group.members, (-request.priority << _ORDER_BITS) + request.order)
        else:
            heappush(group.members, request.order)
        for heap in (group.members, group.arrivals):
            if len(heap) > 2 * group.size + _MUCH_GARBAGE:
                heap[:] = sorted({rank for rank in heap if self._is_member(group, rank)})

    def _is_member(self, group: Group, rank: Rank) -> bool:
        request = self._requests.get(rank & _ORDER)
        return request is not None and request.group is group

    def _first(self, group: Group, heap: list[Rank]) -> Request:
        """The first member by one of the group's heaps; there is one."""
        while not self._is_member(group, heap[0]):
            heappop(heap)
        return self._requests[heap[0] & _ORDER]

    def _offer(self, group: Group) -> None:
        """Let a group take part from now on, at its present rank."""
        self._withdraw(group)
        group.stamp = next(self._stamps)
        self._offered[group.stamp] = group
        self._push(self._by_arrival, self._arrival(group), group)
        if self._policy in ("lpm", "priority"):
            self._push(self._by_policy, self._rank(group), group)
        if self._subtrees is not None:
            self._subtrees.offer(group.key[0], group, self._arrival(group))

    def _push(self, heap: list[tuple[Rank, int]], rank: Rank, group: Group) -> None:
        heappush(heap, (rank, group.stamp))
        if len(heap) > 2 * len(self._offered) + _MUCH_GARBAGE:
            heap[:] = sorted(entry for entry in heap if entry[1] in self._offered)

    def _withdraw(self, group: Group) -> None:
        if group.stamp:
            del self._offered[group.stamp]
            group.stamp = 0
            if self._subtrees is not None:
                self._subtrees.withdraw(group.key[0])

    def _rank(self, group: Group) -> Rank:
        first = self._first(group, group.members)
        best = group.length if self._policy == "lpm" else first.priority
        return (-best << _ORDER_BITS) + first.order

    def _arrival(self, group: Group) -> Rank:
        return self._first(group, group.arrivals).order

    def _top(self, heap: list[tuple[Rank, int]], rank: Callable[[Group], Rank]) -> Group | None:
        """The group of the lowest rank. One whose rank rose since it was put there moves back first."""
        while heap:
            was, stamp = heap[0]
            group = self._offered.get(stamp)
            if group is None:
                heappop(heap)
            elif (now := rank(group)) != was:
                heapreplace(heap, (now, stamp))
            else:
                return group
        return None

    def _best(self) -> tuple[Group, Request] | None:
        """Who is next of those that take part."""
        if self._overtaken >= self._patience or self._policy == "fcfs":
            group = self._top(self._by_arrival, self._arrival)
            if group is not None:
                first = self._first(group, group.arrivals)
                if self._policy == "fcfs" or first.tick == self._oldest_tick():
                    return group, first
        subtrees = self._subtrees
        group = self._top(self._by_policy, self._rank) if subtrees is None else subtrees.best()
        return None if group is None else (group, self._first(group, group.members))

    def _set_aside(self, group: Group, owner: int) -> None:
        """Leave a group out until `owner` computes no more, or a page is added for it."""
        self._withdraw(group)
        group.blocked_by = owner
        self._blocked.setdefault(owner, []).append(group)

    def _unblock(self) -> None:
        """Let those take part again that wait for nobody any more."""
        for owner in [owner for owner in self._blocked if not self._prefixes.is_in_flight(owner)]:
            for group in self._blocked.pop(owner):
                if group.blocked_by == owner and group.size:
                    group.blocked_by = None
                    self._offer(group)

    def _match_again(self, budget: int) -> int:
        """Put so many requests of stale groups where they belong by now; returns how many fewer it were."""
        while self._stale and budget:
            group = self._stale[0]
            if not group.size or not group.is_stale:
                self._stale.popleft()
                continue
            request = self._first(group, group.members)
            if key_of(self._prefixes.current_match(request)) == group.key:
                group.is_stale = False  # what was added has been evicted again
                group.length = group.key[1]
                continue
            budget -= 1
            self._leave(request)
            self._place(request)
        return budget

    def _oldest_tick(self) -> int | None:
        arrivals = self._arrivals
        while arrivals and arrivals[0] not in self._requests:
            heappop(arrivals)
        return self._requests[arrivals[0]].tick if arrivals else None


def key_of(match: Match) -> Key:
    """Under which a request of that match is filed."""
    return match.node, match.length, match.next_edge
