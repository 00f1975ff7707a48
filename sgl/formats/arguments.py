"""Arguments as they are written, read in pieces and turned into the JSON text of an object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from sgl.formats.marks import Malformed, NeedMore, find_mark, half_mark, read_mark, read_one
from sgl.formats.value_types import json_of, types_of


class ArgumentReader(Protocol):
    """Reads one call's arguments."""

    is_complete: bool

    def feed(self, text: str) -> tuple[str, int]:
        """What is new of the JSON text, and how many characters were read; those left are to come again, with more.
        Raises Malformed."""


_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class JsonReader(ArgumentReader):
    """Arguments that are JSON: finds the end of the object, or of what else begins with a bracket."""

    def __init__(self, bracket: str = "{") -> None:
        self.is_complete = False
        self._bracket = bracket
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> tuple[str, int]:
        start = 0
        if not self._depth:
            start = len(text) - len(text.lstrip())
            if start < len(text) and text[start] != self._bracket:
                raise Malformed("arguments are an object")
        at = start
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                break
            at = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._is_escaped = True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if not self._depth:
                        self.is_complete = True
                        return text[start:at], at
        return text[start:], len(text)


class XmlStyle(NamedTuple):
    """How parameters are written: a key between the first two marks, its value before the third."""

    begin: str
    middle: str
    end: str
    is_padded: bool = False
    """A value stands in lines of its own."""
    string_middle: str = ""
    """What stands before a string instead, where the middle tells."""
    more_middles: tuple[str, ...] = ()
    """What may stand in the place of the middle before values of other kinds, none of them strings."""
    has_cdata: bool = False
    """A text may stand between <![CDATA[ and ]]>."""
    has_escapes: bool = False
    """A key has &amp; and &quot; for what they stand for in XML."""


XML_STYLES = {
    "qwen_xml": XmlStyle("<parameter=", ">", "</parameter>", is_padded=True),
    "glm_xml": XmlStyle("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    "hy_xml": XmlStyle(
        "<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>"
    ),
    "ifm_xml": XmlStyle("<ifm|arg_key>", "</ifm|arg_key>\n<ifm|arg_value>", "</ifm|arg_value>"),
    "solar_xml": XmlStyle("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"),
    "minicpm_xml": XmlStyle('<param name="', '">', "</param>", has_cdata=True),
    "minimax_xml": XmlStyle('<parameter name="', '">', "</parameter>"),
    "step_xml": XmlStyle('<steptml:parameter name="', '">', "</steptml:parameter>"),
    "deepseek_xml": XmlStyle(
        '<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>", string_middle='" string="true">'
    ),
    "kimi_xml": XmlStyle(
        '<|open|>argument key="',
        '" type="number"<|sep|>',
        "<|close|>argument<|sep|>",
        string_middle='" type="string"<|sep|>',
        more_middles=tuple(f'" type="{kind}"<|sep|>' for kind in ("boolean", "null", "array", "object")),
        has_escapes=True,
    ),
    "gcml_xml": XmlStyle(
        '<｜GCML｜parameter name="', '" string="false">', "</｜GCML｜parameter>", string_middle='" string="true">'
    ),
}


_TEXT = frozenset({"string"})
_CDATA = "<![CDATA["
_MOST_KEY = 4096  # characters within which a parameter's name ends, each of which is looked at again with the next


