"""Looks for drafts where steps wait for them: whether they pay is told by the tokens that they give in their time."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl import Engine
from sgl.runtime.speculate.budget import Budget
from sgl.runtime.speculate.looks import Looks

SECONDS = {"plain": 333e-6, "waits": 861e-6, "drafts": 730e-6, "jumps": 600e-6, "prompts": 900e-6}
"""What steps of the embedded model take on an H200."""


def test_looks_pay_while_they_give_more_tokens_in_their_time() -> None:
    looks = Looks()
    assert looks.pay(1), "nobody knows"
    for _ in range(40):
        looks.saw(1, 1, 1.0, looked=False)
        looks.saw(1, 5, 2.5, looked=True)
        looks.saw(8, 8, 2.5, looked=True)
        looks.saw(8, 8, 1.0, looked=False)
    assert looks.pay(1)
    assert not looks.pay(8)
    assert not looks.pay(6), "of about as many rows"
    for _ in range(20):
        looks.saw(1, 2, 2.5, looked=True)
    assert not looks.pay(1)
    for _ in range(40):
        looks.saw(1, 1, 2.0, looked=False)  # as where half of the steps were in vain
    assert looks.pay(1)


def test_a_step_while_others_had_the_processor_changes_little() -> None:
    looks = Looks()
    for _ in range(40):
        looks.saw(1, 1, 1.0, looked=False)
        looks.saw(1, 4, 2.5, looked=True)
    looks.saw(1, 4, 1e6, looked=True)
    assert looks.pay(1)


@pytest.mark.parametrize("seconds", [0.01, 100.0])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("looked", [False, True])
def test_first_steps_that_compile_are_soon_forgotten(looked: bool, number: int, seconds: float) -> None:
    looks = Looks()
    for _ in range(number):
        looks.saw(1, 1, seconds, looked=looked)
    for _ in range(12):
        looks.saw(1, 1, 1.0, looked=False)
        looks.saw(1, 4, 2.0, looked=True)
    assert looks.pay(1)
    for _ in range(30):
        looks.saw(1, 1, 2.0, looked=True)
    assert not looks.pay(1)


def test_looks_behind_which_no_step_can_be_measured_end() -> None:
    looks = Looks()
    looks.saw(1, 1, 1.0, looked=False)
    assert [looks.pay(1) for _ in range(20)].count(True) == 16


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 10**6), st.floats(), st.booleans()), max_size=60),
    st.integers(1, 200),
)
def test_they_pay_or_not_whatever_a_clock_says(steps: list[tuple[int, int, float, bool]], rows: int) -> None:
    looks = Looks()
    for num_rows, num_tokens, seconds, looked in steps:
        looks.saw(num_rows, num_tokens, seconds, looked=looked)
    assert looks.pay(rows) in (True, False)
    assert all(math.isfinite(each.seconds) for each in looks._seen.values())


def on_a_gpu(engine: Engine, kinds: Counter[str]) -> list[float]:
    """Have its speculator believe that steps take `SECONDS`. Returns the clock; kinds: how many of each there were."""
    loop: Any = engine._loop
    speculator, clock, took = loop._speculator, [0.0], dict[int, float]()
    forward, handle = loop._runner.forward, loop._handle

    def noting(batch: Any) -> Any:
        kind = "waits" if speculator._waited else "plain"
        if batch.setups or not batch.samples.all():
            kind = "prompts"
        elif batch.drafts:
            kind = "drafts"
        elif batch.longest > 1:
            kind = "jumps"
        kinds[kind] += 1
        took[id(batch)] = SECONDS[kind]
        return forward(batch)

    def handling(step: Any, pending: Any) -> None:
        clock[0] += took.pop(id(step.batch))
        handle(step, pending)

    def change() -> None:
        loop._run_ahead, speculator._is_on_host, speculator._clock = True, False, lambda: clock[0]
        budget = Budget(is_padded=True, compiles=True)
        speculator._budget = speculator._trials._budget = budget
        loop._runner.forward, loop._handle = noting, handling

    loop.call(change)
    return clock


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 1.4), (0.7, 1.0)])
def test_documents_are_drafted_for_where_plain_steps_run_ahead_in_vain(temperature: float, least: float) -> None:
    """A step that ran ahead of certain text is one for nothing, so waiting for a look costs less than it takes."""
    properties = {name: {"type": "string", "maxLength": 12} for name in ("name", "city", "street", "colour")}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    rates: dict[str, float] = {}
    for algorithm in ("off", "auto"):
        kinds = Counter[str]()
        with Engine(speculative_algorithm=algorithm, random_seed=0, max_total_tokens=8192) as engine:
            clock = on_a_gpu(engine, kinds)
            rng = random.Random(0)
            prompts = [f"A record of {rng.choice(['Ann', 'Bo', 'Cy'])}, as JSON: " for _ in range(16)]
            tokens = 0
            for number, prompt in enumerate(prompts):
                params = {"json_schema": schema, "max_new_tokens": 90, "temperature": temperature, "seed": number}
                tokens += len(engine.generate(prompt=prompt, sampling_params=params)["output_ids"])
        rates[algorithm] = tokens / clock[0]
    assert rates["auto"] > least * rates["off"]
