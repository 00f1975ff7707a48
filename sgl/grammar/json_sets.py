"""Works out formulas: which values of each kind belong to one, as a set of that kind.

Every kind has sets closed under intersection, union and complement, so formulas are worked out member by member and
kind by kind. The schema compiler asks for the sets of each formula that it reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Final

from sgl.grammar import json_arrays, json_objects
from sgl.grammar.expr import words
from sgl.grammar.json_arrays import ArrayCase, Arrays, EvaluatedItems, Items
from sgl.grammar.json_document import Document
from sgl.grammar.json_formula import (
    ARRAY,
    CASES_LIMIT,
    FALSE,
    KINDS,
    LITERAL,
    NUMBER,
    OBJECT,
    STRING,
    TRUE,
    Formula,
    Formulas,
    TooManyCases,
    freeze,
    too_many_cases,
)
from sgl.grammar.json_keywords import EVERY_LITERAL, EVERYTHING, NOTHING, KindSet, Known
from sgl.grammar.json_objects import Block, EvaluatedKeys, ObjectCase, Objects
from sgl.grammar.json_reader import Reader, SchemaSubject
from sgl.grammar.json_report import Dropped, Report
from sgl.grammar.json_strings import Strings, StringSet, make_strings
from sgl.grammar.jsontext import string_body
from sgl.grammar.numbers import NumberSet, exact, make_set
from sgl.grammar.time_limit import check_time

LOOK_AHEAD: Final = 4
"""How many required keys and items deep a case is searched for one that no value fits, before it is kept."""


COMBINATORS: Final = (
    "oneOf", "anyOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies", "allOf", "$ref",
    "$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
"""The keywords that may multiply alternatives; the first of a subschema is what is named when there are too many.
"""


class ReferenceLoop(Exception):
    """A schema that refers to itself for the same value: it says nothing that could be worked out."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula


