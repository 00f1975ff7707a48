"""Texts whose canonical JSON text, without quotes, is in a language: strings as they stand outside of JSON."""

from __future__ import annotations

from sgl.grammar.regular.arcs import grouped
from sgl.grammar.regular.charset import ESCAPED
from sgl.grammar.regular.expr import EMPTY, EPSILON, Arcs, Compound, Expr
from sgl.grammar.regular.expr_leaves import intern

_LONGEST_ESCAPE = max(map(len, ESCAPED.values()))
_ESCAPED_BYTES = sum(1 << code for code in ESCAPED)
_BACKSLASH = 0x5C


class Unescaped(Compound):
    """The texts that `body` spells with JSON's escapes."""

    __slots__ = ("body",)

    def __init__(self, body: Expr) -> None:
        super().__init__(body.nullable, True, body.least // _LONGEST_ESCAPE, body.most)
        self.body = body

    def _derive(self) -> Arcs:
        arcs = []
        for mask, target in self.body.arcs():
            if plain := mask & ~_ESCAPED_BYTES:
                arcs.append((plain, unescaped(target)))
            if mask >> _BACKSLASH & 1:
                for code, escape in ESCAPED.items():
                    rest = target
                    for byte in escape[1:]:
                        rest = rest.step(byte)
                    arcs.append((1 << code, unescaped(rest)))
        return grouped(arcs)

    def __repr__(self) -> str:
        return f"unescaped({self.body!r})"


def unescaped(body: Expr) -> Expr:
    """The texts whose canonical JSON text is in a language of such texts."""
    return body if body is EMPTY or body is EPSILON else intern(Unescaped, body)
