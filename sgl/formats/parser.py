"""Reads calls in an answer that comes in pieces: the text beside them, their names, and their arguments as JSON."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sgl.formats.arguments import XML_STYLES, ArgumentReader, JsonReader, XmlReader
from sgl.formats.call_format import CallFormat
from sgl.formats.literals import LITERAL_STYLES, LiteralReader
from sgl.formats.marks import Malformed, NeedMore, find_mark, half_mark, parts_of, read_mark, read_one
from sgl.formats.value_types import parsed

MAX_CALLS = 4096
"""Of one answer; what stands behind them is text. More would take a long text seconds."""
MAX_NAME = 2048
"""Characters of a call's name as it is written, and of each mark around it and around the arguments."""
_OWN_ID = re.compile(r'\s*,\s*"id"\s*:\s*"[^"]*"(?=\s*\})')
"""Which some models write behind the arguments."""
_QUOTED = re.compile(r'(?:[^"\\]|\\.)*(?=")', re.DOTALL)
_BARE_NAME = re.compile(r"\s*[\w./-]*\s*(?:\(|$)")
_TO_LINE_END = re.compile(r"[^\n<]*(?=[\n<])")
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
_NUMBER = re.compile(r"\s*\d{0,9}")


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text beside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `id`: its own, if the model writes one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """What is new of the arguments' JSON text, of the call that began last."""

    text: str


