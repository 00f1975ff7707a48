"""JSON objects as nodes: which key may come next, what its value must be, when the object may close.

A plan holds what is fixed of one `Object` shape; a state what has been seen of it. A state is only entered if it
can be completed: enough distinct keys are left for what is still required, and not more are required than fit.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import NamedTuple

from sgl.grammar.automaton.nfa import CLOSING, PLAIN, Builder, Moves, Node, Stay, Thread, UniqueText
from sgl.grammar.automaton.values import value_node
from sgl.grammar.regular.expr import EPSILON, Expr, concat, is_empty, literal
from sgl.grammar.regular.shortest import num_texts
from sgl.grammar.shape import Object, Schema
from sgl.grammar.text.json import string_body


class Seen(NamedTuple):
    """What has been seen of an object.

    `keys` is a bit set of declared keys, or the index of the next one where keys come in order. `total` is only
    kept where bounds on the number of properties ask for it. `met` is a bit set of `exists`. `unique` counts the
    undeclared keys that may not come again, as far as it matters.
    """

    keys: int
    total: int
    met: int
    unique: int


class ObjectPlan:
    """One `Object` shape, prepared for reading."""

    def __init__(self, builder: Builder, shape: Object) -> None:
        self.builder = builder
        self.shape = shape
        self.in_order = builder.key_order == "schema"
        self.key_begin, self.key_end = (b"", b":") if shape.has_bare_keys else (b'"', b'"')
        self.names = [string_body(name) + self.key_end for name, _ in shape.properties]
        self.sorted_names = sorted(range(len(self.names)), key=self.names.__getitem__)
        required = [i for i, (name, _) in enumerate(shape.properties) if name in shape.required]
        self.required_mask = sum(1 << i for i in required)
        self.required_from = _counts_from(required, len(self.names))
        """[i] is the number of required keys from index i on."""
        self.is_counted = shape.max_properties is not None or shape.min_properties > len(required)
        self.count_cap = max(shape.max_properties or 0, shape.min_properties)
        self.every_met = (1 << len(shape.exists)) - 1
        self.open_key = concat(builder.space, literal(self.key_begin))
        self.after_key = (
            builder.space if shape.has_bare_keys else concat(builder.space, literal(b":"), builder.space)
        )
        self.colon = concat(literal(b":"), builder.space) if shape.has_bare_keys else builder.colon
        self.start = Seen(0, 0, 0, 0)
        self._rests: dict[tuple[int, int], Expr] = {}

    def rest_of_key(self, index: int, depth: int) -> Expr:
        """What is left of a declared key behind its first `depth` bytes, up to its value."""
        found = self._rests.get((index, depth))
        if found is None:
            found = self._rests[index, depth] = concat(literal(self.names[index][depth:]), self.after_key)
        return found

    @cached_property
    def num_undeclared(self) -> int:
        """How many undeclared keys there are, as far as it matters."""
        enough = self.shape.min_properties
        return sum(num_texts(pattern.key, enough) for pattern in self.shape.patterns)

    def threads_at_start(self) -> tuple[Thread, ...]:
        """The threads right behind the opening brace."""
        return self.threads_at(self.start, EPSILON)

    def threads_at(self, seen: Seen, before: Expr) -> tuple[Thread, ...]:
        """The threads at which another key may begin, with `before` in front, or the object may end."""
        builder = self.builder
        key = builder.one(KeyNode, self, seen)
        threads: list[Thread] = []
        if key.threads():
            threads += builder.enter(concat(before, self.open_key), key)
        if self.may_close(seen):
            threads.append(builder.lexeme(concat(builder.space, literal(b"}")), CLOSING))
        return tuple(threads)

    def value_node(self, schema: Schema, seen: Seen) -> Node:
        """The value of a key, `seen` being what has been seen when it is complete."""
        return value_node(self.builder, schema, self.builder.one(AfterProperty, self, seen))

    def may_close(self, seen: Seen) -> bool:
        """Whether the object may end here."""
        return (
            self.required_left(seen) == 0
            and seen.met == self.every_met
            and (not self.is_counted or seen.total >= self.shape.min_properties)
        )

    def required_left(self, seen: Seen) -> int:
        """How many required keys are still missing."""
        if self.in_order:
            return self.required_from[seen.keys]
        return (self.required_mask & ~seen.keys).bit_count()

    def with_declared(self, seen: Seen, index: int) -> Seen:
        """After a declared key."""
        keys = index + 1 if self.in_order else seen.keys | 1 << index
        return Seen(keys, self.counted(seen), seen.met, self.unique(seen, seen.unique))

    def with_undeclared(self, seen: Seen, met: int) -> Seen:
        """After an undeclared key."""
        keys = len(self.names) if self.in_order else seen.keys
        return Seen(keys, self.counted(seen), seen.met | met, self.unique(seen, seen.unique + self.is_unique(seen)))

    def counted(self, seen: Seen) -> int:
        """The number of properties with one more, as far as it matters."""
        return min(seen.total + 1, self.count_cap + 1) if self.is_counted else 0

    def unique(self, seen: Seen, unique: int) -> int:
        """The number of unique keys behind one more key, as far as it matters."""
        return min(unique, self.shape.min_properties) if seen.total + 1 < self.shape.min_properties else 0

    def is_unique(self, seen: Seen) -> bool:
        """Whether it matters which undeclared key comes next: those that come twice count once."""
        lacking = self.shape.min_properties - seen.total if self.is_counted else 0
        return bool(self.shape.exists) or lacking > 1 or (lacking == 1 and seen.unique > 0)

    def is_completable(self, seen: Seen) -> bool:
        """Whether an object that begins so can still be completed."""
        unmet = [e for i, e in enumerate(self.shape.exists) if not seen.met >> i & 1]
        needed = self.required_left(seen) + len(unmet)
        maximum = self.shape.max_properties
        if maximum is not None and seen.total + needed > maximum:
            return False
        if not self.is_counted:
            return True
        left = len(self.names) - (seen.keys if self.in_order else seen.keys.bit_count())
        lacking = self.shape.min_properties - seen.total - left
        return lacking <= 0 or lacking <= self.num_undeclared - seen.unique

    def declared_at(self, seen: Seen) -> list[int]:
        """The declared keys that may come next."""
        total = len(self.names)
        if self.in_order:
            first = seen.keys
            required = self.required_from[first]
            found = []
            for i in range(first, total):
                found.append(i)
                if self.required_from[i + 1] < required:  # this one is required: nothing behind it may come first
                    break
        else:
            found = [i for i in range(total) if not seen.keys >> i & 1]
        if not (self.is_counted or self.shape.exists):
            return found
        return [i for i in found if self.is_completable(self.with_declared(seen, i))]

    def undeclared_at(self, seen: Seen) -> list[tuple[Expr, Schema, int]]:
        """Key, schema of the value and what it meets, of the undeclared keys that may come next."""
        if self.in_order and self.required_left(seen):
            return []
        groups = [(p.key, p.value, 0) for p in self.shape.patterns]
        groups += [(e.key, e.value, 1 << i) for i, e in enumerate(self.shape.exists) if not seen.met >> i & 1]
        return [
            (key, value, met)
            for key, value, met in groups
            if not is_empty(key) and self.is_completable(self.with_undeclared(seen, met))
        ]


class KeyNode(Node):
    """Where a key begins, behind its opening quote."""

    def __init__(self, plan: ObjectPlan, seen: Seen) -> None:
        self.plan = plan
        self.seen = seen

    def _find_threads(self) -> tuple[Thread, ...]:
        plan, seen, builder = self.plan, self.seen, self.plan.builder
        threads: list[Thread] = []
        declared = plan.declared_at(seen)
        if declared:
            chosen = set(declared)
            names = [(plan.names[i], i) for i in plan.sorted_names if i in chosen]
            threads += DeclaredKeys(plan, seen, names, 0, len(names), 0).narrowed()
        for key, value, met in plan.undeclared_at(seen):
            target = plan.value_node(value, plan.with_undeclared(seen, met))
            if plan.is_unique(seen):
                threads.append(builder.one(UniqueText, builder, key, plan.after_key, target))
            else:
                threads.append(builder.lexeme(concat(key, plan.colon), target))
        return tuple(threads)


class DeclaredKeys(Thread):
    """Inside one of several declared keys that share what has been read: names[low:high], each with its closing quote,
    or its colon.
    """

    __slots__ = ("depth", "high", "low", "names", "plan", "seen")

    def __init__(
        self, plan: ObjectPlan, seen: Seen, names: list[tuple[bytes, int]], low: int, high: int, depth: int
    ) -> None:
        super().__init__()
        self.plan = plan
        self.seen = seen
        self.names = names
        self.low = low
        self.high = high
        self.depth = depth

    def narrowed(self) -> tuple[Thread, ...]:
        """This thread, or the plain lexeme if only one key is left."""
        if self.high - self.low > 1:
            return (self,)
        index = self.names[self.low][1]
        return self.plan.builder.enter(self.plan.rest_of_key(index, self.depth), self.behind(self.low))

    def behind(self, place: int) -> Node:
        """What stands behind a key and its colon."""
        index = self.names[place][1]
        return self.plan.value_node(self.plan.shape.properties[index][1], self.plan.with_declared(self.seen, index))

    def _find_moves(self) -> Moves:
        names, depth = self.names, self.depth
        moves = []
        low = self.low
        while low < self.high:
            byte = names[low][0][depth]
            end = bisect_left(names, byte + 1, low, self.high, key=lambda entry: entry[0][depth])
            narrower = DeclaredKeys(self.plan, self.seen, names, low, end, depth + 1).narrowed()
            moves.append((1 << byte, Stay(narrower, PLAIN)))
            low = end
        return tuple(moves)


class AfterProperty(Node):
    """Behind the value of a property."""

    def __init__(self, plan: ObjectPlan, seen: Seen) -> None:
        self.plan = plan
        self.seen = seen

    def _find_threads(self) -> tuple[Thread, ...]:
        return self.plan.threads_at(self.seen, self.plan.builder.comma)


def _counts_from(indices: list[int], total: int) -> list[int]:
    counts = [0] * (total + 1)
    for i in indices:
        counts[i] = 1
    for i in reversed(range(total)):
        counts[i] += counts[i + 1]
    return counts
