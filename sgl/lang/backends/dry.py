"""A backend that makes values up, for explain, preview and trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from sgl.errors import ProgramError
from sgl.lang.backends.steps import Completion, GenParams, Prompt, StepSession, TextBackend
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate, as_template
from sgl.lang.ir.choices import Scores

MAX_SEGMENTS = 200  # ends loops that wait for a value
_VALUES = {"int": "0", "float": "0.0", "bool": "True", "str": '""'}


class DryBackend(TextBackend):
    """Answers at once; selects take their first choice. `segments` counts shipments."""

    constraints: ClassVar[frozenset[str]] = frozenset({"regex", "json", "ebnf"})

    def __init__(self, chat_template: ChatTemplate | str | None = None) -> None:
        self.chat_template = as_template(chat_template or "default")
        self.segments = 0

    def open(self, program: ir.Program, sink: ir.Sink) -> StepSession:
        return _CountingSession(self, program, sink)

    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        text = _VALUES.get(params.node.dtype or "", "{" + (params.node.name or "…") + "}")
        meta: dict[str, Any] = {"completion_tokens": 0, "finish_reason": {"type": "stop"}}
        return [Completion(text, dict(meta)) for _ in range(params.sampling["n"])]

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> list[Scores]:
        return [Scores([0.0], unconditional=[0.0]) for _ in choices]


class _CountingSession(StepSession):
    def __init__(self, backend: DryBackend, program: ir.Program, sink: ir.Sink) -> None:
        super().__init__(backend, program, sink)
        self._dry = backend

    def send(self, segment: ir.Segment) -> None:
        self._dry.segments += 1
        if self._dry.segments > MAX_SEGMENTS:
            raise ProgramError(f"with made-up values the program does not end within {MAX_SEGMENTS} requests")
        super().send(segment)