Event: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class CallParser:
    """Takes an answer in any pieces. Where calls are `sure` to be well-formed, events come as soon as they can; else a
    call waits until it is complete, and what turns out to be none is text."""

    def __init__(self, format: CallFormat, schemas: Mapping[str, Mapping[str, Any]], *, is_sure: bool) -> None:
        """schemas: the tools' parameters by name."""
        self._format = format
        self._schemas = schemas
        self._is_sure = is_sure
        self._held = ""
        self._events: list[Event] = []
        self._waiting: list[Event] = []  # of a call that may be none
        self._raw = ""  # the text of that
        self._num_calls = 0
        self._arguments: ArgumentReader = JsonReader()
        self._step: Callable[[], None] = self._text if format.trigger else self._start
        self._begun = self._number if format.number_mark else self._name
        """The step behind what a call begins with."""
        self._is_behind_call = False
        self._is_triggered = False  # whether what waits begins with the trigger
        self._ways_between = [format.closing] if format.closing else []
        """What may stand behind a call among several."""
        if format.begin:
            self._ways_between += [format.separator + format.begin, format.begin]
        else:
            self._ways_between.append(format.separator)

    @property
    def is_calling(self) -> bool:
        """Whether what was fed last belongs to a call."""
        return self._step not in (self._text, self._start, self._rest)

    def feed(self, text: str, *, final: bool = False) -> list[Event]:
        """The next events. `final` releases what is held."""
        self._held += text
        try:
            while True:
                try:
                    self._step()
                except Malformed:
                    self._fail()
                except NeedMore:
                    if not self._is_too_long():
                        raise
                    self._fail()
        except NeedMore:
            pass
        if final:
            self._finish()
        events, self._events = self._events, []
        return events

    def _is_too_long(self) -> bool:
        """Whether so much is held that it is no call, beside arguments."""
        # twice: what ends such a mark may be another one
        return len(self._held) > 2 * MAX_NAME and self.is_calling and self._step != self._argue

    # ── outside of calls ────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        """Where an answer begins that may be calls as a whole."""
        if not self._held.strip():
            raise NeedMore
        with contextlib.suppress(Malformed):
            self._read(self._format.prefix)
        self._step = self._open

    def _rest(self) -> None:
        """What stays text."""
        self._say(self._held)
        self._held = ""
        raise NeedMore

    def _text(self) -> None:
        trigger = self._format.trigger
        if self._is_behind_call:
            self._held = self._held.lstrip()
            self._is_behind_call = not self._held
        before, found, _ = self._held.partition(trigger)
        if not found:
            before = self._held[: len(self._held) - half_mark(self._held, trigger)]
        self._say(before)
        self._held = self._held[len(before) :]
        if not found:
            raise NeedMore
        self._raw = ""
        self._step = self._open

    def _open(self) -> None:
        if self._num_calls == MAX_CALLS:
            self._step = self._rest
            return
        self._is_triggered = True
        self._read(self._format.opening)
        self._step = self._call

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _call(self) -> None:
        self._read(self._format.begin)
        self._step = self._begun

    def _number(self) -> None:
        """The call's, which nobody asks for."""
        digits = _NUMBER.match(self._held)
        if digits is None or digits.end() == len(self._held):
            raise NeedMore
        self._pass(digits.end() + read_mark(self._format.number_mark, self._held[digits.end() :]))
        self._step = self._name

    def _name(self) -> None:
        middle, end = self._format.middle, self._end_of_name()
        written, length = self._held[:end], end + read_mark(middle, self._held[end:])
        name = _unquoted(written) if self._format.quotes_name else written.strip()
        own_id = ""
        if self._format.id_mark:
            name, own_id = _name_and_id(self._format.id_mark, name)
        if not name or (name.startswith("{") and not self._format.quotes_name):  # JSON, of another form
            raise Malformed("a call has a name")
        if self._format.writes_id and (found := _ID.fullmatch(name)) is not None:
            name, own_id = found.group(1), name
        self._waiting.append(ToolCallStart(name, None if self._format.has_number else own_id or None))
        self._pass(length)
        self._arguments = self._reader(name)
        self._step = self._argue

    def _end_of_name(self) -> int:
        """Where what stands behind a name begins. Raises NeedMore."""
        format, held = self._format, self._held
        if not format.begin and not _BARE_NAME.match(held):
            raise Malformed("a call begins with its name")
        if format.quotes_name:
            found = _QUOTED.match(held)
        elif not parts_of(format.middle):  # white space is none
            found = _TO_LINE_END.match(held)
        else:
            at = 0
            if format.has_number:  # its mark begins as the middle does
                at = find_mark(format.id_mark, held)
                at += read_mark(format.id_mark, held[at:])
            return at + find_mark(format.middle, held[at:])
        if found is None:
            raise NeedMore
        return found.end()

    def _reader(self, name: str) -> ArgumentReader:
        if self._format.arguments == "json":
            return JsonReader()
        if (style := LITERAL_STYLES.get(self._format.arguments)) is not None:
            return LiteralReader(style)
        return XmlReader(XML_STYLES[self._format.arguments], self._format.end, self._schemas.get(name, {}))

    def _argue(self) -> None:
        new, length = self._arguments.feed(self._held)
        self._take(length)
        if new:
            self._waiting.append(ArgumentsDelta(new))
        if self._is_sure:
            self._release()
        if not self._arguments.is_complete:
            raise NeedMore
        self._step = self._end

    def _end(self) -> None:
        self._check()
        if self._held.lstrip().startswith(",") and self._format.end.startswith("}"):
            found = _OWN_ID.match(self._held)
            if found is None and len(self._held) <= 2 * MAX_NAME:
                raise NeedMore
            self._pass(0 if found is None else found.end())
        self._read(self._format.end)
        self._release()
        self._num_calls += 1
        if self._format.trigger and not self._format.opening:
            self._is_behind_call = True
            self._step = self._text
        else:
            self._step = self._between

    def _between(self) -> None:
        """Behind a call among several."""
        if not self._held.strip():
            raise NeedMore
        index, length = read_one(self._ways_between, self._held)
        is_closing = bool(self._format.closing) and index == 0
        if self._num_calls == MAX_CALLS and not is_closing:
            self._step = self._rest
            return
        self._pass(length)
        self._raw = "" if is_closing else self._raw
        self._is_behind_call = is_closing
        self._step = self._begun if not is_closing else self._text if self._format.trigger else self._rest

    # ── what is read ────────────────────────────────────────────────────────────────────────────────────────────

    def _say(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def _read(self, mark: str) -> None:
        self._pass(read_mark(mark, self._held))

    def _pass(self, length: int) -> None:
        """Take a name or a mark. A long one is none: in pieces, it would not be waited for."""
        if length > MAX_NAME:
            raise Malformed("names and marks are short")
        self._take(length)

    def _take(self, length: int) -> None:
        self._raw += self._held[:length]
        self._held = self._held[length:]

    def _release(self) -> None:
        """The call is one, as far as it goes."""
        self._events += self._waiting
        self._waiting, self._raw, self._is_triggered = [], "", False

    def _check(self) -> None:
        """Raise Malformed where arguments are no JSON."""
        written = "".join(event.text for event in self._waiting if isinstance(event, ArgumentsDelta))
        try:
            if written:
                parsed(written)
        except (ValueError, RecursionError) as error:
            raise Malformed("arguments are JSON") from error

    def _fail(self) -> None:
        """What seemed to be a call is text."""
        text = self._raw + self._held
        self._waiting, self._raw, self._is_behind_call = [], "", False
        trigger = self._format.trigger
        if self._is_triggered:
            self._say(trigger)
            text = text[len(trigger) :]
        self._held = text
        self._step = self._text if trigger else self._rest

    def _finish(self) -> None:
        if self._step == self._between:
            self._held = self._held.strip()
        elif self._step == self._end:
            with contextlib.suppress(Malformed):
                self._check()
                self._release()
                self._held = ""
        elif self.is_calling and self._is_sure:
            self._release()
            self._held = ""
        self._say(self._raw + (self._held.lstrip() if self._is_behind_call else self._held))
        self._held, self._raw, self._waiting = "", "", []


def _unquoted(written: str) -> str:
    try:
        name: str = json.loads(f'"{written}"', strict=False)
    except ValueError as error:
        raise Malformed("a quoted name is a JSON string") from error
    return name


def _name_and_id(mark: str, text: str) -> tuple[str, str]:
    """What stands before a mark and behind it."""
    try:
        at = find_mark(mark, text)
        length = read_mark(mark, text[at:])
    except (Malformed, NeedMore):
        return text, ""
    return text[:at].strip(), text[at + length :].strip()
