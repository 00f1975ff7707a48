"""The expressions, nodes and threads of a grammar by the numbers that they have in C; see `subsets.py`.

Text is told of as its bytes, a key that may not be one of some words as any key and those words, and declared keys as
words: none of what they lead to needs Python, which makes it again when it is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from sgl.grammar.automaton.nfa import (
    PLAIN,
    Blanks,
    Builder,
    Closing,
    Counted,
    CountedText,
    Finished,
    Guard,
    InLexeme,
    Lexeme,
    Node,
    Stay,
    Target,
    Thread,
    UniqueText,
)
from sgl.grammar.automaton.objects import DeclaredKeys
from sgl.grammar.automaton.plain import NEVER_REACHED, thread_limit
from sgl.grammar.automaton.subsets_reference import begins_with_list
from sgl.grammar.regular.byteset import bytes_of, lowest
from sgl.grammar.regular.expr import (
    EPSILON,
    ByteSet,
    Concat,
    Expr,
    Intersection,
    Union,
    Words,
    concat,
    difference,
    literal,
    union,
    words,
)
from sgl.grammar.text.json import behind_blanks

NONE: Final = -1
LEXEME, BLANKS, GUARD, KEYS, COUNTED, GUARDED = range(6)
_NODE, _OPENING, _CLOSING = range(3)
_ACCEPTS, _READS_UNIQUE = 1, 2


class Numbers:
    """Each is told of once."""

    def __init__(self, library: ctypes.CDLL, address: int, fields: Any, builder: Builder) -> None:
        self._library, self._address, self._fields, self._builder = library, address, fields, builder
        self.exprs: list[Expr | None] = []
        self._expr_numbers: dict[Expr, int] = {}
        self.targets: list[Target] = []
        self._target_numbers: dict[Target, int] = {}
        self.threads: dict[int, Thread] = {}
        self._thread_numbers: dict[Thread, int] = {}
        self.words: list[tuple[bytes, DeclaredKeys | None, int]] = []
        """All keys, each with its closing quote; for declared ones the thread at their start, and where among them."""
        self._texts: list[CountedText] = []
        self._text_numbers: dict[CountedText, int] = {}
        self.expr(EPSILON)

    def check(self, answer: int) -> int:
        """What a function of the C has answered, if it had memory enough."""
        if answer < 0:
            raise MemoryError
        return answer

    def expr(self, expr: Expr) -> int:
        """Its number in C."""
        found = self._expr_numbers.get(expr)
        if found is None:
            text, tail = _text_of(expr)
            key = self._key_of(expr)
            if text:
                rest = self.expr(tail)
                found = self.check(self._library.sgl_add_text(self._address, text, len(text), rest))
            elif key is not None:
                found = self._add_key(*key)
            else:
                indented = behind_blanks(expr)
                behind = NONE if indented is None else self.expr(indented)
                is_list = begins_with_list(expr)
                found = self.check(self._library.sgl_add_expr(self._address, expr.nullable, behind, is_list))
            self.exprs += [None] * (found + 1 - len(self.exprs))
            self.exprs[found] = expr
            self._expr_numbers[expr] = found
        return found

    def _key_of(self, expr: Expr) -> tuple[Expr, Expr] | None:
        """Of any key but some, and what stands behind keys: any key, and those; None for any other expression."""
        if isinstance(expr, Concat) and expr.tail is self._builder.colon and isinstance(expr.head, Intersection):
            return None if expr.head.excluded is None else (expr.head.kept, expr.head.excluded)
        return None

    def _add_key(self, kept: Expr, excluded: Expr) -> int:
        whole = self.expr(concat(kept, self._builder.colon))
        low, high = self._add_words([(key, None, 0) for key in sorted(text + b'"' for text in _texts(excluded))])
        return self.check(self._library.sgl_add_without(self._address, whole, low, high))

    def _add_words(
        self, words: list[tuple[bytes, DeclaredKeys | None, int]], behind: int = NONE
    ) -> tuple[int, int]:
        lengths = np.array([len(word) for word, _, _ in words], np.int32)
        packed = b"".join(word for word, _, _ in words)
        low = self.check(
            self._library.sgl_add_words(self._address, packed, lengths.ctypes.data, len(words), behind)
        )
        self.words += words
        return low, low + len(words)

    def target(self, target: Target) -> int:
        """Its number in C."""
        found = self._target_numbers.get(target)
        if found is None:
            kind = _NODE if isinstance(target, Node) else _CLOSING if isinstance(target, Closing) else _OPENING
            operation = target.operation if isinstance(target, Node) else PLAIN
            found = self.check(self._library.sgl_add_target(self._address, kind, operation))
            self.targets.append(target)
            self._target_numbers[target] = found
        return found

    def counted(self, text: CountedText) -> int:
        """Its number in C."""
        found = self._text_numbers.get(text)
        if found is None:
            high = NONE if text.high is None else text.high
            parts = self.expr(text.char), min(text.low, NEVER_REACHED), min(high, NEVER_REACHED)
            limit = thread_limit(self._builder.one(Counted, text, None, 0))
            found = self.check(self._library.sgl_add_counted(self._address, *parts, self.target(text.then), limit))
            self._texts.append(text)
            self._text_numbers[text] = found
        return found

    def thread(self, thread: Thread) -> int:
        """Its number in C."""
        found = self._thread_numbers.get(thread)
        if found is None:
            library = self._library
            if isinstance(thread, InLexeme):
                kind = BLANKS if isinstance(thread, Blanks) else LEXEME
                expr, target = self.expr(thread.expr), self.target(thread.target)
                found = self.check(library.sgl_intern(self._address, kind, expr, target, 0))
            elif isinstance(thread, DeclaredKeys):
                places = range(thread.low, thread.high)
                behind = self.expr(thread.plan.after_key)
                low, high = self._add_words([(thread.names[i][0], thread, i) for i in places], behind)
                found = self.check(library.sgl_intern(self._address, KEYS, low, high, thread.depth))
            elif isinstance(thread, Counted):
                rest = NONE if thread.rest is None else self.expr(thread.rest)
                text = self.counted(thread.text)
                found = self.check(library.sgl_intern(self._address, COUNTED, rest, text, thread.region))
            elif isinstance(thread, Guard):
                threads = self.list((*thread.below, *thread.at))
                numbers = len(thread.below), len(thread.at)
                at = threads.ctypes.data
                found = self.check(library.sgl_add_guard(self._address, thread.counter, thread.limit, at, *numbers))
            else:
                flags = isinstance(thread, Finished) * _ACCEPTS | isinstance(thread, UniqueText) * _READS_UNIQUE
                found = self.check(library.sgl_add_thread(self._address, flags, thread_limit(thread)))
            self.threads[found] = thread
            self._thread_numbers[thread] = found
        return found

    def thread_of(self, number: int) -> Thread:
        """The thread of a number."""
        found = self.threads.get(number)
        if found is None:
            self._library.sgl_show_thread(self._address, number)
            kind, expr, target = self._fields.kind, self._fields.expr, self._fields.target
            if kind == GUARD:
                found = self._guard_of(target)
            elif kind == COUNTED:
                text, region = self._texts[target], self._fields.length
                found = self._builder.one(Counted, text, None if expr == NONE else self.expr_of(expr), region)
            elif kind == KEYS:
                _, keys, low = self.words[expr]
                assert keys is not None
                high = low + target - expr
                found = DeclaredKeys(keys.plan, keys.seen, keys.names, low, high, self._fields.length)
            else:
                made: type[InLexeme] = Blanks if kind == BLANKS else Lexeme
                found = self._builder.one(made, self._builder, self.expr_of(expr), self.targets[target])
            self.threads[number] = found
            self._thread_numbers[found] = number
        return found

    def _guard_of(self, owner: int) -> Guard:
        """The guard that one is stopped at behind the next blank, or behind the next byte of a counted text."""
        self._library.sgl_show_thread(self._address, owner)
        if self._fields.kind == BLANKS:
            move = self.thread_of(owner).moves()[0][1]
            assert isinstance(move, Stay)
            [guard] = move.threads
            assert isinstance(guard, Guard)
            return guard
        rest, region = self._fields.expr, self._fields.length
        text = self._texts[self._fields.target]
        limit = text.limit(region)
        assert limit is not None
        found: Guard = text.guard(self.expr_of(rest), region, limit)
        return found

    def expr_of(self, number: int) -> Expr:
        """The expression of a number."""
        found = self.exprs[number] if number < len(self.exprs) else None
        if found is None:
            self._library.sgl_show_text(self._address, number)
            fields = self._fields
            if fields.length:
                text, tail = ctypes.string_at(fields.text, fields.length), fields.expr
                found = concat(literal(text), self.expr_of(tail))
            else:
                self._library.sgl_show_words(self._address, number)
                low, high, depth, whole = fields.kind, fields.target, fields.length, fields.expr
                colon, excluded = self._builder.colon, words(key[depth:-1] for key, _, _ in self.words[low:high])
                found = concat(difference(_before(self.expr_of(whole), colon), excluded), colon)
            self.exprs += [None] * (number + 1 - len(self.exprs))
            self.exprs[number] = found
        return found

    def list(self, threads: Iterable[Thread]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The numbers of several, int32."""
        return np.array([self.thread(thread) for thread in threads], np.int32)


def _texts(excluded: Expr) -> list[bytes]:
    match excluded:
        case Words():
            return excluded.texts()
        case ByteSet():
            return [bytes([byte]) for byte in bytes_of(excluded.mask)]
    return [b""] if excluded.nullable else []


def _before(expr: Expr, tail: Expr) -> Expr:
    """What stands before the tail in an expression that ends with it."""
    if expr is tail:
        return EPSILON
    if isinstance(expr, Union):
        return union(*[_before(member, tail) for member in expr.members])
    assert isinstance(expr, Concat)
    return concat(expr.head, _before(expr.tail, tail))


def _text_of(expr: Expr) -> tuple[bytes, Expr]:
    """What an expression begins with, and what is behind it: nothing where there is a choice at once."""
    text = bytearray()
    while expr is not EPSILON:
        head, tail = (expr.head, expr.tail) if isinstance(expr, Concat) else (expr, EPSILON)
        match head:
            case Words() if head.high - head.low == 1:
                text += head.words[head.low][head.depth :]
            case ByteSet() if head.mask & (head.mask - 1) == 0:
                text.append(lowest(head.mask))
            case _:
                break
        expr = tail
    return bytes(text), expr
