"""Evaluates formulas: the values of each kind in one, as a set of that kind.

The sets of a kind are closed under intersection, union and complement, so formulas are evaluated member by member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import combinations, product
from typing import Any, Final, cast

from sgl.grammar.regular.expr import words
from sgl.grammar.schema.arrays import ANY_ARRAY, ArrayConjunct, Items
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
    Conjunct,
    Conjuncts,
    Formula,
    Formulas,
    OneOf,
    TooManyConjuncts,
    Undecidable,
    Unknown,
    Values,
    too_many_conjuncts,
)
from sgl.grammar.schema.keywords import EVERY_LITERAL, EVERYTHING, NOTHING, Keywords, KindSet, Result
from sgl.grammar.schema.objects import ANY_OBJECT, KeywordGroup, ObjectConjunct
from sgl.grammar.schema.reader import UNEVALUATED, ObjectFormula, Reader, Subschema
from sgl.grammar.schema.report import Dropped, Report
from sgl.grammar.schema.strings import Strings, StringSet, make_strings
from sgl.grammar.text.decimals import NumberSet, make_set
from sgl.grammar.text.json import string_body
from sgl.time_limit import check_time

LOOK_AHEAD: Final = 4
"""The depth, in required keys and items, to which a conjunct is searched for one without values."""


class ReferenceLoop(Exception):
    """A schema that refers to itself for the same value, which means nothing."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula


