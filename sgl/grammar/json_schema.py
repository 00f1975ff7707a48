"""The schema compiler: from a JSON Schema to the shapes of its values.

Walks from the root over every formula that a value can reach, settles what cannot be enforced, finds out which
formulas have values at all, and hands out shapes on demand. The grammar compiler calls `compile_schema`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar import json_arrays, json_objects
from sgl.grammar.expr import EMPTY, Expr, union, words
from sgl.grammar.json_arrays import ArrayCase, ArrayDraft
from sgl.grammar.json_document import Dialect, Document, dialect_of
from sgl.grammar.json_formula import ARRAY, LITERAL, NUMBER, OBJECT, STRING, Formula, TooManyCases, Undecidable
from sgl.grammar.json_numbers import number_text
from sgl.grammar.json_objects import ObjectCase, ObjectDraft
from sgl.grammar.json_reader import NeedsTracking, Subschema
from sgl.grammar.json_report import Dropped, Report
from sgl.grammar.json_sets import Sets, as_cases
from sgl.grammar.json_strings import StringSet
from sgl.grammar.numbers import NumberSet
from sgl.grammar.shape import Array, Contains, CountedString, Exists, KeyPattern, Object, Schema, Shape, Text
from sgl.grammar.shortest import num_texts

MOST_FORMULAS: Final = 50_000
"""How many different sets of values a schema may speak of, each with the sets that it is put together from."""

MOST_COUNTED_KEYS: Final = 1000
"""How many undeclared keys minProperties may ask for."""


@dataclass(frozen=True, slots=True)
class CompiledSchema:
    """The values that a schema allows, and what of it is not enforced."""

    root: Schema
    dropped: tuple[Dropped, ...]


def compile_schema(schema: object, *, lenient: bool = False, any_spelling: bool = False) -> CompiledSchema:
    """Compile a schema of any draft from 4 to 2020-12.

    What cannot be enforced raises UnsupportedSchema, or is dropped if `lenient`. `any_spelling` also allows numbers
    with exponents and trailing zeros. Raises GrammarTooLarge past the limits on size and time, and GrammarError
    where no value at all satisfies the schema.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a JSON Schema is an object or a boolean, not {type(schema).__name__}")
    for is_tracking in (False, True):
        report = Report(lenient=lenient)
        dialect = dialect_of(schema)
        if dialect is None:
            report.problem("", "$schema", "no draft from 4 to 2020-12 has this address")
        sets = Sets(Document(schema, dialect or Dialect()), report, is_tracking=is_tracking)
        try:
            root = _Compilation(sets, any_spelling).root()
        except NeedsTracking:
            continue
        except UnicodeEncodeError as error:
            raise GrammarError(f"the schema holds half of a surrogate pair, which has no UTF-8: {error}") from error
        return CompiledSchema(root, report.records())
    raise AssertionError("nothing asks for tracking while everything is tracked")


@dataclass(slots=True, eq=False)
class _Values:
    """The values of one formula: a Schema."""

    formula: Formula
    compilation: _Compilation
    text: Expr = EMPTY
    counted: list[CountedString] = field(default_factory=list)
    objects: list[ObjectDraft] = field(default_factory=list)
    arrays: list[ArrayDraft] = field(default_factory=list)
    is_inhabited: bool = False
    users: list[_Values] = field(default_factory=list)
    shapes: tuple[Shape, ...] | None = None

    def alternatives(self) -> tuple[Shape, ...]:
        if self.shapes is None:
            self.shapes = tuple(self.compilation.shapes(self))
        return self.shapes


