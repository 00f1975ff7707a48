"""The leaves of expressions: the empty language and string, sets of bytes, and lists of words, perhaps of one.

Expressions are hash-consed: equal ones are one object. `expr.py` builds on these and hands them on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import count
from threading import Lock
from typing import Final
from weakref import WeakValueDictionary

from sgl.grammar.regular.byteset import bytes_of
from sgl.grammar.regular.rope import Rope

Arcs = tuple[tuple[int, "Expr"], ...]
_serial = count()
ENDLESS: Final = 1 << 62


class Expr:
    """A regular language over bytes. Made by the functions below, compared by identity.

    `nullable` says whether it contains the empty string. `is_boolean` says whether it holds an intersection or a
    complement somewhere: only then can an expression other than EMPTY be empty. Every string of it has
    `least` to `most` bytes. `known_*` are None until worked out;
    `known_arcs` may lead to empty languages until `is_pruned`.
    """

    __slots__ = (
        "__weakref__",
        "is_boolean",
        "is_pruned",
        "known_arcs",
        "known_empty",
        "known_plain",
        "known_shortest",
        "least",
        "most",
        "nullable",
        "serial",
    )

    def __init__(self, nullable: bool, is_boolean: bool, least: int, most: int) -> None:
        self.nullable = nullable
        self.is_boolean = is_boolean
        self.least = least
        self.most = most
        self.serial = next(_serial)
        self.known_arcs: Arcs | None = None
        self.is_pruned = not is_boolean
        self.known_empty: bool | None = None if is_boolean else False
        self.known_shortest: Rope | None = None
        self.known_plain: int | None = None

    def arcs(self) -> Arcs:
        """Disjoint non-zero sets of bytes and where they lead; never to an empty language."""
        return self.raw_arcs()

    def raw_arcs(self) -> Arcs:
        """As `arcs`, but perhaps to empty languages."""
        if self.known_arcs is None:
            self.known_arcs = self._derive()
        return self.known_arcs

    def _derive(self) -> Arcs:
        """The arcs, computed."""
        raise NotImplementedError  # no ABC: asking isinstance of one takes three times as long

    def parts_are_empty(self) -> bool | None:
        """Whether it is empty, as far as its parts tell; None: that takes a search."""
        return False if self.nullable else None

    def step(self, byte: int) -> Expr:
        """What is left after `byte`: EMPTY if nothing in the language starts with it."""
        for mask, target in self.arcs():
            if mask >> byte & 1:
                return target
        return EMPTY


class _Constant(Expr):
    """The empty language, or that of the empty string: nothing may follow."""

    __slots__ = ()

    def _derive(self) -> Arcs:
        return ()

    def __repr__(self) -> str:
        return "ε" if self.nullable else "∅"


class ByteSet(Expr):
    """One byte of a set."""

    __slots__ = ("mask",)

    def __init__(self, mask: int) -> None:
        super().__init__(False, False, 1, 1)
        self.mask = mask

    def _derive(self) -> Arcs:
        return ((self.mask, EPSILON),)

    def __repr__(self) -> str:
        bytes_ = bytes_of(self.mask)
        return f"[{bytes_!r}]" if len(bytes_) < 12 else f"[{len(bytes_)} bytes]"


class Words(Expr):
    """One string or a finite set of them: words[low:high] of a sorted sequence, each without its first `depth` bytes,
    which they share. Stepping narrows the interval, so thousands of words, or of bytes of one, cost as little as one.
    """

    __slots__ = ("depth", "high", "low", "words")

    def __init__(self, words: tuple[bytes, ...], low: int, high: int, depth: int) -> None:
        shortest = len(words[low]) - depth
        is_one = high - low == 1
        super().__init__(
            shortest == 0, False, shortest if is_one else min(shortest, 1), shortest if is_one else ENDLESS
        )
        self.words = words
        self.low = low
        self.high = high
        self.depth = depth

    def texts(self) -> list[bytes]:
        """All the strings."""
        return [word[self.depth :] for word in self.words[self.low : self.high]]

    def holds(self, text: bytes) -> bool:
        """Whether `text` is one of the strings."""
        whole = self.words[self.low][: self.depth] + text
        place = bisect_left(self.words, whole, self.low, self.high)
        return place < self.high and self.words[place] == whole

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


EMPTY: Final[Expr] = _Constant(False, False, 0, 0)
EPSILON: Final[Expr] = _Constant(True, False, 0, 0)
EMPTY.known_empty = True
_interned: WeakValueDictionary[tuple[object, ...], Expr] = WeakValueDictionary()
_lock = Lock()


def intern(kind: Callable[..., Expr], *parts: object, key: tuple[object, ...] | None = None) -> Expr:
    """kind(*parts), one object for each, or for each `key`."""
    key = key or (kind, *parts)
    found = _interned.get(key)
    if found is None:
        with _lock:  # grammars are compiled in several threads
            found = _interned.get(key)
            if found is None:
                found = _interned[key] = kind(*parts)
    return found


def byte_set(mask: int) -> Expr:
    """One byte of those whose bits are set in `mask`."""
    if not mask:
        return EMPTY
    return intern(ByteSet, mask)


def literal(text: bytes) -> Expr:
    """Exactly `text`."""
    return _words((text,), 0, 1, 0)


def words(texts: Iterable[bytes]) -> Expr:
    """Exactly one of `texts`."""
    ordered = tuple(sorted(set(texts)))
    return _words(ordered, 0, len(ordered), 0) if ordered else EMPTY


def _words(texts: tuple[bytes, ...], low: int, high: int, depth: int) -> Expr:
    if high - low == 1:
        left = len(texts[low]) - depth
        if left < 2:
            return byte_set(1 << texts[low][depth]) if left else EPSILON
        if left <= 64 or len(texts) > 1:  # a long one keeps its text, so that stepping stays cheap
            texts, low, depth = (texts[low][depth:],), 0, 0
        return intern(Words, texts, low, low + 1, depth)
    if high - low < 16:
        return intern(Words, tuple(word[depth:] for word in texts[low:high]), 0, high - low, 0)
    return intern(Words, texts, low, high, depth, key=(Words, id(texts), low, high, depth))
