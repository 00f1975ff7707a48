"""The three choice methods: their arithmetic, and on trained checkpoints the log-probabilities of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import sgl
from sgl.errors import InvalidRequest, ProgramError
from sgl.lang.backends.base import Backend
from sgl.lang.backends.engine import engine_backend
from sgl.lang.ir.choices import METHODS, Scores, method_named
from sgl.runtime.engine import Engine
from tests.engine_calls import CallByCall

# Arithmetic


def test_the_three_methods_prefer_different_choices() -> None:
    scores = [
        Scores([-1.0, -1.0], unconditional=[None, -1.1]),  # highest mean
        Scores([-0.5, -4.0], unconditional=[None, -4.0]),  # highest first token
        Scores([-2.0, -2.0], unconditional=[None, -9.0]),  # highest gain over itself
    ]
    chosen = {name: method("abc", scores).decision for name, method in METHODS.items()}
    assert chosen == {
        "token_length_normalized": "a",
        "greedy_token_selection": "b",
        "unconditional_likelihood_normalized": "c",
    }


def test_greedy_selection_goes_on_with_the_mean_of_what_has_ended() -> None:
    scores = [Scores([-1.0]), Scores([-1.0, -0.5]), Scores([-1.0, -3.0])]
    decision = sgl.greedy_token_selection("abc", scores)
    assert decision.meta_info["greedy_logprob_matrix"] == [[-1.0, -1.0], [-1.0, -0.5], [-1.0, -3.0]]
    assert decision.decision == "b"


@given(st.lists(st.lists(st.floats(-20, 0), min_size=1, max_size=4), min_size=1, max_size=5))
def test_methods_are_those_of_their_definitions(rows: list[list[float]]) -> None:
    choices = [str(i) for i in range(len(rows))]
    scores = [Scores(row, unconditional=[None, *row[1:]]) for row in rows]
    by_mean = sgl.token_length_normalized(choices, scores)
    means = [np.mean(row) for row in rows]
    assert means[int(by_mean.decision)] == pytest.approx(max(means))
    assert by_mean.meta_info["normalized_prompt_logprobs"] == pytest.approx(means)
    totals = np.array([sum(row) for row in rows])
    expected = np.exp(totals - np.logaddexp.reduce(totals))
    assert by_mean.meta_info["probabilities"] == pytest.approx(list(expected))
    by_gain = sgl.unconditional_likelihood_normalized(choices, scores)
    gains = [row[0] / len(row) for row in rows]
    assert gains[int(by_gain.decision)] == pytest.approx(max(gains))


def test_greedy_selection_is_not_decided_by_the_last_digits_of_shared_tokens() -> None:
    scores = [Scores([-1.0], [5]), Scores([-1.0 - 1e-7, -0.5], [5, 6])]
    assert sgl.greedy_token_selection("ab", scores).decision == "b"


def test_methods_take_the_lists_of_the_originals() -> None:
    given: dict[str, Any] = {
        "choices": ["sun", "sunflower", "moonlight"],
        "normalized_prompt_logprobs": [-0.2, -0.4, -0.1],
        "input_token_logprobs": [
            [[-0.2, 1, None]],
            [[-0.2, 1, None], [-0.6, 2, None]],
            [[-0.5, 3, None], [-0.1, 4, None], [-0.01, 5, None]],
        ],
        "output_token_logprobs": [[[-0.1, 9, None]]] * 3,
        "unconditional_token_logprobs": [
            [[None, 1, None]],
            [[None, 1, None], [-2.0, 2, None]],
            [[None, 3, None], [-0.1, 4, None], [-0.01, 5, None]],
        ],
    }
    assert sgl.token_length_normalized(**given).decision == "moonlight"
    greedy = sgl.greedy_token_selection(**given)
    assert greedy.decision == "sun"
    assert greedy.meta_info["greedy_logprob_matrix"][1] == pytest.approx([-0.2, -0.6, -0.4])
    by_gain = sgl.unconditional_likelihood_normalized(**given)
    assert by_gain.decision == "sunflower"
    assert by_gain.meta_info["normalized_unconditional_prompt_logprobs"] == pytest.approx([-0.2, 0.6, -0.5 / 3])


def test_ties_go_to_the_first_and_impossible_choices_do_no_harm() -> None:
    for method in METHODS.values():
        same = Scores([-1.0, -2.0], unconditional=[None, -1.0])
        assert method("ab", [same, same]).decision == "a"
        never = Scores([-math.inf], unconditional=[None])
        assert method("ab", [never, same]).decision == "b"
        assert sum(method("ab", [never, never]).meta_info["probabilities"]) == pytest.approx(1)
    with pytest.raises(InvalidRequest, match="unconditional log-probabilities"):
        sgl.unconditional_likelihood_normalized("a", [Scores([-1.0])])
    assert method_named(None) is sgl.token_length_normalized


# Agreement

CASES: list[tuple[str, list[str]]] = [
    ("Once upon a time, there was a", [" cat", " dog", " little girl", " zebra"]),
    ("The end.\n\n", ["yes", "no"]),  # ends in a repeated token
    ("very very very", [" very", " happy", ", very sad"]),
    ("She went to the", [" park", " park with", " park with her mom", " parks"]),  # shared prefixes
    ("He was hap", ["py", "pen", "less"]),  # merge with the end of the prompt
    ("It is a ", ["th", "the", "a", " ball"]),
    ("Le caf", ["é", "é au lait", "ë", "日本語", "🙂"]),  # not ASCII
    ("x", ["a"]),
    ("Tom said,", [' "Hi!"', " nothing", "\n"]),
]
CHECKPOINTS = ["stories260K", "stories260K-qwen2", "babyllama-105"]


class Reference:
    """A checkpoint in transformers: the log-probabilities of tokens, one plain forward each."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = tokenizer

    def logprobs(self, ids: list[int]) -> list[float]:
        """Of each token but the first, given those before it."""
        if len(ids) < 2:
            return []
        with torch.inference_mode():
            table = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return [float(table[i, token]) for i, token in enumerate(ids[1:])]

    def scores(self, prompt: str, choices: list[str]) -> list[Scores]:
        """From the last token boundary on that the prompt and all choices after it share."""
        alone = self.tokenizer.encode(prompt)
        wholes = [self.tokenizer.encode(prompt + choice) for choice in choices]
        start = min(common(alone, whole) for whole in wholes)
        return [
            Scores(self.logprobs(whole)[start - 1 :], whole[start:], [None, *self.logprobs(whole[start:])])
            for whole in wholes
        ]


