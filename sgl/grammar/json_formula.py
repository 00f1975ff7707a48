"""Formulas over JSON values: what a schema says before it is worked out, as hash-consed Boolean expressions.

A formula is a subschema, a set of plain values, a fact about objects or arrays, or a combination of formulas. Equal
formulas of one compilation are one object, which is what makes recursive schemas finite. The evaluator works them
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Final, Literal

from sgl.errors import GrammarTooLarge
from sgl.grammar.numbers import exact, sized
from sgl.grammar.time_limit import check_time

LITERAL, NUMBER, STRING, OBJECT, ARRAY = KINDS = range(5)
"""The kinds of JSON values; null, true and false are literals."""
ALL_KINDS: Final = 31

CASES_LIMIT: Final = 256
"""How many alternatives one object may have before the schema is refused as too large."""
WORK_LIMIT: Final = 3_000_000
"""How many keys and blocks may be looked at to combine the alternatives of one formula: some seconds of work."""

Operator = Literal["true", "false", "schema", "local", "values", "fact", "unknown", "and", "or", "one", "not"]
Frozen = tuple[str, object]


class Formula:
    """A set of JSON values by its definition. `kinds` is a mask of the kinds that may occur in it.

    `subject` is what a leaf is about; `members` are the operands of a combination. `sets` is the evaluator's
    memory.
    """

    __slots__ = ("kinds", "members", "operator", "subject")

    def __init__(
        self, operator: Operator, members: tuple[Formula, ...] = (), subject: object = None, kinds: int = ALL_KINDS
    ) -> None:
        self.operator = operator
        self.members = members
        self.subject = subject
        self.kinds = kinds

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self.members)) if self.members else repr(self.subject)
        return f"{self.operator}({inner})"


class TooManyCases(GrammarTooLarge):
    """The alternatives of one value multiply out of hand; lenient compilation may leave out the combinator."""


def too_many_cases() -> TooManyCases:
    """The error for a product of alternatives past CASES_LIMIT."""
    return TooManyCases(
        f"the combinators of this schema multiply to more than {CASES_LIMIT} alternatives",
        states=CASES_LIMIT,
        limit=CASES_LIMIT,
    )


TRUE: Final = Formula("true")
FALSE: Final = Formula("false", kinds=0)


class Formulas:
    """Makes formulas, each once, simplified as far as costs nothing."""

    def __init__(self) -> None:
        self._made: dict[object, Formula] = {}
        self.blocks: dict[tuple[str, Formula], object] = {}
        """Shared parts of objects, kept for whoever makes them."""
        self._work = 0

    def start_work(self) -> None:
        """Begin to work out another formula."""
        self._work = 0

    def work(self, amount: int) -> None:
        """Count work, in blocks and keys looked at. Raises TooManyCases past the limit."""
        check_time()
        self._work += amount
        if self._work > WORK_LIMIT:
            self._work = 0  # what is left out instead may take as much again
            raise too_many_cases()

    def leaf(self, operator: Operator, key: object, subject: object, kinds: int = ALL_KINDS) -> Formula:
        """A leaf, the same one for the same key."""
        found = self._made.get((operator, key))
        if found is None:
            found = self._made[operator, key] = Formula(operator, (), subject, kinds)
        return found

    def values(self, values: Mapping[Frozen, object]) -> Formula:
        """Exactly these values, given by their frozen form."""
        if not values:
            return FALSE
        key = frozenset(values)
        found = self._made.get(key)
        if found is None:
            kinds = 0
            for tag, _ in values:
                kinds |= _KIND_OF_TAG[tag]
            found = self._made[key] = Formula("values", (), dict(values), kinds)
        return found

    def both(self, *formulas: Formula) -> Formula:
        """What all formulas share."""
        if len(formulas) == 1:
            return formulas[0]
        if len(formulas) == 2:
            left, right = formulas
            if left is TRUE or left is right:
                return right
            if right is TRUE:
                return left
        flat: dict[Formula, None] = {}
        for formula in formulas:
            if formula is FALSE:
                return FALSE
            if formula.operator == "and":
                flat.update(dict.fromkeys(formula.members))
            elif formula is not TRUE:
                flat[formula] = None
        if sum(member.operator == "values" for member in flat):
            flat = self._sift_values(flat)
        kinds = ALL_KINDS
        for member in flat:
            kinds &= member.kinds
            if member.operator == "not" and member.members[0] in flat:
                return FALSE
        if not kinds:
            return FALSE
        if len(flat) < 2:
            return next(iter(flat), TRUE)
        return self._combine("and", tuple(flat), kinds)

    def _sift_values(self, flat: dict[Formula, None]) -> dict[Formula, None]:
        """Draw plain values together, and take out those that a sibling excludes."""
        values: dict[Frozen, object] | None = None
        rest: dict[Formula, None] = {}
        for member in flat:
            if member.operator == "values":
                own = _values_of(member)
                values = own if values is None else {key: item for key, item in values.items() if key in own}
            else:
                rest[member] = None
        assert values is not None
        for member in list(rest):
            if member.operator == "not" and member.members[0].operator == "values":
                excluded = _values_of(member.members[0])
                values = {key: item for key, item in values.items() if key not in excluded}
                del rest[member]
        return {self.values(values): None, **rest} if values else {FALSE: None}

    def either(self, *formulas: Formula) -> Formula:
        """What belongs to any of the formulas."""
        flat: dict[Formula, None] = {}
        for formula in formulas:
            if formula is TRUE:
                return TRUE
            if formula.operator == "or":
                flat.update(dict.fromkeys(formula.members))
            elif formula is not FALSE:
                flat[formula] = None
        plain = [member for member in flat if member.operator == "values"]
        if len(plain) > 1:
            merged: dict[Frozen, object] = {}
            for member in plain:
                merged.update(_values_of(member))
                del flat[member]
            flat[self.values(merged)] = None
        if len(flat) < 2:
            return next(iter(flat), FALSE)
        kinds = 0
        for member in flat:
            kinds |= member.kinds
        return self._combine("or", tuple(flat), kinds)

    def either_in_full(self, formulas: Iterable[Formula]) -> Formula:
        """As `either`, but every alternative is kept even if another swallows it."""
        alive = tuple(dict.fromkeys(formula for formula in formulas if formula is not FALSE))
        if len(alive) < 2:
            return alive[0] if alive else FALSE
        kinds = 0
        for member in alive:
            kinds |= member.kinds
        return self._combine("or", alive, kinds)

    def exactly_one(self, *formulas: Formula, path: str) -> Formula:
        """What belongs to one of the formulas and to no other; `path` is where they stand, for messages."""
        alive = [formula for formula in formulas if formula is not FALSE]
        if len(alive) < 2:
            return alive[0] if alive else FALSE
        kinds = 0
        for member in alive:
            kinds |= member.kinds
        one = self._combine("one", tuple(alive), kinds)
        one.subject = one.subject or path
        return one

    def negate(self, formula: Formula) -> Formula:
        """Everything else."""
        if formula is TRUE:
            return FALSE
        if formula is FALSE:
            return TRUE
        if formula.operator == "not":
            return formula.members[0]
        return self._combine("not", (formula,), ALL_KINDS)

    def _combine(self, operator: Operator, members: tuple[Formula, ...], kinds: int) -> Formula:
        key = (operator, members if operator in ("one", "not") else frozenset(members))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Formula(operator, members, None, kinds)
        return found


def _values_of(formula: Formula) -> dict[Frozen, object]:
    assert isinstance(formula.subject, dict)
    return formula.subject


_KIND_OF_TAG: Final = {
    "literal": 1 << LITERAL,
    "number": 1 << NUMBER,
    "string": 1 << STRING,
    "object": 1 << OBJECT,
    "array": 1 << ARRAY,
}


def freeze(value: object) -> Frozen:
    """A JSON value as something hashable that is equal for equal values: 1 and 1.0 are, 1 and true are not.

    Raises ValueError for numbers that are too large or no numbers, and TypeError for what is not JSON.
    """
    if isinstance(value, str):
        return ("string", value)
    if value is None or isinstance(value, bool):
        return ("literal", "null" if value is None else "true" if value else "false")
    if isinstance(value, int):
        return ("number", sized(value))
    if isinstance(value, float):
        try:
            return ("number", exact(value))
        except OverflowError:
            raise ValueError("an infinite number") from None
    if isinstance(value, Fraction):
        return ("number", value)
    if isinstance(value, list):
        return ("array", tuple(freeze(item) for item in value))
    if isinstance(value, dict):
        return ("object", frozenset((key, freeze(item)) for key, item in value.items()))
    raise TypeError(f"{type(value).__name__} is no JSON value")


def frozen_values(values: Iterable[object]) -> dict[Frozen, object]:
    """Values by their frozen form, in order and without repetition."""
    result: dict[Frozen, object] = {}
    for value in values:
        result.setdefault(freeze(value), value)
    return result
