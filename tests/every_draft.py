"""A budget that verifies all that is drafted, whatever steps take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgl.runtime.speculate.budget import Budget, StepCosts


class EveryDraft(Budget):
    """Each row has as many drafts as are proposed, and drafters are asked before every step."""

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