class Evaluator:
    """The sets of the formulas of one document."""

    def __init__(self, document: Document, report: Report, *, is_tracking: bool) -> None:
        self.report = report
        self.formulas = Formulas()
        self.reader = Reader(document, self.formulas, report, is_tracking=is_tracking)
        self._known: dict[tuple[Formula, int], Result] = {}
        self._outsides: dict[Conjunct, Conjuncts] = {}
        self._in_progress: set[tuple[Formula, int]] = set()
        self._plainly_empty: dict[Formula, bool] = {}
        self._depth = 0

    def of(self, formula: Formula, kind: int) -> Result:
        """The values of one kind that belong to a formula. Raises ReferenceLoop and TooManyConjuncts."""
        if not formula.kinds >> kind & 1:
            return Result(NOTHING[kind])
        if formula is TRUE:
            return Result(EVERYTHING[kind])
        key = (formula, kind)
        found = self._known.get(key)
        if found is None:
            check_time()
            found = self._known[key] = self._work_out(formula, kind)
        return found

    def _work_out(self, formula: Formula, kind: int) -> Result:
        everything = EVERYTHING[kind]
        match formula:
            case Subschema(operator="leaf"):
                return Keywords(formula, lambda strings: self.of(strings, STRING)).set_of(kind)
            case Values():
                return Result(self._of_values(formula, kind))
            case ObjectFormula():
                return Result((formula.conjunct,) if kind == OBJECT else everything)
            case Unknown():
                return Result(everything, formula.problem)
            case Formula(operator="not"):
                value, problem = self._without(everything, formula.members[0], kind)
                if self.reader.is_tracking and isinstance(value, tuple):
                    value = tuple(conjunct.not_looked_at() for conjunct in value)  # negations evaluate nothing
                return Result(value, problem)
        return self._within(everything, formula, kind)

    # Combinations of objects and arrays are evaluated within a context, the set that their siblings leave: most
    # alternatives end there at once.

    def _within(self, context: KindSet, formula: Formula, kind: int) -> Result:
        if kind < OBJECT and context is not EVERYTHING[kind]:
            return self._meet_known(context, formula, kind)
        match formula:
            case Subschema(operator="schema"):
                return self._within_schema(context, formula, kind)
            case OneOf():
                return self._within_one(context, formula, kind)
            case Formula(operator="and"):
                problem = None
                for member in sorted(formula.members, key=self._weight):
                    context, own = self._within(context, member, kind)
                    problem = problem or own
                return Result(context, problem)
            case Formula(operator="or"):
                parts = (self._within(context, member, kind) for member in formula.members)
                return self._any_of(parts, context, kind)
            case Formula(operator="not") if not self.reader.is_tracking:
                return self._without(context, formula.members[0], kind)
        return self._meet_known(context, formula, kind)

    def _meet_known(self, context: KindSet, formula: Formula, kind: int) -> Result:
        value, problem = self.of(formula, kind)
        return Result(self._meet(context, value, kind), problem)

    def _weight(self, formula: Formula) -> int:
        if isinstance(formula, Subschema) and formula.operator == "schema":
            formula = formula.expansion()
        return _WEIGHTS.get(formula.operator, 0)

    def _within_schema(self, context: KindSet, formula: Subschema, kind: int) -> Result:
        if not formula.kinds >> kind & 1:
            return Result(NOTHING[kind])
        unevaluated = formula.unevaluated(kind)
        is_simple = unevaluated is None and context is not EVERYTHING[kind]
        if is_simple and formula.expansion().operator == "leaf":
            return self._meet_known(context, formula, kind)
        start = context if unevaluated is None else EVERYTHING[kind]
        try:
            value, problem = self._expanded(self._within, start, formula, kind)
        except TooManyConjuncts as error:
            combinator = next(name for name in IN_PLACE if name in formula.keywords)
            dropped = self._refuse(formula, combinator, str(error), error)
            return Result(self._meet_known(context, formula.by_itself(), kind).value, dropped)
        if unevaluated is None:
            return Result(value, problem)
        if problem is not None:
            reason = f"{problem.keyword!r} beside it is not enforced"
            problem = self._refuse(formula, UNEVALUATED[kind], reason)
        elif isinstance(value, tuple):
            value = tuple(conjunct.with_unevaluated(self.formulas, unevaluated) for conjunct in value)
        return Result(self._meet(context, value, kind), problem)

    def _expanded(
        self, work: Callable[[KindSet, Formula, int], Result], context: KindSet, formula: Subschema, kind: int
    ) -> Result:
        """`work` on the expansion of a subschema; the whole context if that leads back to itself."""
        key = (formula, kind)
        if key in self._in_progress:
            raise ReferenceLoop(formula)
        self._in_progress.add(key)
        try:
            return work(context, formula.expansion(), kind)
        except ReferenceLoop as loop:
            if loop.formula is not formula:
                raise
            return Result(context, self._refuse(formula, "$ref", "the reference leads back to itself"))
        finally:
            self._in_progress.remove(key)

    def _refuse(self, formula: Subschema, keyword: str, reason: str, cause: Exception | None = None) -> Dropped:
        return self.report.problem(formula.location.path(), keyword, reason, cause)

    def _within_one(self, context: KindSet, formula: OneOf, kind: int) -> Result:
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
                raise too_many_conjuncts()
            return alone
        except TooManyConjuncts as error:
            problem = self.report.problem(formula.path, "oneOf", str(error), error)
            return Result(self._any_of(every, context, kind, is_limited=False).value, problem)

    def _alone(self, index: int, parts: list[tuple[Formula, Result]], formula: OneOf, kind: int) -> Result:
        """The values of one branch of a oneOf that are in no other."""
        value, problem = parts[index][1]
        for member, other in parts[:index] + parts[index + 1 :]:
            if not self._meet(value, other.value, kind):
                continue
            value, without = self._without(value, member, kind)
            if other.problem is not None:
                reason = f"{other.problem.keyword!r} in a branch is not enforced"
                without = self.report.problem(formula.path, "oneOf", reason)
            problem = problem or without
        return Result(value, problem)

    def _without(self, context: KindSet, formula: Formula, kind: int) -> Result:
        if not formula.kinds >> kind & 1:
            return Result(context)
        members = formula.members
        match formula.operator if kind >= OBJECT or context is EVERYTHING[kind] else "":
            case "true":
                return Result(NOTHING[kind])
            case "schema" if isinstance(formula, Subschema) and formula.unevaluated(kind) is None:
                return self._expanded(self._without, context, formula, kind)
            case "and":
                return self._any_of((self._without(context, member, kind) for member in members), context, kind)
            case "or":
                problem = None
                for member in members:
                    context, own = self._without(context, member, kind)
                    problem = problem or own
                return Result(context, problem)
            case "one":
                none = self.formulas.both(*map(self.formulas.negate, members))
                several = [self.formulas.both(*pair) for pair in combinations(members, 2)]
                return self._within(context, self.formulas.either(none, *several), kind)
            case "not":
                return self._within(context, members[0], kind)
        value, problem = self.of(formula, kind)
        return Result(context) if problem is not None else self._minus(context, value, kind)

    def _minus(self, context: KindSet, value: KindSet, kind: int) -> Result:
        if isinstance(value, NumberSet | StringSet):
            return Result(self._meet(context, ~value, kind))
        if isinstance(value, frozenset):
            return Result(self._meet(context, EVERY_LITERAL - value, kind))
        problem = None
        for conjunct in as_conjuncts(value):
            try:
                if conjunct not in self._outsides:  # one object each, so that they can be compared
                    self._outsides[conjunct] = conjunct.outside(self.formulas)
                context = self._meet(context, self._outsides[conjunct], kind)
            except Undecidable as error:
                problem = self.report.problem(error.path or "", error.keyword, error.reason)
        return Result(context, problem)

    def _of_values(self, formula: Values, kind: int) -> KindSet:
        held = [text for tag, text in formula.values if tag == TAGS[kind]]
        if kind == LITERAL:
            return frozenset(map(str, held))
        if kind == NUMBER:
            return make_set((), [number for number in held if isinstance(number, Fraction | int)])
        if kind == STRING:
            texts = [string_body(text) for text in held if isinstance(text, str)]
            return make_strings([Strings(body=words(texts))] if texts else [])
        values = formula.values.values()
        if kind == OBJECT:
            return tuple(self._object_value(value) for value in values if isinstance(value, dict))
        return tuple(self._array_value(value) for value in values if isinstance(value, list))

    def _object_value(self, value: dict[str, object]) -> ObjectConjunct:
        names = {name: self.formulas.value(member) for name, member in value.items()}
        return ObjectConjunct((KeywordGroup(names, rest=FALSE),), tuple(names))

    def _array_value(self, value: list[object]) -> ArrayConjunct:
        return ArrayConjunct((Items(tuple(map(self.formulas.value, value)), FALSE),), len(value), len(value))

    # Operations

    def _any_of(self, parts: Iterable[Result], context: KindSet, kind: int, *, is_limited: bool = True) -> Result:
        """The union of parts of a context. Raises TooManyConjuncts if alternatives of the context multiply."""
        value, problem = NOTHING[kind], None
        size = _size(context)
        for part in parts:
            value = self._join(value, part.value, kind)
            problem = problem or part.problem
            if size > 1 and is_limited and _size(value) > max(CASES_LIMIT, size):
                raise too_many_conjuncts()
        return Result(value, problem)

    def _are_told_apart(self, parts: list[KindSet]) -> bool:
        """Whether all branches require one key with disjoint values: the usual discriminator."""
        conjuncts = [
            conjunct for part in parts for conjunct in as_conjuncts(part) if isinstance(conjunct, ObjectConjunct)
        ]
        if any(_size(part) != 1 for part in parts):
            return False
        for name in set(conjuncts[0].required).intersection(*[conjunct.required for conjunct in conjuncts[1:]]):
            values = [conjunct.under(name, self.formulas) for conjunct in conjuncts]
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
            both: KindSet = cast(Any, left) & right
            return both
        return self._meet_cases(as_conjuncts(left), as_conjuncts(right))

    def _meet_cases(self, left: Conjuncts, right: Conjuncts) -> Conjuncts:
        """The intersection of sets of objects or arrays, without plainly empty conjuncts."""
        limit = max(CASES_LIMIT, len(left), len(right))  # only products are limited
        if len(left) * len(right) > limit * 64:
            raise too_many_conjuncts()
        result: list[Conjunct] = []
        for one, other in product(left, right):
            if one in _ANY or other in _ANY:
                result.append(other if one in _ANY else one)
                continue
            self.formulas.work(len(one.blocks) + len(other.blocks))
            conjunct = one.join(other, self.formulas)
            if conjunct is not None and not self._is_dead(conjunct, (one, other)):
                result.append(conjunct)
                if len(result) > limit:
                    raise too_many_conjuncts()
        return _widest(result) if len(left) > 1 < len(right) else tuple(dict.fromkeys(result))

    def _is_dead(self, conjunct: Conjunct, sides: tuple[Conjunct, ...] = ()) -> bool:
        """Whether a conjunct, joined of two sides that are not plainly empty, is."""
        return conjunct.is_void() or any(map(self.is_plainly_empty, conjunct.needed(self.formulas, sides)))

    def _join(self, left: KindSet, right: KindSet, kind: int) -> KindSet:
        if kind < OBJECT:
            either: KindSet = cast(Any, left) | right
            return either
        if not self.reader.is_tracking and EVERYTHING[kind] in (left, right):
            return EVERYTHING[kind]
        return tuple(dict.fromkeys((*as_conjuncts(left), *as_conjuncts(right))))

    def is_plainly_empty(self, formula: Formula) -> bool:
        """Whether a formula is seen to have no value, within LOOK_AHEAD."""
        if formula is TRUE or isinstance(formula, Values | Unknown | ObjectFormula):
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
            except (ReferenceLoop, TooManyConjuncts):
                found = False  # reported when the formula itself is evaluated
            finally:
                self._depth -= 1
            self._plainly_empty[formula] = found
        return found

    def _is_plainly_empty_of(self, formula: Formula, kind: int) -> bool:
        value = self.of(formula, kind).value
        return all(map(self._is_dead, value)) if isinstance(value, tuple) else not value


_ANY: Final[Conjuncts] = (ANY_OBJECT, ANY_ARRAY)
# Alternatives last, so that they meet what is left after all others.
_WEIGHTS: Final = {"schema": 1, "or": 2, "one": 3, "not": 4}


def _widest(conjuncts: list[Conjunct]) -> Conjuncts:
    """The conjuncts without those that demand more than another."""
    kept: list[tuple[frozenset[object], Conjunct]] = []
    marked = [(conjunct.demands(), conjunct) for conjunct in conjuncts]
    for demands, conjunct in sorted(marked, key=lambda pair: len(pair[0])):
        if not any(
            fewer <= demands
            and wider.low <= conjunct.low
            and (wider.high is None or wider.high == conjunct.high)
            and wider.evaluated == conjunct.evaluated
            for fewer, wider in kept
        ):
            kept.append((demands, conjunct))
    return tuple(conjunct for _, conjunct in kept)


def _size(value: KindSet) -> int:
    """The number of alternatives of a set of objects or arrays; 0 for other sets."""
    return len(value) if isinstance(value, tuple) else 0


def as_conjuncts(value: KindSet) -> Conjuncts:
    """A set of objects or arrays, with its type."""
    assert isinstance(value, tuple)
    return value
