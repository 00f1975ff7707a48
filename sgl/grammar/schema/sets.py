"""Works out formulas: which values of each kind belong to one, as a set of that kind.

Every kind has sets closed under intersection, union and complement, so formulas are worked out member by member and
kind by kind. The schema compiler asks for the sets of each formula that it reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import combinations, product
from typing import Final, cast

from sgl.grammar.regular.expr import words
from sgl.grammar.schema.arrays import ANY_ARRAY, ArrayCase, Items
from sgl.grammar.schema.document import IN_PLACE, Document
from sgl.grammar.schema.formula import (
    CASES_LIMIT,
    FALSE,
    KINDS,
    LITERAL,
    NUMBER,
    OBJECT,
    STRING,
    TAGS,
    TRUE,
    Case,
    Cases,
    Formula,
    Formulas,
    OneOf,
    TooManyCases,
    Undecidable,
    Unknown,
    Values,
    freeze,
    too_many_cases,
)
from sgl.grammar.schema.keywords import EVERY_LITERAL, EVERYTHING, NOTHING, Keywords, KindSet, Known, Scalars
from sgl.grammar.schema.objects import ANY_OBJECT, Block, ObjectCase
from sgl.grammar.schema.reader import UNEVALUATED, Fact, Reader, Subschema
from sgl.grammar.schema.report import Dropped, Report
from sgl.grammar.schema.strings import Strings, StringSet, make_strings
from sgl.grammar.text.decimals import NumberSet, make_set
from sgl.grammar.text.json import string_body
from sgl.time_limit import check_time

LOOK_AHEAD: Final = 4
"""How many required keys and items deep a case is searched for one that no value fits, before it is kept."""


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
        self.reader = Reader(document, self.formulas, report, is_tracking=is_tracking)
        self._known: dict[tuple[Formula, int], Known] = {}
        self._outsides: dict[Case, Cases] = {}
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
        match formula:
            case Subschema(operator="leaf"):
                return Keywords(formula, lambda strings: self.of(strings, STRING)).set_of(kind)
            case Values():
                return Known(self._of_values(formula, kind))
            case Fact():
                return Known((formula.case,) if kind == OBJECT else everything)
            case Unknown():
                return Known(everything, formula.problem)
            case Formula(operator="not"):
                value, problem = self._without(everything, formula.members[0], kind)
                if self.reader.is_tracking and isinstance(value, tuple):
                    value = tuple(case.not_looked_at() for case in value)  # nothing under a negation counts
                return Known(value, problem)
        return self._within(everything, formula, kind)

    # Combinations of objects and arrays are worked out within a context, what the siblings leave: most alternatives
    # end there at once.

    def _within(self, context: KindSet, formula: Formula, kind: int) -> Known:
        """What of a context belongs to a formula."""
        match formula.operator if kind >= OBJECT or context is EVERYTHING[kind] else "":
            case "schema":
                assert isinstance(formula, Subschema)
                return self._within_schema(context, formula, kind)
            case "and":
                problem = None
                for member in sorted(formula.members, key=self._weight):
                    context, own = self._within(context, member, kind)
                    problem = problem or own
                return Known(context, problem)
            case "or":
                parts = (self._within(context, member, kind) for member in formula.members)
                return self._any_of(parts, context, kind)
            case "one":
                assert isinstance(formula, OneOf)
                return self._within_one(context, formula, kind)
            case "not" if not self.reader.is_tracking:
                return self._without(context, formula.members[0], kind)
        return self._meet_known(context, formula, kind)

    def _meet_known(self, context: KindSet, formula: Formula, kind: int) -> Known:
        value, problem = self.of(formula, kind)
        return Known(self._meet(context, value, kind), problem)

    def _weight(self, formula: Formula) -> int:
        if isinstance(formula, Subschema) and formula.operator == "schema":
            formula = formula.expansion()
        return _WEIGHTS.get(formula.operator, 0)

    def _within_schema(self, context: KindSet, formula: Subschema, kind: int) -> Known:
        if not formula.kinds >> kind & 1:
            return Known(NOTHING[kind])
        unevaluated = formula.unevaluated(kind)
        is_simple = unevaluated is None and context is not EVERYTHING[kind]
        if is_simple and formula.expansion().operator == "leaf":
            return self._meet_known(context, formula, kind)
        start = context if unevaluated is None else EVERYTHING[kind]
        try:
            value, problem = self._expanded(self._within, start, formula, kind)
        except TooManyCases as error:
            combinator = next(name for name in IN_PLACE if name in formula.keywords)
            dropped = self._refuse(formula, combinator, str(error), error)
            return Known(self._meet_known(context, formula.by_itself(), kind).value, dropped)
        if unevaluated is None:
            return Known(value, problem)
        if problem is not None:
            reason = f"{problem.keyword!r} beside it is not enforced"
            problem = self._refuse(formula, UNEVALUATED[kind], reason)
        elif isinstance(value, tuple):
            value = tuple(case.with_unevaluated(self.formulas, unevaluated) for case in value)
        return Known(self._meet(context, value, kind), problem)

    def _expanded(
        self, work: Callable[[KindSet, Formula, int], Known], context: KindSet, formula: Subschema, kind: int
    ) -> Known:
        """What `work` leaves of a context by what a subschema expands to: all of it where that leads to itself."""
        key = (formula, kind)
        if key in self._in_progress:
            raise ReferenceLoop(formula)
        self._in_progress.add(key)
        try:
            return work(context, formula.expansion(), kind)
        except ReferenceLoop as loop:
            if loop.formula is not formula:
                raise
            return Known(context, self._refuse(formula, "$ref", "the reference leads back to itself"))
        finally:
            self._in_progress.remove(key)

    def _refuse(self, formula: Subschema, keyword: str, reason: str, cause: Exception | None = None) -> Dropped:
        return self.report.problem(formula.location.path(), keyword, reason, cause)

    def _within_one(self, context: KindSet, formula: OneOf, kind: int) -> Known:
        parts = []
        for member in formula.members:
            part = self._within(context, member, kind)
            if part.value:
                parts.append((member, part))
        every = [part for _, part in parts]
        if len(parts) < 2 or (kind == OBJECT and self._are_told_apart([part.value for part in every])):
            return self._any_of(every, context, kind)
        try:
            alone = self._any_of([self._alone(i, parts, formula, kind) for i in range(len(parts))], context, kind)
            if _size(alone.value) > max(CASES_LIMIT, len(parts)):
                raise too_many_cases()
            return alone
        except TooManyCases as error:
            problem = self.report.problem(formula.path, "oneOf", str(error), error)
            return Known(self._any_of(every, context, kind, is_limited=False).value, problem)

    def _alone(self, index: int, parts: list[tuple[Formula, Known]], formula: OneOf, kind: int) -> Known:
        """What belongs to one branch of a oneOf and to no other."""
        value, problem = parts[index][1]
        for member, other in parts[:index] + parts[index + 1 :]:
            if not self._meet(value, other.value, kind):
                continue
            value, without = self._without(value, member, kind)
            if other.problem is not None:
                reason = f"{other.problem.keyword!r} in a branch is not enforced"
                without = self.report.problem(formula.path, "oneOf", reason)
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
            case "schema" if isinstance(formula, Subschema) and formula.unevaluated(kind) is None:
                return self._expanded(self._without, context, formula, kind)
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
        return Known(context) if problem is not None else self._minus(context, value, kind)

    def _minus(self, context: KindSet, value: KindSet, kind: int) -> Known:
        if isinstance(value, NumberSet | StringSet):
            return Known(self._meet(context, ~value, kind))
        if isinstance(value, frozenset):
            return Known(self._meet(context, EVERY_LITERAL - value, kind))
        problem = None
        for case in as_cases(value):
            try:
                if case not in self._outsides:  # the same cases each time, so that they can be compared
                    self._outsides[case] = case.outside(self.formulas)
                context = self._meet(context, self._outsides[case], kind)
            except Undecidable as error:
                problem = self.report.problem(error.path or "", error.keyword, error.reason)
        return Known(context, problem)

    def _of_values(self, formula: Values, kind: int) -> KindSet:
        """The members of one kind of a list of plain values."""
        held = [text for tag, text in formula.values if tag == TAGS[kind]]
        if kind == LITERAL:
            return frozenset(held)
        if kind == NUMBER:
            return make_set((), [number for number in held if isinstance(number, Fraction | int)])
        if kind == STRING:
            texts = [string_body(text) for text in held if isinstance(text, str)]
            return make_strings([Strings(body=words(texts))] if texts else [])
        values = formula.values.values()
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
        size = _size(context)
        for part in parts:
            value = self._join(value, part.value, kind)
            problem = problem or part.problem
            if size > 1 and is_limited and _size(value) > max(CASES_LIMIT, size):
                raise too_many_cases()
        return Known(value, problem)

    def _are_told_apart(self, parts: list[KindSet]) -> bool:
        """Whether every branch requires one key with values of its own: the usual discriminator, seen at once."""
        cases = [case for part in parts for case in as_cases(part) if isinstance(case, ObjectCase)]
        if any(_size(part) != 1 for part in parts):
            return False
        for name in set(cases[0].required).intersection(*[case.required for case in cases[1:]]):
            values = [case.under(name, self.formulas) for case in cases]
            keys = [key for value in values if isinstance(value, Values) for key in value.values]
            if all(isinstance(value, Values) for value in values) and len(set(keys)) == len(keys):
                return True
        return False

    def _meet(self, left: KindSet, right: KindSet, kind: int) -> KindSet:
        if left is EVERYTHING[kind]:
            return right
        if right is EVERYTHING[kind]:
            return left
        if kind < OBJECT:
            return cast(Scalars, left) & cast(Scalars, right)
        return self._meet_cases(as_cases(left), as_cases(right))

    def _meet_cases(self, left: Cases, right: Cases) -> Cases:
        """The objects or arrays that belong to both sets, without cases that are plainly empty."""
        limit = max(CASES_LIMIT, len(left), len(right))  # what need not multiply is not limited
        if len(left) * len(right) > limit * 64:
            raise too_many_cases()
        result: list[Case] = []
        for one, other in product(left, right):
            if one in _ANY or other in _ANY:
                result.append(other if one in _ANY else one)
                continue
            self.formulas.work(len(one.blocks) + len(other.blocks))
            case = one.join(other, self.formulas)
            if case is not None and not self._is_dead(case, (one, other)):
                result.append(case)
                if len(result) > limit:
                    raise too_many_cases()
        return _widest(result) if len(left) > 1 < len(right) else tuple(dict.fromkeys(result))

    def _is_dead(self, case: Case, sides: tuple[Case, ...] = ()) -> bool:
        """Whether a case, joined of two sides that are not, is plainly empty."""
        return case.is_void() or any(map(self.is_plainly_empty, case.needed(self.formulas, sides)))

    def _join(self, left: KindSet, right: KindSet, kind: int) -> KindSet:
        if kind < OBJECT:
            return cast(Scalars, left) | cast(Scalars, right)
        if not self.reader.is_tracking and EVERYTHING[kind] in (left, right):
            return EVERYTHING[kind]
        return tuple(dict.fromkeys((*as_cases(left), *as_cases(right))))

    def is_plainly_empty(self, formula: Formula) -> bool:
        """Whether a formula has no value, as far as a short look shows."""
        if formula is TRUE or isinstance(formula, Values | Unknown | Fact):
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
        return all(map(self._is_dead, value)) if isinstance(value, tuple) else not value


_ANY: Final[Cases] = (ANY_OBJECT, ANY_ARRAY)
# Alternatives last, so that they meet what is left after all others.
_WEIGHTS: Final = {"schema": 1, "or": 2, "one": 3, "not": 4}


def _widest(cases: list[Case]) -> Cases:
    """The cases without those that demand all that another one does, and more."""
    kept: list[tuple[frozenset[object], Case]] = []
    marked = [(case.demands(), case) for case in cases]
    for demands, case in sorted(marked, key=lambda pair: len(pair[0])):
        if not any(
            fewer <= demands
            and wider.low <= case.low
            and (wider.high is None or wider.high == case.high)
            and wider.evaluated == case.evaluated
            for fewer, wider in kept
        ):
            kept.append((demands, case))
    return tuple(case for _, case in kept)


def _size(value: KindSet) -> int:
    """How many alternatives a set of objects or arrays has; 0 for other sets."""
    return len(value) if isinstance(value, tuple) else 0


def as_cases(value: KindSet) -> Cases:
    """The set, which is one of objects or arrays."""
    assert isinstance(value, tuple)
    return value
