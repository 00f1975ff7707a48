"""Regular expressions over bytes, with symbolic derivatives: the lexemes of every grammar.

An expression is hash-consed, so equal ones are one object and a state of an automaton is an expression. `Expr.arcs()`
gives its derivatives by disjoint sets of bytes, computed on first use: nothing is determinised up front, a bounded
repeat of any size costs nothing to build, and intersection and complement are ordinary nodes (Brzozowski 1964; Owens,
Reppy and Turon 2009). A set of bytes is an int of 256 bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final
from weakref import WeakValueDictionary

from sgl.errors import GrammarTooLarge

ALL_BYTES: Final = (1 << 256) - 1
EXPLORE_LIMIT: Final = 20_000
"""How many derivatives `is_empty` and `shortest` may look at before they give up with GrammarTooLarge."""

Arcs = tuple[tuple[int, "Expr"], ...]
_serial = count()


class Expr:
    """A regular language over bytes. Made by the functions below, compared by identity.

    `nullable` says whether it contains the empty string. `is_boolean` says whether it holds an intersection or a complement
    somewhere: only then can an expression other than EMPTY be empty.
    """

    __slots__ = ("__weakref__", "_arcs", "_known_empty", "_shortest", "is_boolean", "nullable", "serial")

    nullable: bool
    is_boolean: bool

    def __init__(self, nullable: bool, is_boolean: bool) -> None:
        self.nullable = nullable
        self.is_boolean = is_boolean
        self.serial = next(_serial)
        self._arcs: Arcs | None = None
        self._known_empty: bool | None = None if is_boolean else False
        self._shortest: bytes | None = None

    def arcs(self) -> Arcs:
        """Disjoint non-zero sets of bytes and where they lead; never to an empty language."""
        arcs = self._arcs
        if arcs is None:
            arcs = self._derive()
            if self.is_boolean:
                arcs = tuple(arc for arc in arcs if not is_empty(arc[1]))
            self._arcs = arcs
        return arcs

    def _derive(self) -> Arcs:
        """As `arcs`, but targets may be empty languages where the expression is boolean."""
        raise NotImplementedError

    def step(self, byte: int) -> Expr:
        """What is left after `byte`: EMPTY if nothing in the language starts with it."""
        for mask, target in self.arcs():
            if mask >> byte & 1:
                return target
        return EMPTY

    def __reduce__(self) -> tuple[object, ...]:
        raise NotImplementedError


class _Empty(Expr):
    __slots__ = ()

    def _derive(self) -> Arcs:
        return ()

    def __repr__(self) -> str:
        return "∅"

    def __reduce__(self) -> tuple[object, ...]:
        return (_empty, ())


class _Epsilon(Expr):
    __slots__ = ()

    def _derive(self) -> Arcs:
        return ()

    def __repr__(self) -> str:
        return "ε"

    def __reduce__(self) -> tuple[object, ...]:
        return (_epsilon, ())


class ByteSet(Expr):
    """One byte of a set."""

    __slots__ = ("mask",)

    def __init__(self, mask: int) -> None:
        super().__init__(False, False)
        self.mask = mask

    def _derive(self) -> Arcs:
        return ((self.mask, EPSILON),)

    def __repr__(self) -> str:
        bytes_ = bytes_of(self.mask)
        return f"[{bytes_!r}]" if len(bytes_) < 12 else f"[{len(bytes_)} bytes]"

    def __reduce__(self) -> tuple[object, ...]:
        return (byte_set, (self.mask,))


class Literal(Expr):
    """One string: what `text` holds from `start` on. Long ones share their text, so that stepping stays cheap."""

    __slots__ = ("start", "text")

    def __init__(self, text: bytes, start: int) -> None:
        super().__init__(False, False)
        self.text = text
        self.start = start

    def _derive(self) -> Arcs:
        return ((1 << self.text[self.start], _literal(self.text, self.start + 1)),)

    def __repr__(self) -> str:
        return repr(self.text[self.start :])

    def __reduce__(self) -> tuple[object, ...]:
        return (literal, (self.text[self.start :],))


class Words(Expr):
    """A finite set of strings: words[low:high] of a sorted sequence, each without its first `depth` bytes, which
    they share. Stepping narrows the interval, so thousands of words cost as little as one."""

    __slots__ = ("depth", "high", "low", "words")

    def __init__(self, words: tuple[bytes, ...], low: int, high: int, depth: int) -> None:
        super().__init__(len(words[low]) == depth, False)
        self.words = words
        self.low = low
        self.high = high
        self.depth = depth

    def _derive(self) -> Arcs:
        words, depth, high = self.words, self.depth, self.high
        arcs = []
        low = self.low + self.nullable
        while low < high:
            byte = words[low][depth]
            if words[high - 1][depth] == byte:
                end = high
            else:
                end = bisect_left(words, byte + 1, low, high, key=lambda word: word[depth])
            arcs.append((1 << byte, _words(words, low, end, depth + 1)))
            low = end
        return tuple(arcs)

    def __repr__(self) -> str:
        return f"words({self.high - self.low} from {self.words[self.low][self.depth :]!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (words, ([word[self.depth :] for word in self.words[self.low : self.high]],))


class Concat(Expr):
    """`head` then `tail`; the head is never itself a concatenation."""

    __slots__ = ("head", "tail")

    def __init__(self, head: Expr, tail: Expr) -> None:
        super().__init__(head.nullable and tail.nullable, head.is_boolean or tail.is_boolean)
        self.head = head
        self.tail = tail

    def _derive(self) -> Arcs:
        tail = self.tail
        arcs = tuple((mask, _distribute(target, tail)) for mask, target in self.head.arcs())
        if self.head.nullable:
            return merge_arcs((arcs, tail.arcs()))
        return arcs

    def __repr__(self) -> str:
        return f"({self.head!r}·{self.tail!r})"

    def __reduce__(self) -> tuple[object, ...]:
        parts = [self.head]
        rest = self.tail
        while isinstance(rest, Concat):
            parts.append(rest.head)
            rest = rest.tail
        return (concat, (*parts, rest))


class Union(Expr):
    """Any of `members`: at least two, none of them a union, in the order of their making."""

    __slots__ = ("members",)

    def __init__(self, members: tuple[Expr, ...]) -> None:
        super().__init__(any(e.nullable for e in members), any(e.is_boolean for e in members))
        self.members = members

    def _derive(self) -> Arcs:
        return merge_arcs([member.arcs() for member in self.members])

    def __repr__(self) -> str:
        return "(" + "|".join(map(repr, self.members)) + ")"

    def __reduce__(self) -> tuple[object, ...]:
        return (union, self.members)


class Repeat(Expr):
    """`body` from `low` to `high` times; no upper bound if that is None."""

    __slots__ = ("body", "high", "low")

    def __init__(self, body: Expr, low: int, high: int | None) -> None:
        super().__init__(low == 0 or body.nullable, body.is_boolean)
        self.body = body
        self.low = low
        self.high = high

    def _derive(self) -> Arcs:
        rest = repeat(self.body, max(self.low - 1, 0), None if self.high is None else self.high - 1)
        return tuple((mask, _distribute(target, rest)) for mask, target in self.body.arcs())

    def __repr__(self) -> str:
        return f"{self.body!r}{{{self.low},{'' if self.high is None else self.high}}}"

    def __reduce__(self) -> tuple[object, ...]:
        return (repeat, (self.body, self.low, self.high))


class Intersection(Expr):
    """All of `members` at once."""

    __slots__ = ("members",)

    def __init__(self, members: tuple[Expr, ...]) -> None:
        super().__init__(all(e.nullable for e in members), True)
        self.members = members

    def _derive(self) -> Arcs:
        cells: list[tuple[int, list[Expr]]] = [(ALL_BYTES, [])]
        for member in self.members:
            arcs = member.arcs()
            cells = [
                (both, [*targets, target])
                for mask, targets in cells
                for other, target in arcs
                if (both := mask & other)
            ]
        return _grouped((mask, intersect(*targets)) for mask, targets in cells)

    def __repr__(self) -> str:
        return "(" + "&".join(map(repr, self.members)) + ")"

    def __reduce__(self) -> tuple[object, ...]:
        return (intersect, self.members)


class Complement(Expr):
    """Every string of bytes that is not in `body`."""

    __slots__ = ("body",)

    def __init__(self, body: Expr) -> None:
        super().__init__(not body.nullable, True)
        self.body = body

    def _derive(self) -> Arcs:
        rest = ALL_BYTES
        arcs = []
        for mask, target in self.body.arcs():
            rest &= ~mask
            arcs.append((mask, complement(target)))
        if rest:
            arcs.append((rest, ANYTHING))
        return _grouped(arcs)

    def __repr__(self) -> str:
        return f"~{self.body!r}"

    def __reduce__(self) -> tuple[object, ...]:
        return (complement, (self.body,))


EMPTY: Final[Expr] = _Empty(False, False)
EPSILON: Final[Expr] = _Epsilon(True, False)
EMPTY._known_empty = True
_interned: WeakValueDictionary[tuple[object, ...], Expr] = WeakValueDictionary()


def _empty() -> Expr:
    return EMPTY


def _epsilon() -> Expr:
    return EPSILON


def byte_set(mask: int) -> Expr:
    """One byte of those whose bits are set in `mask`."""
    if not mask:
        return EMPTY
    key = (ByteSet, mask)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = ByteSet(mask)
    return found


def byte_range(first: int, last: int) -> int:
    """The set of the bytes `first` to `last`, both included."""
    return (1 << last + 1) - (1 << first)


def bytes_of(mask: int) -> bytes:
    """The bytes of a set, rising."""
    return bytes(byte for byte in range(256) if mask >> byte & 1)


def literal(text: bytes) -> Expr:
    """Exactly `text`."""
    return _literal(text, 0)


def _literal(text: bytes, start: int) -> Expr:
    left = len(text) - start
    if left == 0:
        return EPSILON
    if left == 1:
        return byte_set(1 << text[start])
    if left <= 64:
        text, start = text[start:], 0
    key = (Literal, text, start)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Literal(text, start)
    return found


def words(texts: Iterable[bytes]) -> Expr:
    """Exactly one of `texts`."""
    ordered = tuple(sorted(set(texts)))
    return _words(ordered, 0, len(ordered), 0) if ordered else EMPTY


def _words(texts: tuple[bytes, ...], low: int, high: int, depth: int) -> Expr:
    if high - low == 1:
        return _literal(texts[low][depth:], 0)
    if high - low < 16:
        texts, low, high, depth = tuple(word[depth:] for word in texts[low:high]), 0, high - low, 0
        key: tuple[object, ...] = (Words, texts)
    else:
        key = (Words, id(texts), low, high, depth)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Words(texts, low, high, depth)
    return found


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
        key = (Concat, head, tail)
        found = _interned.get(key)
        if found is None:
            found = _interned[key] = Concat(head, tail)
        tail = found
    return tail


def _distribute(head: Expr, tail: Expr) -> Expr:
    """head·tail as a union of simple terms, so that a derivative is a set of linear forms and their number stays small."""
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
    if len(flat) > 1:
        flat = _merge_repeats(flat)
    if EPSILON in flat and len(flat) > 1 and any(part.nullable for part in flat if part is not EPSILON):
        del flat[EPSILON]
    if len(flat) == 1:
        return next(iter(flat))
    ordered = tuple(sorted(flat, key=_by_serial))
    key = (Union, ordered)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Union(ordered)
    return found


def _by_serial(expr: Expr) -> int:
    return expr.serial


def _merge_repeats(parts: dict[Expr, None]) -> dict[Expr, None]:
    """x{a,b}·y | x{c,d}·y = x{min,max}·y where the ranges touch: keeps ambiguous bounded repeats from multiplying."""
    groups: dict[tuple[Expr, Expr], list[Expr]] = {}
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
        spans = sorted(
            (head.low, head.high) for head in heads if isinstance(head, Repeat) and head.high is not None
        )
        endless = [head.low for head in heads if isinstance(head, Repeat) and head.high is None]
        for head in heads:
            del merged[_concat(head, tail)]
        joined: list[tuple[int, int | None]] = []
        for low, high in spans:
            if joined and joined[-1][1] is not None and low <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(joined[-1][1], high))
            else:
                joined.append((low, high))
        if endless:
            start = min(endless)
            while joined and joined[-1][1] is not None and joined[-1][1] + 1 >= start:
                start = min(start, joined.pop()[0])
            joined.append((start, None))
        for low, high in joined:
            merged[_concat(repeat(body, low, high), tail)] = None
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
    key = (Repeat, body, low, high)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Repeat(body, low, high)
    return found


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
    for part in flat:
        if part is EPSILON:
            return EPSILON if all(other.nullable for other in flat) else EMPTY
        if isinstance(part, Complement) and part.body in flat:
            return EMPTY
        texts = _few_texts(part)
        if texts is not None:
            others = [other for other in flat if other is not part]
            return words(text for text in texts if all(matches(other, text) for other in others))
    ordered = tuple(sorted(flat, key=_by_serial))
    key = (Intersection, ordered)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Intersection(ordered)
    return found


def _few_texts(expr: Expr) -> list[bytes] | None:
    """All strings of an expression that is a plain list of at most 1,000."""
    if isinstance(expr, Literal):
        return [expr.text[expr.start :]]
    if isinstance(expr, Words) and expr.high - expr.low <= 1000:
        return [word[expr.depth :] for word in expr.words[expr.low : expr.high]]
    return None


def complement(body: Expr) -> Expr:
    """Every string of bytes, well-formed or not, that is not in `body`."""
    if body is EMPTY:
        return ANYTHING
    if body is ANYTHING:
        return EMPTY
    if isinstance(body, Complement):
        return body.body
    key = (Complement, body)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Complement(body)
    return found


def difference(left: Expr, right: Expr) -> Expr:
    """What is in `left` and not in `right`."""
    return intersect(left, complement(right))


ANYTHING: Final[Expr] = Repeat(byte_set(ALL_BYTES), 0, None)
_interned[(Repeat, byte_set(ALL_BYTES), 0, None)] = ANYTHING


def matches(expr: Expr, text: bytes) -> bool:
    """Whether `text` is in the language."""
    for byte in text:
        for mask, target in expr.arcs() if expr._arcs is not None or not expr.is_boolean else expr._derive():
            if mask >> byte & 1:
                expr = target
                break
        else:
            return False
    return expr.nullable


def is_empty(expr: Expr) -> bool:
    """Whether nothing is in the language; exact. Raises GrammarTooLarge past EXPLORE_LIMIT derivatives."""
    if expr._known_empty is None:
        expr._known_empty = _explore_empty(expr)
    return expr._known_empty


def _explore_empty(start: Expr) -> bool:
    if isinstance(start, Concat):
        return is_empty(start.head) or is_empty(start.tail)
    if isinstance(start, Union):
        return all(is_empty(member) for member in start.members)
    if isinstance(start, Repeat):
        return start.low > 0 and is_empty(start.body)
    parents: dict[Expr, Expr | None] = {start: None}
    stack = [start]
    while stack:
        expr = stack.pop()
        if expr.nullable or expr._known_empty is False:
            step: Expr | None = expr
            while step is not None:
                step._known_empty = False
                step = parents[step]
            return False
        if expr._known_empty:
            continue
        if len(parents) > EXPLORE_LIMIT:
            raise GrammarTooLarge(
                f"an intersection or complement has more than {EXPLORE_LIMIT} derivatives",
                states=len(parents),
                limit=EXPLORE_LIMIT,
            )
        for _, target in expr._derive():
            if target not in parents:
                parents[target] = expr
                stack.append(target)
    for expr in parents:
        expr._known_empty = True
    return True


def disjoint(left: Expr, right: Expr) -> bool:
    """Whether no string is in both."""
    return is_empty(intersect(left, right))


def shortest(expr: Expr) -> bytes | None:
    """The first, in the order of bytes, of the shortest strings of the language; None if it is empty.

    It is consistent: what is left of it after some bytes is the shortest string of what is left of the expression.
    """
    if expr is EMPTY or is_empty(expr):
        return None
    return _shortest(expr)


def _shortest(expr: Expr) -> bytes:
    found = expr._shortest
    if found is not None:
        return found
    if expr.nullable:
        found = b""
    elif isinstance(expr, ByteSet):
        found = bytes([(expr.mask & -expr.mask).bit_length() - 1])
    elif isinstance(expr, Literal):
        found = expr.text[expr.start :]
    elif isinstance(expr, Words):
        chosen = min(expr.words[expr.low : expr.high], key=lambda word: (len(word), word))
        found = chosen[expr.depth :]
    elif isinstance(expr, Concat):
        parts = []
        rest: Expr = expr
        while isinstance(rest, Concat):
            parts.append(_shortest(rest.head))
            rest = rest.tail
        found = b"".join([*parts, _shortest(rest)])
    elif isinstance(expr, Union):
        found = min((_shortest(m) for m in expr.members if not is_empty(m)), key=lambda word: (len(word), word))
    elif isinstance(expr, Repeat):
        found = _shortest(expr.body) * expr.low
    else:
        found = _search_shortest(expr)
    expr._shortest = found
    return found


def _search_shortest(start: Expr) -> bytes:
    """Breadth first, level by level in the order of bytes, until a level holds a nullable expression."""
    level: dict[Expr, bytes] = {start: b""}
    seen = {start}
    while level:
        if len(seen) > EXPLORE_LIMIT:
            raise GrammarTooLarge(
                f"the shortest string of an intersection lies behind more than {EXPLORE_LIMIT} derivatives",
                states=len(seen),
                limit=EXPLORE_LIMIT,
            )
        done = [word for expr, word in level.items() if expr.nullable]
        if done:
            return min(done)
        following: dict[Expr, bytes] = {}
        for expr, word in sorted(level.items(), key=lambda item: item[1]):
            for mask, target in expr.arcs():
                longer = word + bytes([(mask & -mask).bit_length() - 1])
                if target not in seen and (target not in following or longer < following[target]):
                    following[target] = longer
        seen.update(following)
        level = following
    raise AssertionError("a language that is not empty has a shortest string")


def merge_arcs(lists: Sequence[Arcs]) -> Arcs:
    """The arcs of a union: bytes that several lists have lead to the union of the targets."""
    cells: list[tuple[int, tuple[Expr, ...]]] = []
    covered = 0
    for arcs in lists:
        for mask, target in arcs:
            if mask & covered:
                split: list[tuple[int, tuple[Expr, ...]]] = []
                left = mask
                for cell, targets in cells:
                    both = cell & left
                    if both:
                        split.append((both, (*targets, target)))
                        if cell != both:
                            split.append((cell & ~both, targets))
                        left &= ~both
                    else:
                        split.append((cell, targets))
                if left:
                    split.append((left, (target,)))
                cells = split
            else:
                cells.append((mask, (target,)))
            covered |= mask
    return _grouped((mask, targets[0] if len(targets) == 1 else union(*targets)) for mask, targets in cells)


def _grouped(arcs: Iterable[tuple[int, Expr]]) -> Arcs:
    by_target: dict[Expr, int] = {}
    for mask, target in arcs:
        if target is not EMPTY:
            by_target[target] = by_target.get(target, 0) | mask
    return tuple((mask, target) for target, mask in by_target.items())
