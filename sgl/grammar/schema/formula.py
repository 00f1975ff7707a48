"""Formulas: schemas as hash-consed Boolean expressions over sets of JSON values, before evaluation.

Equal formulas of one compilation are one object, which makes recursive schemas finite.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from operator import or_
from typing import Final, Literal, Self

from sgl.errors import GrammarTooLarge
from sgl.grammar.schema.report import Dropped
from sgl.grammar.text.decimals import exact, sized
from sgl.time_limit import check_time

LITERAL, NUMBER, STRING, OBJECT, ARRAY = KINDS = range(5)
"""The kinds of JSON values; null, true and false are literals."""
ALL_KINDS: Final = 31
TAGS: Final = ("literal", "number", "string", "object", "array")
"""The names of the kinds in frozen values."""

CASES_LIMIT: Final = 256
"""The most alternatives of one object."""
WORK_LIMIT: Final = 3_000_000
"""The most keys and blocks visited to combine the alternatives of one formula: some seconds of work."""

Operator = Literal["true", "false", "leaf", "schema", "and", "or", "one", "not"]
Frozen = tuple[str, object]


@dataclass(slots=True, eq=False)
class Formula:
    """A definition of a set of JSON values: a leaf of some class, or a combination of `members`."""

    operator: Operator = "leaf"
    members: tuple[Formula, ...] = ()
    kinds: int = ALL_KINDS
    """A mask of the kinds that may occur in it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Values(Formula):
    """Exactly these values, by their frozen form."""

    values: Mapping[Frozen, object]


@dataclass(slots=True, eq=False, kw_only=True)
class Unknown(Formula):
    """A dropped keyword: any value may belong to it."""

    problem: Dropped


@dataclass(slots=True, eq=False, kw_only=True)
class OneOf(Formula):
    """What belongs to exactly one member; `path` is its place in the schema."""

    path: str


class Conjunct:
    """The objects or arrays that satisfy several demands at once. Sets of either are unions of conjuncts."""

    blocks: tuple[object, ...]
    """The keyword groups about its members."""
    low: int
    """The least number of keys or items."""
    high: int | None
    """The most."""
    evaluated: object
    """The evaluated keys or items, for unevaluated*."""

    @abstractmethod
    def demands(self) -> frozenset[object]:
        """Its other demands, comparable one by one."""

    @abstractmethod
    def is_void(self) -> bool:
        """Whether its bounds contradict each other."""

    @abstractmethod
    def needed(self, formulas: Formulas, sides: tuple[Self, ...] = ()) -> Iterable[Formula]:
        """The formulas of required values; in a join of `sides`, of those that several constrain."""

    @abstractmethod
    def join(self, other: Self, formulas: Formulas) -> Self | None:
        """The intersection; None if it is plainly empty."""

    @abstractmethod
    def outside(self, formulas: Formulas) -> tuple[Self, ...]:
        """The complement, as a union of conjuncts. Raises Undecidable."""

    @abstractmethod
    def with_unevaluated(self, formulas: Formulas, unevaluated: Formula) -> Self:
        """The conjunct with all that is not evaluated held to a formula."""

    @abstractmethod
    def not_looked_at(self) -> Self:
        """The conjunct with nothing evaluated."""


Conjuncts = tuple[Conjunct, ...]


def lower_of(left: int | None, right: int | None) -> int | None:
    """The lower of two upper bounds; None is unbounded."""
    return right if left is None else left if right is None else min(left, right)


class Undecidable(Exception):
    """A keyword of a conjunct that no shape expresses; `path` is its pointer, if known."""

    def __init__(self, keyword: str, reason: str, path: str | None = None) -> None:
        super().__init__(reason)
        self.keyword = keyword
        self.reason = reason
        self.path = path


def _kinds_of_any(members: Iterable[Formula]) -> int:
    return reduce(or_, (member.kinds for member in members), 0)


class TooManyConjuncts(GrammarTooLarge):
    """The alternatives of one value multiply past a limit; lenient compilation may drop the combinator."""


def too_many_conjuncts() -> TooManyConjuncts:
    """The error past CASES_LIMIT."""
    return TooManyConjuncts(
        f"the combinators of this schema multiply to more than {CASES_LIMIT} alternatives",
        states=CASES_LIMIT,
        limit=CASES_LIMIT,
    )


TRUE: Final = Formula("true")
FALSE: Final = Formula("false", kinds=0)


