"""Stopping a loop's steps with generations under way, and going on."""

from __future__ import annotations

import time
from typing import Any, Literal, get_args

from sgl.errors import EngineDead, InvalidRequest
from sgl.lang.ir.sampling import shown
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.scheduler.scheduler import Scheduler

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of generations under way: abort ends them with what they have, retract gives their KV back and computes
it anew later, in_place keeps it."""

_QUIET_SECONDS = 120.0  # for steps that are under way to end
_POLL_SECONDS = 1e-3


def pause(loop: EngineLoop, mode: Any) -> None:
    """Begin no step, and wait for those under way. New requests wait. Idempotent; another mode applies as well. Raises
    InvalidRequest and EngineDead."""
    if mode not in get_args(PauseMode):
        raise InvalidRequest(
            f"mode must be one of {', '.join(get_args(PauseMode))}, not {shown(mode)}", param="mode"
        )
    scheduler = loop.scheduler

    def halt() -> bool:
        scheduler.is_paused = True
        return loop.is_quiet

    end = time.monotonic() + _QUIET_SECONDS
    while not loop.call(halt):
        if time.monotonic() > end:
            raise EngineDead(f"the step under way has not ended after {_QUIET_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
    if mode == "abort":
        loop.abort_and_wait(None)
    elif mode == "retract":
        loop.call(lambda: _retract_all(scheduler))


def settle(loop: EngineLoop) -> None:
    """End the steps under way, and begin none. On the loop's thread, between two steps."""
    was_paused, loop.scheduler.is_paused = loop.scheduler.is_paused, True
    while not loop.is_quiet:
        loop.step()
    loop.scheduler.is_paused = was_paused


def go_on(loop: EngineLoop) -> None:
    """Begin steps again. Idempotent. Raises EngineDead."""
    loop.call(lambda: setattr(loop.scheduler, "is_paused", False))


def _retract_all(scheduler: Scheduler) -> None:
    for request in list(scheduler.memory.running.values()):
        scheduler.retract(request)
