"""JSON objects as nodes: which key may come next, what its value must be, when the object may close.

A plan holds what is fixed of one `Object` shape; a state what has been seen of it. A state is only entered if it
can be completed: enough distinct keys are left for what is still required, and not more are required than fit.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import NamedTuple

from sgl.grammar.byteset import bytes_of
from sgl.grammar.expr import Expr, concat, is_empty, literal
from sgl.grammar.jsontext import string_body
from sgl.grammar.key_marks import KeyMarks, Mark
from sgl.grammar.shape import Object, Schema
from sgl.grammar.threads import CLOSING, PLAIN, Builder, Moves, Node, Stay, Thread
from sgl.grammar.values import value_node

_NO_MARKS: frozenset[Mark] = frozenset()


class Seen(NamedTuple):
    """What has been seen of an object.

    `keys` is a bit set of declared keys, or the index of the next one where keys come in order. `total` is only
    kept where bounds on the number of properties ask for it. `met` is a bit set of `exists`. `used` are the marks
    of undeclared keys that may not come again.
    """

    keys: int
    total: int
    met: int
    used: frozenset[Mark]


class ObjectPlan:
    """One `Object` shape, prepared for reading."""

    def __init__(self, builder: Builder, shape: Object) -> None:
        self.builder = builder
        self.shape = shape
        self.in_order = builder.key_order == "schema"
        self.names = [string_body(name) + b'"' for name, _ in shape.properties]
        self.sorted_names = sorted(range(len(self.names)), key=self.names.__getitem__)
        required = [i for i, (name, _) in enumerate(shape.properties) if name in shape.required]
        self.required_mask = sum(1 << i for i in required)
        self.last_required = required[-1] if required else -1
        self.required_from = _counts_from(required, len(self.names))
        """[i] is the number of required keys from index i on."""
        self.is_counted = shape.max_properties is not None or shape.min_properties > len(required)
        limit = shape.max_properties if shape.max_properties is not None else shape.min_properties
        self.count_cap = max(limit, shape.min_properties)
        self.every_met = (1 << len(shape.exists)) - 1
        self.after_quote = concat(builder.space, literal(b":"), builder.space)
        self.start = Seen(0, 0, 0, _NO_MARKS)
        self._live: dict[tuple[Expr, Mark, Seen, int], bool] = {}
        self._tracked: dict[tuple[Seen, Expr, Schema, int, Mark], TrackedKey] = {}

    @cached_property
    def marks(self) -> KeyMarks:
        """What tells undeclared keys apart."""
        shape = self.shape
        return KeyMarks([p.key for p in shape.patterns], max(shape.min_properties, len(shape.exists)))

    def threads_at_start(self) -> tuple[Thread, ...]:
        """The threads right behind the opening brace."""
        threads = []
        if self.keys_at(self.start):
            threads.append(self.builder.lexeme(self.builder.open_key, self.key_node(self.start)))
        if self.may_close(self.start):
            threads.append(self.builder.lexeme(concat(self.builder.space, literal(b"}")), CLOSING))
        return tuple(threads)

    def key_node(self, seen: Seen) -> Node:
        """The node behind the opening quote of the next key."""
        key = (KeyNode, self, seen)
        found = self.builder.nodes.get(key)
        if found is None:
            found = self.builder.nodes[key] = KeyNode(self, seen)
        return found

    def value_node(self, schema: Schema, seen: Seen) -> Node:
        """The value of a key, `seen` being what has been seen when it is complete."""
        key = (AfterProperty, self, seen)
        then = self.builder.nodes.get(key)
        if then is None:
            then = self.builder.nodes[key] = AfterProperty(self, seen)
        return value_node(self.builder, schema, then)

    def tracked_key(self, seen: Seen, key: Expr, value: Schema, met: int, mark: Mark) -> TrackedKey:
        """The thread with `key` still to come of an undeclared key."""
        place = seen, key, value, met, mark
        found = self._tracked.get(place)
        if found is None:
            found = self._tracked[place] = TrackedKey(self, seen, key, value, met, mark)
        return found

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
        return Seen(keys, self.counted(seen), seen.met, self.kept(seen.used, seen))

    def with_undeclared(self, seen: Seen, mark: Mark | None, met: int) -> Seen:
        """After an undeclared key, with its mark where it may not come again."""
        keys = len(self.names) if self.in_order else seen.keys
        used = self.kept(seen.used if mark is None else seen.used | {mark}, seen)
        return Seen(keys, self.counted(seen), seen.met | met, used)

    def counted(self, seen: Seen) -> int:
        """The number of properties with one more, as far as it matters."""
        return min(seen.total + 1, self.count_cap + 1) if self.is_counted else 0

    def kept(self, used: frozenset[Mark], seen: Seen) -> frozenset[Mark]:
        """Once there are enough properties, a key that comes again takes nothing away."""
        enough = seen.total + 1 >= self.shape.min_properties and not self.shape.exists
        return _NO_MARKS if enough else used

    def is_tracked(self, seen: Seen) -> bool:
        """Whether it matters which undeclared key comes next: those that come twice count once."""
        lacking = self.shape.min_properties - seen.total if self.is_counted else 0
        return bool(self.shape.exists) or lacking > 1 or (lacking == 1 and bool(seen.used))

    def can_end(self, key: Expr, mark: Mark, seen: Seen, met: int) -> bool:
        """Whether what is left of a tracked key can end so that the object can be completed behind it."""
        place = key, mark, seen, met
        found = self._live.get(place)
        if found is None:
            found = self._live[place] = any(self.is_good(end, seen, met) for end in self.marks.ends(key, mark))
        return found

    def is_good(self, mark: Mark, seen: Seen, met: int) -> bool:
        """Whether the object can be completed behind a tracked key of this mark."""
        return mark not in seen.used and self.is_completable(self.with_undeclared(seen, mark, met))

    def is_completable(self, seen: Seen) -> bool:
        """Whether an object that begins so can still be completed."""
        unmet = [e for i, e in enumerate(self.shape.exists) if not seen.met >> i & 1]
        needed = self.required_left(seen) + len(unmet)
        maximum = self.shape.max_properties
        if maximum is not None and seen.total + needed > maximum:
            return False
        if any(self.marks.num_unused(e.key, seen.used, 1) == 0 for e in unmet):
            return False
        if not self.is_counted:
            return True
        left = len(self.names) - (seen.keys if self.in_order else seen.keys.bit_count())
        lacking = self.shape.min_properties - seen.total - left
        for pattern in self.shape.patterns:
            if lacking <= 0:
                break
            lacking -= self.marks.num_unused(pattern.key, seen.used, lacking)
        return lacking <= 0

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
        if self.is_tracked(seen):
            return [
                (key, value, met) for key, value, met in groups if self.can_end(key, self.marks.start, seen, met)
            ]
        after = self.with_undeclared(seen, None, 0)
        return [group for group in groups if not is_empty(group[0])] if self.is_completable(after) else []

    def keys_at(self, seen: Seen) -> bool:
        """Whether any key may come next."""
        return bool(self.key_node(seen).threads())


def object_plan(builder: Builder, shape: Object) -> ObjectPlan:
    """The plan of a shape, one for each."""
    found = builder.plans.get(shape)
    if found is None:
        found = builder.plans[shape] = ObjectPlan(builder, shape)
    assert isinstance(found, ObjectPlan)
    return found


class KeyNode(Node):
    """Behind the opening quote of a key."""

    def __init__(self, plan: ObjectPlan, seen: Seen) -> None:
        self.plan = plan
        self.seen = seen
        self._threads: tuple[Thread, ...] | None = None

    def threads(self) -> tuple[Thread, ...]:
        if self._threads is None:
            self._threads = self._find_threads()
        return self._threads

    def _find_threads(self) -> tuple[Thread, ...]:
        plan, seen, builder = self.plan, self.seen, self.plan.builder
        threads: list[Thread] = []
        declared = plan.declared_at(seen)
        if declared:
            chosen = set(declared)
            names = [(plan.names[i], i) for i in plan.sorted_names if i in chosen]
            threads += DeclaredKeys(plan, seen, names, 0, len(names), 0).narrowed()
        for key, value, met in plan.undeclared_at(seen):
            if plan.is_tracked(seen):
                threads.append(plan.tracked_key(seen, key, value, met, plan.marks.start))
            else:
                target = plan.value_node(value, plan.with_undeclared(seen, None, met))
                threads.append(builder.lexeme(concat(key, builder.colon), target))
        return tuple(threads)


class DeclaredKeys(Thread):
    """Inside one of several declared keys that share what has been read: names[low:high], each with its closing
    quote.
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
        plan, builder = self.plan, self.plan.builder
        name, index = self.names[self.low]
        target = plan.value_node(plan.shape.properties[index][1], plan.with_declared(self.seen, index))
        return builder.enter(concat(literal(name[self.depth :]), plan.after_quote), target)

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


