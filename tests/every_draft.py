"""Budgets for which drafts take no time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

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

    def divide(self, num_rows: int, drafts: Sequence[tuple[float, int]]) -> list[int]:
        return [number for _, number in drafts]


class _NoCosts(StepCosts):
    """Looks take nothing of such long steps."""

    def saw(self, num_rows: int, num_drafts: int, longest: int, seconds: float, *, waited: bool = False) -> None:
        return

    def plain(self, num_rows: int) -> float:
        return math.inf
