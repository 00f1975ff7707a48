"""How `select` decides: methods over the log-probabilities of each choice's tokens. `input_logprobs[i][j]` is that of
choice i's token j, given the prompt and the tokens before."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sgl.errors import InvalidRequest, nearest_name

Entry: TypeAlias = Sequence[Any]  # (log-probability or None, token id, text or None)


@dataclass(frozen=True, slots=True)
class Scores:
    """One choice's tokens: log-probabilities after the prompt, ids, log-probabilities without it (first: None)."""

    logprobs: Sequence[float]
    token_ids: Sequence[int | None] = ()
    unconditional: Sequence[float | None] | None = None
    normalized: float | None = None  # replaces the mean if given

    @property
    def mean(self) -> float:
        """The mean log-probability per token."""
        return _mean(self.logprobs) if self.normalized is None else self.normalized

    def entries(self) -> list[tuple[float, int | None, None]]:
        """(log-probability, token id, None) per token, as in meta info."""
        ids = self.token_ids or [None] * len(self.logprobs)
        return [(logprob, token_id, None) for logprob, token_id in zip(self.logprobs, ids, strict=True)]


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """The choice and its meta info."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


class ChoicesSamplingMethod(ABC):
    """Picks a choice by scores; the first wins ties."""

    name: str
    requires_unconditional_logprobs = False

    @abstractmethod
    def _prefer(self, scores: Sequence[Scores]) -> tuple[int, dict[str, Any]]: ...

    def __call__(
        self,
        choices: Sequence[str],
        scores: Sequence[Scores] | None = None,
        *,
        normalized_prompt_logprobs: Sequence[float] = (),
        input_token_logprobs: Sequence[Sequence[Entry]] = (),
        output_token_logprobs: Sequence[Sequence[Entry]] = (),
        unconditional_token_logprobs: Sequence[Sequence[Entry]] | None = None,
    ) -> ChoicesDecision:
        """Decide by `scores` or the original's arguments: per choice, a list of (log-probability, token id, text)."""
        if scores is None:
            alone: Sequence[Sequence[Entry] | None] = unconditional_token_logprobs or [None] * len(choices)
            given = zip(input_token_logprobs, alone, normalized_prompt_logprobs, strict=True)
            scores = [_scores_of(*lists) for lists in given]
        if self.requires_unconditional_logprobs and any(score.unconditional is None for score in scores):
            raise InvalidRequest(
                "this choices_method needs unconditional log-probabilities", param="choices_method"
            )
        index, extra = self._prefer(scores)
        meta = {
            "normalized_prompt_logprobs": [score.mean for score in scores],
            "input_token_logprobs": [score.entries() for score in scores],
            "output_token_logprobs": [[] for _ in scores],
            "probabilities": _probabilities([math.fsum(score.logprobs) for score in scores]),
            **extra,
        }
        return ChoicesDecision(choices[index], meta)


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The highest mean log-probability per token."""

    name = "token_length_normalized"

    def _prefer(self, scores: Sequence[Scores]) -> tuple[int, dict[str, Any]]:
        return _argmax([score.mean for score in scores]), {}


class GreedyTokenSelection(ChoicesSamplingMethod):
    """The likeliest token at each step; ended choices continue with their mean."""

    name = "greedy_token_selection"

    def _prefer(self, scores: Sequence[Scores]) -> tuple[int, dict[str, Any]]:
        rows = _unified(scores)
        longest = max(map(len, rows))
        matrix = [[*row, *[_mean(row)] * (longest - len(row))] for row in rows]
        left = list(range(len(matrix)))
        for column in range(longest):
            best = max(matrix[row][column] for row in left)
            left = [row for row in left if matrix[row][column] == best]
            if len(left) == 1:
                break
        return left[0], {"greedy_logprob_matrix": matrix}


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The highest mean gain over the choice without the prompt."""

    name = "unconditional_likelihood_normalized"
    requires_unconditional_logprobs = True

    def _prefer(self, scores: Sequence[Scores]) -> tuple[int, dict[str, Any]]:
        gains = [
            [given - (alone or 0.0) for given, alone in zip(s.logprobs, s.unconditional or (), strict=True)]
            for s in scores
        ]
        means = [_mean(gain) for gain in gains]
        return _argmax(means), {
            "unconditional_token_logprobs": [list(s.unconditional or ()) for s in scores],
            "normalized_unconditional_prompt_logprobs": means,
        }


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()

METHODS: dict[str, ChoicesSamplingMethod] = {
    method.name: method
    for method in (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)
}


def method_named(method: str | ChoicesSamplingMethod | None) -> ChoicesSamplingMethod:
    """The method of that name, or the method itself."""
    name = getattr(method or token_length_normalized, "name", method)
    if name not in METHODS:
        hint = nearest_name(str(name), METHODS)
        raise InvalidRequest(
            f"no choices_method {name!r}{hint}; there are {', '.join(METHODS)}", param="choices_method"
        )
    return METHODS[str(name)]


def _scores_of(entries: Sequence[Entry], alone: Sequence[Entry] | None, normalized: float) -> Scores:
    return Scores(
        [entry[0] or 0.0 for entry in entries],
        [entry[1] for entry in entries],
        [entry[0] for entry in alone] if alone is not None else None,
        normalized,
    )


def _unified(scores: Sequence[Scores]) -> list[list[float]]:
    """Log-probabilities made equal for shared prefixes: two forward passes differ in the last digits."""
    known: dict[tuple[int | None, ...], float] = {}
    return [
        [
            known.setdefault(tuple(score.token_ids[: i + 1]), logprob) if score.token_ids else logprob
            for i, logprob in enumerate(score.logprobs)
        ]
        for score in scores
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else -math.inf


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _probabilities(totals: Sequence[float]) -> list[float]:
    top = max(totals)
    if top == -math.inf:
        return [1 / len(totals)] * len(totals)
    weights = [math.exp(total - top) for total in totals]
    return [weight / sum(weights) for weight in weights]
