"""The schema compiler: from a JSON Schema to the shapes of its values.

It evaluates every formula that a value can reach, refuses or drops what cannot be enforced, finds the formulas that
have values, and makes shapes on demand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import or_
from typing import Final

from sgl.errors import GrammarError
from sgl.grammar.regular.expr import EMPTY, Expr, union, words
from sgl.grammar.regular.shortest import num_texts
from sgl.grammar.schema import objects as json_objects
from sgl.grammar.schema.arrays import ArrayConjunct, Resolver
from sgl.grammar.schema.document import IN_PLACE, Dialect, Document, dialect_of
from sgl.grammar.schema.evaluator import Evaluator, as_conjuncts
from sgl.grammar.schema.formula import (
    ARRAY,
    LITERAL,
    NUMBER,
    OBJECT,
    STRING,
    Formula,
    TooManyConjuncts,
    Undecidable,
)
from sgl.grammar.schema.keywords import KindSet
from sgl.grammar.schema.objects import ObjectConjunct
from sgl.grammar.schema.reader import NeedsTracking, Subschema
from sgl.grammar.schema.report import Dropped, Report
from sgl.grammar.schema.strings import StringSet
from sgl.grammar.shape import Array, CountedString, Object, Schema, Shape, Text, num_spots
from sgl.grammar.text.decimals import NumberSet
from sgl.grammar.text.json import string_of
from sgl.grammar.text.numbers import number_text
from sgl.time_limit import check_size

MOST_FORMULAS: Final = 50_000
"""The most formulas of a schema, each counted with its members."""

MOST_COUNTED_KEYS: Final = 1000
"""The most undeclared keys that minProperties may require."""


def compile_schema(
    schema: object, *, lenient: bool = False, any_spelling: bool = False, closes_objects: bool = False
) -> tuple[Schema, tuple[Dropped, ...]]:
    """The values that a schema of a draft from 4 to 2020-12 allows, and its keywords that are not enforced.

    A keyword that cannot be enforced raises UnsupportedSchema, or is dropped if `lenient`. `any_spelling` allows
    exponents and trailing zeros of numbers. `closes_objects` allows declared keys only in objects for which all schemas
    together declare keys and say nothing of others. Raises GrammarTooLarge past the limits on size and time, and
    GrammarError if no value satisfies the schema.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a JSON Schema is an object or a boolean, not {type(schema).__name__}")
    for is_tracking in (False, True):
        report = Report(lenient=lenient)
        dialect = dialect_of(schema)
        if dialect is None:
            report.problem("", "$schema", "no draft from 4 to 2020-12 has this address")
        sets = Evaluator(Document(schema, dialect or Dialect()), report, is_tracking=is_tracking)
        try:
            root = _Compilation(sets, any_spelling, closes_objects).root()
        except NeedsTracking:
            continue
        except UnicodeEncodeError as error:
            raise GrammarError(f"the schema holds half of a surrogate pair, which has no UTF-8: {error}") from error
        return root, report.records()
    raise AssertionError("nothing asks for tracking while everything is tracked")


@dataclass(slots=True, eq=False)
class _Values:
    """The values of one formula, as a `Schema`."""

    formula: Formula
    compilation: _Compilation
    text: Expr = EMPTY
    others: Expr = EMPTY
    """Of the text, what is no string."""
    strings: StringSet = field(default_factory=StringSet)
    counted: list[CountedString] = field(default_factory=list)
    nested: list[Object | Array] = field(default_factory=list)
    """Some of their children may have no values."""
    users: list[_Values] = field(default_factory=list)
    shapes: tuple[Shape, ...] | None = None

    def alternatives(self) -> tuple[Shape, ...]:
        if self.shapes is None:
            self.shapes = tuple(self.compilation.shapes(self))
        return self.shapes

    def bare(self) -> tuple[Expr, Expr]:
        return self.strings.bare(), self.others


