"""Requests whose tokens and log-probabilities are compared bit by bit, over what else an engine may have to do.

Imported by tests on a CPU and on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from sgl.runtime.engine import Engine

Bits = tuple[Any, ...]
"""Output ids, logprobs of the prompt and of outputs, and of the likeliest; numbers that are equal have equal bits."""

CELLS: dict[str, dict[str, Any]] = {
    "among others": {},
    "chunks of 1": {"chunked_prefill_size": 1},
    "chunks of 7": {"chunked_prefill_size": 7},
    "chunks of 64": {"chunked_prefill_size": 64},
    "one at once": {"max_running_requests": 1},
    "no cache": {"disable_radix_cache": True},
    "drafts": {"speculative_algorithm": "NGRAM"},
    "no jumps": {"disable_jump_forward": True},
    "run ahead": {"disable_overlap_schedule": False},
    "synchronous": {"disable_overlap_schedule": True},
}
"""Options of engines under which a request's bits stay what they are."""


class Requests:
    """Random prompts, many with shared beginnings, with all kinds of sampling. regex: every fourth is constrained by
    it."""

    def __init__(
        self,
        number: int,
        vocab_size: int,
        longest: int,
        max_new_tokens: int,
        seed: int = 0,
        regex: str | None = None,
    ) -> None:
        rng = random.Random(seed)
        shared = [rng.randrange(3, vocab_size) for _ in range(longest // 2)]
        self.prompts = [
            shared[: rng.randrange(1, len(shared))]
            + [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, longest // 2))]
            for _ in range(number)
        ]
        self.params: list[dict[str, Any]] = [
            {
                "max_new_tokens": max_new_tokens,
                "temperature": rng.choice([0.0, 1.0]),
                "top_p": rng.choice([1.0, 0.9]),
                "min_p": rng.choice([0.0, 0.02]),
                "frequency_penalty": rng.choice([0.0, 0.5]),
                "seed": i,
                "ignore_eos": True,
            }
            for i in range(number)
        ]
        for params in self.params[3::4] if regex else ():
            params |= {"regex": regex, "ignore_eos": False, "frequency_penalty": 0.0}  # which forbids jumps

    def __len__(self) -> int:
        return len(self.prompts)

    def bits(self, engine: Engine, which: Sequence[int], start: int = 0) -> list[Bits]:
        """Of these requests, sent at once. start: the first position whose logprobs are wanted; -1: of outputs alone,
        which a cached prefix may begin."""
        results = engine.generate(
            input_ids=[self.prompts[i] for i in which],
            sampling_params=[self.params[i] for i in which],
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=2,
        )
        return [_bits(result) for result in results]

    def ids(self, engine: Engine, which: Sequence[int]) -> list[list[int]]:
        """Of these without logprobs, so that forced text may be appended."""
        results = engine.generate(
            input_ids=[self.prompts[i] for i in which], sampling_params=[self.params[i] for i in which]
        )
        return [result["output_ids"] for result in results]

    def alone(self, engine: Engine, start: int = 0) -> list[Bits]:
        """Of all, one after another."""
        return [self.bits(engine, [i], start)[0] for i in range(len(self))]

    def among_others(self, engine: Engine, start: int = 0) -> Iterator[tuple[str, list[Bits]]]:
        """Of all, sent at once in several ways."""
        everyone = range(len(self))
        yield "cold", self.bits(engine, everyone, start)
        yield "warm", self.bits(engine, everyone, start)
        yield "in another order", self.bits(engine, everyone[::-1], start)[::-1]
        yield "warm, alone", self.alone(engine, start)


def differing(expected: Sequence[Bits], found: Sequence[Bits]) -> int:
    """How many numbers differ."""
    return sum(_number(one, other) for one, other in zip(expected, found, strict=True))


def _number(one: Any, other: Any) -> int:
    if not isinstance(one, list | tuple):
        return int(one != other)
    if len(one) != len(other):
        return max(len(one), len(other))
    return sum(map(_number, one, other))


def _bits(result: Any) -> Bits:
    info = result["meta_info"]
    of_tokens = ([place[0] for place in info.get(f"{side}_token_logprobs", ())] for side in ("input", "output"))
    likeliest = [[best[:2] for best in place or ()] for place in info["output_top_logprobs"]]
    return (result["output_ids"], *of_tokens, likeliest)
