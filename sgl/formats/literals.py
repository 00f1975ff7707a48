"""Arguments written as Python's or Gemma's values, read in pieces and turned into the JSON text of an object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from sgl.formats.arguments import ArgumentReader
from sgl.formats.marks import Malformed, NeedMore


class LiteralStyle(NamedTuple):
    """How values are written. Nested ones have colons between keys and values in any case."""

    assigns: str
    """Between a parameter and its value."""
    end: str
    """Behind the last parameter."""
    quotes: tuple[str, ...]
    """What a string may stand between two of."""
    has_escapes: bool = False
    """Whether strings have Python's escapes."""


LITERAL_STYLES: Final = {
    "pythonic": LiteralStyle("=", ")", ('"', "'"), has_escapes=True),
    "gemma4": LiteralStyle(":", "}", ('<|"|>',)),
    "functiongemma": LiteralStyle(":", "}", ("<escape>",)),
}
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_SCALAR: Final = re.compile(r"""[^\s,:={}\[\]()<>"']+""")
_JSON_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_HEX: Final = {"x": 2, "u": 4, "U": 8}
"""How many digits an escape has."""
_DIGITS: Final = re.compile("[0-9a-fA-F]+")
_OCTAL: Final = re.compile("[0-7]{1,3}")
_CHARS: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": "", "/": "/"}
"""By what stands behind a backslash. The last is JSON's."""
_BLANKS: Final = " \t\r\n"

Step = Callable[[str], int]
"""Reads what comes next, and says how many characters it took. Raises NeedMore and Malformed."""


class LiteralReader(ArgumentReader):
    """Reads parameters up to what ends them, which stays."""

    def __init__(self, style: LiteralStyle) -> None:
        self.is_complete = False
        self._style = style
        self._closers = [style.end]
        """Of what is open, the parameters first."""
        self._is_first = True
        """Whether nothing stands yet in what was opened last."""
        self._written = "{"
        self._step: Step = self._item
        self._quote = ""
        """Of the string that is read; none outside of one."""
        self._behind_string: Step = self._behind

    def feed(self, text: str) -> tuple[str, int]:
        at = 0
        try:
            while not self.is_complete:
                if not self._quote and text[at : at + 1] in _BLANKS:
                    at = len(text) - len(text[at:].lstrip(_BLANKS))
                if at == len(text):
                    break
                at += self._step(text[at:])
        except NeedMore:
            pass
        written, self._written = self._written, ""
        return written, at

    def _item(self, text: str) -> int:
        """A key, or an item of an array, or the end of what is open."""
        if text[0] == self._closers[-1]:
            return self._close()
        if self._closers[-1] == "]":
            self._begin()
            self._step = self._value
            return self._value(text)
        if quote := self._quote_of(text):
            self._begin()
            return self._open_string(quote, self._assign)
        end = text.find(self._assigns)
        if end < 0:
            raise NeedMore
        if end == 0:
            raise Malformed("a parameter has a name")
        self._begin()
        self._written += json.dumps(text[:end].rstrip(_BLANKS), ensure_ascii=False)
        self._step = self._assign
        return end

    def _assign(self, text: str) -> int:
        if text[0] != self._assigns:
            raise Malformed(f"{self._assigns!r} is expected")
        self._written += ": "
        self._step = self._value
        return 1

    def _value(self, text: str) -> int:
        if quote := self._quote_of(text):
            return self._open_string(quote, self._behind)
        if text[0] in "{[":
            self._closers.append("}" if text[0] == "{" else "]")
            self._is_first = True
            self._written += text[0]
            self._step = self._item
            return 1
        found = _SCALAR.match(text)
        if found is None:
            raise Malformed("a value is expected")
        if found.end() == len(text):
            raise NeedMore
        self._written += _scalar(found.group())
        self._step = self._behind
        return found.end()

    def _behind(self, text: str) -> int:
        """Behind a value."""
        if text[0] == self._closers[-1]:
            return self._close()
        if text[0] != ",":
            raise Malformed("a comma is expected")
        self._step = self._item
        return 1

    def _string(self, text: str) -> int:
        """More of a string, or its end."""
        quote = self._quote
        if text.startswith(quote):
            self._written += '"'
            self._step, self._quote = self._behind_string, ""
            return len(quote)
        if quote.startswith(text):
            raise NeedMore
        if text[0] == "\\" and self._style.has_escapes:
            said, length = _escaped(text)
            self._written += said
            return length
        ends = [at for each in (quote[0], "\\") if (at := text.find(each, 1)) > 0]
        length = min(ends, default=len(text))
        self._written += json.dumps(text[:length], ensure_ascii=False)[1:-1]
        return length

    @property
    def _assigns(self) -> str:
        return self._style.assigns if len(self._closers) == 1 else ":"

    def _quote_of(self, text: str) -> str:
        """The quote that a text begins with, if it does."""
        for quote in self._style.quotes:
            if text.startswith(quote):
                return quote
            if quote.startswith(text):
                raise NeedMore
        return ""

    def _open_string(self, quote: str, behind: Step) -> int:
        self._written += '"'
        self._quote, self._behind_string, self._step = quote, behind, self._string
        return len(quote)

    def _begin(self) -> None:
        """Another item comes."""
        self._written += "" if self._is_first else ", "
        self._is_first = False

    def _close(self) -> int:
        """Close what was opened last."""
        closer = self._closers.pop()
        self.is_complete = not self._closers
        self._written += "]" if closer == "]" else "}"
        self._is_first = False
        self._step = self._behind
        return 0 if self.is_complete else 1


def _scalar(word: str) -> str:
    """The JSON text of a value that is no string."""
    found = _WORDS.get(word, word)
    if not _JSON_SCALAR.fullmatch(found):
        raise Malformed("a value is JSON's or Python's")
    return found


def _escaped(text: str) -> tuple[str, int]:
    """What stands in JSON for the escape that a text begins with, and its length."""
    kind = text[1:2]
    if kind in _HEX:
        length = 2 + _HEX[kind]
        if len(text) < length:
            raise NeedMore
        digits = text[2:length]
        if not _DIGITS.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
            raise Malformed("an escape has digits")
        if kind != "U":  # as in JSON, where halves of a surrogate pair stand side by side, too
            return f"\\u{digits:0>4}", length
        char = chr(int(digits, 16))
    elif octal := _OCTAL.match(text, 1):
        length = octal.end()
        if length == len(text):
            raise NeedMore
        char = chr(int(octal.group(), 8))
    elif not kind:
        raise NeedMore
    else:
        length = 2
        char = _CHARS.get(kind, kind if kind in "\\'\"" else f"\\{kind}")
    return json.dumps(char)[1:-1], length
