"""The waiting queue: who is admitted next.

It orders requests and bounds every wait; it does not know whether a request fits. A request is *overtaken* when
one that arrived in a later round is admitted before it. Whoever was overtaken `patience` times goes first, in
order of arrival, and then nobody may pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from sgl.runtime.cache.radix import Match, Node
from sgl.runtime.config import SchedulePolicy
from sgl.runtime.scheduler.request import Request

DEFAULT_PATIENCE = 256


class WaitingQueue:
    """Requests without a row, in order of arrival within; `ordered` gives the policy's order."""

    def __init__(
        self, policy: SchedulePolicy, current_match: Callable[[Request], Match], patience: int = DEFAULT_PATIENCE
    ) -> None:
        self._policy = policy
        self._current_match = current_match
        self._patience = patience
        self._requests: OrderedDict[int, Request] = OrderedDict()  # by uid, oldest round first
        self._overtaken = 0  # how often the oldest round was

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Append a request, or give a retracted one its old place back."""
        self._requests[request.uid] = request
        newer = [other.uid for other in self._requests.values() if other.tick > request.tick]
        for uid in newer:  # only after a retract is there any
            self._requests.move_to_end(uid)

    def remove(self, request: Request) -> None:
        """Take out a request that leaves for another reason than admission."""
        oldest = self._oldest_tick()
        del self._requests[request.uid]
        if self._oldest_tick() != oldest:
            self._overtaken = 0

    def admitted(self, request: Request) -> None:
        """Take out a request that was given a row, and remember whom it overtook."""
        self.remove(request)
        oldest = self._oldest_tick()
        if oldest is not None and oldest < request.tick:
            self._overtaken += 1

    def is_aged(self, request: Request) -> bool:
        """Whether the request waited so long that nobody may pass it any more."""
        return self._overtaken >= self._patience and request.tick == self._oldest_tick()

    def ordered(self) -> list[Request]:
        """All waiting requests, next first."""
        requests = list(self._requests.values())
        if self._policy == "priority":
            requests.sort(key=lambda request: -request.priority)
        elif self._policy == "lpm":
            requests.sort(key=lambda request: -self._current_match(request).length)
        elif self._policy == "dfs-weight":
            requests = _depth_first({request: self._current_match(request).node for request in requests})
        if self._overtaken >= self._patience:
            oldest = self._oldest_tick()
            requests.sort(key=lambda request: request.tick != oldest)
        return requests

    def _oldest_tick(self) -> int | None:
        return next(iter(self._requests.values())).tick if self._requests else None


def _depth_first(places: dict[Request, Node]) -> list[Request]:
    """Order by a walk over the cache tree that enters the subtree with most waiting requests first
    (DFS-weight of the SGLang paper, arXiv 2312.07104), so that a prefix is used up while it is cached."""
    at: dict[Node, list[Request]] = {}
    weight: dict[Node, int] = {}
    children: dict[Node, list[Node]] = {}
    roots: list[Node] = []
    for request, place in places.items():
        at.setdefault(place, []).append(request)
        node: Node | None = place
        while node is not None:
            seen = node in weight
            weight[node] = weight.get(node, 0) + 1
            if not seen:
                if node.parent is None:
                    roots.append(node)
                else:
                    children.setdefault(node.parent, []).append(node)
            node = node.parent
    result: list[Request] = []
    stack = sorted(roots, key=weight.__getitem__)
    while stack:
        node = stack.pop()
        result.extend(at.get(node, ()))
        stack.extend(sorted(children.get(node, ()), key=weight.__getitem__))
    return result
