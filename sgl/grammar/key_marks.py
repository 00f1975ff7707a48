"""How the undeclared keys of an object are told apart where a key that came twice would count twice.

A *mark* stands for what has been typed of a key: its text, where the keys that may come are few, else a small hash of
it, since states that remember texts would be as many as there are texts. Keys with one mark are taken for the same
key, so that no key ever counts twice, and one key in `modulus` is refused that could have come.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from sgl.errors import GrammarTooLarge
from sgl.grammar.byteset import bytes_of
from sgl.grammar.expr import Expr
from sgl.grammar.shortest import shortest
from sgl.grammar.time_limit import check_time

Mark = bytes | int
FEW_TEXTS: Final = 200
_MODULI: Final = (61, 251, 1021)
_FACTOR: Final = 31


class KeyMarks:
    """The marks of one object. `keys` are the languages of its undeclared keys, `number` how many of them it needs."""

    def __init__(self, keys: list[Expr], number: int) -> None:
        self.modulus = next((modulus for modulus in _MODULI if number * 2 <= modulus), 0)
        self.start: Mark = b""
        if not all(_has_few_texts(key) for key in keys):
            if not self.modulus:
                raise GrammarTooLarge(
                    f"an object needs {number} undeclared keys, more than can be told apart",
                    states=number,
                    limit=_MODULI[-1] // 2,
                )
            self.start = 0

    def step(self, mark: Mark, byte: int) -> Mark:
        """The mark once `byte` is typed."""
        return _step(mark, byte, self.modulus)

    def num_unused(self, expr: Expr, used: frozenset[Mark], enough: int) -> int:
        """How many marks the keys of a language have that are not in use, at most `enough`."""
        return min(len(_all_marks(expr, self.start, self.modulus) - used), enough)

    def ends(self, expr: Expr, mark: Mark) -> Iterator[Mark]:
        """The marks of what `mark` becomes by the texts of an expression, nearest first, some more than once."""
        nearest: Mark = mark
        for byte in shortest(expr) or b"":
            nearest = self.step(nearest, byte)
        yield nearest
        yield from _ends(expr, mark, self.modulus)


def _step(mark: Mark, byte: int, modulus: int) -> Mark:
    if isinstance(mark, bytes):
        return mark + bytes([byte])
    return (mark * _FACTOR + byte + 1) % modulus


def _ends(expr: Expr, mark: Mark, modulus: int) -> Iterator[Mark]:
    level = {(expr, mark): None}
    seen = set(level)
    while level:
        following: dict[tuple[Expr, Mark], None] = {}
        for place, before in level:
            check_time()
            if place.nullable:
                yield before
            for mask, target in place.arcs():
                for byte in bytes_of(mask):
                    reached = target, _step(before, byte, modulus)
                    if reached not in seen:
                        seen.add(reached)
                        following[reached] = None
        level = following


@lru_cache(maxsize=1024)
def _all_marks(expr: Expr, start: Mark, modulus: int) -> frozenset[Mark]:
    found: set[Mark] = set()
    for end in _ends(expr, start, modulus):
        found.add(end)
        if isinstance(start, int) and len(found) == modulus:
            break
    return frozenset(found)


@lru_cache(maxsize=1024)
def _has_few_texts(expr: Expr) -> bool:
    """Whether a language has at most FEW_TEXTS texts, of few bytes together."""
    stack = [(expr, 0)]
    found = steps = 0
    while stack:
        place, depth = stack.pop()
        found += place.nullable
        steps += 1
        if found > FEW_TEXTS or steps > 10 * FEW_TEXTS or len(stack) > 10 * FEW_TEXTS or depth > 10 * FEW_TEXTS:
            return False
        for mask, target in place.arcs():
            stack += [(target, depth + 1)] * mask.bit_count()
    return True
