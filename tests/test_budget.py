"""How drafts are divided: none where they cost more than they give, many where they are good and cheap."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.runtime.speculate.budget import Acceptance, Budget, size_of
from sgl.runtime.speculate.speculator import Speculator
from sgl.runtime.speculate.trials import Trials


def _seen(seconds: dict[tuple[int, int], float], *, is_padded: bool, rounds: int = 30) -> Budget:
    """A budget that has seen steps of (rows, drafts of each row) take so long."""
    budget = Budget(is_padded=is_padded)
    for _ in range(rounds):
        for (rows, drafts), took in sorted(seconds.items()):
            budget.costs.saw(rows, rows * drafts, 1 + drafts, took)
    return budget


def test_drafts_are_as_many_as_give_most_tokens_a_second() -> None:
    flat = _seen({(1, k): 4.0 for k in (0, 1, 3, 7)}, is_padded=True)
    assert flat.divide(1, [(0.9, 7)]) == [7]
    assert flat.divide(1, [(0.5, 7)]) == [3], "the fourth would stand once in sixteen steps"
    steep = _seen({(64, 0): 4.0, (64, 1): 5.0, (64, 3): 9.0, (64, 7): 16.0}, is_padded=True)
    assert steep.divide(64, [(0.6, 7)] * 64) == [1] * 64
    assert steep.divide(64, [(0.1, 7)] * 64) == [0] * 64
    assert steep.divide(64, [(0.9, 7)] * 4) == [0] * 4, "all rows would be computed as long as four"


def test_a_processor_computes_only_the_drafts_that_there_are() -> None:
    linear = _seen({(8, k): 1.0 + 0.08 * k * 8 for k in (0, 1, 3, 7)}, is_padded=False)
    assert linear.divide(8, [(0.9, 7)] * 2 + [(0.1, 7)] * 6)[2:] == [0] * 6
    dear = _seen({(8, k): 1.0 + 1.0 * k for k in (0, 1, 3, 7)}, is_padded=False)
    assert dear.divide(8, [(0.9, 7)] * 8) == [0] * 8


@settings(max_examples=50)
@given(
    rows=st.integers(1, 64),
    times=st.lists(st.floats(0.5, 20), min_size=4, max_size=4),
    drafts=st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(1, 7)), max_size=8),
    is_padded=st.booleans(),
)
def test_a_row_never_gets_more_than_it_has_whatever_was_measured(
    rows: int, times: list[float], drafts: list[tuple[float, int]], is_padded: bool
) -> None:
    budget = _seen(
        {(rows, k): took for k, took in zip((0, 1, 3, 7), times, strict=True)}, is_padded=is_padded, rounds=3
    )
    given_out = budget.divide(max(rows, len(drafts)), drafts)
    assert len(given_out) == len(drafts)
    assert all(0 <= got <= most for got, (_, most) in zip(given_out, drafts, strict=True))


def test_a_slow_step_among_others_is_forgotten() -> None:
    budget = _seen({(1, 0): 4.0, (1, 3): 4.4}, is_padded=True)
    budget.costs.saw(1, 3, 4, 400.0)
    for _ in range(20):
        budget.costs.saw(1, 3, 4, 4.4)
    assert budget.divide(1, [(0.8, 3)]) == [3]


@pytest.mark.parametrize("compiles", [False, True])
def test_a_step_with_drafts_that_was_quicker_than_plain_ones_is_forgotten(*, compiles: bool) -> None:
    """Plain ones were slow then; of what few drafts seemed to save, many would take no time at all."""
    budget = Budget(compiles=compiles)
    budget.costs.saw(8, 0, 1, 1.0)
    for _ in range(20):
        budget.costs.saw(8, 1, 2, 0.6)
    for _ in range(50):
        budget.costs.saw(8, 0, 1, 0.5)
        budget.costs.saw(8, 8, 2, 1.5)
    assert budget.divide(8, [(0.5, 1)] * 8) == [0] * 8


@pytest.mark.parametrize("is_on_host", [False, True])
@pytest.mark.parametrize("ticks", [[0.0] * 7 + [0.0156], [1e-300], [1e300, 0.0]])
def test_numbers_stay_finite_whatever_the_clock_says(ticks: list[float], *, is_on_host: bool) -> None:
    """Some processors' time goes on in ticks longer than a step."""
    speculator = Speculator(cast(Any, None), budget=Budget(), is_on_host=is_on_host)
    costs = speculator._budget.costs
    for step in range(20_000):
        seconds = ticks[step % len(ticks)]
        costs.saw(1, 0, 1, seconds)
        costs.saw(1, 0, 1, seconds, waited=True)
        costs.saw(1, 3, 4, seconds)
        assert math.isfinite(costs.plain(1))
        assert math.isfinite(costs.ratio(1, 3, 4))
        if costs.plain(1):
            speculator._rest_from_looks(1, 0.0001, has_guesses=False)
            assert 0 <= speculator._until_look <= 128


