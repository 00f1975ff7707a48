"""One policy's order over waiting requests, without ever visiting all of them.

Requests with the same cached prefix (tree node) and next page form a group, since changes of the cache concern them
alike. A change marks its group stale; stale members are rematched a few each round, oldest first. A group whose
next page is being computed is set aside. "Longest prefix" therefore means the longest known so far.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush, heapreplace
from itertools import count

from sgl.runtime.cache.node import Edge, Match, Node
from sgl.runtime.config import SchedulePolicy
from sgl.runtime.scheduler.memory import RowMemory
from sgl.runtime.scheduler.programs import rank_of
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.subtrees import Group, Key, Rank, Subtrees

_MUCH_GARBAGE = 64  # tolerated dead heap entries

_ORDER_BITS = 48
_ORDER = (1 << _ORDER_BITS) - 1


class Order:
    """Placed requests; `best` is the first that is not set aside."""

    def __init__(self, policy: SchedulePolicy, memory: RowMemory) -> None:
        self._policy = policy
        self._memory = memory
        self._requests: dict[int, Request] = {}  # by order of arrival
        self._stamps = count(1)
        self._groups: dict[Key, Group] = {}
        self._offered: dict[int, Group] = {}  # groups that are not set aside, by stamp
        self._heap: list[tuple[Rank, int]] = []  # (rank, stamp) of those, including dead entries
        self._subtrees: Subtrees | None = Subtrees() if policy == "dfs-weight" else None
        self._stale: deque[Group] = deque()
        self._blocked: dict[int, dict[Group, None]] = {}  # set aside, by the uid that computes their next page

    def place(self, request: Request) -> None:
        """Put a request into its group."""
        key = key_of(self._memory.current_match(request))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key)
        self._requests[request.order] = request
        self._join(group, request)
        if self._subtrees is not None:
            self._subtrees.weigh(key[0], 1)
        if group.blocked_by is None and (group.size == 1 or self._first(group) is request):
            self._offer(group)

    def leave(self, request: Request) -> None:
        """Take a request out of its group."""
        group: Group = request.group
        del self._requests[request.order]
        request.group = None
        group.size -= 1
        if group.members and group.members[0] & _ORDER == request.order:
            heappop(group.members)
        if not group.size:
            self._withdraw(group)
            self._unblock(group)
            del self._groups[group.key]
        if self._subtrees is not None:
            self._subtrees.weigh(group.key[0], -1)

    def best(self) -> Request | None:
        """The first request that is not set aside."""
        group = self._top() if self._subtrees is None else self._subtrees.best()
        return None if group is None else self._first(group)

    def takes_part(self, request: Request) -> bool:
        """Whether it has a group that is not set aside."""
        return request.group is not None and request.group.stamp > 0

    def is_misplaced(self, request: Request) -> bool:
        """Whether its match no longer fits its group, which becomes stale."""
        match = self._memory.current_match(request)
        if key_of(match) == request.group.key:
            return False
        group: Group = request.group
        group.length = match.length  # likely true of all members
        self._mark_stale(group)
        return True

    def set_aside(self, request: Request, owner: int) -> None:
        """Leave its group out until `owner` is done or adds the page."""
        group: Group = request.group
        self._withdraw(group)
        group.blocked_by = owner
        self._blocked.setdefault(owner, {})[group] = None

    def begin_round(self, matches_left: int) -> int:
        """Reoffer unblocked groups and match up to `matches_left` stale requests again; returns how many are left.
        Freezes weights until `end_round`."""
        for owner in [owner for owner in self._blocked if not self._memory.is_in_flight(owner)]:
            for group in self._blocked.pop(owner):
                group.blocked_by = None
                self._offer(group)
        matches_left = self._match_again(matches_left)
        if self._subtrees is not None:
            self._subtrees.freeze()
        return matches_left

    def end_round(self) -> None:
        """Apply the changes of weights."""
        if self._subtrees is not None:
            self._subtrees.thaw()

    # ── what the cache tells ────────────────────────────────────────────────────────────────────────────────────

    def grown(self, node: Node, edge: Edge) -> None:
        """See `radix.Watcher`: whoever waits for that page has a longer prefix now."""
        group = self._groups.get((node, node.length, edge))
        if group is not None:
            group.length = max(group.length, group.key[1] + 1)
            self._mark_stale(group)
            self._unblock(group)
            self._offer(group)

    def split(self, node: Node, upper: Node) -> None:
        """`upper` is new, above `node`."""
        if self._subtrees is not None:
            self._subtrees.split(node, upper)

    # ── groups ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _join(self, group: Group, request: Request) -> None:
        request.group = group
        group.size += 1
        rank = request.order
        if self._policy == "priority":
            rank -= request.priority << _ORDER_BITS
        elif self._policy == "program":
            rank |= rank_of(request) << _ORDER_BITS
        heappush(group.members, rank)
        if len(group.members) > 2 * group.size + _MUCH_GARBAGE:
            group.members = sorted({rank for rank in group.members if self._is_member(group, rank)})

    def _is_member(self, group: Group, rank: Rank) -> bool:
        request = self._requests.get(rank & _ORDER)
        return request is not None and request.group is group

    def _first(self, group: Group) -> Request:
        while not self._is_member(group, group.members[0]):
            heappop(group.members)
        return self._requests[group.members[0] & _ORDER]

    def _offer(self, group: Group) -> None:
        self._withdraw(group)
        group.stamp = next(self._stamps)
        self._offered[group.stamp] = group
        if self._subtrees is not None:
            self._subtrees.offer(group.key[0], group, self._first(group).order)
            return
        heappush(self._heap, (self._rank(group), group.stamp))
        if len(self._heap) > 2 * len(self._offered) + _MUCH_GARBAGE:
            self._heap = sorted(entry for entry in self._heap if entry[1] in self._offered)

    def _withdraw(self, group: Group) -> None:
        if group.stamp:
            del self._offered[group.stamp]
            group.stamp = 0
            if self._subtrees is not None:
                self._subtrees.withdraw(group.key[0])

    def _rank(self, group: Group) -> Rank:
        self._first(group)
        rank = group.members[0]  # for fcfs, priority and program
        return rank - (group.length << _ORDER_BITS) if self._policy == "lpm" else rank

    def _top(self) -> Group | None:
        """The group of lowest rank; risen groups are moved first."""
        heap = self._heap
        while heap:
            was, stamp = heap[0]
            group = self._offered.get(stamp)
            if group is None:
                heappop(heap)
            elif (now := self._rank(group)) != was:
                heapreplace(heap, (now, stamp))
            else:
                return group
        return None

    def _unblock(self, group: Group) -> None:
        if group.blocked_by is not None:
            del self._blocked[group.blocked_by][group]
            group.blocked_by = None

    def _mark_stale(self, group: Group) -> None:
        if not group.is_stale:
            group.is_stale = True
            self._stale.append(group)

    def _match_again(self, matches_left: int) -> int:
        while self._stale and matches_left:
            group = self._stale[0]
            if not group.size or not group.is_stale:
                self._stale.popleft()
                continue
            request = self._first(group)
            if key_of(self._memory.current_match(request)) == group.key:
                group.is_stale = False  # the addition was evicted again
                group.length = group.key[1]
                continue
            matches_left -= 1
            self.leave(request)
            self.place(request)
        return matches_left


def key_of(match: Match) -> Key:
    """The group key of a match."""
    return match.node, match.length, match.next_edge
