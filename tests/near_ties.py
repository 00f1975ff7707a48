"""Holds greedy outputs to the model's own logits: another token than plain decoding's must be as likely, up to
rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl import Engine


@dataclass(frozen=True, slots=True)
class Scored:
    """What the model says of outputs when it reads them as prompts, by token, in log-probabilities."""

    own: list[np.ndarray]  # of the output's token
    best: list[np.ndarray]  # of the likeliest token in its place

    @classmethod
    def of(cls, engine: Engine, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> Scored:
        """Of greedy outputs, one a prompt. engine: without drafters."""
        results = engine.generate(
            input_ids=[[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)],
            sampling_params={"max_new_tokens": 0, "temperature": 0.0},
            return_logprob=True,
            logprob_start_len=[len(prompt) - 1 for prompt in prompts],
            top_logprobs_num=1,
        )
        metas = [result["meta_info"] for result in results]
        return cls(
            [np.array([entry[0] for entry in meta["input_token_logprobs"][1:]]) for meta in metas],
            [np.array([top[0][0] for top in meta["input_top_logprobs"][1:]]) for meta in metas],
        )

    @property
    def gaps(self) -> list[np.ndarray]:
        """By how much the likeliest token was likelier than the output's."""
        return [best - own for best, own in zip(self.best, self.own, strict=True)]


def without_reason(
    plain: Sequence[list[int]], others: Sequence[list[int]], scored: Scored, rounding: float
) -> list[str]:
    """A line for each output that parts from plain decoding's where no near tie is, or goes on with tokens that are
    not the likeliest. scored: of the others. rounding: of a log-probability, at most."""
    breaches = []
    for row, (expected, output, gaps) in enumerate(zip(plain, others, scored.gaps, strict=True)):
        parts = next((place for place, (a, b) in enumerate(zip(expected, output, strict=True)) if a != b), None)
        if parts is None:
            continue
        worst = parts + int(gaps[parts:].argmax())
        if gaps[worst] > 2 * rounding:  # its own logit may be too high, and the likeliest one's too low
            breaches.append(
                f"output {row} parts at token {parts}, and token {worst} is {gaps[worst]:.4f} below the likeliest"
            )
    return breaches