def test_what_was_seen_of_guesses_is_believed_soon_and_forgotten_slowly() -> None:
    seen = Acceptance()
    for _ in range(30):
        seen.saw(0, 1)
    assert seen.share < 0.2
    for _ in range(30):
        seen.saw(3, 3)
    assert seen.share > 0.7


def test_a_first_step_that_compiled_is_not_believed_whole() -> None:
    budget = Budget(compiles=True)
    budget.costs.saw(1, 0, 1, 4.0)
    budget.costs.saw(1, 7, 8, 4000.0)
    assert budget.divide(1, [(0.4, 7)]) != [0]
    for _ in range(12):
        budget.costs.saw(1, 7, 8, 24.0)
    assert budget.divide(1, [(0.4, 7)]) == [0]


def test_a_length_that_no_draft_lives_to_see_costs_nothing() -> None:
    """Steps are as long as the longest row, whatever longer ones were found to take."""
    budget = _seen({(64, 0): 8.0, (64, 1): 16.0, (64, 7): 8.1}, is_padded=True)
    assert budget.divide(64, [(0.2, 7)] * 64) == [0] * 64


def test_more_drafts_are_not_guessed_to_take_as_many_times_longer() -> None:
    """Much of what one draft takes is there for any: a step with drafts waits for the one before."""
    budget = _seen({(64, 0): 8.0, (64, 1): 16.0}, is_padded=True)
    assert budget.divide(64, [(0.9, 7)] * 64) == [7] * 64
    budget = _seen({(64, 0): 8.0, (64, 1): 16.0, (64, 3): 40.0, (64, 7): 80.0}, is_padded=True)
    assert budget.divide(64, [(0.9, 7)] * 64) == [0] * 64


def test_trials_try_every_length_where_it_costs_little() -> None:
    budget = Budget(is_padded=True)
    assert [budget.trial(64, [(0.9, 7)] * 64)[0] for _ in range(4)] == [1, 3, 7, 1]
    assert max(max(budget.trial(64, [(0.3, 7), (0.0, 7), (1.0, 7)])[:2]) for _ in range(3)) == 1
    assert Budget().trial(64, [(0.9, 7)] * 64) == [1] * 64
    assert Budget().trial(2, [(0.9, 7), (0.9, 1)]) == [2, 1]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("waiting", [0.0, 0.8])
@pytest.mark.parametrize("compiling", [1, 100])
def test_by_what_an_h100_takes_drafts_are_worth_near_their_most(
    share: float, rows: int, waiting: float, compiling: int
) -> None:
    """In plain steps: those with drafts take `waiting` more, and the first of each length `compiling` times as long."""
    rng = random.Random(1)
    ratios = {1: [1.11, 1.12, 1.22], 8: [1.02, 1.04, 1.13], 64: [1.06, 1.21, 1.77]}[rows]
    took = {length: ratio + waiting for length, ratio in zip((2, 4, 8), ratios, strict=True)}
    best = max(1.0, *(sum(share**i for i in range(length)) / took[length] for length in took))
    budget, known = Budget(is_padded=True, compiles=True), set()
    tokens = seconds = 0.0
    rest = pause = 0
    for step in range(3000):
        if step < 20 or not step % 128:
            budget.costs.saw(rows, 0, 1, 1.0)
            continue
        seen = budget.acceptance("any", 0)
        drafts = [(seen.share, 7)] * rows
        numbers = [0] * rows if rest > 0 else budget.divide(rows, drafts)
        rest -= 1
        if not any(numbers) and rest <= 0:
            pause = min(2 * pause + 1, 128)
            rest, numbers = pause, budget.trial(rows, drafts) if pause == 128 else numbers
        elif any(numbers):
            pause = 0
        longest = 1 + max(numbers)
        accepted = [next((i for i in range(n) if rng.random() >= share), n) for n in numbers]
        time = 1.0
        if longest > 1:
            length = size_of(longest)
            time = took[length] * (1 if length in known else compiling)
            known.add(length)
        for n, got in zip(numbers, accepted, strict=True):
            if n:
                seen.saw(got, min(got + 1, n), rows)
        budget.costs.saw(rows, sum(numbers), longest, time)
        if step >= 1000:
            tokens, seconds = tokens + rows + sum(accepted), seconds + time
    assert tokens / rows / seconds > max(0.97, 0.8 * best)


def test_guesses_that_did_not_stand_are_tried_again_where_better_ones_would_pay() -> None:
    class Model:
        name = "model"

        def grade(self, request: Any) -> int:
            return 1

        def follow(self, *, is_on: bool) -> None:
            pass

    budget = _seen({(1, 0): 4.0, (1, 3): 4.4}, is_padded=True)
    for _ in range(99):
        budget.acceptance("model", 1).saw(0, 1)
    trials, request, begun, looks = Trials([Model()], budget, 3), Any, 0, 0  # type: ignore[list-item]
    for _ in range(1000):
        if trials.follows:  # a look
            looks += 1
            begun += trials.choose(1, [request])  # type: ignore[list-item]
            if trials.is_on:
                trials.looked(is_drafted=True)
        if trials.may_change(1):
            trials.choose(1)
    assert begun
    assert looks < 100
