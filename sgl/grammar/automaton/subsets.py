"""The subset construction in C: tells it of a grammar what it asks for, and of its states what Python asks for.

`subsets_reference.py` is the definition, and does it where there is no compiler. An expression is told of as its arcs,
or as a text before another one, whose bytes need no Python; a node as the threads that begin there.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import Final

import numpy as np

from sgl import native_code
from sgl.grammar.automaton.nfa import (
    PLAIN,
    POP,
    Blanks,
    Builder,
    Closing,
    Finished,
    Guard,
    InLexeme,
    Lexeme,
    Move,
    Node,
    Opening,
    Push,
    Stay,
    Target,
    Thread,
    UniqueText,
)
from sgl.grammar.automaton.plain import plain_kind, thread_limit
from sgl.grammar.automaton.subsets_reference import Bracket, Member, SubsetsReference, Ways
from sgl.grammar.automaton.tables import Tables
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
from sgl.time_limit import check_size

_DONE, _NEEDS, _BRACKETS, _ROOM, _TOO_MANY, _NO_MEMORY = range(6)
_STAY, _PUSH, _POP = range(3)
_NODE, _OPENING, _CLOSING = range(3)
_LEXEME, _BLANKS, _GUARD, _OTHER = range(4)
_ACCEPTS, _READS_UNIQUE = 1, 2
_NONE: Final = -1
_ARC, _MOVE, _BRACKET = Struct("<32sq"), Struct("<32s6i"), Struct("<32sqq")
logger = logging.getLogger(__name__)


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """subsets.c; None where it cannot be had, which is logged once."""
    functions = {
        "sgl_new": ":p",
        "sgl_free": "p:",
        "sgl_expand": "pip:i",
        "sgl_state": "ppi:i",
        "sgl_add_expr": "pii:i",
        "sgl_add_text": "ppii:i",
        "sgl_add_without": "pippi:i",
        "sgl_give_arcs": "pipii:i",
        "sgl_add_target": "pii:i",
        "sgl_give_threads": "pipi:i",
        "sgl_lexeme": "piii:i",
        "sgl_add_thread": "pii:i",
        "sgl_give_moves": "pipipi:i",
        "sgl_add_guard": "piipii:i",
        "sgl_plain": "pi:i",
        "sgl_plain_limit": "pi:i",
        "sgl_show_members": "pi:",
        "sgl_show_only": "pi:i",
        "sgl_show_thread": "pi:",
        "sgl_show_text": "pi:",
        "sgl_show_words": "pi:",
    }
    try:
        return native_code.load(Path(__file__).with_suffix(".c"), functions)
    except native_code.CannotCompile as error:
        logger.warning("token masks will take several times as long, nothing is compiled for states: %s", error)
        return None


_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Fields(ctypes.Structure):
    """What is known here of `Subsets` in subsets.c."""

    _fields_ = [
        (name, kind)
        for kind, names in (
            (_POINTER, "entries symbols guards accepting reads_unique classes"),
            (_LONG, "num_rows width max_states num_states num_classes version has_counters has_unique_texts"),
            (_POINTER, "needed"),
            (_LONG, "num_needed"),
            (_POINTER, "bracket way"),
            (_LONG, "num_brackets"),
            (_POINTER, "member"),
            (_LONG, "num_members"),
            (_INT, "kind expr target length"),
            (_POINTER, "text"),
            (_LONG, "plain_limit"),
        )
        for name in names.split()
    ]


def make_subsets(tables: Tables, builder: Builder, max_states: int) -> Subsets | SubsetsReference:
    """In C where there is a compiler."""
    library = compiled()
    return (
        SubsetsReference(tables, max_states) if library is None else Subsets(library, tables, builder, max_states)
    )


class Subsets:
    """The states of one automaton, in its tables."""

    def __init__(self, library: ctypes.CDLL, tables: Tables, builder: Builder, max_states: int) -> None:
        self._library, self._tables, self._builder = library, tables, builder
        self.address: int = library.sgl_new()
        """Of the C's memory, for other C."""
        if not self.address:
            raise MemoryError
        weakref.finalize(self, library.sgl_free, self.address).atexit = False
        self._fields = _Fields.from_address(self.address)
        self._fields.max_states = max_states
        self._exprs: list[Expr | None] = []
        self._expr_numbers: dict[Expr, int] = {}
        self._targets: list[Target] = []
        self._target_numbers: dict[Target, int] = {}
        self._threads: dict[int, Thread] = {}
        self._thread_numbers: dict[Thread, int] = {}
        self._members: dict[int, tuple[Member, ...]] = {}
        self._keys: list[bytes] = []
        """All words that expressions are without, and the quote behind each."""
        self._point()
        self._expr(EPSILON)

    def function(self, name: str) -> int:
        """The address of a function, for other C."""
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    def _point(self) -> None:
        fields, tables = self._fields, self._tables
        fields.entries, fields.classes = tables.entries.ctypes.data, tables.classes.ctypes.data
        fields.symbols, fields.guards = tables.symbols.ctypes.data, tables.guards.ctypes.data
        fields.accepting, fields.reads_unique = tables.accepting.ctypes.data, tables.reads_unique.ctypes.data
        fields.num_rows, fields.width = tables.entries.shape

    def take_over(self) -> None:
        """Tell the tables what the C has added."""
        fields, tables = self._fields, self._tables
        tables.num_states, tables.num_classes = fields.num_states, fields.num_classes
        tables.version += 1
        tables.has_counters, tables.has_unique_texts = bool(fields.has_counters), bool(fields.has_unique_texts)

    def state(self, members: Iterable[Member]) -> int:
        """As `SubsetsReference.state`."""
        chosen = np.array([origin << 32 | self._thread(thread) for origin, thread in members], np.uint64)
        while (found := self._library.sgl_state(self.address, chosen.ctypes.data, len(chosen))) < 0:
            self._make_room(-1 - found)
        self.take_over()
        return int(found)

    def expand(self, state: int, bracket: Bracket) -> None:
        """As `SubsetsReference.expand`."""
        answers = None
        while why := self._library.sgl_expand(self.address, state, answers):
            if why == _NEEDS:
                self._tell()
            elif why == _BRACKETS:
                self.take_over()
                found = [bracket(state, mask, ways) for mask, ways in self._brackets()]
                answers = np.array(found, np.int32).tobytes()
            else:
                self._make_room(why)
        self.take_over()

    def members(self, state: int) -> tuple[Member, ...]:
        """As `SubsetsReference.members`."""
        found = self._members.get(state)
        if found is None:
            self._library.sgl_show_members(self.address, state)
            fields = self._fields
            shown = memoryview(ctypes.string_at(fields.member, 8 * fields.num_members)).cast("Q")
            found = tuple((member >> 32, self._thread_of(member & 0xFFFFFFFF)) for member in shown)
            self._members[state] = found
        return found

    def only_lexeme(self, state: int) -> Member | None:
        """As `SubsetsReference.only_lexeme`."""
        fields = self._fields
        is_one = self._library.sgl_show_only(self.address, state)
        return self.members(state)[0] if is_one and fields.kind == _LEXEME and not fields.length else None

    def plain_limit(self, state: int) -> tuple[int, bool]:
        """As `SubsetsReference.plain_limit`."""
        is_alone = self._library.sgl_plain_limit(self.address, state)
        return self._fields.plain_limit, bool(is_alone)

    def _make_room(self, why: int) -> None:
        fields, tables = self._fields, self._tables
        if why == _TOO_MANY:
            check_size(fields.max_states + 1, fields.max_states, "the automaton has more than {} states")
        if why == _NO_MEMORY:
            raise MemoryError
        assert why == _ROOM
        self.take_over()
        if fields.num_states == fields.num_rows:
            tables.grow_rows()
        if fields.num_classes == fields.width:
            tables.grow_columns()
        self._point()

    def _tell(self) -> None:
        """Tell of the expressions, nodes and threads that the C has asked for."""
        fields = self._fields
        needs = memoryview(ctypes.string_at(fields.needed, 8 * fields.num_needed)).cast("i").tolist()
        for what, which in dict.fromkeys(zip(needs[::2], needs[1::2], strict=True)):
            if what == 0:
                self._tell_arcs(which)
            elif what == 1:
                node = self._targets[which]
                assert isinstance(node, Node)
                threads = self._list(node.threads())
                self._check(self._library.sgl_give_threads(self.address, which, threads.ctypes.data, len(threads)))
            else:
                self._tell_moves(which)

    def _tell_arcs(self, number: int) -> None:
        expr = self._exprs[number]
        assert expr is not None
        arcs = [_ARC.pack(mask.to_bytes(32, "little"), self._expr(rest)) for mask, rest in expr.arcs()]
        packed, plain = b"".join(arcs), plain_kind(expr)
        self._check(self._library.sgl_give_arcs(self.address, number, packed, len(arcs), plain))

    def _tell_moves(self, number: int) -> None:
        moves, threads = [], list[Thread]()
        for mask, move in self._threads[number].moves():
            assert isinstance(move, Stay), "lexemes alone have brackets"
            parts = (_STAY, move.operation, len(threads), len(move.threads), _NONE, 0)
            moves.append(_MOVE.pack(mask.to_bytes(32, "little"), *parts))
            threads += move.threads
        numbers = self._list(threads)
        self._check(
            self._library.sgl_give_moves(
                self.address, number, b"".join(moves), len(moves), numbers.ctypes.data, len(numbers)
            )
        )

    def _brackets(self) -> list[tuple[int, Ways]]:
        fields = self._fields
        shown = ctypes.string_at(fields.bracket, _BRACKET.size * fields.num_brackets)
        found = []
        for mask, first, number in _BRACKET.iter_unpack(shown):
            ways = memoryview(ctypes.string_at(fields.way + 16 * first, 16 * number)).cast("i").tolist()
            moves = [
                (origin, self._move(kind, target))
                for origin, kind, target in zip(ways[::4], ways[1::4], ways[2::4], strict=True)
            ]
            found.append((int.from_bytes(mask, "little"), moves))
        return found

    def _move(self, kind: int, target: int) -> Move:
        if kind == _STAY:
            return _SOME
        opening = self._targets[target]
        return Push(opening.schema, opening.then) if isinstance(opening, Opening) else POP

    def _check(self, answer: int) -> int:
        if answer < 0:
            self._make_room(-1 - answer)
        return answer

    def _list(self, threads: Iterable[Thread]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array([self._thread(thread) for thread in threads], np.int32)

    def _expr(self, expr: Expr) -> int:
        """Its number in C."""
        found = self._expr_numbers.get(expr)
        if found is None:
            text, tail = _text_of(expr)
            key = self._key_of(expr)
            if text:
                rest = self._expr(tail)
                found = self._check(self._library.sgl_add_text(self.address, text, len(text), rest))
            elif key is not None:
                found = self._add_key(*key)
            else:
                indented = behind_blanks(expr)
                behind = _NONE if indented is None else self._expr(indented)
                found = self._check(self._library.sgl_add_expr(self.address, expr.nullable, behind))
            self._exprs += [None] * (found + 1 - len(self._exprs))
            self._exprs[found] = expr
            self._expr_numbers[expr] = found
        return found

    def _key_of(self, expr: Expr) -> tuple[Expr, Expr] | None:
        """Of any key but some, and what stands behind keys: any key, and those; None for any other expression."""
        if isinstance(expr, Concat) and expr.tail is self._builder.colon and isinstance(expr.head, Intersection):
            return None if expr.head.excluded is None else (expr.head.kept, expr.head.excluded)
        return None

    def _add_key(self, kept: Expr, excluded: Expr) -> int:
        whole = self._expr(concat(kept, self._builder.colon))
        keys = sorted(text + b'"' for text in _texts(excluded))
        lengths = np.array([len(key) for key in keys], np.int32)
        packed = b"".join(keys)
        self._keys += keys
        return self._check(
            self._library.sgl_add_without(self.address, whole, packed, lengths.ctypes.data, len(keys))
        )

    def _target(self, target: Target) -> int:
        found = self._target_numbers.get(target)
        if found is None:
            kind = _NODE if isinstance(target, Node) else _CLOSING if isinstance(target, Closing) else _OPENING
            operation = target.operation if isinstance(target, Node) else PLAIN
            found = self._check(self._library.sgl_add_target(self.address, kind, operation))
            self._targets.append(target)
            self._target_numbers[target] = found
        return found

    def _thread(self, thread: Thread) -> int:
        found = self._thread_numbers.get(thread)
        if found is None:
            library = self._library
            if isinstance(thread, InLexeme):
                kind = _BLANKS if isinstance(thread, Blanks) else _LEXEME
                expr, target = self._expr(thread.expr), self._target(thread.target)
                found = self._check(library.sgl_lexeme(self.address, kind, expr, target))
            elif isinstance(thread, Guard):
                threads = self._list((*thread.below, *thread.at))
                numbers = len(thread.below), len(thread.at)
                at = threads.ctypes.data
                found = self._check(library.sgl_add_guard(self.address, thread.counter, thread.limit, at, *numbers))
            else:
                flags = isinstance(thread, Finished) * _ACCEPTS | isinstance(thread, UniqueText) * _READS_UNIQUE
                found = self._check(library.sgl_add_thread(self.address, flags, thread_limit(thread)))
            self._threads[found] = thread
            self._thread_numbers[thread] = found
        return found

    def _thread_of(self, number: int) -> Thread:
        found = self._threads.get(number)
        if found is None:
            self._library.sgl_show_thread(self.address, number)
            kind, expr, target = self._fields.kind, self._fields.expr, self._fields.target
            if kind == _GUARD:
                move = self._thread_of(target).moves()[0][1]
                assert isinstance(move, Stay)
                found = move.threads[0]
            else:
                made: type[InLexeme] = Blanks if kind == _BLANKS else Lexeme
                found = self._builder.one(made, self._builder, self._expr_of(expr), self._targets[target])
            self._threads[number] = found
            self._thread_numbers[found] = number
        return found

    def _expr_of(self, number: int) -> Expr:
        found = self._exprs[number] if number < len(self._exprs) else None
        if found is None:
            self._library.sgl_show_text(self.address, number)
            fields = self._fields
            if fields.length:
                text, tail = ctypes.string_at(fields.text, fields.length), fields.expr
                found = concat(literal(text), self._expr_of(tail))
            else:
                self._library.sgl_show_words(self.address, number)
                low, high, depth, whole = fields.kind, fields.target, fields.length, fields.expr
                colon, excluded = self._builder.colon, words(key[depth:-1] for key in self._keys[low:high])
                found = concat(difference(_before(self._expr_of(whole), colon), excluded), colon)
            self._exprs += [None] * (number + 1 - len(self._exprs))
            self._exprs[number] = found
        return found


_SOME: Final = Stay((Finished(),), PLAIN)
"""A move that stays in the frame, where it does not matter to where."""


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
