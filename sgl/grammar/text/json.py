"""JSON's lexemes: expressions for strings, numbers and white space, and the canonical text of a string.

Constrained strings, keys and enumerated values have one spelling: UTF-8, with the escapes that JSON requires.
Unconstrained strings may use every legal spelling.
"""

from __future__ import annotations

import json
from typing import Final

from sgl.grammar.regular.charset import ESCAPED, EVERY_CHAR, json_text
from sgl.grammar.regular.expr import EPSILON, Concat, Expr, Repeat, byte_set, concat, literal, repeat, union
from sgl.grammar.regular.expr_leaves import intern
from sgl.grammar.regular.regex import compile_regex


def _regex(pattern: str) -> Expr:
    return compile_regex(pattern, dialect="python", search=False)


QUOTE: Final = literal(b'"')
CANONICAL_CHAR: Final = json_text(EVERY_CHAR)
"""One character in canonical spelling."""
CANONICAL_BODY: Final = repeat(CANONICAL_CHAR, 0, None)
"""Every string in canonical spelling, without quotes."""
_HEX: Final = "[0-9A-Fa-f]"
_UNIT: Final = rf"[0-9A-CEFa-cef]{_HEX}{{3}}|[Dd][0-7]{_HEX}{{2}}|[Dd][89ABab]{_HEX}{{2}}\\u[Dd][C-Fc-f]{_HEX}{{2}}"
"""What may follow \\u: a code that is no surrogate, or a pair of surrogates."""
JSON_CHAR: Final = union(CANONICAL_CHAR, _regex(rf'\\(?:["\\/bfnrt]|u(?:{_UNIT}))'))
"""One character in any spelling."""
JSON_STRING: Final = concat(QUOTE, repeat(JSON_CHAR, 0, None), QUOTE)
JSON_INTEGER: Final = _regex(r"-?(?:0|[1-9]\d*)")
JSON_NUMBER: Final = concat(JSON_INTEGER, _regex(r"(?:\.\d+)?(?:[eE][+-]?\d+)?"))
MAX_BLANKS: Final = 64
BLANK_BYTES: Final = 1 << 0x20 | 1 << 0x09
# An expression of its own: a lexeme that reaches it counts the blanks that follow.
_BLANKS: Final = intern(Repeat, byte_set(BLANK_BYTES), 0, MAX_BLANKS, key=(Repeat, "blanks"))
WHITESPACE: Final = {
    "compact": literal(b""),
    "flexible": union(_regex(" ?"), concat(_regex("\r?\n"), _BLANKS)),
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