class Sets:
    """The sets of the formulas of one document."""

    def __init__(self, document: Document, report: Report, *, is_tracking: bool) -> None:
        self.report = report
        self.formulas = Formulas()
        self.reader = Reader(
            document,
            self.formulas,
            report,
            is_tracking=is_tracking,
            strings_of=lambda formula: self.of(formula, STRING),
        )
        self.is_tracking = is_tracking
        self._known: dict[tuple[Formula, int], Known] = {}
        self._outsides: dict[ObjectCase, Objects] = {}
        self._in_progress: set[tuple[Formula, int]] = set()
        self._plainly_empty: dict[Formula, bool] = {}
        self._depth = 0

    def of(self, formula: Formula, kind: int) -> Known:
        """The values of one kind that belong to a formula. Raises ReferenceLoop and TooManyCases."""
        if not formula.kinds >> kind & 1:
            return Known(NOTHING[kind])
        if formula is TRUE:
            return Known(EVERYTHING[kind])
        key = (formula, kind)
        found = self._known.get(key)
        if found is None:
            check_time()
            found = self._known[key] = self._work_out(formula, kind)
        return found

    def _work_out(self, formula: Formula, kind: int) -> Known:
        everything = EVERYTHING[kind]
        match formula.operator:
            case "local":
                return self.reader.keyword_set(formula, kind)
            case "values":
                assert isinstance(formula.subject, dict)
                return Known(self._of_values(formula.subject.values(), kind))
            case "fact":
                assert isinstance(formula.subject, tuple)
                return Known(formula.subject if kind == OBJECT else everything)
            case "unknown":
                assert isinstance(formula.subject, Dropped)
                return Known(everything, formula.subject)
            case "not":
                value, problem = self._without(everything, formula.members[0], kind)
                return Known(_as_not_looked_at(value) if self.is_tracking else value, problem)
        return self._within(everything, formula, kind)

    # Combinations of objects and arrays are worked out within a context, what the siblings leave: most alternatives
    # end there at once.

    def _within(self, context: KindSet, formula: Formula, kind: int) -> Known:
        """What of a context belongs to a formula."""
        if kind < OBJECT and context is not EVERYTHING[kind]:
            value, problem = self.of(formula, kind)
            return Known(self._meet(context, value, kind), problem)
        match formula.operator:
            case "schema":
                return self._within_schema(context, formula, kind)
            case "and":
                problem = None
                for member in sorted(formula.members, key=self._weight):
                    context, own = self._within(context, member, kind)
                    problem = problem or own
                return Known(context, problem)
            case "or":
                return self._any_of(
                    (self._within(context, member, kind) for member in formula.members), context, kind
                )
            case "one":
                return self._within_one(context, formula, kind)
            case "not" if not self.is_tracking:
                return self._without(context, formula.members[0], kind)
        value, problem = self.of(formula, kind)
        return Known(self._meet(context, value, kind), problem)

    def _weight(self, formula: Formula) -> int:
        if formula.operator == "schema":
            formula = self.reader.expand(formula)
        return _WEIGHTS.get(formula.operator, 0)

    def _within_schema(self, context: KindSet, formula: Formula, kind: int) -> Known:
        subject = formula.subject
        assert isinstance(subject, SchemaSubject)
        if not formula.kinds >> kind & 1:
            return Known(NOTHING[kind])
        unevaluated = self.reader.unevaluated(formula, kind)
        is_simple = unevaluated is None and context is not EVERYTHING[kind]
        if is_simple and self.reader.expand(formula).operator in ("local", "values"):
            value, problem = self.of(formula, kind)
            return Known(self._meet(context, value, kind), problem)
        with self._active(formula, kind):
            try:
                start = context if unevaluated is None else EVERYTHING[kind]
                value, problem = self._within(start, self.reader.expand(formula), kind)
            except ReferenceLoop as loop:
                if loop.formula is not formula:
                    raise
                dropped = self._refuse(subject, "$ref", "the reference leads back to itself")
                return Known(context, dropped)
            except TooManyCases as error:
                combinator = next(name for name in COMBINATORS if name in subject.keywords)
                dropped = self._refuse(subject, combinator, str(error), error)
                own = self.of(self.reader.without_applicators(formula), kind)
                return Known(self._meet(context, own.value, kind), dropped)
        if unevaluated is None:
            return Known(value, problem)
        keyword = "unevaluatedProperties" if kind == OBJECT else "unevaluatedItems"
        if problem is not None:
            problem = self._refuse(subject, keyword, f"{problem.keyword!r} beside it is not enforced")
        elif kind == OBJECT:
            value = tuple(json_objects.evaluated_as(case, unevaluated) for case in as_objects(value))
        else:
            value = tuple(json_arrays.evaluated_as(case, unevaluated, self.formulas) for case in as_arrays(value))
        return Known(self._meet(context, value, kind), problem)

    @contextmanager
    def _active(self, formula: Formula, kind: int) -> Iterator[None]:
        key = (formula, kind)
        if key in self._in_progress:
            raise ReferenceLoop(formula)
        self._in_progress.add(key)
        try:
            yield
        finally:
            self._in_progress.remove(key)

    def _refuse(self, subject: SchemaSubject, keyword: str, reason: str, cause: Exception | None = None) -> Dropped:
        return self.report.problem(subject.location.path(), keyword, reason, cause)

    def _within_one(self, context: KindSet, formula: Formula, kind: int) -> Known:
        parts = []
        for member in formula.members:
            part = self._within(context, member, kind)
            if not _is_nothing(part.value):
                parts.append((member, part))
        every = [part for _, part in parts]
        if len(parts) < 2 or (kind == OBJECT and self._are_told_apart([as_objects(part.value) for part in every])):
            return self._any_of(every, context, kind)
        try:
            alone = self._any_of([self._alone(i, parts, formula, kind) for i in range(len(parts))], context, kind)
            if kind >= OBJECT and len(as_objects(alone.value)) > max(CASES_LIMIT, len(parts)):
                raise too_many_cases()
            return alone
        except TooManyCases as error:
            assert isinstance(formula.subject, str)
            problem = self.report.problem(formula.subject, "oneOf", str(error), error)
            return Known(self._any_of(every, context, kind, is_limited=False).value, problem)

    def _alone(self, index: int, parts: list[tuple[Formula, Known]], formula: Formula, kind: int) -> Known:
        """What belongs to one branch of a oneOf and to no other."""
        value, problem = parts[index][1]
        for member, other in parts[:index] + parts[index + 1 :]:
            if _is_nothing(self._meet(value, other.value, kind)):
                continue
            value, without = self._without(value, member, kind)
            if other.problem is not None:
                assert isinstance(formula.subject, str)
                reason = f"{other.problem.keyword!r} in a branch is not enforced"
                without = self.report.problem(formula.subject, "oneOf", reason)
            problem = problem or without
        return Known(value, problem)

    def _without(self, context: KindSet, formula: Formula, kind: int) -> Known:
        """What of a context does not belong to a formula."""
        if not formula.kinds >> kind & 1:
            return Known(context)
        members = formula.members
        match formula.operator if kind >= OBJECT or context is EVERYTHING[kind] else "":
            case "true":
                return Known(NOTHING[kind])
            case "schema" if self.reader.unevaluated(formula, kind) is None:
                with self._active(formula, kind):
                    return self._without(context, self.reader.expand(formula), kind)
            case "and":
                return self._any_of((self._without(context, member, kind) for member in members), context, kind)
            case "or":
                problem = None
                for member in members:
                    context, own = self._without(context, member, kind)
                    problem = problem or own
                return Known(context, problem)
            case "one":
                none = self.formulas.both(*map(self.formulas.negate, members))
                several = [self.formulas.both(*pair) for pair in combinations(members, 2)]
                return self._within(context, self.formulas.either(none, *several), kind)
            case "not":
                return self._within(context, members[0], kind)
        value, problem = self.of(formula, kind)
        if problem is not None:
            return Known(context, problem)
        return self._minus(context, value, kind)

    def _minus(self, context: KindSet, value: KindSet, kind: int) -> Known:
        if isinstance(value, NumberSet | StringSet):
            return Known(self._meet(context, ~value, kind))
        if isinstance(value, frozenset):
            return Known(self._meet(context, EVERY_LITERAL - value, kind))
        problem = None
        for case in value:
            if isinstance(case, ObjectCase):
                others = self._outsides.get(case)
                if others is None:  # the same objects each time, so that cases can be compared
                    others = self._outsides[case] = json_objects.outside(case, self.formulas)
                context = self._meet(context, others, kind)
            elif case.unique is not None:
                reason = "it stands under a negation, and arrays with items that repeat are no regular set"
                problem = self.report.problem(case.unique, "uniqueItems", reason)
            else:
                context = self._meet(context, json_arrays.outside(case, self.formulas), kind)
        return Known(context, problem)

    def _of_values(self, values: Iterable[object], kind: int) -> KindSet:
        """The members of one kind of a list of plain values."""
        if kind == LITERAL:
            names = {None: "null", True: "true", False: "false"}
            return frozenset(names[value] for value in values if value is None or isinstance(value, bool))
        if kind == NUMBER:
            numbers = [value for value in values if isinstance(value, int | float | Fraction)]
            return make_set(
                (), [exact(v) if isinstance(v, float) else v for v in numbers if not isinstance(v, bool)]
            )
        if kind == STRING:
            texts = [string_body(value) for value in values if isinstance(value, str)]
            return make_strings([Strings(body=words(texts))]) if texts else StringSet()
        if kind == OBJECT:
            return tuple(self._object_value(value) for value in values if isinstance(value, dict))
        return tuple(self._array_value(value) for value in values if isinstance(value, list))

    def _object_value(self, value: dict[str, object]) -> ObjectCase:
        names = {name: self._value(member) for name, member in value.items()}
        return ObjectCase((Block(names, rest=FALSE),), tuple(names))

    def _array_value(self, value: list[object]) -> ArrayCase:
        return ArrayCase((Items(tuple(map(self._value, value)), FALSE),), len(value), len(value))

    def _value(self, value: object) -> Formula:
        return self.formulas.values({freeze(value): value})

    # Operations

    def _any_of(self, parts: Iterable[Known], context: KindSet, kind: int, *, is_limited: bool = True) -> Known:
        """The union of parts of a context. Raises TooManyCases where alternatives of the context multiply."""
        value, problem = NOTHING[kind], None
        size = len(as_objects(context)) if kind >= OBJECT else 0
        for part in parts:
            value = self._join(value, part.value, kind)
            problem = problem or part.problem
            if size > 1 and is_limited and len(as_objects(value)) > max(CASES_LIMIT, size):
                raise too_many_cases()
        return Known(value, problem)

    def _are_told_apart(self, parts: list[Objects]) -> bool:
        """Whether every branch requires one key with values of its own: the usual discriminator, seen at once."""
        if any(len(part) != 1 for part in parts):
            return False
        cases = [case for (case,) in parts]
        shared = set(cases[0].required).intersection(*[case.required for case in cases[1:]]) if cases else set()
        for name in shared:
            seen: set[object] = set()
            for case in cases:
                value = json_objects.under(case, name, self.formulas)
                if value.operator != "values":
                    break
                assert isinstance(value.subject, dict)
                if not seen.isdisjoint(value.subject):
                    break
                seen.update(value.subject)
            else:
                return True
        return False

    def _meet(self, left: KindSet, right: KindSet, kind: int) -> KindSet:
        if left is EVERYTHING[kind]:
            return right
        if right is EVERYTHING[kind]:
            return left
        if isinstance(left, NumberSet) and isinstance(right, NumberSet):
            return left & right
        if isinstance(left, StringSet) and isinstance(right, StringSet):
            return left & right
        if isinstance(left, frozenset) and isinstance(right, frozenset):
            return left & right
        if kind == OBJECT:
            return json_objects.meet(as_objects(left), as_objects(right), self.formulas, self.is_plainly_empty)
        return json_arrays.meet(as_arrays(left), as_arrays(right), self.formulas, self.is_plainly_empty)

    def _join(self, left: KindSet, right: KindSet, kind: int) -> KindSet:
        if isinstance(left, NumberSet) and isinstance(right, NumberSet):
            return left | right
        if isinstance(left, StringSet) and isinstance(right, StringSet):
            return left | right
        if isinstance(left, frozenset) and isinstance(right, frozenset):
            return left | right
        if not self.is_tracking and EVERYTHING[kind] in (left, right):
            return EVERYTHING[kind]
        if kind == OBJECT:
            return tuple(dict.fromkeys((*as_objects(left), *as_objects(right))))
        return tuple(dict.fromkeys((*as_arrays(left), *as_arrays(right))))

    def is_plainly_empty(self, formula: Formula) -> bool:
        """Whether a formula has no value, as far as a short look shows."""
        if formula.operator in ("true", "values", "unknown", "fact"):
            return False
        if formula is FALSE:
            return True
        found = self._plainly_empty.get(formula)
        if found is None:
            if self._depth >= LOOK_AHEAD:
                return False
            self._depth += 1
            try:
                found = all(self._is_plainly_empty_of(formula, kind) for kind in KINDS)
            except (ReferenceLoop, TooManyCases):
                found = False  # what is wrong is told when the formula's own turn comes
            finally:
                self._depth -= 1
            self._plainly_empty[formula] = found
        return found

    def _is_plainly_empty_of(self, formula: Formula, kind: int) -> bool:
        value = self.of(formula, kind).value
        if kind == OBJECT:
            return all(
                json_objects.is_dead(case, self.formulas, self.is_plainly_empty) for case in as_objects(value)
            )
        if kind == ARRAY:
            return all(json_arrays.is_dead(case, self.formulas, self.is_plainly_empty) for case in as_arrays(value))
        return _is_nothing(value)


# Alternatives last, so that they meet what is left after all others.
_WEIGHTS: Final = {"schema": 1, "or": 2, "one": 3, "not": 4}


def _is_nothing(value: KindSet) -> bool:
    if isinstance(value, NumberSet):
        return value.is_empty
    return value.is_nothing if isinstance(value, StringSet) else not value


def _as_not_looked_at(value: KindSet) -> KindSet:
    """The set as if nothing in it had looked at keys or items: what stands under a negation does not count."""
    if isinstance(value, NumberSet | StringSet | frozenset):
        return value
    objects = tuple(replace(case, evaluated=EvaluatedKeys()) for case in value if isinstance(case, ObjectCase))
    return objects or tuple(
        replace(case, evaluated=EvaluatedItems()) for case in value if isinstance(case, ArrayCase)
    )


def as_objects(value: KindSet) -> Objects:
    """The set, which is one of objects."""
    return value  # type: ignore[return-value]


def as_arrays(value: KindSet) -> Arrays:
    """The set, which is one of arrays."""
    return value  # type: ignore[return-value]
