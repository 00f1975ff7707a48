"""Harmony, in which gpt-oss models answer: messages in channels. What they think comes in one, what they say in
another, and a message to a function is a call.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from typing import Final

from sgl.formats.arguments import JsonReader
from sgl.formats.marks import Malformed, half_mark
from sgl.formats.parser import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, ToolCallStart
from sgl.formats.value_types import parsed

START: Final = "<|start|>assistant"
MESSAGE: Final = "<|message|>"
_MAX_HEADER: Final = 4096
"""Characters; more are text."""
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(r"\s*(?:<\|start\|>assistant)?\s*(?:to=|<\|channel\|>)")
_BEGINNINGS: Final = ("<|start|>", "to=", "<|channel|>", MESSAGE)


class HarmonyParser:
    """Takes an answer in any pieces, behind a prompt that ends with START or not. Where calls are `sure` to be
    well-formed, their arguments come as they are written; else once they are complete, and what is no JSON object is
    text. Without tools, a call is text with all that marks it."""

    def __init__(self, *, has_tools: bool, is_sure: bool) -> None:
        self._has_tools = has_tools
        self._is_sure = is_sure
        self._held = ""
        self._is_within = False
        """Behind a message's header."""
        self._channel = "final"
        self._name: str | None = None
        self._is_kept = False
        """Whether the message is a call, and stays as it is written."""
        self._arguments = JsonReader()
        self._body = ""
        """The text of a call that may be none."""

    @property
    def is_calling(self) -> bool:
        """Whether what was fed last belongs to a call."""
        return self._name is not None

    def feed(self, text: str, *, final: bool = False) -> list[Event]:
        """The next events. `final` releases what is held."""
        self._held += text
        events: list[Event] = []
        while self._held:
            length = (
                self._read_body(events, final=final) if self._is_within else self._read_header(events, final=final)
            )
            if not length:
                break
        if final:
            self._end(events)
            self._held = ""
        return events

    def _read_header(self, events: list[Event], *, final: bool) -> int:
        """How many characters were read."""
        most = _MAX_HEADER + len(MESSAGE)
        header, found, _ = self._held[:most].partition(MESSAGE)
        start = self._held.lstrip()
        if any(map(start.startswith, _BEGINNINGS)):
            if not found and len(self._held) < most:
                return 0
            if not found:  # a text that begins like one
                mark = next(each for each in _BEGINNINGS if start.startswith(each))
                return self._begin_text(len(self._held) - len(start) + len(mark), events)
        elif not final and any(each.startswith(start) for each in _BEGINNINGS):
            return 0
        else:  # a text without a header
            header, found = "", ""
        length = len(header) + len(found)
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel.group(1) if channel is not None else "final"
        self._name, self._is_kept = None, recipient is not None and not self._has_tools
        if self._is_kept:
            self._channel = "final"
            self._add(f"{header}{found}", events)
        elif recipient is not None:
            self._name = recipient.group(1).removeprefix("functions.")
            if self._is_sure:
                events.append(ToolCallStart(self._name))
        self._is_within, self._body, self._arguments = True, "", JsonReader()
        self._held = self._held[length:]
        return length or (0 if not self._held else self._read_body(events, final=final))

    def _begin_text(self, length: int, events: list[Event]) -> int:
        """A message without a header, of whose text so many characters are taken."""
        self._channel, self._name, self._is_kept, self._is_within = "final", None, False, True
        self._add(self._held[:length], events)
        self._held = self._held[length:]
        return length

    def _read_body(self, events: list[Event], *, final: bool) -> int:
        length = 0
        if self._name is not None and not self._arguments.is_complete:
            try:
                new, length = self._arguments.feed(self._held)
            except Malformed:
                self._end(events)
            else:
                self._add(new, events)
                self._body += self._held[:length]
                self._held = self._held[length:]
        if self._name is not None and not self._arguments.is_complete:
            return length
        ends = [at for end in _ENDS if (at := self._held.find(end)) >= 0]
        at = min(ends, default=-1)
        body = self._held[:at] if at >= 0 else self._held
        if at < 0 and not final:
            body = body[: len(body) - max(half_mark(body, end) for end in _ENDS)]
        if self._name is None:
            self._add(body, events)
        length += len(body)
        mark = next((end for end in _ENDS if at >= 0 and self._held.startswith(end, at)), "")
        if mark:
            if self._is_kept and mark != "<|start|>":
                self._add(mark, events)
            self._end(events)
            self._is_within = False
        taken = len(body) + (0 if mark == "<|start|>" else len(mark))
        self._held = self._held[taken:]
        return length or len(mark)

    def _add(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self._name is None:
            events.append(ReasoningDelta(text) if self._channel == "analysis" else ContentDelta(text))
        elif self._is_sure:
            events.append(ArgumentsDelta(text))

    def _end(self, events: list[Event]) -> None:
        """A message ends."""
        if self._name is not None and not self._is_sure:
            try:
                parsed(self._body)
                events += [ToolCallStart(self._name), ArgumentsDelta(self._body.strip())]
            except (ValueError, RecursionError):
                events += [ContentDelta(self._body)] if self._body else []
        self._name, self._body = None, ""
