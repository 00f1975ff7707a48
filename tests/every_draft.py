"""Budgets for which drafts take no time."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import pytest

from sgl import Engine
from sgl.runtime.speculate import speculator
from sgl.runtime.speculate.budget import Budget, StepCosts


def stop_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that start from now on, looks and steps take no time: what pays is told by what stands alone."""
    for name in ("thread_time", "perf_counter"):
        monkeypatch.setattr(speculator, name, lambda: 0.0)


class EveryDraft(Budget):
    """Verifies all that is drafted, and has drafters asked before every step."""

    def __init__(self) -> None:
        super().__init__()
        self.costs = _NoCosts(is_padded=False, compiles=False)

    def is_plain_due(self, num_rows: int) -> bool:
        return False

    def may_pass_look(self, num_rows: int) -> bool:
        return True

    def divide(self, num_rows: int, drafts: Sequence[tuple[float, int]], *, waited: bool = False) -> list[int]:
        return [number for _, number in drafts]


class _NoCosts(StepCosts):
    """Looks take nothing of such long steps."""

    def saw(self, num_rows: int, num_drafts: int, longest: int, seconds: float, *, waited: bool = False) -> None:
        return

    def plain(self, num_rows: int) -> float:
        return math.inf


@contextlib.contextmanager
def every_draft(engine: Engine) -> Iterator[None]:
    """Meanwhile, rows have as many drafts as are proposed."""
    speculator = engine._loop._speculator
    trials = speculator._trials
    budget, every = speculator._budget, EveryDraft()
    engine._loop.call(lambda: (setattr(speculator, "_budget", every), setattr(trials, "_budget", every)))
    engine._loop.call(lambda: setattr(speculator, "_until_look", 0))
    engine._loop.call(lambda: setattr(trials, "follows", True))
    for model in speculator._models:
        engine._loop.call(functools.partial(model.follow, is_on=True))
    try:
        yield
    finally:
        engine._loop.call(lambda: (setattr(speculator, "_budget", budget), setattr(trials, "_budget", budget)))
