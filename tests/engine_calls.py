"""An engine used call by call: the oracle for the executor of programs beside its scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from sgl.lang.backends.steps import Completion, GenParams, Prompt, TextBackend
from sgl.lang.ir.choices import Scores
from sgl.lang.ir.sampling import CONSTRAINT_NAMES, logprob_options, native_sampling


class CallByCall(TextBackend):
    """Each gen is a request of its own, each prompt is encoded anew."""

    constraints: ClassVar[frozenset[str]] = frozenset(CONSTRAINT_NAMES)

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.chat_template = engine.chat_template

    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        results = await self._engine.async_generate(
            input_ids=[self._encode(prompt)] * len(params.seeds),
            sampling_params=[native_sampling(params.sampling, params.constraint, seed) for seed in params.seeds],
            **_options(params),
        )
        return [Completion(result["text"], result["meta_info"]) for result in results]

    async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
        events = await self._engine.async_generate(
            input_ids=self._encode(prompt),
            sampling_params=native_sampling(params.sampling, params.constraint, params.seeds[0]),
            stream=True,
            **_options(params),
        )
        sent = 0
        async for event in events:
            yield Completion(event["text"][sent:], event["meta_info"])
            sent = len(event["text"])

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> list[Scores]:
        prefix = self._encode(prompt)
        wholes = [self._encode(_with(prompt, choice)) for choice in choices]
        start = min(_common_len(prefix, whole) for whole in wholes)
        candidates = [whole[start:] for whole in wholes]
        given = await asyncio.to_thread(self._engine.score, prefix[:start], candidates)
        if not unconditional:
            return [Scores(score.logprobs, score.token_ids) for score in given]
        alone = await asyncio.to_thread(self._engine.score, [], candidates)
        return [Scores(s.logprobs, s.token_ids, a.logprobs) for s, a in zip(given, alone, strict=True)]

    def _encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Control tokens come from templates only: where other text spells one, the pieces
        are encoded one by one, otherwise all at once, as a tokenizer sees a rendered conversation."""
        tokenizer = self._engine.tokenizer
        is_chat = any(is_template for _, is_template in prompt.pieces)
        if not any(self._spells_control_token(text) for text, is_template in prompt.pieces if not is_template):
            ids = tokenizer.encode(prompt.text, add_special_tokens=not is_chat)
            return [int(token_id) for token_id in ids]
        ids = []
        for i, (text, is_template) in enumerate(prompt.pieces):
            add = i == 0 and not is_chat
            ids.extend(tokenizer.encode(text, add_special_tokens=add, allow_special=is_template))
        return [int(token_id) for token_id in ids]

    def _spells_control_token(self, text: str) -> bool:
        hf = self._engine.tokenizer.hf
        return any(str(token) in text for token in hf.get_added_vocab())


def _options(params: GenParams) -> dict[str, Any]:
    options = logprob_options(params.sampling)
    return {**options, "priority": params.sampling["priority"], **(params.sampling["extra"] or {})}


def _with(prompt: Prompt, text: str) -> Prompt:
    """The prompt, continued by text of a program."""
    return replace(prompt, text=prompt.text + text, pieces=[*prompt.pieces, (text, False)])


def _common_len(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two prompts share from their beginning."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