class XmlReader(ArgumentReader):
    """Parameters between tags, up to what ends the call. Strings stand as they are, in lines of their own or not; other
    values are JSON."""

    def __init__(self, style: XmlStyle, end: str, parameters: Mapping[str, Any]) -> None:
        """end: what stands behind the last parameter. parameters: the schema of all."""
        self.is_complete = False
        self._style = style
        self._end = end
        self._parameters = parameters
        self._types: frozenset[str] | None = None
        """Of the value that is read; None between values."""
        self._has_begun = False
        self._value_end = style.end
        self._json: JsonReader | None = None
        self._scanned = 0  # of a value that has not ended: each piece is looked at once
        self._num_keys = 0

    def feed(self, text: str) -> tuple[str, int]:
        written, at = "", 0
        try:
            while not self.is_complete:
                added, length = self._between(text[at:]) if self._types is None else self._value(text[at:])
                written += added
                at += length
                if not length and not self.is_complete:
                    break
        except NeedMore:
            pass
        return written, at

    def _between(self, text: str) -> tuple[str, int]:
        """The next key, or the end, which stays."""
        style = self._style
        if blanks := len(text) - len(text.lstrip()):  # each is looked at once
            return "", blanks
        try:
            begun = read_mark(style.begin, text)
        except Malformed:
            read_mark(self._end, text)
            self.is_complete = True
            return "{}" if not self._num_keys else "}", 0
        try:
            length = find_mark(style.middle, text[begun:])
        except NeedMore:
            if len(text) - begun <= _MOST_KEY:
                raise
            length = len(text) - begun
        if length > _MOST_KEY:
            raise Malformed("a parameter's name ends")
        end = begun + length
        middles = [style.middle, *style.more_middles] + [style.string_middle] * bool(style.string_middle)
        index, length = read_one(middles, text[end:])
        length += end
        key = text[begun:end].strip()
        if style.has_escapes:
            key = key.replace("&quot;", '"').replace("&amp;", "&")
        types = types_of(self._parameters, key) if index <= len(style.more_middles) else _TEXT
        end_mark = style.end
        if style.has_cdata and text.startswith(_CDATA, length):
            length += len(_CDATA)
            end_mark = "]]>" + style.end
            types = _TEXT if "string" in types else types
        elif style.has_cdata and _CDATA.startswith(text[length:]):
            raise NeedMore
        self._types, self._value_end = types, end_mark
        self._has_begun, self._json, self._scanned = False, None, 0
        self._num_keys += 1
        opened = "{" if self._num_keys == 1 else ", "
        return f"{opened}{json.dumps(key, ensure_ascii=False)}: ", length

    def _value(self, text: str) -> tuple[str, int]:
        """What is new of a value. Only a string alone need not wait for its end."""
        style, types = self._style, self._types
        assert types is not None
        if types != _TEXT:
            value = text[: self._end_of_value(text, types)]
            self._types = None
            return json_of(self._unpadded(value), types), len(value) + len(self._value_end)
        value, end, _ = text.partition(self._value_end)
        if not end:  # what may be the end, or the line break before it, waits
            value = text[: len(text) - half_mark(text, self._value_end)]
            if style.is_padded and (len(value) > 1 or self._has_begun):
                value = value.removesuffix("\n")
            if not value or (value == "\n" and not self._has_begun):
                raise NeedMore
        said = value
        if style.is_padded:
            said = said if self._has_begun else said.removeprefix("\n")
            said = said.removesuffix("\n") if end else said
        opened = "" if self._has_begun else '"'
        self._has_begun = True
        if end:
            self._types = None
        return opened + json.dumps(said, ensure_ascii=False)[1:-1] + ('"' if end else ""), len(value) + len(end)

    def _unpadded(self, value: str) -> str:
        return value.removeprefix("\n").removesuffix("\n") if self._style.is_padded else value

    def _end_of_value(self, text: str, types: frozenset[str]) -> int:
        """Where a value ends that may be JSON, whose strings may hold the end tag. Raises NeedMore."""
        if not self._has_begun:
            rest = text[self._scanned :]
            start = rest.lstrip()
            self._scanned += len(rest) - len(start)
            if not start:
                raise NeedMore
            self._has_begun = True
            if {"{": "object", "[": "array"}.get(start[0]) in types:
                self._json = JsonReader(start[0])
        if self._json is not None and not self._json.is_complete:
            self._scanned += self._json.feed(text[self._scanned :])[1]
            if not self._json.is_complete:
                raise NeedMore
        at = text.find(self._value_end, self._scanned)
        if at < 0:
            self._scanned = max(self._scanned, len(text) - len(self._value_end) + 1)
            raise NeedMore
        return at
