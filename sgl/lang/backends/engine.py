"""Runs programs on an `Engine` in this process: no HTTP, no JSON.

An engine that executes programs gets segments as they are; one that only generates gets single calls. It knows the
engine's public methods and imports nothing of the runtime.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from sgl.lang import ir
from sgl.lang.backends.base import Backend, Session
from sgl.lang.choices import Scores
from sgl.lang.steps import Completion, GenParams, Prompt, TextBackend

CONSTRAINT_NAMES = {"regex": "regex", "json": "json_schema", "ebnf": "ebnf"}
LOGPROB_OPTIONS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
_NOT_SAMPLING = frozenset(
    {*LOGPROB_OPTIONS, "n", "seed", "priority", "timeout", "extra", "max_tokens", "min_tokens"}
)


def engine_backend(engine: Any) -> Backend:
    """The backend of an engine; the same one each time."""
    known: Backend | None = getattr(engine, "_sgl_backend", None)
    if known is None:
        known = ProgramEngineBackend(engine) if hasattr(engine, "open_program") else EngineBackend(engine)
        engine._sgl_backend = known
    return known


def native_sampling(params: GenParams, seed: int) -> dict[str, Any]:
    """One sample's parameters under the names of the engine and of the native HTTP protocol."""
    sampling = params.sampling
    native = {key: value for key, value in sampling.items() if key not in _NOT_SAMPLING and value is not None}
    native |= {"max_new_tokens": sampling["max_tokens"], "min_new_tokens": sampling["min_tokens"], "seed": seed}
    if params.constraint:
        kind, value = params.constraint
        native[CONSTRAINT_NAMES[kind]] = value
    return native


class _EngineBackend(Backend):
    """What both kinds share: the engine's own methods."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def flush_cache(self) -> bool:
        return bool(self._engine.flush_cache())

    def get_server_info(self) -> dict[str, Any] | None:
        return dict(self._engine.get_server_info())

    def shutdown(self) -> None:
        self._engine.shutdown()


class ProgramEngineBackend(_EngineBackend):
    """An engine with `open_program(program, sink) -> session`, an executor beside its scheduler."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.chat_template = engine.chat_template

    def open(self, program: ir.Program, sink: ir.Sink) -> Session:
        """Hand the program to the engine's executor."""
        session: Session = self._engine.open_program(program, sink)
        return session


class EngineBackend(_EngineBackend, TextBackend):
    """An engine used call by call. Constraints are the engine's to enforce or to refuse."""

    constraints: ClassVar[frozenset[str]] = frozenset(CONSTRAINT_NAMES)

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.chat_template = engine.chat_template

    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        results = await self._engine.async_generate(
            input_ids=[self._encode(prompt)] * len(params.seeds),
            sampling_params=[native_sampling(params, seed) for seed in params.seeds],
            **_options(params),
        )
        return [Completion(result["text"], result["meta_info"]) for result in results]

    async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
        events = await self._engine.async_generate(
            input_ids=self._encode(prompt),
            sampling_params=native_sampling(params, params.seeds[0]),
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
    options = {key: params.sampling[key] for key in LOGPROB_OPTIONS if params.sampling[key] is not None}
    return {**options, "priority": params.sampling["priority"], **(params.sampling["extra"] or {})}


def _with(prompt: Prompt, text: str) -> Prompt:
    """The prompt, continued by text of a program."""
    return replace(prompt, text=prompt.text + text, pieces=[*prompt.pieces, (text, False)])


def _common_len(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two prompts share from their beginning."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
