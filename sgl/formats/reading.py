"""The parser of each format, and whole texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sgl.formats.blocks import BlocksParser
from sgl.formats.call_format import BlockKind, CallFormat
from sgl.formats.harmony import HarmonyParser
from sgl.formats.parser import ArgumentsDelta, CallParser, Event, ToolCallStart


class AnswerReader(Protocol):
    """Reads calls in an answer that comes in pieces, and what stands beside them."""

    @property
    def is_calling(self) -> bool:
        """Whether what was fed last belongs to a call."""

    def feed(self, text: str, *, final: bool = False) -> list[Event]:
        """The next events. `final` releases what is held."""


def reader_of(
    format: CallFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    has_tools: bool = True,
    is_sure: bool = False,
    begun: BlockKind = "",
) -> AnswerReader:
    """A parser of a format. schemas: the tools' parameters by name. is_sure: calls are certainly well-formed. begun:
    the block that the prompt began."""
    if format.blocks is not None:
        return BlocksParser(format, format.blocks, schemas, has_tools=has_tools, is_sure=is_sure, begun=begun)
    if format.has_channels:
        return HarmonyParser(has_tools=has_tools, is_sure=is_sure)
    return CallParser(format, schemas, is_sure=is_sure)


def calls_in(
    text: str, format: CallFormat, schemas: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, str | None]]:
    """The calls in a whole text: {"id", "name", "arguments"}, the arguments as JSON text."""
    calls: list[dict[str, str | None]] = []
    for event in reader_of(format, schemas or {}).feed(text, final=True):
        if isinstance(event, ToolCallStart):
            calls.append({"id": event.id, "name": event.name, "arguments": ""})
        elif isinstance(event, ArgumentsDelta):
            calls[-1]["arguments"] = f"{calls[-1]['arguments']}{event.text}"
    return calls
