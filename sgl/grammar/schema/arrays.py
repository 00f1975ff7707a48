"""Sets of JSON arrays, closed under intersection and, without uniqueItems, under complement.

A conjunct lists the keyword groups of its schemas; `Resolver` merges them position by position. Children are formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from sgl.grammar.regular.expr import Expr
from sgl.grammar.regular.shortest import num_texts
from sgl.grammar.schema.formula import FALSE, TRUE, Conjunct, Formula, Formulas, Undecidable, lower_of
from sgl.grammar.shape import Array, Contains, Schema

FEW_ITEMS: Final = 64
"""uniqueItems over a tuple becomes a list of at most this many arrays."""
MOST_NOTED: Final = 1000
"""The most different strings that minItems may require."""
ENOUGH_TEXTS: Final = 10_000
"""No array has more items: so many strings never run out."""


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """One schema's formulas of items: by position, and for the rest."""

    prefix: tuple[Formula, ...] = ()
    rest: Formula = TRUE

    def at(self, index: int) -> Formula:
        """What the item at a position must be."""
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True, slots=True)
class Count:
    """`low` to `high` of the items from `start` on belong to `value`."""

    start: int
    value: Formula
    low: int
    high: int | None

    def is_void(self) -> bool:
        """Whether its bounds contradict each other."""
        return self.high is not None and self.low > self.high


@dataclass(frozen=True, slots=True, eq=False)
class ArrayConjunct(Conjunct):
    """Arrays of `low` to `high` items that satisfy all blocks and counts; distinct items if `unique`, the pointer of
    uniqueItems, is not None."""

    blocks: tuple[Items, ...] = ()
    low: int = 0
    high: int | None = None
    counts: tuple[Count, ...] = ()
    unique: str | None = None
    evaluated: tuple[int, Formula] = (0, FALSE)
    """The length of the evaluated prefix and the formula of other evaluated items, for unevaluatedItems."""

    def demands(self) -> frozenset[object]:
        return frozenset((*self.blocks, *self.counts, *([] if self.unique is None else [self.unique])))

    def is_void(self) -> bool:
        return self.high is not None and self.low > self.high

    def at(self, index: int, formulas: Formulas) -> Formula:
        """What the item at a position must be."""
        return formulas.both(*[block.at(index) for block in self.blocks])

    def needed(self, formulas: Formulas, sides: tuple[ArrayConjunct, ...] = ()) -> Iterator[Formula]:
        length = max((len(block.prefix) for block in self.blocks), default=0)
        return (self.at(index, formulas) for index in range(min(self.low, length + 1)))

    def join(self, other: ArrayConjunct, formulas: Formulas) -> ArrayConjunct:
        (first, matching), (other_first, other_matching) = self.evaluated, other.evaluated
        return ArrayConjunct(
            tuple(dict.fromkeys((*self.blocks, *other.blocks))),
            max(self.low, other.low),
            lower_of(self.high, other.high),
            tuple(dict.fromkeys((*self.counts, *other.counts))),
            other.unique if self.unique is None else self.unique,  # the root's pointer is empty
            (max(first, other_first), formulas.either(matching, other_matching)),
        )

    def outside(self, formulas: Formulas) -> tuple[ArrayConjunct, ...]:
        if self.unique is not None:
            reason = "it stands under a negation, and arrays with items that repeat are no regular set"
            raise Undecidable("uniqueItems", reason, self.unique)
        result: list[ArrayConjunct] = []
        for block in self.blocks:
            for index, value in enumerate(block.prefix):
                wrong = formulas.negate(value)
                if wrong is not FALSE:
                    result.append(ArrayConjunct((Items((*[TRUE] * index, wrong)),), low=index + 1))
            wrong = formulas.negate(block.rest)
            if wrong is TRUE:
                result.append(ArrayConjunct(low=len(block.prefix) + 1))
            elif wrong is not FALSE:
                result.append(ArrayConjunct(counts=(Count(len(block.prefix), wrong, 1, None),)))
        if self.low > 0:
            result.append(ArrayConjunct(high=self.low - 1))
        if self.high is not None:
            result.append(ArrayConjunct(low=self.high + 1))
        for count in self.counts:
            if count.low > 0:
                result.append(ArrayConjunct(counts=(replace(count, low=0, high=count.low - 1),)))
            if count.high is not None:
                result.append(ArrayConjunct(counts=(replace(count, low=count.high + 1, high=None),)))
        return tuple(result)

    def with_unevaluated(self, formulas: Formulas, unevaluated: Formula) -> ArrayConjunct:
        first, matching = self.evaluated
        if matching is TRUE:
            return self
        block = Items((TRUE,) * first, formulas.either(unevaluated, matching))
        return replace(self, blocks=(*self.blocks, block), evaluated=(0, TRUE))

    def not_looked_at(self) -> ArrayConjunct:
        return replace(self, evaluated=(0, FALSE))


ANY_ARRAY: Final = ArrayConjunct()


