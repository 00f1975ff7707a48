"""Harmony, in which gpt-oss models answer: messages in channels. What they think comes in one, what they say in
another, and a message to a function is a call.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from typing import Final

from sgl.formats.arguments import JsonReader
from sgl.formats.marks import Malformed, NeedMore, half_mark
from sgl.formats.parser import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, ToolCallStart
from sgl.formats.value_types import parsed

START: Final = "<|start|>assistant"
MESSAGE: Final = "<|message|>"
_MAX_HEADER: Final = 4096
"""Characters; more are text."""
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BEGINNINGS: Final = ("<|start|>", "to=", "<|channel|>", MESSAGE)


class HarmonyParser:
    """Takes an answer in any pieces, behind a prompt that ends with START or not. Where calls are `sure` to be
    well-formed, their arguments come as they are written; else once they are complete, and what is no JSON object is
    text. Without tools, a call is text with all that marks it."""

    def __init__(self, *, has_tools: bool, is_sure: bool) -> None:
        self._has_tools = has_tools
        self._is_sure = is_sure
        self._held = ""
        self._events: list[Event] = []
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
        try:
            while self._held:
                (self._read_body if self._is_within else self._read_header)(final=final)
        except NeedMore:
            pass
        if final:
            self._end()
            self._held = ""
        events, self._events = self._events, []
        return events

    def _read_header(self, *, final: bool) -> None:
        most = _MAX_HEADER + len(MESSAGE)
        header, found, _ = self._held[:most].partition(MESSAGE)
        start = self._held.lstrip()
        mark = next((each for each in _BEGINNINGS if start.startswith(each)), "")
        if mark and not found:
            if len(self._held) < most:
                raise NeedMore
            header = self._take(len(self._held) - len(start) + len(mark))  # a text that begins like one
        elif mark:
            self._take(len(header) + len(found))
        elif not final and any(each.startswith(start) for each in _BEGINNINGS):
            raise NeedMore
        else:  # a text without a header
            header, found = "", ""
        channel, recipient = (_CHANNEL.search(header), _RECIPIENT.search(header)) if found else (None, None)
        self._is_kept = recipient is not None and not self._has_tools
        self._channel = "final" if channel is None or self._is_kept else channel.group(1)
        self._name = None if recipient is None or self._is_kept else recipient.group(1).removeprefix("functions.")
        self._is_within, self._body, self._arguments = True, "", JsonReader()
        if self._is_kept or not found:
            self._add(header + found)
        elif self._name is not None and self._is_sure:
            self._events.append(ToolCallStart(self._name))

    def _read_body(self, *, final: bool) -> None:
        if self._name is not None and not self._arguments.is_complete:
            try:
                new, length = self._arguments.feed(self._held)
            except Malformed:
                self._end()
            else:
                self._add(new)
                self._body += self._take(length)
                if not self._arguments.is_complete:  # all is read
                    return
        end = _END.search(self._held)
        half = 0 if final else max(half_mark(self._held, each) for each in _ENDS)
        text = self._take(len(self._held) - half if end is None else end.start())
        if self._name is None:
            self._add(text)
        if end is None:
            raise NeedMore
        if end.group() != "<|start|>":
            mark = self._take(len(end.group()))
            self._add(mark if self._is_kept else "")
        self._end()
        self._is_within = False

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._name is None:
            self._events.append(ReasoningDelta(text) if self._channel == "analysis" else ContentDelta(text))
        elif self._is_sure:
            self._events.append(ArgumentsDelta(text))

    def _end(self) -> None:
        """A message ends."""
        if self._name is not None and not self._is_sure:
            try:
                parsed(self._body)
                self._events += [ToolCallStart(self._name), ArgumentsDelta(self._body.strip())]
            except (ValueError, RecursionError):
                self._events += [ContentDelta(self._body)] if self._body else []
        self._name, self._body = None, ""
