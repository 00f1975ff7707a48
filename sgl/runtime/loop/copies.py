"""Copies of pages between the loop's steps, and how long steps take, by which the tiers decide what to load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from sgl.errors import EngineDead, InvalidRequest, QueueFull
from sgl.runtime.batch import Mover, PendingStep, StepResult
from sgl.runtime.cache.files import CLOSING_SECONDS
from sgl.runtime.scheduler.memory import RowMemory
from sgl.runtime.scheduler.request import FinishReason, Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Step
from sgl.runtime.scheduler.tiers import Tiers

_DRAIN_SECONDS = 10.0 - CLOSING_SECONDS
_DRAIN_POLL_SECONDS = 2e-3
_SETTLING_SECONDS = 60.0


class Copies:
    """Of one loop."""

    def __init__(self, memory: RowMemory, mover: Mover) -> None:
        self._memory = memory
        self._tiers = memory.tiers
        self._movers = [each for each in (memory.tiers, memory.transfers) if each is not None]
        self._mover = mover
        self._last = 0.0  # monotonic seconds of the last result

    def schedule(self, make: Callable[[], Step | None]) -> Step | None:
        """The next step, if there is one, and the copies before it: after all steps that were launched, before it
        is."""
        for each in self._movers:
            each.poll()
        step = make()
        for each in self._movers:
            each.launch(self._mover)
        if step is not None:
            step.launched = time.monotonic()
        return step

    def settle(self) -> None:
        """Wait until no page is on its way to or from host memory. Raises InvalidRequest if that takes too long."""
        if self._tiers is None:
            return
        self._tiers.saves.clear()
        end = time.monotonic() + _SETTLING_SECONDS
        while self._tiers.is_moving:
            if time.monotonic() > end:
                raise InvalidRequest(
                    f"copies of KV pages are still under way after {_SETTLING_SECONDS:g} s: try again"
                )
            self._tiers.poll()
            self._tiers.launch(self._mover)
            time.sleep(_DRAIN_POLL_SECONDS)

    def longest_wait(self, seconds: float) -> float:
        """How long an idle loop may sleep: `seconds`, or less while copies are under way."""
        return min((seconds, *(each.poll_seconds or seconds for each in self._movers)))

    @property
    def is_loading(self) -> bool:
        """Whether requests may wait for pages under way."""
        return self._memory.is_bringing

    def finish(self, scheduler: Scheduler, request: Request, reason: FinishReason) -> FinishReason:
        """End a request, and offer its prompt to another engine if that is wanted. Returns why it ended."""
        scheduler.finish(request, reason)
        transfers = self._memory.transfers
        if request.offers_transfer and reason.type != "abort" and transfers is not None and transfers.exports:
            try:
                request.offered = transfers.exports.offer(request)
            except QueueFull as error:
                return FinishReason("abort", error=error)
        return reason

    def result(self, step: Step, pending: PendingStep) -> StepResult:
        """Wait for a step."""
        result = pending.wait()
        if self._tiers is not None:
            now = time.monotonic()
            began, self._last = max(self._last, step.launched), now
            num_tokens = len(step.batch.token_ids)
            self._tiers.rates.note_step(num_tokens - step.num_decodes, num_tokens, now - began)
        return result


def drain(tiers: Tiers | None, call: Callable[[Callable[[], Any]], Any]) -> None:
    """Have all that is cached written to files, if there are any, before an engine ends. call: `EngineLoop.call`."""
    if tiers is None or tiers.files is None:
        return
    end = time.monotonic() + _DRAIN_SECONDS
    with contextlib.suppress(EngineDead):
        call(tiers.saves.save_all_later)
        while call(lambda: tiers.poll_seconds) is not None and time.monotonic() < end:
            time.sleep(_DRAIN_POLL_SECONDS)
