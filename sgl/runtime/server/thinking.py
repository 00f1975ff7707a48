"""What a model thinks before it answers: told apart from the answer, and free of the answer's constraint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sgl.formats.call_format import BlockKind, CallFormat
from sgl.formats.constraint import behind_reasoning, in_channels
from sgl.lang.ir.reasoning import ReasoningFormat, ReasoningSplitter, is_begun, reasoning_format
from sgl.runtime.sampling_params import CONSTRAINTS
from sgl.runtime.text.tokenizer import Tokenizer

_TAIL = 16  # tokens of a prompt, the last of which may begin the reasoning


class Thinking(NamedTuple):
    """The reasoning of one chat's answers."""

    parser: str
    format: ReasoningFormat
    is_begun: bool | None
    """By the prompt, which may also have ended it; None: it says nothing."""
    streams: bool

    @classmethod
    def of(
        cls, parser: str, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, streams: bool, said: str | None = None
    ) -> Thinking:
        """As a prompt leaves it. said: what a continued answer begins with. Raises InvalidRequest for an unknown
        parser."""
        format = reasoning_format(parser)
        begun = is_begun(tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False), format)
        if begun is None and said:
            begun = said.rfind(format.begin) > said.rfind(format.end)
        return cls(parser, format, begun, streams)

    @property
    def marks(self) -> tuple[str, str]:
        """What is written around it."""
        return self.format.begin, self.format.end

    def splitter(self) -> ReasoningSplitter:
        """Tells it from one answer."""
        return ReasoningSplitter(self.parser, is_inside=self.is_begun, streams=self.streams, only_leading=True)

    def before(self, params: dict[str, Any]) -> dict[str, Any]:
        """Sampling parameters whose constraint holds from where the reasoning ends."""
        kind = constraint_in(params)
        if kind is None or self.is_begun is False:
            return params
        is_inside = self.format.starts_inside if self.is_begun is None else self.is_begun
        tag = behind_reasoning(kind, params[kind], *self.marks, is_inside=is_inside)
        return params if tag is None else {**params, kind: None, "structural_tag": tag}


def block_begun(
    format: CallFormat | None, tokenizer: Tokenizer, prompt_ids: Sequence[int], said: str | None = None
) -> BlockKind:
    """Of a format with blocks, by the end of a prompt. said: what a continued answer begins with, inside its block."""
    if format is None or format.blocks is None:
        return ""
    begun = format.blocks.begun_by(tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False))
    return "said" if said and not begun else begun


def in_last_channel(params: dict[str, Any], format: CallFormat, begun: BlockKind) -> dict[str, Any]:
    """Sampling parameters whose constraint holds for what a model says in the last of its channels."""
    kind = constraint_in(params)
    tag = None if kind is None else in_channels(kind, params[kind], format, begun)
    return params if kind is None or tag is None else {**params, kind: None, "structural_tag": tag}


def constraint_in(params: dict[str, Any]) -> str | None:
    """The kind of constraint that sampling parameters hold."""
    return next((name for name in CONSTRAINTS if params.get(name) is not None), None)