class _Compilation:
    """One walk over a document. `values` grows until it holds every formula that a value may be held to."""

    def __init__(self, sets: Sets, any_spelling: bool) -> None:
        self.sets = sets
        self.any_spelling = any_spelling
        self.values: dict[Formula, _Values] = {}
        self._unseen: list[_Values] = []
        self._size = 0

    def root(self) -> Schema:
        document = self.sets.reader.document
        root = self._of(self.sets.reader.formula(document.root))
        while self._unseen:
            self._look_into(self._unseen.pop())
        self._find_inhabited()
        if not root.is_inhabited:
            raise GrammarError("no JSON value satisfies this schema")
        return root

    def _of(self, formula: Formula) -> _Values:
        found = self.values.get(formula)
        if found is None:
            found = self.values[formula] = _Values(formula, self)
            self._unseen.append(found)
            self._size += 1 + len(formula.members)
            if self._size > MOST_FORMULAS:
                raise GrammarTooLarge(
                    f"the schema speaks of more than {MOST_FORMULAS} sets of values",
                    states=self._size,
                    limit=MOST_FORMULAS,
                )
        return found

    def _look_into(self, values: _Values) -> None:
        """Work out the sets of a formula, and meet those of its children."""
        sets, formula = self.sets, values.formula
        sets.formulas.start_work()
        literals, numbers, strings = self._scalars(formula)
        texts = [
            words(literal.encode() for literal in literals),
            number_text(numbers, any_spelling=self.any_spelling),
        ]
        for part in strings.parts:
            shape = part.shape()
            if isinstance(shape, CountedString):
                values.counted.append(shape)
            else:
                texts.append(shape.expr)
        values.text = union(*texts)
        for case in chain(*[as_cases(sets.of(formula, kind).value) for kind in (OBJECT, ARRAY)]):
            if isinstance(case, ObjectCase):
                values.objects += self._object_drafts(formula, case)
            elif isinstance(case, ArrayCase):
                values.arrays += self._array_drafts(formula, case)
        for child in dict.fromkeys(chain(_children_of_objects(values.objects), _children_of_arrays(values.arrays))):
            self._of(child).users.append(values)

    def _scalars(self, formula: Formula) -> tuple[frozenset[str], NumberSet, StringSet]:
        """The literals, numbers and strings of a formula."""
        literals, numbers, strings = (self.sets.of(formula, kind).value for kind in (LITERAL, NUMBER, STRING))
        assert isinstance(literals, frozenset)
        assert isinstance(numbers, NumberSet)
        assert isinstance(strings, StringSet)
        return literals, numbers, strings

    def _object_drafts(self, formula: Formula, case: ObjectCase) -> list[ObjectDraft]:
        try:
            return list(json_objects.resolve(case, self.sets.formulas))
        except TooManyCases as error:
            self._refuse(formula, "not", str(error))
            return list(json_objects.resolve(replace(case, exists=()), self.sets.formulas))

    def _array_drafts(self, formula: Formula, case: ArrayCase) -> list[ArrayDraft]:
        try:
            return list(json_arrays.resolve(case, self.sets.formulas, self._single_values, self._all_strings))
        except Undecidable as error:
            if error.path is None:
                self._refuse(formula, error.keyword, error.reason)
            else:
                self.sets.report.problem(error.path, error.keyword, error.reason)
            if error.keyword == "uniqueItems":
                return self._array_drafts(formula, replace(case, unique=None))
            return self._array_drafts(formula, replace(case, counts=case.counts[:-1]))

    def _refuse(self, formula: Formula, keyword: str, reason: str) -> None:
        """Report something at the place in the schema that a formula comes from, as near as is known."""
        stack = [formula]
        path = ""
        while stack:
            here = stack.pop()
            if isinstance(here, Subschema):
                path = here.location.path()
                break
            stack.extend(reversed(here.members))
        self.sets.report.problem(path, keyword, reason)

    def _single_values(self, formula: Formula) -> list[Formula] | None:
        """A formula of finitely many scalars as formulas of one value each, or None."""
        sets, formulas = self.sets, self.sets.formulas
        literals, numbers, strings = self._scalars(formula)
        if sets.of(formula, OBJECT).value or sets.of(formula, ARRAY).value or numbers.ranges:
            return None
        texts: list[str] = []
        for part in strings.parts:
            found = None if part.body is None else json_objects.few_words(part.language(), json_objects.FEW_KEYS)
            if found is None:
                return None
            texts += map(json_objects.key_of, found)
        values = [formulas.values({("literal", name): _LITERALS[name]}) for name in sorted(literals)]
        values += [formulas.values({("number", number): number}) for number in sorted(numbers.values)]
        return values + [formulas.values({("string", text): text}) for text in sorted(texts)]

    def _all_strings(self, formula: Formula) -> Expr | None:
        """The bodies of the values of a formula if all are strings, else None."""
        if any(self.sets.of(formula, kind).value for kind in (LITERAL, NUMBER, OBJECT, ARRAY)):
            return None
        return self._scalars(formula)[2].bodies()

    # Which formulas have values

    def _find_inhabited(self) -> None:
        """The least fixed point: a value is finite, so what needs itself to exist does not."""
        waiting = list(self.values.values())
        while waiting:
            values = waiting.pop()
            if not values.is_inhabited and self._has_values(values):
                values.is_inhabited = True
                waiting += [user for user in values.users if not user.is_inhabited]

    def _has_values(self, values: _Values) -> bool:
        if values.text is not EMPTY or values.counted:
            return True
        return any(map(self._is_object_possible, values.objects)) or any(
            map(self._is_array_possible, values.arrays)
        )

    def _is_object_possible(self, draft: ObjectDraft) -> bool:
        is_inhabited = self._is_inhabited
        if not all(is_inhabited(draft.names[name]) for name in draft.required):
            return False
        if not all(is_inhabited(value) for _, value in draft.exists):
            return False
        if draft.high is not None and max(draft.low, len(draft.required) + len(draft.exists)) > draft.high:
            return False
        if draft.low <= len(draft.required):
            return True
        available = sum(map(is_inhabited, draft.names.values()))
        for key, value in draft.patterns:
            if available < draft.low and is_inhabited(value):
                found = num_texts(key, min(draft.low, MOST_COUNTED_KEYS + 1))
                if found > MOST_COUNTED_KEYS:
                    raise GrammarTooLarge(
                        f"minProperties asks for more than {MOST_COUNTED_KEYS} undeclared keys",
                        states=draft.low,
                        limit=MOST_COUNTED_KEYS,
                    )
                available += found
        return available >= draft.low

    def _is_array_possible(self, draft: ArrayDraft) -> bool:
        return _array_length(draft, self._is_inhabited) is not None

    def _is_inhabited(self, formula: Formula) -> bool:
        return self.values[formula].is_inhabited

    # Shapes

    def shapes(self, values: _Values) -> Iterator[Shape]:
        """What `Schema.alternatives` promises."""
        if values.text is not EMPTY:
            yield Text(values.text)
        yield from values.counted
        for draft in values.objects:
            if self._is_object_possible(draft):
                yield self._object(draft)
        for array in values.arrays:
            high = _array_length(array, self._is_inhabited)
            if high is not None:
                yield self._array(array, high)

    def _object(self, draft: ObjectDraft) -> Object:
        return Object(
            tuple((name, self.values[value]) for name, value in draft.names.items() if self._is_inhabited(value)),
            draft.required,
            tuple(
                KeyPattern(key, self.values[value]) for key, value in draft.patterns if self._is_inhabited(value)
            ),
            draft.low,
            draft.high,
            tuple(Exists(key, self.values[value]) for key, value in draft.exists),
        )

    def _array(self, draft: ArrayDraft, high: float) -> Array:
        most = None if high == _ENDLESS else int(high)
        prefix = draft.prefix if most is None else draft.prefix[:most]
        if draft.matching is None or draft.other is None:
            contains = None
        else:
            matching, other = ([self._or_none(item) for item in items] for items in (draft.matching, draft.other))
            contains = Contains(tuple(matching), tuple(other), draft.count_low, draft.count_high)
        return Array(
            tuple(self.values[item] for item in prefix),
            self._or_none(draft.rest) if most is None or most > len(prefix) else None,
            draft.low,
            most,
            contains,
            None if draft.distinct is None else tuple(self.values[value] for value in draft.distinct),
            draft.noted,
        )

    def _or_none(self, formula: Formula) -> _Values | None:
        values = self.values[formula]
        return values if values.is_inhabited else None


