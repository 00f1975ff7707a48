"""A heap of requests by their next deadline."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from sgl.runtime.scheduler.request import Phase, Request

MAX_EXPIRED = 256
"""Requests that one call returns at most."""


class Deadlines:
    """Requests with a deadline. Ended ones are dropped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_live = 0  # requests in the heap that have not ended

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.is_timed:
            self._num_live += 1
            self._watch(request)

    def end(self, request: Request) -> None:
        """Forget a request that ended."""
        self._num_live -= request.is_timed

    def expired(self, now: float, most: int) -> list[Request]:
        """Up to `most` requests whose deadline has passed, each once."""
        late: list[Request] = []
        while self._heap and self._heap[0][0] <= now and len(late) < most:
            _, _, request = heappop(self._heap)
            if request.is_done:
                continue
            if _next_deadline(request) <= now:
                late.append(request)
            elif request.deadline is not None:  # it left the queue in time
                self._watch(request)
        return late

    def __len__(self) -> int:
        """Includes ended requests."""
        return len(self._heap)

    def _watch(self, request: Request) -> None:
        heappush(self._heap, (_next_deadline(request), request.uid, request))
        if len(self._heap) > 2 * self._num_live + MAX_EXPIRED:
            self._heap = [entry for entry in self._heap if not entry[2].is_done]
            heapify(self._heap)


def _next_deadline(request: Request) -> float:
    deadline = request.deadline if request.deadline is not None else float("inf")
    if request.queue_deadline is not None and request.phase is Phase.WAITING and not request.num_retractions:
        return min(deadline, request.queue_deadline)
    return deadline
