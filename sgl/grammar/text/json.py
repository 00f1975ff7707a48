"""JSON's lexemes: expressions for strings, numbers and white space, and the canonical text of a string.

Constrained strings, keys and enumerated values have one spelling: UTF-8, with the escapes that JSON requires.
Unconstrained strings may use every legal spelling.
"""

from __future__ import annotations

import json
from typing import Final

from sgl.grammar.regular.byteset import byte_range
from sgl.grammar.regular.charset import ESCAPED, EVERY_CHAR, json_text
from sgl.grammar.regular.expr import EPSILON, Concat, Expr, Repeat, byte_set, concat, literal, repeat, union
from sgl.grammar.regular.expr_leaves import intern

_HEX: Final = byte_set(byte_range(0x30, 0x39) | byte_range(0x41, 0x46) | byte_range(0x61, 0x66))


def _hex_escape() -> Expr:
    """One character as \\uXXXX, or as a pair of surrogates."""
    digits = {char: byte_set((1 << ord(char)) | (1 << ord(char.upper()))) for char in "abcdef"}
    not_d = byte_set(_mask("0123456789abcefABCEF"))
    below_8 = byte_set(_mask("01234567"))
    unit = union(concat(not_d, repeat(_HEX, 3, 3)), concat(digits["d"], below_8, _HEX, _HEX))
    high = concat(digits["d"], byte_set(_mask("89abAB")), _HEX, _HEX)
    low = concat(digits["d"], byte_set(_mask("cdefCDEF")), _HEX, _HEX)
    return union(concat(literal(b"\\u"), unit), concat(literal(b"\\u"), high, literal(b"\\u"), low))


def _mask(characters: str) -> int:
    return sum(1 << ord(char) for char in set(characters))


QUOTE: Final = literal(b'"')
CANONICAL_CHAR: Final = json_text(EVERY_CHAR)
"""One character in canonical spelling."""
CANONICAL_BODY: Final = repeat(CANONICAL_CHAR, 0, None)
"""Every string in canonical spelling, without quotes."""
JSON_CHAR: Final = union(CANONICAL_CHAR, concat(literal(b"\\"), byte_set(_mask('"\\/bfnrt'))), _hex_escape())
"""One character in any spelling."""
JSON_STRING: Final = concat(QUOTE, repeat(JSON_CHAR, 0, None), QUOTE)
_DIGIT: Final = byte_set(_mask("0123456789"))
JSON_INTEGER: Final = concat(
    repeat(literal(b"-"), 0, 1), union(literal(b"0"), concat(byte_set(_mask("123456789")), repeat(_DIGIT, 0, None)))
)
JSON_NUMBER: Final = concat(
    JSON_INTEGER,
    repeat(concat(literal(b"."), repeat(_DIGIT, 1, None)), 0, 1),
    repeat(concat(byte_set(_mask("eE")), repeat(byte_set(_mask("+-")), 0, 1), repeat(_DIGIT, 1, None)), 0, 1),
)
MAX_BLANKS: Final = 64
BLANK_BYTES: Final = _mask(" \t")
# An expression of its own: a lexeme that reaches it counts the blanks that follow.
_BLANKS: Final = intern(Repeat, byte_set(BLANK_BYTES), 0, MAX_BLANKS, key=(Repeat, "blanks"))
WHITESPACE: Final = {
    "compact": literal(b""),
    "flexible": union(repeat(literal(b" "), 0, 1), concat(repeat(literal(b"\r"), 0, 1), literal(b"\n"), _BLANKS)),
}
"""Texts between JSON's tokens: nothing, or one space, or a line break and at most 64 columns."""


def behind_blanks(expr: Expr) -> Expr | None:
    """The rest behind the blanks after a line break; None in any other expression."""
    if isinstance(expr, Concat):
        return expr.tail if expr.head is _BLANKS else None
    return EPSILON if expr is _BLANKS else None


_ESCAPES: Final = {char: escape.decode() for char, escape in ESCAPED.items()}


def string_body(text: str) -> bytes:
    """The canonical JSON text of a string, without quotes. Raises UnicodeEncodeError for a lone surrogate."""
    return text.translate(_ESCAPES).encode()


def string_of(body: bytes) -> str:
    """The string with a canonical text."""
    text = json.loads(b'"' + body + b'"')
    assert isinstance(text, str)
    return text
