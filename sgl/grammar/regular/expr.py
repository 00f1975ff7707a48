"""Regular expressions over bytes, with symbolic derivatives: the lexemes of every grammar.

An expression is hash-consed, so equal ones are one object and a state of an automaton is an expression.
`Expr.arcs()` gives its derivatives by disjoint sets of bytes, computed on first use: nothing is determinised up
front, a bounded repeat of any size costs nothing to build, and intersection and complement are ordinary nodes
(Brzozowski 1964; Owens, Reppy and Turon 2009). A set of bytes is an int of 256 bits.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final

from sgl.grammar.regular.arcs import beyond, bytes_of_arcs, grouped, merged
from sgl.grammar.regular.byteset import ALL_BYTES
from sgl.grammar.regular.emptiness import is_empty
from sgl.grammar.regular.expr_leaves import (
    EMPTY,
    ENDLESS,
    EPSILON,
    Arcs,
    ByteSet,
    Expr,
    Words,
    byte_set,
    intern,
    literal,
    words,
)
from sgl.time_limit import check_time

__all__ = ["EMPTY", "EPSILON", "Arcs", "ByteSet", "Expr", "Words", "byte_set", "is_empty", "literal", "words"]
_FEW_WORDS: Final = 1_000


class Compound(Expr):
    """An expression of others. `_derive` may lead to empty languages where it is boolean."""

    __slots__ = ()

    def shortest_text(self) -> bytes | None:
        """The first, in the order of bytes, of the shortest strings; None if that takes a search. Of a language that
        is neither empty nor has the empty string."""
        return None

    def arcs(self) -> Arcs:
        if self.known_arcs is None or not self.is_pruned:
            arcs = self.raw_arcs()
            if self.is_boolean:
                check_time()
                # Threads that do this at once find equal arcs; `is_pruned` comes last, so that none reads others.
                self.known_arcs = arcs = tuple(arc for arc in arcs if not is_empty(arc[1]))
                self.is_pruned = True
            return arcs
        return self.known_arcs


class Concat(Compound):
    """`head` then `tail`; the head is never itself a concatenation."""

    __slots__ = ("head", "tail")

    def __init__(self, head: Expr, tail: Expr) -> None:
        super().__init__(
            head.nullable and tail.nullable,
            head.is_boolean or tail.is_boolean,
            head.least + tail.least,
            min(head.most + tail.most, ENDLESS),
        )
        self.head = head
        self.tail = tail

    def parts_are_empty(self) -> bool:
        return is_empty(self.head) or is_empty(self.tail)

    def _derive(self) -> Arcs:
        head, tail = self.head, self.tail
        self._derive_behind()
        if isinstance(head, Intersection) and (found := head.arcs_before(tail)) is not None:
            return found
        arcs = tuple((mask, _distribute(target, tail)) for mask, target in head.arcs())
        if head.nullable:
            return merged((arcs, tail.arcs()), union)
        return arcs

    def _derive_behind(self) -> None:
        """Where many parts may be left out, the last ones first, or they would be derived at any depth."""
        rest: list[Concat] = [self]
        while rest[-1].head.nullable and isinstance(tail := rest[-1].tail, Concat) and tail.known_arcs is None:
            rest.append(tail)
        for concat in reversed(rest[1:]):
            check_time()
            concat.arcs()

    def __repr__(self) -> str:
        return f"({self.head!r}·{self.tail!r})"


class Union(Compound):
    """Any of `members`: at least two, none of them a union, in the order of their making."""

    __slots__ = ("members",)

    def __init__(self, members: tuple[Expr, ...]) -> None:
        super().__init__(
            any(e.nullable for e in members),
            any(e.is_boolean for e in members),
            min(e.least for e in members),
            max(e.most for e in members),
        )
        self.members = members

    def parts_are_empty(self) -> bool:
        return all(map(is_empty, self.members))

    def _derive(self) -> Arcs:
        return merged((member.arcs() for member in self.members), union)

    def __repr__(self) -> str:
        return "(" + "|".join(map(repr, self.members)) + ")"


class Repeat(Compound):
    """`body` from `low` to `high` times; no upper bound if that is None."""

    __slots__ = ("body", "high", "low")

    def __init__(self, body: Expr, low: int, high: int | None) -> None:
        most = ENDLESS if high is None else min(high * body.most, ENDLESS)
        super().__init__(low == 0 or body.nullable, body.is_boolean, low * body.least, most)
        self.body = body
        self.low = low
        self.high = high

    def parts_are_empty(self) -> bool:
        return self.low > 0 and is_empty(self.body)

    def _derive(self) -> Arcs:
        rest = repeat(self.body, max(self.low - 1, 0), None if self.high is None else self.high - 1)
        return tuple((mask, _distribute(target, rest)) for mask, target in self.body.arcs())

    def __repr__(self) -> str:
        return f"{self.body!r}{{{self.low},{'' if self.high is None else self.high}}}"


class Intersection(Compound):
    """All of `members` at once. Where those are `kept` but for `excluded` words, these are known."""

    __slots__ = ("excluded", "kept", "members")

    def __init__(self, members: tuple[Expr, ...]) -> None:
        least, most = max(e.least for e in members), min(e.most for e in members)
        super().__init__(all(e.nullable for e in members), True, least, most)
        self.members = members
        self.kept: Expr = EMPTY
        self.excluded: Expr | None = None
        if len(members) == 2:
            for kept, other in (members, members[::-1]):
                if isinstance(other, Complement) and not isinstance(other.body, Compound):
                    self.kept, self.excluded = kept, other.body
        if self.nullable or _only_excludes_words(members):
            self.known_empty = False

    def arcs_before(self, tail: Expr) -> Arcs | None:
        """The arcs of this and then `tail`, where excluding words changes only those by their bytes; else None."""
        if self.excluded is None or self.kept.nullable != self.nullable:
            return None
        excluded = self.excluded.arcs()
        if self.nullable and bytes_of_arcs(excluded) & bytes_of_arcs(tail.arcs()):
            return None
        # these are known from the start of a key
        others = beyond(_concat(self.kept, tail).arcs(), excluded)
        into = ((mask, _distribute(target, tail)) for mask, target in self.arcs_into_excluded())
        return grouped((*others, *into))

    def arcs_into_excluded(self) -> list[tuple[int, Expr]]:
        """The arcs by bytes that excluded words go on with."""
        assert self.excluded is not None
        return [
            (both, intersect(target, complement(rest)))
            for mask, target in self.kept.arcs()
            for other, rest in self.excluded.arcs()
            if (both := mask & other)
        ]

    def _derive(self) -> Arcs:
        if self.excluded is not None:
            return grouped((*beyond(self.kept.arcs(), self.excluded.arcs()), *self.arcs_into_excluded()))
        cells: list[tuple[int, list[Expr]]] = [(ALL_BYTES, [])]
        for member in self.members:
            arcs = member.arcs()
            cells = [
                (both, targets if target is ANYTHING else [*targets, target])
                for mask, targets in cells
                for other, target in arcs
                if (both := mask & other)
            ]
        return grouped((mask, targets[0] if len(targets) == 1 else intersect(*targets)) for mask, targets in cells)

    def __repr__(self) -> str:
        return "(" + "&".join(map(repr, self.members)) + ")"


class Complement(Compound):
    """Every string of bytes that is not in `body`."""

    __slots__ = ("body",)

    def __init__(self, body: Expr) -> None:
        super().__init__(not body.nullable, True, int(body.nullable), ENDLESS)
        self.body = body

    def _derive(self) -> Arcs:
        rest = ALL_BYTES
        arcs = []
        for mask, target in self.body.arcs():
            rest &= ~mask
            arcs.append((mask, complement(target)))
        if rest:
            arcs.append((rest, ANYTHING))
        return grouped(arcs)

    def __repr__(self) -> str:
        return f"~{self.body!r}"


def concat(*parts: Expr) -> Expr:
    """The parts one after another."""
    result = EPSILON
    for part in reversed(parts):
        result = _concat(part, result)
    return result


def _concat(head: Expr, tail: Expr) -> Expr:
    if head is EMPTY or tail is EMPTY:
        return EMPTY
    if head is EPSILON:
        return tail
    if tail is EPSILON:
        return head
    pending = []
    while isinstance(head, Concat):
        pending.append(head.head)
        head = head.tail
    pending.append(head)
    while pending:
        head = pending.pop()
        if isinstance(head, Repeat) and isinstance(tail, Repeat) and head.body is tail.body:
            high = None if head.high is None or tail.high is None else head.high + tail.high
            tail = repeat(head.body, head.low + tail.low, high)
            continue
        tail = intern(Concat, head, tail)
    return tail


def _distribute(head: Expr, tail: Expr) -> Expr:
    """head·tail as a union of simple terms: a derivative is a set of linear forms, and their number stays small."""
    if isinstance(head, Union):
        return union(*[_concat(member, tail) for member in head.members])
    return _concat(head, tail)


def union(*members: Expr) -> Expr:
    """Any of the members."""
    flat: dict[Expr, None] = {}
    single_bytes = 0
    for member in members:
        for part in member.members if isinstance(member, Union) else (member,):
            if isinstance(part, ByteSet):
                single_bytes |= part.mask
            elif part is ANYTHING:
                return ANYTHING
            elif part is not EMPTY:
                flat[part] = None
    if single_bytes:
        flat[byte_set(single_bytes)] = None
    if len(flat) < 2:
        return next(iter(flat), EMPTY)
    flat = _merge_repeats(flat)
    if EPSILON in flat and len(flat) > 1 and any(part.nullable for part in flat if part is not EPSILON):
        del flat[EPSILON]
    if len(flat) == 1:
        return next(iter(flat))
    return intern(Union, tuple(sorted(flat, key=attrgetter("serial"))))


def _merge_repeats(parts: dict[Expr, None]) -> dict[Expr, None]:
    """x{a,b}·y | x{c,d}·y = x{min,max}·y where the ranges touch: ambiguous bounded repeats do not multiply."""
    groups: dict[tuple[Expr, Expr], list[Repeat]] = {}
    for part in parts:
        head, tail = (part.head, part.tail) if isinstance(part, Concat) else (part, EPSILON)
        if isinstance(head, Repeat):
            groups.setdefault((head.body, tail), []).append(head)
    if all(len(heads) < 2 for heads in groups.values()):
        return parts
    merged = dict(parts)
    for (body, tail), heads in groups.items():
        if len(heads) < 2:
            continue
        for head in heads:
            del merged[_concat(head, tail)]
        spans = sorted((head.low, ENDLESS if head.high is None else head.high) for head in heads)
        joined = [spans[0]]
        for low, high in spans[1:]:
            if low <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(joined[-1][1], high))
            else:
                joined.append((low, high))
        for low, high in joined:
            merged[_concat(repeat(body, low, None if high == ENDLESS else high), tail)] = None
    return merged


def repeat(body: Expr, low: int, high: int | None) -> Expr:
    """`body` from `low` to `high` times (None: any number of times)."""
    if high is not None and high < low:
        return EMPTY
    if high == 0 or body is EPSILON:
        return EPSILON
    if body is EMPTY:
        return EPSILON if low == 0 else EMPTY
    if low == 1 and high == 1:
        return body
    if body.nullable:
        low = 0
    if (
        isinstance(body, Repeat)
        and body.low <= 1
        and body.high is None
        and (high is None or high >= 1)
        and low <= 1
    ):
        # (x*)* = x*, (x+)* = x*, (x*)+ = x*, (x+){1,n} = x+
        return repeat(body.body, min(body.low, low), None)
    if isinstance(body, Repeat) and body.low == 0 and body.high is not None and low == 0 and high is not None:
        return repeat(body.body, 0, body.high * high)  # (x{0,a}){0,b} = x{0,ab}
    if isinstance(body, Union) and EPSILON in body.members:
        return repeat(union(*[part for part in body.members if part is not EPSILON]), 0, high)
    return intern(Repeat, body, low, high)


def intersect(*members: Expr) -> Expr:
    """What all members share."""
    flat: dict[Expr, None] = {}
    for member in members:
        if member is EMPTY:
            return EMPTY
        for part in member.members if isinstance(member, Intersection) else (member,):
            if part is not ANYTHING:
                flat[part] = None
    if len(flat) < 2:
        return next(iter(flat), ANYTHING)
    if max(part.least for part in flat) > min(part.most for part in flat):
        return EMPTY
    for part in flat:
        if part is EPSILON:
            return EPSILON if all(other.nullable for other in flat) else EMPTY
        if isinstance(part, Complement) and part.body in flat:
            return EMPTY
        if isinstance(part, Words) and part.high - part.low <= _FEW_WORDS:
            others = [other for other in flat if other is not part]
            return words(text for text in part.texts() if all(matches(other, text) for other in others))
    return intern(Intersection, tuple(sorted(flat, key=attrgetter("serial"))))


def complement(body: Expr) -> Expr:
    """Every string of bytes, well-formed or not, that is not in `body`."""
    if body is EMPTY:
        return ANYTHING
    if body is ANYTHING:
        return EMPTY
    if isinstance(body, Complement):
        return body.body
    return intern(Complement, body)


def difference(left: Expr, right: Expr) -> Expr:
    """What is in `left` and not in `right`."""
    return intersect(left, complement(right))


ANYTHING: Final[Expr] = Repeat(byte_set(ALL_BYTES), 0, None)


def matches(expr: Expr, text: bytes) -> bool:
    """Whether `text` is in the language."""
    for i, byte in enumerate(text):
        if expr.is_boolean and expr.known_arcs is None:
            # Asking each part takes less than deriving the whole, which is for one use.
            match expr:
                case Intersection():
                    check_time()
                    return all(matches(member, text[i:]) for member in expr.members)
                case Union():
                    check_time()
                    return any(matches(member, text[i:]) for member in expr.members)
                case Complement():
                    return not matches(expr.body, text[i:])
        elif isinstance(expr, Words):
            return expr.holds(text[i:])
        known = expr.known_arcs is not None or not expr.is_boolean
        for mask, target in expr.arcs() if known else expr._derive():
            if mask >> byte & 1:
                expr = target
                break
        else:
            return False
    return expr.nullable


def _only_excludes_words(members: tuple[Expr, ...]) -> bool:
    """Whether an intersection only keeps lists of words out of an endless language: never empty, and no exploring."""
    kept = [one for one in members if not (isinstance(one, Complement) and isinstance(one.body, Words | ByteSet))]
    return len(kept) == 1 and _is_endless(kept[0])


def _is_endless(expr: Expr) -> bool:
    """Whether this surely is a language without a longest text."""
    if expr.is_boolean:
        return False
    while isinstance(expr, Concat):
        if _is_endless(expr.head):
            return True
        expr = expr.tail
    if isinstance(expr, Union):
        return any(map(_is_endless, expr.members))
    return isinstance(expr, Repeat) and expr.high is None
