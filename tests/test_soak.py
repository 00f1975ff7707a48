"""A short version of benchmarks/scheduler_soak.py: random operations under settings of every kind."""

from __future__ import annotations

import random

import pytest

from benchmarks.scheduler_soak import episode


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(8))
def test_random_operations_lose_no_page_and_no_token(seed: int) -> None:
    finished, _ = episode(random.Random(seed), operations=1500)
    assert finished > 0
