"""Sets of strings, by length in characters and by regular language, closed under the set operations.

A length alone stays a counter, so that a bound of any size costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from sgl.errors import GrammarTooLarge, RegexSyntaxError
from sgl.grammar.regular.charset import ANY_TEXT
from sgl.grammar.regular.expr import (
    EPSILON,
    Expr,
    complement,
    concat,
    difference,
    intersect,
    is_empty,
    repeat,
    union,
)
from sgl.grammar.regular.regex import compile_regex, single_class_repeat
from sgl.grammar.regular.shortest import shortest
from sgl.grammar.regular.unescaped import unescaped
from sgl.grammar.schema.formula import TooManyConjuncts, lower_of
from sgl.grammar.shape import CountedString, Text
from sgl.grammar.text.json import CANONICAL_BODY, CANONICAL_CHAR, JSON_CHAR, JSON_STRING, QUOTE, string_of
from sgl.time_limit import OutOfTime


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings of `low` to `high` characters of `char` whose canonical JSON text is in `body` (None: any).

    JSON_CHAR is any character in any spelling.
    """

    char: Expr = JSON_CHAR
    low: int = 0
    high: int | None = None
    body: Expr | None = None

    def language(self) -> Expr:
        """Their canonical texts, without quotes."""
        parts = [] if self.body is None else [self.body]
        if self.char is not JSON_CHAR:
            parts.append(repeat(self.char, self.low, self.high))
        elif self.low > 0 or self.high is not None:
            parts.append(repeat(CANONICAL_CHAR, self.low, self.high))
        return intersect(*parts) if parts else CANONICAL_BODY

    def is_empty(self) -> bool:
        """Whether there is no such string. Raises TooManyConjuncts if that takes too long."""
        if self.high is not None and self.high < self.low:
            return True
        if self.body is None:
            return False
        free = replace(self, low=0, high=None).language()  # lengths multiply the search
        try:
            return is_empty(free) or is_empty(self.language())
        except OutOfTime:
            raise
        except GrammarTooLarge as error:
            if self._has_shortest_of(free):
                return False
            raise TooManyConjuncts(str(error), states=error.states, limit=error.limit) from error

    def _has_shortest_of(self, free: Expr) -> bool:
        """Whether the shortest text of any length keeps to the bounds; False if it is not found."""
        try:
            text = shortest(free)
        except OutOfTime:
            raise
        except GrammarTooLarge:
            return False
        return text is not None and self.low <= len(string_of(text)) <= (self.high or len(text))

    def shape(self) -> Text | CountedString:
        """As a shape."""
        if self.body is not None:
            return Text(concat(QUOTE, self.language(), QUOTE))
        if self == EVERY:
            return Text(JSON_STRING)
        if self.high == 0:
            return Text(concat(QUOTE, EPSILON, QUOTE))
        return CountedString(self.char, self.low, self.high)

    def __and__(self, other: Strings) -> Strings:
        bodies = [part.body for part in (self, other) if part.body is not None]
        char = self.char if other.char is JSON_CHAR else other.char
        if JSON_CHAR not in (self.char, other.char) and self.char is not other.char:
            bodies.append(repeat(self.char, 0, None))
        low, high = max(self.low, other.low), lower_of(self.high, other.high)
        return Strings(char, low, high, intersect(*bodies) if bodies else None)

    def outside(self) -> list[Strings]:
        """The complement."""
        result = []
        if self.low > 0:
            result.append(Strings(high=self.low - 1))
        if self.high is not None:
            result.append(Strings(low=self.high + 1))
        if self.char is not JSON_CHAR or self.body is not None:
            result.append(Strings(body=difference(CANONICAL_BODY, replace(self, low=0, high=None).language())))
        return result


EVERY: Final = Strings()


@lru_cache(maxsize=1024)
def pattern_strings(pattern: str) -> Strings:
    """The strings in which a pattern matches somewhere, by ECMA-262, or by Python's `re` if ECMA-262 refuses it: many
    schemas are written so. Raises RegexSyntaxError."""
    try:
        counted = single_class_repeat(pattern)
        if counted is not None:
            return Strings(*counted)
        return Strings(body=compile_regex(pattern, json=True))
    except RegexSyntaxError as error:
        try:
            return Strings(body=compile_regex(pattern, dialect="python", json=True))
        except RegexSyntaxError:
            raise error from None


@dataclass(frozen=True, slots=True)
class StringSet:
    """A union of kinds of strings."""

    parts: tuple[Strings, ...] = ()

    def __bool__(self) -> bool:
        """Whether any string belongs to the set; exact, since `make_strings` drops empty parts."""
        return bool(self.parts)

    def __and__(self, other: StringSet) -> StringSet:
        if self.parts == (EVERY,):
            return other
        if other.parts == (EVERY,):
            return self
        return make_strings([left & right for left in self.parts for right in other.parts])

    def __or__(self, other: StringSet) -> StringSet:
        return make_strings([*self.parts, *other.parts])

    def __invert__(self) -> StringSet:
        result = EVERY_STRING
        for part in self.parts:
            result &= make_strings(part.outside())
        return result

    def bodies(self) -> Expr:
        """Their canonical texts, without quotes."""
        return union(*[part.language() for part in self.parts])

    def bare(self) -> Expr:
        """The strings themselves."""
        return ANY_TEXT if self.parts == (EVERY,) else union(*[unescaped(part.language()) for part in self.parts])


def make_strings(parts: list[Strings]) -> StringSet:
    """The union of the parts without empty ones; languages without lengths become one."""
    bodies: list[Expr] = []
    kept: dict[Strings, None] = {}
    for part in parts:
        if part == EVERY:
            return EVERY_STRING
        if part.is_empty():
            continue
        if part.body is not None and part == Strings(body=part.body):
            bodies.append(part.body)
        else:
            kept[part] = None
    if bodies:
        kept[Strings(body=union(*bodies))] = None
    return StringSet(tuple(kept))


def not_in(body: Expr) -> Expr:
    """The canonical texts of strings that are not in a language."""
    return intersect(CANONICAL_BODY, complement(body))


EVERY_STRING: Final = StringSet((EVERY,))
