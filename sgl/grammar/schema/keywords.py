"""What the keywords of one subschema say by themselves, as sets: one set for each kind of value.

A malformed keyword is reported and dropped. Keywords that apply schemas to the same value are the reader's.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Final, NamedTuple, TypeVar

from sgl.errors import GrammarTooLarge, RegexSyntaxError
from sgl.grammar.regular.expr import union, words
from sgl.grammar.schema.arrays import ANY_ARRAY, ArrayConjunct, Count, Items
from sgl.grammar.schema.formula import ARRAY, FALSE, LITERAL, NUMBER, OBJECT, STRING, TRUE, Conjuncts, Formula
from sgl.grammar.schema.objects import ANY_OBJECT, KeywordGroup, ObjectConjunct
from sgl.grammar.schema.reader import TYPES, Subschema
from sgl.grammar.schema.report import Dropped
from sgl.grammar.schema.strings import EVERY_STRING, Strings, StringSet, make_strings, not_in, pattern_strings
from sgl.grammar.text.decimals import EVERY_NUMBER, INTEGERS, PLAIN_INTEGERS, NumberSet, Range, exact, make_set
from sgl.grammar.text.formats import KNOWN_BUT_UNDECIDABLE, LONGEST, format_text
from sgl.grammar.text.json import CANONICAL_BODY, string_body
from sgl.time_limit import OutOfTime

KindSet = frozenset[str] | NumberSet | StringSet | Conjuncts
"""A set of values of one kind; false if empty."""
EVERY_LITERAL: Final = frozenset(("null", "true", "false"))
EVERYTHING: Final[tuple[KindSet, ...]] = (EVERY_LITERAL, EVERY_NUMBER, EVERY_STRING, (ANY_OBJECT,), (ANY_ARRAY,))
NOTHING: Final[tuple[KindSet, ...]] = (frozenset(), NumberSet(), StringSet(), (), ())
_OF_OTHERS: Final = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
_T = TypeVar("_T")


class Result(NamedTuple):
    """The values of one kind in a formula; a superset if `problem`, a dropped keyword, is not None."""

    value: KindSet
    problem: Dropped | None = None


class Keywords:
    """The values that a subschema's keywords allow; `problem` is the first dropped one.

    `strings_of` gives the strings of a formula, for propertyNames.
    """

    def __init__(self, subschema: Subschema, strings_of: Callable[[Formula], Result]) -> None:
        self.schema = subschema.schema
        self.keywords = subschema.keywords
        self.location = subschema.location
        self.child = subschema.child
        self.types = subschema.types
        self.report = subschema.reader.report
        self.is_tracking = subschema.reader.is_tracking
        self.strings_of = strings_of
        self.problem: Dropped | None = None

    def set_of(self, kind: int) -> Result:
        """The allowed values of one kind."""
        names = self.types
        if names is None:
            self.malformed(
                "type", f"{self.schema['type']!r} names no type of JSON values: {', '.join(sorted(TYPES))}"
            )
            names = frozenset(TYPES)
        value = NOTHING[kind]
        if kind == LITERAL:
            others = [text for text in EVERY_LITERAL if ("null" if text == "null" else "boolean") not in names]
            value = EVERY_LITERAL.difference(others)
        elif kind == NUMBER and not names.isdisjoint(("number", "integer")):
            integers = PLAIN_INTEGERS if self.location.resource.dialect.draft == 4 else INTEGERS
            value = self._numbers(EVERY_NUMBER if "number" in names else integers)
        elif kind == STRING and "string" in names:
            value = self._strings()
        elif kind == OBJECT and "object" in names:
            value = (self._objects(),)
        elif kind == ARRAY and "array" in names:
            value = (self._arrays(),)
        return Result(value, self.problem)

    def has(self, keyword: str) -> bool:
        """Whether the keyword is present and part of this draft."""
        return keyword in self.keywords

    def raw(self, keyword: str) -> object:
        """Its value; None if absent."""
        return self.schema[keyword] if keyword in self.keywords else None

    def malformed(self, keyword: str, reason: str, cause: Exception | None = None) -> None:
        """Report a malformed keyword, and drop it if lenient."""
        self._note(self.report.problem(self.location.path(), keyword, reason, cause))

    def of_type(self, keyword: str, expected: type[_T], default: _T) -> _T:
        """Its value; the default if absent or malformed."""
        value = self.raw(keyword)
        if value is None:
            return default
        if not isinstance(value, expected):
            self.malformed(keyword, f"{expected.__name__} is expected, not {type(value).__name__}")
            return default
        return value

    def count(self, keyword: str) -> int | None:
        """A number from 0; None if absent or malformed."""
        value = self.raw(keyword)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.malformed(keyword, "a number of things is expected")
            return None
        return value

    def strings(self, keyword: str) -> list[str]:
        """A list of strings, empty if absent or malformed."""
        value = self.of_type(keyword, list, [])
        if not all(isinstance(item, str) for item in value):
            self.malformed(keyword, "a list of names is expected")
            return []
        return value

    def number(self, keyword: str) -> Fraction | None:
        """An exact number; None if absent, malformed or a boolean."""
        value = self.raw(keyword)
        if value is None or isinstance(value, bool):
            return None
        if not isinstance(value, int | float):
            self.malformed(keyword, "a number is expected")
            return None
        try:
            return exact(value)
        except ValueError as error:
            self.malformed(keyword, str(error), error)
            return None

    def pattern(self, keyword: str, pattern: object) -> Strings | None:
        """The strings in which a pattern matches; None, and reported, if it cannot be compiled."""
        if not isinstance(pattern, str):
            self.malformed(keyword, "a pattern is a string")
            return None
        try:
            return pattern_strings(pattern)
        except OutOfTime:
            raise
        except (RegexSyntaxError, GrammarTooLarge) as error:
            self.malformed(keyword, f"pattern {pattern!r}: {error}", error)
            return None

    def _note(self, problem: Dropped | None) -> None:
        self.problem = self.problem or problem

    def _numbers(self, result: NumberSet) -> NumberSet:
        low, high = self.number("minimum"), self.number("maximum")
        over, below = self.number("exclusiveMinimum"), self.number("exclusiveMaximum")
        is_over, is_below = self.raw("exclusiveMinimum") is True, self.raw("exclusiveMaximum") is True  # draft 4
        for part in (Range(low, high, is_over, is_below), Range(over, below, over is not None, below is not None)):
            if part != Range():
                result &= make_set([part])
        step = self.number("multipleOf")
        if step is not None:
            if step <= 0:
                self.malformed("multipleOf", "a number greater than 0 is expected")
            else:
                result &= make_set([Range(multiple_of=step)])
        return result

    def _strings(self) -> StringSet:
        strings = Strings(low=self.count("minLength") or 0, high=self.count("maxLength"))
        if self.has("pattern"):
            matching = self.pattern("pattern", self.raw("pattern"))
            if matching is not None:
                strings &= matching
        if self.has("format"):
            name = self.of_type("format", str, "")
            path = self.location.path()
            if not self.location.resource.dialect.asserts_formats:
                self.report.note(path, "format", f"{name!r} is an annotation in the draft that $schema declares")
            elif name in KNOWN_BUT_UNDECIDABLE:
                self.malformed("format", f"{name!r}: {KNOWN_BUT_UNDECIDABLE[name]}")
            else:
                body = format_text(name)
                if body is None:
                    self.report.note(path, "format", f"{name!r} is no format of JSON Schema")
                else:
                    strings &= Strings(body=body, high=LONGEST.get(name))
        return make_strings([strings])

    def _objects(self) -> ObjectConjunct:
        names = {name: self.child("properties", name) for name in self.of_type("properties", dict, {})}
        patterns = []
        rest = self.child("additionalProperties") if self.has("additionalProperties") else TRUE
        for pattern in self.of_type("patternProperties", dict, {}):
            keys = self.pattern("patternProperties", pattern)
            if keys is None:
                rest = TRUE  # it may be about keys of that pattern
            else:
                patterns.append((keys.language(), self.child("patternProperties", pattern)))
        blocks = []
        is_declaring, is_about_others = self.has("properties"), any(map(self.has, _OF_OTHERS))
        if is_declaring or patterns or rest is not TRUE or is_about_others:
            blocks.append(KeywordGroup(names, tuple(patterns), rest, is_declaring, is_about_others))
        if self.has("propertyNames"):
            known = self.strings_of(self.child("propertyNames"))
            assert isinstance(known.value, StringSet)
            self._note(known.problem)
            if known.value != EVERY_STRING:
                blocks.append(KeywordGroup(patterns=((not_in(known.value.bodies()), FALSE),)))
        required = tuple(dict.fromkeys(self.strings("required")))
        low, high = self.count("minProperties") or 0, self.count("maxProperties")
        if self.is_tracking:
            looked_at = union(words(map(string_body, names)), *(keys for keys, _ in patterns))
            looked_at = CANONICAL_BODY if self.has("additionalProperties") else looked_at
            return ObjectConjunct(tuple(blocks), required, low, high, evaluated=looked_at)
        if not (blocks or required or low) and high is None:
            return ANY_OBJECT
        return ObjectConjunct(tuple(blocks), required, low, high)

    def _arrays(self) -> ArrayConjunct:
        prefix: tuple[Formula, ...] = ()
        behind = "items"
        for keyword in ("prefixItems", "items"):
            members = self.raw(keyword)
            if isinstance(members, list):
                prefix = tuple(self.child(keyword, index) for index in range(len(members)))
                behind = "items" if keyword == "prefixItems" else "additionalItems"
            elif keyword == "prefixItems" and self.has(keyword):
                self.malformed(keyword, "a list of schemas is expected")
        looks_at_all = self.has(behind) and not isinstance(self.raw(behind), list)
        rest = self.child(behind) if looks_at_all else TRUE
        blocks = (Items(prefix, rest),) if prefix or rest is not TRUE else ()
        counts: tuple[Count, ...] = ()
        if self.has("contains"):
            least = self.count("minContains")
            counts = (Count(0, self.child("contains"), 1 if least is None else least, self.count("maxContains")),)
        unique = self.location.path() if self.of_type("uniqueItems", bool, False) else None
        low, high = self.count("minItems") or 0, self.count("maxItems")
        if self.is_tracking:
            has_looked = bool(counts) and self.location.resource.dialect.draft >= 2020
            looked_at = TRUE if looks_at_all else counts[0].value if has_looked else FALSE
            return ArrayConjunct(blocks, low, high, counts, unique, (len(prefix), looked_at))
        if not (blocks or counts or low) and high is None and unique is None:
            return ANY_ARRAY
        return ArrayConjunct(blocks, low, high, counts, unique)