@dataclass(frozen=True, slots=True)
class Resolver:
    """Turns conjuncts into shapes, some of whose items may turn out to have no values."""

    formulas: Formulas
    schema_of: Callable[[Formula], Schema]
    single_values: Callable[[Formula], list[Formula] | None]
    """The values of a formula, if they are finitely many scalars."""
    all_strings: Callable[[Formula], Expr | None]
    """The language of the bodies of its values, if they are strings."""

    def shapes(self, conjunct: ArrayConjunct) -> Iterator[Array]:
        """One shape, or a list of arrays of distinct items. Raises Undecidable."""
        formulas = self.formulas
        counts = _merge_counts(conjunct.counts)
        length = max(
            [len(block.prefix) for block in conjunct.blocks] + [count.start for count in counts], default=0
        )
        if conjunct.high is not None:
            length = min(length, conjunct.high)
        prefix = tuple(conjunct.at(index, formulas) for index in range(length))
        rest = conjunct.at(length, formulas) if conjunct.high is None or conjunct.high > length else FALSE
        if FALSE in prefix:
            prefix, rest = prefix[: prefix.index(FALSE)], FALSE
        high = lower_of(conjunct.high, len(prefix)) if rest is FALSE else conjunct.high
        while prefix and prefix[-1] is rest and not counts:
            prefix = prefix[:-1]
        is_void = (high is not None and conjunct.low > high) or any(count.is_void() for count in counts)
        if is_void:
            return
        if conjunct.unique is not None and (high is None or high > 1):
            if counts:
                raise Undecidable("uniqueItems", "distinct items together with contains", conjunct.unique)
            yield from self._distinct(conjunct, prefix, rest, high)
            return
        if len(counts) > 1:
            raise Undecidable("contains", "several counts of different items in one array")
        contains = self._contains(prefix, rest, counts[0]) if counts else None
        yield Array(tuple(map(self.schema_of, prefix)), self.schema_of(rest), conjunct.low, high, contains)

    def _contains(self, prefix: tuple[Formula, ...], rest: Formula, count: Count) -> Contains:
        both, other = self.formulas.both, self.formulas.negate(count.value)
        matching: list[Formula] = []
        others: list[Formula] = []
        for index, item in enumerate((*prefix, rest)):
            is_counted = index >= count.start
            matching.append(both(item, count.value) if is_counted else FALSE)
            others.append(both(item, other) if is_counted and count.high is not None else item)
        return Contains(
            tuple(map(self.schema_of, matching)), tuple(map(self.schema_of, others)), count.low, count.high
        )

    def _distinct(
        self, conjunct: ArrayConjunct, prefix: tuple[Formula, ...], rest: Formula, high: int | None
    ) -> Iterator[Array]:
        """Arrays of distinct items, which have finitely many values or are strings."""
        if prefix:
            yield from self._distinct_tuples(conjunct, prefix, rest)
            return
        values, texts = self.single_values(rest), None
        if values is not None:
            high = lower_of(high, len(values))
        else:
            texts = self.all_strings(rest)
            if texts is None:
                reason = "items that are neither strings nor finitely many scalars"
                raise Undecidable("uniqueItems", reason, conjunct.unique)
            if conjunct.low > MOST_NOTED:
                raise Undecidable("uniqueItems", f"more than {MOST_NOTED} different strings", conjunct.unique)
            available = num_texts(texts, ENOUGH_TEXTS)
            high = lower_of(high, available if available < ENOUGH_TEXTS else None)
        if high is None or conjunct.low <= high:
            distinct = None if values is None else tuple(map(self.schema_of, values))
            yield Array((), self.schema_of(rest), conjunct.low, high, distinct=distinct, unique=texts)

    def _distinct_tuples(
        self, conjunct: ArrayConjunct, prefix: tuple[Formula, ...], rest: Formula
    ) -> Iterator[Array]:
        written: list[tuple[Formula, ...]] = [()]
        lengths = [written]
        for item in prefix:
            values = self.single_values(item)
            if rest is not FALSE or values is None:
                raise Undecidable(
                    "uniqueItems", "a tuple whose items are not finitely many scalars", conjunct.unique
                )
            written = [(*array, value) for array in written for value in values if value not in array]
            if len(written) > FEW_ITEMS:
                raise Undecidable("uniqueItems", f"a tuple of more than {FEW_ITEMS} combinations", conjunct.unique)
            lengths.append(written)
        for length, arrays in enumerate(lengths):
            if conjunct.low <= length:
                for array in arrays:
                    yield Array(tuple(map(self.schema_of, array)), None, length, length)


def _merge_counts(counts: tuple[Count, ...]) -> list[Count]:
    """One count for each start and value, without those that always hold."""
    merged: dict[tuple[int, Formula], Count] = {}
    for count in counts:
        old = merged.get((count.start, count.value), count)
        least, most = max(old.low, count.low), lower_of(old.high, count.high)
        merged[count.start, count.value] = Count(count.start, count.value, least, most)
    return [count for count in merged.values() if count.low > 0 or count.high is not None]