def common(left: list[int], right: list[int]) -> int:
    """How many tokens two lists begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


@pytest.fixture(scope="module", params=CHECKPOINTS)
def models(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[tuple[Engine, Reference]]:
    path = checkpoint(request.param)
    with Engine(str(path), device="cpu", dtype="float32", max_total_tokens=4096) as engine:
        yield engine, Reference(path, engine.get_tokenizer())


@pytest.fixture(params=["program", "call by call"])
def backend(request: pytest.FixtureRequest, models: tuple[Engine, Reference]) -> Backend:
    """The engine's executor of programs, and its single calls."""
    return engine_backend(models[0]) if request.param == "program" else CallByCall(models[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("prompt", "choices"), CASES, ids=[prompt[:12] for prompt, _ in CASES])
def test_methods_agree_with_transformers(
    models: tuple[Engine, Reference], backend: Backend, method: str, prompt: str, choices: list[str]
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += prompt
        s += sgl.select("x", choices, choices_method=method)

    expected = METHODS[method](choices, models[1].scores(prompt, choices))
    state = program.run(backend=backend)
    meta = state.get_meta_info("x")
    for mine, theirs in zip(meta["input_token_logprobs"], expected.meta_info["input_token_logprobs"], strict=True):
        assert [entry[1] for entry in mine] == [entry[1] for entry in theirs]
        assert [entry[0] for entry in mine] == pytest.approx([entry[0] for entry in theirs], abs=1e-3)
    if method == "unconditional_likelihood_normalized":
        for mine, theirs in zip(
            meta["unconditional_token_logprobs"], expected.meta_info["unconditional_token_logprobs"], strict=True
        ):
            assert mine[0] is None
            assert mine[1:] == pytest.approx(theirs[1:], abs=1e-3)
    for key in ("normalized_prompt_logprobs", "probabilities"):
        assert meta[key] == pytest.approx(expected.meta_info[key], abs=1e-3)
    assert state["x"] == expected.decision
    assert state.text() == prompt + expected.decision


def test_a_select_may_stand_in_a_turn_after_a_gen_and_in_branches(backend: Backend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Once upon a time" + sgl.gen("story", max_tokens=8, temperature=0)
        forks = s.fork(2)
        forks += " And then" + sgl.select("x", [" he", " she"])
        forks.join()
        s += "." + sgl.select("y", [" The end", " More"])

    state = program.run(backend=backend)
    assert state["x"][0] == state["x"][1]
    assert state.text() == "Once upon a time" + state["story"] + "." + state["y"]


def test_a_select_without_text_before_it_is_an_error_or_decides(backend: Backend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.select("x", [" a", " b"])

    state = program.run(backend=backend)
    if (error := state.error()) is None:
        assert state["x"] in (" a", " b")
    else:
        assert isinstance(error, ProgramError)
        assert isinstance(error.__cause__, InvalidRequest)