class _Compilation:
    """One walk over a document; `values` collects every formula that a value can reach."""

    def __init__(self, sets: Evaluator, any_spelling: bool, closes_objects: bool) -> None:
        self.sets = sets
        self.any_spelling = any_spelling
        self.closes_objects = closes_objects
        self.values: dict[Formula, _Values] = {}
        self.inhabited: set[Schema] = set()
        self.arrays = Resolver(sets.formulas, self._of, self._single_values, self._all_strings)
        self._unseen: list[_Values] = []
        self._size = 0

    def root(self) -> Schema:
        document = self.sets.reader.document
        root = self._of(self.sets.reader.formula(document.root))
        while self._unseen:
            self._look_into(self._unseen.pop())
        self._find_inhabited()
        if root not in self.inhabited:
            raise GrammarError("no JSON value satisfies this schema")
        return root

    def _of(self, formula: Formula) -> _Values:
        found = self.values.get(formula)
        if found is None:
            found = self.values[formula] = _Values(formula, self)
            self._unseen.append(found)
            self._size += 1 + len(formula.members)
            check_size(self._size, MOST_FORMULAS, "the schema speaks of more than {} sets of values")
        return found

    def _look_into(self, values: _Values) -> None:
        formula = values.formula
        self.sets.formulas.start_work()
        literals, numbers, strings = self._scalars(formula)
        values.strings = strings
        values.others = union(
            words(literal.encode() for literal in literals), number_text(numbers, any_spelling=self.any_spelling)
        )
        texts = [values.others]
        for part in strings.parts:
            shape = part.shape()
            if isinstance(shape, CountedString):
                values.counted.append(shape)
            else:
                texts.append(shape.expr)
        values.text = union(*texts)
        for conjunct in chain(*[as_conjuncts(self._set(formula, kind)) for kind in (OBJECT, ARRAY)]):
            if isinstance(conjunct, ObjectConjunct):
                values.nested += self._objects(formula, conjunct)
            elif isinstance(conjunct, ArrayConjunct):
                values.nested += self._arrays(formula, conjunct)
        for child in dict.fromkeys(child for shape in values.nested for child in _children(shape)):
            assert isinstance(child, _Values)
            child.users.append(values)

    def _set(self, formula: Formula, kind: int) -> KindSet:
        """The values of one kind; with those that it excludes, if excluding takes too many alternatives."""
        try:
            return self.sets.of(formula, kind).value
        except TooManyConjuncts as error:
            rest = self.sets.formulas.without_negations(formula)
            if rest is formula:
                raise
            self._refuse(formula, None, f"{error}, where what it excludes is asked for")
            return self.sets.of(rest, kind).value

    def _scalars(self, formula: Formula) -> tuple[frozenset[str], NumberSet, StringSet]:
        literals, numbers, strings = (self._set(formula, kind) for kind in (LITERAL, NUMBER, STRING))
        assert isinstance(literals, frozenset)
        assert isinstance(numbers, NumberSet)
        assert isinstance(strings, StringSet)
        return literals, numbers, strings

    def _objects(self, formula: Formula, conjunct: ObjectConjunct) -> list[Object]:
        try:
            return list(json_objects.resolve(conjunct, self.sets.formulas, self._of))
        except TooManyConjuncts as error:
            self._refuse(formula, None, str(error))
            return list(json_objects.resolve(replace(conjunct, exists=()), self.sets.formulas, self._of))

    def _arrays(self, formula: Formula, conjunct: ArrayConjunct) -> list[Array]:
        try:
            return list(self.arrays.shapes(conjunct))
        except Undecidable as error:
            if error.path is None:
                self._refuse(formula, error.keyword, error.reason)
            else:
                self.sets.report.problem(error.path, error.keyword, error.reason)
            if error.keyword == "uniqueItems":
                return self._arrays(formula, replace(conjunct, unique=None))
            return self._arrays(formula, replace(conjunct, counts=conjunct.counts[:-1]))

    def _refuse(self, formula: Formula, keyword: str | None, reason: str) -> None:
        """Report a keyword, or the combinator, of the schema that a formula comes from, as far as known."""
        places: list[Subschema] = []
        stack = [formula]
        while stack:
            here = stack.pop()
            if isinstance(here, Subschema):
                places.append(here)
            else:
                stack.extend(reversed(here.members))
        place = next(iter(places), None)
        if keyword is None:
            place = next((one for one in places if one.operator == "schema"), place)
            keyword = next((name for name in IN_PLACE if place is not None and name in place.keywords), "not")
        self.sets.report.problem("" if place is None else place.location.path(), keyword, reason)

    def _single_values(self, formula: Formula) -> list[Formula] | None:
        """One formula for each value, if they are finitely many scalars; else None."""
        formulas = self.sets.formulas
        literals, numbers, strings = self._scalars(formula)
        if self._set(formula, OBJECT) or self._set(formula, ARRAY) or numbers.ranges:
            return None
        texts: list[str] = []
        for part in strings.parts:
            found = None if part.body is None else json_objects.few_words(part.language(), json_objects.FEW_KEYS)
            if found is None:
                return None
            texts += map(string_of, found)
        values = [json.loads(name) for name in sorted(literals)]
        return [formulas.value(value) for value in (*values, *sorted(numbers.values), *sorted(texts))]

    def _all_strings(self, formula: Formula) -> Expr | None:
        """The language of the bodies if all values are strings; else None."""
        if any(self._set(formula, kind) for kind in (LITERAL, NUMBER, OBJECT, ARRAY)):
            return None
        return self._scalars(formula)[2].bodies()

    # Which formulas have values

    def _find_inhabited(self) -> None:
        """The least fixed point: values are finite, so a formula that needs itself has none."""
        waiting = list(self.values.values())
        while waiting:
            values = waiting.pop()
            if values not in self.inhabited and self._has_values(values):
                self.inhabited.add(values)
                waiting += values.users

    def _has_values(self, values: _Values) -> bool:
        if values.text is not EMPTY or values.counted:
            return True
        return any(
            self._is_possible(shape) if isinstance(shape, Object) else self._most_items(shape) is not None
            for shape in values.nested
        )

    def _is_possible(self, shape: Object) -> bool:
        inhabited, low, high = self.inhabited, shape.min_properties, shape.max_properties
        num_inhabited = sum(value in inhabited for _, value in shape.properties)
        if any(value not in inhabited for name, value in shape.properties if name in shape.required):
            return False
        if any(demand.value not in inhabited for demand in shape.exists):
            return False
        if high is not None and max(low, len(shape.required) + len(shape.exists)) > high:
            return False
        if low <= len(shape.required):
            return True
        available = num_inhabited
        for pattern in shape.patterns:
            if available < low and pattern.value in inhabited:
                found = num_texts(pattern.key, min(low, MOST_COUNTED_KEYS + 1))
                check_size(found, MOST_COUNTED_KEYS, "minProperties asks for more than {} undeclared keys")
                available += found
        return available >= low

    def _most_items(self, shape: Array) -> float | None:
        """The most items that such arrays can have; None if there are no such arrays."""
        length, contains = shape.min_items, shape.contains
        can_be = [item in self.inhabited for item in (*shape.prefix, shape.items)]
        if contains is not None:
            can_match = [item in self.inhabited for item in contains.matching]
            can_differ = [item in self.inhabited for item in contains.other]
            can_be = list(map(or_, can_match, can_differ))
            last = len(can_be) - 1
            while length < last and num_spots(can_match, 0, length) < contains.min_count:
                length += 1
            lacking = contains.min_count - num_spots(can_match, 0, length)
            if lacking > 0:
                if not can_match[last]:
                    return None
                length += lacking
            forced = length - num_spots(can_differ, 0, length)
            if contains.max_count is not None and forced > contains.max_count:
                return None
        most = _ENDLESS if shape.max_items is None else float(shape.max_items)
        most = min(most, can_be.index(False) if False in can_be else _ENDLESS)
        return most if length <= most else None

    # Shapes

    def shapes(self, values: _Values) -> Iterator[Shape]:
        """As `Schema.alternatives`."""
        if values.text is not EMPTY:
            yield Text(values.text)
        yield from values.counted
        for shape in values.nested:
            if isinstance(shape, Array):
                most = self._most_items(shape)
                if most is not None:
                    yield self._array(shape, most)
            elif self._is_possible(shape):
                properties = tuple(pair for pair in shape.properties if pair[1] in self.inhabited)
                patterns = tuple(pattern for pattern in shape.patterns if pattern.value in self.inhabited)
                # behind all merging, so that it empties nothing
                if self.closes_objects and shape.is_about_declared:
                    patterns = ()
                yield replace(shape, properties=properties, patterns=patterns)

    def _array(self, shape: Array, most: float) -> Array:
        high = None if most == _ENDLESS else int(most)
        contains = shape.contains
        if contains is not None:
            matching, other = map(self._only_inhabited, (contains.matching, contains.other))
            contains = replace(contains, matching=matching, other=other)
        prefix = shape.prefix[:high]
        (items,) = self._only_inhabited((shape.items,))
        return replace(
            shape,
            prefix=prefix,
            items=items if high is None or high > len(prefix) else None,
            max_items=high,
            contains=contains,
        )

    def _only_inhabited(self, items: tuple[Schema | None, ...]) -> tuple[Schema | None, ...]:
        return tuple(item if item in self.inhabited else None for item in items)


_ENDLESS: Final = float("inf")


def _children(shape: Object | Array) -> Iterator[Schema]:
    if isinstance(shape, Object):
        yield from (value for _, value in shape.properties)
        yield from (pattern.value for pattern in (*shape.patterns, *shape.exists))
    else:
        counted = () if shape.contains is None else (*shape.contains.matching, *shape.contains.other)
        spots = (*shape.prefix, shape.items, *counted, *(shape.distinct or ()))
        yield from (item for item in spots if item is not None)
