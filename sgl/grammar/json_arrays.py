"""Sets of JSON arrays: conjunctions of what schemas say about items by position, closed under intersection and, but
for uniqueItems, complement.

Like objects, a case keeps the blocks that the schemas wrote and `resolve` merges them position by position once the
case is final. Children are formulas. The evaluator calls all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from sgl.grammar.expr import Expr
from sgl.grammar.json_formula import FALSE, TRUE, Formula, Formulas, Undecidable, lower_of
from sgl.grammar.shortest import num_texts

FEW_ITEMS: Final = 64
"""uniqueItems over a tuple is written out if it leaves at most this many arrays."""
MOST_NOTED: Final = 1000
"""How many different strings minItems may ask for."""
ENOUGH_TEXTS: Final = 10_000
"""No array has more different items than this, so it never runs out of so many strings."""


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """What one schema says about items: by position, and for all behind."""

    prefix: tuple[Formula, ...] = ()
    rest: Formula = TRUE

    def at(self, index: int) -> Formula:
        """What the item at a position must be."""
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True, slots=True)
class Count:
    """Of the items from `start` on, `low` to `high` belong to `value`."""

    start: int
    value: Formula
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class EvaluatedItems:
    """The items that some keyword has looked at, for unevaluatedItems: a prefix, and those of some formulas."""

    prefix: int = 0
    everything: bool = False
    matching: tuple[Formula, ...] = ()

    def __or__(self, other: EvaluatedItems) -> EvaluatedItems:
        matching = tuple(dict.fromkeys((*self.matching, *other.matching)))
        return EvaluatedItems(max(self.prefix, other.prefix), self.everything or other.everything, matching)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayCase:
    """Arrays of `low` to `high` items that satisfy all blocks and counts; `unique` is the pointer of a uniqueItems
    that demands distinct items."""

    blocks: tuple[Items, ...] = ()
    low: int = 0
    high: int | None = None
    counts: tuple[Count, ...] = ()
    unique: str | None = None
    evaluated: EvaluatedItems = EvaluatedItems()

    def demands(self) -> frozenset[object]:
        """As `Case.demands`."""
        return frozenset((*self.blocks, *self.counts, *([] if self.unique is None else [self.unique])))

    def is_void(self) -> bool:
        """As `Case.is_void`."""
        return self.high is not None and self.low > self.high

    def at(self, index: int, formulas: Formulas) -> Formula:
        """What the item at a position must be."""
        return formulas.both(*[block.at(index) for block in self.blocks])

    def needed(self, formulas: Formulas, sides: tuple[ArrayCase, ...] = ()) -> Iterator[Formula]:
        """As `Case.needed`."""
        length = max((len(block.prefix) for block in self.blocks), default=0)
        return (self.at(index, formulas) for index in range(min(self.low, length + 1)))

    def join(self, other: ArrayCase, formulas: Formulas) -> ArrayCase:
        """As `Case.join`."""
        return ArrayCase(
            tuple(dict.fromkeys((*self.blocks, *other.blocks))),
            max(self.low, other.low),
            lower_of(self.high, other.high),
            tuple(dict.fromkeys((*self.counts, *other.counts))),
            other.unique if self.unique is None else self.unique,  # the root's pointer is empty
            self.evaluated | other.evaluated,
        )

    def outside(self, formulas: Formulas) -> tuple[ArrayCase, ...]:
        """As `Case.outside`."""
        if self.unique is not None:
            reason = "it stands under a negation, and arrays with items that repeat are no regular set"
            raise Undecidable("uniqueItems", reason, self.unique)
        result: list[ArrayCase] = []
        for block in self.blocks:
            for index, value in enumerate(block.prefix):
                wrong = formulas.negate(value)
                if wrong is not FALSE:
                    result.append(ArrayCase((Items((*[TRUE] * index, wrong)),), low=index + 1))
            wrong = formulas.negate(block.rest)
            if wrong is TRUE:
                result.append(ArrayCase(low=len(block.prefix) + 1))
            elif wrong is not FALSE:
                result.append(ArrayCase(counts=(Count(len(block.prefix), wrong, 1, None),)))
        if self.low > 0:
            result.append(ArrayCase(high=self.low - 1))
        if self.high is not None:
            result.append(ArrayCase(low=self.high + 1))
        for count in self.counts:
            if count.low > 0:
                result.append(ArrayCase(counts=(replace(count, low=0, high=count.low - 1),)))
            if count.high is not None:
                result.append(ArrayCase(counts=(replace(count, low=count.high + 1, high=None),)))
        return tuple(result)

    def with_unevaluated(self, formulas: Formulas, unevaluated: Formula) -> ArrayCase:
        """As `Case.with_unevaluated`."""
        seen = self.evaluated
        if seen.everything:
            return self
        block = Items((TRUE,) * seen.prefix, formulas.either(unevaluated, *seen.matching))
        return replace(self, blocks=(*self.blocks, block), evaluated=EvaluatedItems(everything=True))

    def not_looked_at(self) -> ArrayCase:
        """As `Case.not_looked_at`."""
        return replace(self, evaluated=EvaluatedItems())


ANY_ARRAY: Final = ArrayCase()


@dataclass(slots=True, eq=False)
class ArrayDraft:
    """A final case: formulas by position, the count with its items already merged, distinct values if unique, or the
    strings that all items are, each of which may come once."""

    prefix: tuple[Formula, ...]
    rest: Formula
    low: int
    high: int | None
    matching: tuple[Formula, ...] | None = None
    other: tuple[Formula, ...] | None = None
    count_low: int = 0
    count_high: int | None = None
    distinct: tuple[Formula, ...] | None = None
    noted: Expr | None = None


def resolve(
    case: ArrayCase,
    formulas: Formulas,
    single_values: Callable[[Formula], list[Formula] | None],
    all_strings: Callable[[Formula], Expr | None],
) -> Iterator[ArrayDraft]:
    """The case as drafts: one, unless distinct items are written out. Raises Undecidable.

    `single_values` splits a formula into its values if it has finitely many, all scalars; `all_strings` gives the
    bodies of its values if they are strings.
    """
    counts = _merge_counts(case.counts)
    length = max([len(block.prefix) for block in case.blocks] + [count.start for count in counts], default=0)
    if case.high is not None:
        length = min(length, case.high)
    prefix = tuple(case.at(index, formulas) for index in range(length))
    rest = case.at(length, formulas) if case.high is None or case.high > length else FALSE
    high = case.high
    for index, item in enumerate(prefix):
        if item is FALSE:
            high, prefix, rest = index, prefix[:index], FALSE
            break
    if rest is FALSE:
        high = len(prefix) if high is None else min(high, len(prefix))
    while prefix and prefix[-1] is rest and not counts:
        prefix = prefix[:-1]
    if high is not None and case.low > high:
        return
    if case.unique is not None and (high is None or high > 1):
        yield from _distinct(case, prefix, rest, high, counts, single_values, all_strings)
        return
    draft = ArrayDraft(prefix, rest, case.low, high)
    if counts:
        if len(counts) > 1:
            raise Undecidable("contains", "several counts of different items in one array")
        count = counts[0]
        spots = [*enumerate(prefix), (len(prefix), rest)]
        draft.matching = tuple(
            formulas.both(item, count.value) if index >= count.start else FALSE for index, item in spots
        )
        draft.other = tuple(
            item if index < count.start or count.high is None else formulas.both(item, formulas.negate(count.value))
            for index, item in spots
        )
        draft.count_low, draft.count_high = count.low, count.high
    yield draft


def _merge_counts(counts: tuple[Count, ...]) -> list[Count]:
    """One count for each start and value, and none that holds anyway."""
    merged: dict[tuple[int, Formula], Count] = {}
    for count in counts:
        key = (count.start, count.value)
        old = merged.get(key)
        if old is not None:
            highs = [high for high in (old.high, count.high) if high is not None]
            count = Count(count.start, count.value, max(old.low, count.low), min(highs, default=None))
        merged[key] = count
    return [count for count in merged.values() if count.low > 0 or count.high is not None]


def _distinct(
    case: ArrayCase,
    prefix: tuple[Formula, ...],
    rest: Formula,
    high: int | None,
    counts: list[Count],
    single_values: Callable[[Formula], list[Formula] | None],
    all_strings: Callable[[Formula], Expr | None],
) -> Iterator[ArrayDraft]:
    """Arrays of distinct items, where the items have finitely many values or are strings."""
    if counts:
        raise Undecidable("uniqueItems", "distinct items together with contains", case.unique)
    if not prefix:
        values = single_values(rest)
        if values is None:
            yield from _noted(case, rest, high, all_strings(rest))
            return
        high = len(values) if high is None else min(high, len(values))
        if case.low <= high:
            yield ArrayDraft((), rest, case.low, high, distinct=tuple(values))
        return
    split = [single_values(item) for item in prefix]
    if rest is not FALSE or any(values is None for values in split):
        raise Undecidable("uniqueItems", "a tuple whose items are not finitely many scalars", case.unique)
    written: list[tuple[Formula, ...]] = [()]
    lengths = [written]
    for values in split:
        assert values is not None
        written = [(*array, value) for array in written for value in values if value not in array]
        if len(written) > FEW_ITEMS:
            raise Undecidable("uniqueItems", f"a tuple of more than {FEW_ITEMS} combinations", case.unique)
        lengths.append(written)
    for length, arrays in enumerate(lengths):
        if case.low <= length <= (len(prefix) if high is None else high):
            for array in arrays:
                yield ArrayDraft(array, FALSE, length, length)


def _noted(case: ArrayCase, rest: Formula, high: int | None, texts: Expr | None) -> Iterator[ArrayDraft]:
    if texts is None:
        raise Undecidable("uniqueItems", "items that are neither strings nor finitely many scalars", case.unique)
    if case.low > MOST_NOTED:
        raise Undecidable("uniqueItems", f"more than {MOST_NOTED} different strings", case.unique)
    available = num_texts(texts, ENOUGH_TEXTS)
    if available < ENOUGH_TEXTS:
        high = available if high is None else min(high, available)
    if high is None or case.low <= high:
        yield ArrayDraft((), rest, case.low, high, noted=texts)