class Formulas:
    """Makes formulas, each once, with cheap simplifications."""

    def __init__(self) -> None:
        self._made: dict[object, Formula] = {}
        self.blocks: dict[tuple[str, Formula], object] = {}
        """Shared keyword groups of objects."""
        self._work = 0

    def start_work(self) -> None:
        """Start the count of work anew, for another formula."""
        self._work = 0

    def work(self, amount: int) -> None:
        """Count visited blocks and keys. Raises TooManyConjuncts past WORK_LIMIT."""
        check_time()
        self._work += amount
        if self._work > WORK_LIMIT:
            self._work = 0  # lenient compilation may take as much again
            raise too_many_conjuncts()

    def value(self, value: object) -> Formula:
        """Exactly this JSON value."""
        return self.values({freeze(value): value})

    def values(self, values: Mapping[Frozen, object]) -> Formula:
        """Exactly these values, given by their frozen form."""
        if not values:
            return FALSE
        key = frozenset(values)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Values(
                kinds=sum(1 << TAGS.index(tag) for tag in {tag for tag, _ in key}), values=dict(values)
            )
        return found

    def both(self, *formulas: Formula) -> Formula:
        """The conjunction."""
        flat: dict[Formula, None] = {}
        for formula in formulas:
            if formula is FALSE:
                return FALSE
            if formula.operator == "and":
                flat.update(dict.fromkeys(formula.members))
            elif formula is not TRUE:
                flat[formula] = None
        if any(isinstance(member, Values) for member in flat):
            flat = self._sift_values(flat)
        kinds = ALL_KINDS
        for member in flat:
            kinds &= member.kinds
            if member.operator == "not" and member.members[0] in flat:
                return FALSE
        if not kinds:
            return FALSE
        return self._combine("and", tuple(flat), kinds) if flat else TRUE

    def _sift_values(self, flat: dict[Formula, None]) -> dict[Formula, None]:
        """Merge plain values, without those that a sibling excludes."""
        values: dict[Frozen, object] | None = None
        excluded: set[Frozen] = set()
        rest: dict[Formula, None] = {}
        for member in flat:
            if isinstance(member, Values):
                chosen = member.values if values is None else values
                values = {key: item for key, item in chosen.items() if key in member.values}
            elif member.operator == "not" and isinstance(member.members[0], Values):
                excluded.update(member.members[0].values)
            else:
                rest[member] = None
        assert values is not None
        left = {key: item for key, item in values.items() if key not in excluded}
        return {self.values(left): None, **rest}

    def either(self, *formulas: Formula) -> Formula:
        """The disjunction."""
        flat: dict[Formula, None] = {}
        merged: dict[Frozen, object] = {}
        for formula in formulas:
            if formula is TRUE:
                return TRUE
            for part in formula.members if formula.operator == "or" else (formula,):
                if isinstance(part, Values):
                    merged.update(part.values)
                else:
                    flat[part] = None
        return self.either_in_full([*flat, self.values(merged)])

    def either_in_full(self, formulas: Iterable[Formula]) -> Formula:
        """As `either`, without absorbing alternatives: each may have evaluated other keys."""
        alive = tuple(dict.fromkeys(formula for formula in formulas if formula is not FALSE))
        return self._combine("or", alive, _kinds_of_any(alive)) if alive else FALSE

    def exactly_one(self, *formulas: Formula, path: str) -> Formula:
        """The values of exactly one formula; `path` is for messages."""
        alive = tuple(formula for formula in formulas if formula is not FALSE)
        if len(alive) < 2:
            return alive[0] if alive else FALSE
        found = self._made.get(("one", alive))
        if found is None:
            found = self._made["one", alive] = OneOf("one", alive, _kinds_of_any(alive), path=path)
        return found

    def negate(self, formula: Formula) -> Formula:
        """The negation."""
        if formula is TRUE:
            return FALSE
        if formula is FALSE:
            return TRUE
        if formula.operator == "not":
            return formula.members[0]
        found = self._made.get(("not", formula))
        if found is None:
            found = self._made["not", formula] = Formula("not", (formula,))
        return found

    def without_negations(self, formula: Formula) -> Formula:
        """A weaker formula: without what it excludes."""
        if formula.operator == "not":
            return TRUE
        if formula.operator not in ("and", "or"):
            return formula
        members = map(self.without_negations, formula.members)
        return self.both(*members) if formula.operator == "and" else self.either(*members)

    def _combine(self, operator: Literal["and", "or"], members: tuple[Formula, ...], kinds: int) -> Formula:
        """A conjunction or disjunction of one member or more, all different."""
        if len(members) == 1:
            return members[0]
        key = (operator, frozenset(members))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Formula(operator, members, kinds)
        return found


def freeze(value: object) -> Frozen:
    """A hashable form of a JSON value: 1 and 1.0 are equal, 1 and true are not.

    Raises ValueError for infinite or too large numbers, and TypeError for what is not JSON.
    """
    if isinstance(value, str):
        return ("string", value)
    if value is None or isinstance(value, bool):
        return ("literal", "null" if value is None else "true" if value else "false")
    if isinstance(value, int):
        return ("number", sized(value))
    if isinstance(value, float):
        return ("number", exact(value))
    if isinstance(value, Fraction):
        return ("number", value)
    if isinstance(value, list):
        return ("array", tuple(freeze(item) for item in value))
    if isinstance(value, dict):
        return ("object", frozenset((key, freeze(item)) for key, item in value.items()))
    raise TypeError(f"{type(value).__name__} is no JSON value")