class TrackedKey(Thread):
    """Inside an undeclared key that may not be one of those before it, and may not come again."""

    __slots__ = ("key", "mark", "met", "plan", "seen", "value")

    def __init__(self, plan: ObjectPlan, seen: Seen, key: Expr, value: Schema, met: int, mark: Mark) -> None:
        super().__init__()
        self.plan = plan
        self.seen = seen
        self.key = key
        self.value = value
        self.met = met
        self.mark = mark

    def _find_moves(self) -> Moves:
        plan, seen, met = self.plan, self.seen, self.met
        moves: list[tuple[int, Stay]] = []
        for mask, rest in self.key.arcs():
            by_mark: dict[Mark, int] = {}
            for byte in bytes_of(mask):
                mark = plan.marks.step(self.mark, byte)
                by_mark[mark] = by_mark.get(mark, 0) | 1 << byte
            for mark, bytes_ in by_mark.items():
                if plan.can_end(rest, mark, seen, met):
                    after = plan.tracked_key(seen, rest, self.value, met, mark)
                    moves.append((bytes_, Stay((after,), PLAIN)))
        if self.key.nullable and plan.is_good(self.mark, seen, met):
            target = plan.value_node(self.value, plan.with_undeclared(seen, self.mark, met))
            moves.append((1 << 0x22, Stay(plan.builder.enter(plan.after_quote, target), PLAIN)))
        return tuple(moves)


class AfterProperty(Node):
    """Behind the value of a property."""

    def __init__(self, plan: ObjectPlan, seen: Seen) -> None:
        self.plan = plan
        self.seen = seen
        self._threads: tuple[Thread, ...] | None = None

    def threads(self) -> tuple[Thread, ...]:
        if self._threads is None:
            plan, builder = self.plan, self.plan.builder
            threads = []
            if plan.keys_at(self.seen):
                threads.append(builder.lexeme(concat(builder.comma, builder.open_key), plan.key_node(self.seen)))
            if plan.may_close(self.seen):
                threads.append(builder.lexeme(concat(builder.space, literal(b"}")), CLOSING))
            self._threads = tuple(threads)
        return self._threads


def _counts_from(indices: list[int], total: int) -> list[int]:
    counts = [0] * (total + 1)
    for i in indices:
        counts[i] = 1
    for i in reversed(range(total)):
        counts[i] += counts[i + 1]
    return counts
