"""The dfs-weight order: counts waiting requests at and below each tree node.

Entering the heaviest subtree first (SGLang's paper, arXiv 2312.07104) uses a prefix up while it is cached. An
arrival or departure updates one path to the root.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from sgl.runtime.cache.node import Edge, Node

_MUCH_GARBAGE = 64


Rank: TypeAlias = int  # the policy's criterion, then the order of arrival; lowest first
Key: TypeAlias = tuple[Node, int, Edge | None]  # of a match: its node, length and next page


class Group:
    """Waiting requests with the same cached prefix and next page. `members` are ranks: ints compare fast and the GC
    skips them."""

    __slots__ = ("blocked_by", "is_stale", "key", "length", "members", "size", "stamp")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.length = key[1]  # tokens of the prefix; a lower bound if stale
        self.members: list[Rank] = []  # a heap, including some that left
        self.size = 0
        self.is_stale = False
        self.blocked_by: int | None = None  # uid of the request that computes the next page
        self.stamp = 0  # of its valid heap entries; 0: none


class _Place:
    """A node with waiting requests at or below it."""

    __slots__ = ("groups", "heavy", "node", "num_offered", "parent", "stamp", "weight")

    def __init__(self, node: Node, parent: _Place | None) -> None:
        self.node = node
        self.parent = parent
        self.weight = 0  # requests at or below
        self.num_offered = 0  # groups among them that may go on
        self.stamp = 0  # of its valid entry in the parent's `heavy`
        self.groups: list[tuple[int, int, Group]] = []  # at this node: a heap, including dead entries
        self.heavy: list[tuple[int, int, _Place]] = []  # children, the heaviest first: likewise


class Subtrees:
    """The places of one queue."""

    def __init__(self) -> None:
        self._places: dict[Node, _Place] = {}
        self._root: _Place | None = None
        self._stamps = count(1)
        self._changed: set[_Place] = set()  # those whose entry in the parent's `heavy` is outdated
        self._frozen: dict[Node, int] | None = None  # weight changes to apply later

    def weigh(self, node: Node, number: int) -> None:
        """`number` more requests (or fewer) wait at a node."""
        if self._frozen is not None and node in self._places:
            self._frozen[node] = self._frozen.get(node, 0) + number
            return
        self._weigh(node, number)

    def _weigh(self, node: Node, number: int) -> None:
        place: _Place | None = self._place(node)
        while place is not None:
            place.weight += number
            above = place.parent
            if place.weight or above is None:
                self._show(place)
            else:
                del self._places[place.node]
                self._changed.discard(place)
            place = above

    def offer(self, node: Node, group: Group, rank: int) -> None:
        """A group at a node may go on while its stamp stands."""
        place = self._place(node)
        heappush(place.groups, (rank, group.stamp, group))
        self._count(place, 1)
        if len(place.groups) > 2 * place.num_offered + _MUCH_GARBAGE:
            place.groups = [entry for entry in place.groups if entry[2].stamp == entry[1]]
            heapify(place.groups)

    def withdraw(self, node: Node) -> None:
        """A group offered there may not any more."""
        self._count(self._places[node], -1)

    def freeze(self) -> None:
        """Keep weights until `thaw`, so that a round stays in its subtree."""
        self._frozen = {}

    def thaw(self) -> None:
        """Apply the changes since `freeze`, additions first: an empty place is forgotten at once."""
        changes, self._frozen = self._frozen or {}, None
        for node, number in sorted(changes.items(), key=lambda change: -change[1]):
            if number:
                self._weigh(node, number)

    def split(self, node: Node, upper: Node) -> None:
        """`upper` is new, above `node`."""
        place = self._places.get(node)
        if place is None:
            return
        above = place.parent
        assert above is not None, "the root is never split"
        between = self._places[upper] = _Place(upper, above)
        between.weight, between.num_offered = place.weight, place.num_offered
        place.parent = between
        self._show(place)
        self._show(between)

    def best(self) -> Group | None:
        """The first group of the walk that may go on."""
        for changed in self._changed:
            self._renew(changed)
        self._changed.clear()
        place = self._root
        while place is not None and place.num_offered:
            groups = place.groups
            while groups and groups[0][2].stamp != groups[0][1]:
                heappop(groups)
            if groups:
                return groups[0][2]
            heavy = place.heavy
            while not _is_valid(heavy[0], place):
                heappop(heavy)
            place = heavy[0][2]
        return None

    def _place(self, node: Node) -> _Place:
        missing: list[Node] = []
        above: Node | None = node
        while above is not None and above not in self._places:
            missing.append(above)
            above = above.parent
        assert above is not None or self._root is None, "whoever waits has a place in the tree"
        place = None if above is None else self._places[above]
        for below in reversed(missing):
            place = self._places[below] = _Place(below, place)
            self._root = self._root or place
        assert place is not None, "the root has one"
        return place

    def _count(self, place: _Place | None, number: int) -> None:
        while place is not None:
            place.num_offered += number
            if place.num_offered in (0, number):  # it begins or ceases to take part
                self._show(place)
            place = place.parent

    def _show(self, place: _Place) -> None:
        place.stamp = next(self._stamps)
        self._changed.add(place)

    def _renew(self, place: _Place) -> None:
        above = place.parent
        if above is None or not place.num_offered:
            return
        # among equals the latest change: that subtree is being used up
        heappush(above.heavy, (-place.weight, -place.stamp, place))
        if len(above.heavy) > 2 * above.weight + _MUCH_GARBAGE:  # at least one request waits in each
            above.heavy = [entry for entry in above.heavy if _is_valid(entry, above)]
            heapify(above.heavy)


def _is_valid(entry: tuple[int, int, _Place], parent: _Place) -> bool:
    _, stamp, place = entry
    return place.parent is parent and place.stamp == -stamp and place.num_offered > 0
