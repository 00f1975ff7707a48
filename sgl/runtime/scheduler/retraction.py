"""Which running request gives its pages up when others need them."""

from __future__ import annotations

from collections.abc import Collection

from sgl.runtime.scheduler.programs import last_of
from sgl.runtime.scheduler.request import Phase, Request
from sgl.runtime.scheduler.waiting_queue import WaitingQueue


def youngest(running: Collection[Request], policy: str) -> Request | None:
    """The request to retract first: lowest priority, then one that still compiles (it only holds pages), then the
    latest. Never the only one."""
    under_way = Phase.DRAINING, Phase.VERIFY
    candidates = [request for request in running if request.phase not in under_way]
    if len(candidates) < 2:
        return None
    if policy == "priority":
        lowest = min(request.priority for request in candidates)
        candidates = [request for request in candidates if request.priority == lowest]
    waiting = [request for request in candidates if request.waits_for_grammar]
    return last_of(waiting or candidates) if policy == "program" else (waiting or candidates)[-1]


def in_the_way(running: Collection[Request], queue: WaitingQueue) -> Request | None:
    """Where nothing can be computed: a request whose pages others need. None where retracting one would not help: all
    wait for their grammars, or one for the result of a step."""
    stuck = [request for request in running if request.phase is Phase.PREFILL]
    waiting = [request for request in stuck if request.waits_for_grammar]
    if waiting:  # they only hold pages, until they are compiled
        all_wait = len(waiting) == len(stuck) and queue.num_waiting_for_grammar == len(queue)
        return None if all_wait else waiting[-1]
    return stuck[-1] if len(stuck) > 1 else None  # prompts that wait for each other's pages