_LITERALS: Final = {"null": None, "true": True, "false": False}
_ENDLESS: Final = float("inf")


def _array_length(draft: ArrayDraft, is_inhabited: Callable[[Formula], bool]) -> float | None:
    """The largest number of items that the arrays of a draft can have; None if there are no such arrays."""
    high = _ENDLESS if draft.high is None else float(draft.high)
    if draft.matching is None or draft.other is None:
        spots = [*draft.prefix, draft.rest]
        empty = next((i for i, item in enumerate(spots) if not is_inhabited(item)), _ENDLESS)
        high = min(high, empty)
        return high if draft.low <= high else None
    can_match = [is_inhabited(item) for item in draft.matching]
    can_differ = [is_inhabited(item) for item in draft.other]
    last = len(can_match) - 1
    length = matches = forced = 0
    while length < draft.low or matches < draft.count_low:
        spot = min(length, last)
        if length >= high or not (can_match[spot] or can_differ[spot]):
            return None
        if length > last and length >= draft.low and not can_match[last]:
            return None
        length, matches, forced = length + 1, matches + can_match[spot], forced + (not can_differ[spot])
    if draft.count_high is not None and forced > draft.count_high:
        return None
    empty = next((i for i in range(last + 1) if not (can_match[i] or can_differ[i])), _ENDLESS)
    return min(high, empty)


def _children_of_objects(drafts: list[ObjectDraft]) -> Iterator[Formula]:
    for draft in drafts:
        yield from draft.names.values()
        yield from (value for _, value in chain(draft.patterns, draft.exists))


def _children_of_arrays(drafts: list[ArrayDraft]) -> Iterator[Formula]:
    for draft in drafts:
        yield from (*draft.prefix, draft.rest)
        yield from (*(draft.matching or ()), *(draft.other or ()), *(draft.distinct or ()))
