"""Reads answers that stand in blocks: what is thought in one, what is said in another, and calls in their own.

<|START_THINKING|>…<|END_THINKING|><|START_ACTION|>[…]<|END_ACTION|>
<|START_THINKING|>…<|END_THINKING|><|START_RESPONSE|>…<|END_RESPONSE|>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl.formats.call_format import BlockKind, Blocks, CallFormat
from sgl.formats.marks import NeedMore, half_mark
from sgl.formats.parser import CallParser, ReasoningDelta


class BlocksParser(CallParser):
    """Takes an answer in any pieces. Text outside of blocks is said; a block that another mark breaks off has ended."""

    def __init__(
        self,
        format: CallFormat,
        blocks: Blocks,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        has_tools: bool,
        is_sure: bool,
        begun: BlockKind,
    ) -> None:
        """begun: the block that the prompt began."""
        super().__init__(format, schemas, is_sure=is_sure)
        self._kind: BlockKind = begun
        self._blanks: str | None = ""
        """Outside of blocks, before what is said there, if anything; None behind that."""
        self._marks: dict[str, BlockKind | None] = {blocks.thought[0]: "thought", blocks.said[0]: "said"}
        """What comes behind each; None: calls."""
        self._marks |= {each: "" for each in (blocks.thought[1], blocks.said[1], blocks.end) if each}
        if has_tools:
            self._marks[format.trigger] = None

    def _text(self) -> None:
        if not self._kind and self._blanks is not None:
            held = self._held.lstrip()
            self._blanks += self._held[: len(self._held) - len(held)]
            self._held = held
            if not held:
                raise NeedMore
        held = self._held
        found = [(at, -len(mark), mark) for mark in self._marks if (at := held.find(mark)) >= 0]
        at, _, mark = min(found, default=(len(held), 0, ""))
        if not mark or self._may_grow(mark, held[at:]):
            at = min([at, *(len(held) - half_mark(held, each) for each in self._marks)])
            mark = ""
        before, self._held = held[:at], held[at:]
        self._say(before)
        if not mark:
            raise NeedMore
        kind = self._marks[mark]
        self._kind, self._blanks = kind or "", ""
        if kind is None:
            self._raw = ""
            self._step = self._open
        else:
            self._held = self._held[len(mark) :]

    def _may_grow(self, mark: str, text: str) -> bool:
        """Whether what begins with a mark may be a longer one yet."""
        return any(len(each) > len(mark) and each.startswith(text) for each in self._marks)

    def _say(self, text: str) -> None:
        if self._kind == "thought":
            self._events += [ReasoningDelta(text)] * bool(text)
        elif text:
            super()._say(f"{self._blanks or ''}{text}")
            self._blanks = None
