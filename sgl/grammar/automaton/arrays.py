"""JSON arrays as nodes: what the next item may be, and when the array may close.

Items are counted by the commas of their frame where bounds are large, and by states where they are small or where
what an item may be depends on the ones before it.
"""

from __future__ import annotations

from typing import NamedTuple

from sgl.grammar.automaton.nfa import CLOSING, Builder, Guard, Node, Thread, UniqueNode
from sgl.grammar.automaton.tables import INC_ITEM, ITEMS
from sgl.grammar.automaton.values import value_node
from sgl.grammar.regular.expr import concat, literal
from sgl.grammar.shape import Array, Schema, num_spots

FEW_ITEMS = 12
"""Up to this bound items are counted by states."""


class Items(NamedTuple):
    """What has been read of an array.

    `length` items, where states count them, or as many of them as the prefix has. `region`, where commas are
    counted: 0 below the least number of items, 1 between, 2 at the most. `matching` items for `contains`; `used` a
    bit set of the `distinct` values.
    """

    length: int
    region: int
    matching: int
    used: int


class ArrayPlan:
    """One `Array` shape, prepared for reading."""

    def __init__(self, builder: Builder, shape: Array) -> None:
        self.builder = builder
        self.shape = shape
        bound = max(shape.min_items, shape.max_items or 0)
        self.counts_commas = bound > FEW_ITEMS and shape.contains is None and shape.distinct is None
        self.count_cap = len(shape.prefix) if self.counts_commas else max(bound, len(shape.prefix))
        self.closing = builder.lexeme(concat(builder.space, literal(b"]")), CLOSING)
        self.start = Items(0, self.region_at(0) if self.counts_commas else 1, 0, 0)

    def threads_at_start(self) -> tuple[Thread, ...]:
        """The threads right behind the opening bracket."""
        threads: list[Thread] = []
        if self.shape.max_items != 0:
            threads += self.item_threads(self.start)
        if self.shape.min_items == 0 and (self.shape.contains is None or self.shape.contains.min_count == 0):
            threads.append(self.closing)
        return tuple(dict.fromkeys(threads))

    def region_at(self, commas: int) -> int:
        """How the number of items stands to the bounds once one stands behind `commas` commas."""
        if commas + 1 < self.shape.min_items:
            return 0
        return 2 if self.shape.max_items is not None and commas + 1 >= self.shape.max_items else 1

    def limit(self, region: int) -> int | None:
        """The number of commas at which `region` ends."""
        if region == 0:
            return self.shape.min_items - 1
        return None if self.shape.max_items is None else self.shape.max_items - 1

    def item_threads(self, items: Items) -> tuple[Thread, ...]:
        """The threads at which one more item may begin, `items` being those before it."""
        threads: list[Thread] = []
        for schema, after in self.choices(items):
            if self.shape.unique is not None:
                target = self.builder.one(UniqueNode, self.builder, self.shape.unique, self.after_item(after))
                threads.append(self.builder.lexeme(self.builder.open_key, target))
                continue
            node = value_node(self.builder, schema, self.after_item(after))
            threads += self.builder.enter(self.builder.space, node)
        return tuple(dict.fromkeys(threads))

    def choices(self, items: Items) -> list[tuple[Schema, Items]]:
        """What the next item may be, and what has been read behind it."""
        shape, count = self.shape, items.length
        after = items._replace(length=min(count + 1, self.count_cap))
        if shape.distinct is not None:
            free = [j for j in range(len(shape.distinct)) if not items.used >> j & 1]
            return [(shape.distinct[j], after._replace(used=items.used | 1 << j)) for j in free]
        if shape.contains is None:
            schema = shape.prefix[count] if count < len(shape.prefix) else shape.items
            return [] if schema is None else [(schema, after)]
        contains = shape.contains
        place = min(count, len(contains.matching) - 1)
        found = []
        matching, other = contains.matching[place], contains.other[place]
        cap = contains.min_count if contains.max_count is None else contains.max_count
        more = after._replace(matching=min(items.matching + 1, cap))
        may_match = contains.max_count is None or items.matching < contains.max_count
        if matching is not None and may_match and self.is_completable(more):
            found.append((matching, more))
        if other is not None and self.is_completable(after):
            found.append((other, after))
        return found

    def is_completable(self, items: Items) -> bool:
        """Whether enough items can still match, and enough others still fit, for `contains`."""
        contains, shape = self.shape.contains, self.shape
        assert contains is not None
        length, behind = items.length, len(contains.matching)
        can_match = [item is not None for item in contains.matching]
        can_differ = [item is not None for item in contains.other]
        end = max(behind, shape.min_items, length) if shape.max_items is None else shape.max_items
        matching = items.matching + num_spots(can_match, length, end)
        if shape.max_items is None and can_match[-1]:
            matching += contains.min_count
        if matching < contains.min_count:
            return False
        must_match = max(shape.min_items - length, 0) - num_spots(can_differ, length, shape.min_items)
        return contains.max_count is None or items.matching + must_match <= contains.max_count

    def after_item(self, items: Items) -> Node:
        """The node behind an item, `items` being all up to it."""
        return self.builder.one(AfterItem, self, items)

    def may_close(self, items: Items) -> bool:
        """Whether the array may end behind these items."""
        if self.counts_commas:
            return items.region > 0
        contains = self.shape.contains
        return items.length >= self.shape.min_items and (contains is None or items.matching >= contains.min_count)

    def may_go_on(self, items: Items) -> bool:
        """Whether one more item may follow."""
        if self.counts_commas:
            return items.region < 2
        if self.shape.max_items is not None and items.length >= self.shape.max_items:
            return False
        return bool(self.choices(items))


class AfterItem(Node):
    """Behind an item."""

    def __init__(self, plan: ArrayPlan, items: Items) -> None:
        self.plan = plan
        self.items = items

    def _find_threads(self) -> tuple[Thread, ...]:
        plan, builder = self.plan, self.plan.builder
        threads = []
        if plan.may_go_on(self.items):
            threads.append(builder.lexeme(builder.comma, builder.one(NextItem, plan, self.items)))
        if plan.may_close(self.items):
            threads.append(plan.closing)
        return tuple(threads)


class NextItem(Node):
    """Behind a comma. Where commas are counted, it depends on their number how the array stands to its bounds."""

    def __init__(self, plan: ArrayPlan, items: Items) -> None:
        self.plan = plan
        self.items = items
        self.limit = plan.limit(items.region) if plan.counts_commas else None
        self.operation = 0 if self.limit is None else INC_ITEM

    def _find_threads(self) -> tuple[Thread, ...]:
        plan, items = self.plan, self.items
        here = plan.item_threads(items)
        if self.limit is None:
            return here
        beyond = plan.item_threads(items._replace(region=plan.region_at(self.limit)))
        return (plan.builder.one(Guard, ITEMS, self.limit, here, beyond),)
