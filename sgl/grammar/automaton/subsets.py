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
from sgl.grammar.automaton.nfa import PLAIN, POP, Builder, Finished, Move, Node, Opening, Push, Stay, Thread
from sgl.grammar.automaton.plain import plain_kind
from sgl.grammar.automaton.subset_numbers import NONE, Numbers
from sgl.grammar.automaton.subsets_reference import (
    Bracket,
    Int32Array,
    Int64Array,
    Member,
    Most,
    SubsetsReference,
    Ways,
)
from sgl.grammar.automaton.tables import Tables
from sgl.grammar.regular.shortest import shortest_rope
from sgl.time_limit import check_size

_DONE, _NEEDS, _BRACKETS, _ROOM, _TOO_MANY, _NO_MEMORY = range(6)
_STAY, _PUSH, _POP = range(3)
_SHORTEST, _BEHIND_TARGET = 4, 5
_MOST: Final = 1 << 60
_ARC, _MOVE = Struct("<32sq"), Struct("<32s6i")
logger = logging.getLogger(__name__)


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """subsets.c; None where it cannot be had, which is logged once."""
    functions = {
        "sgl_new": ":p",
        "sgl_free": "p:",
        "sgl_expand": "pip:i",
        "sgl_expand_meanwhile": "pi:i",
        "sgl_state": "ppi:i",
        "sgl_add_expr": "piii:i",
        "sgl_add_text": "ppii:i",
        "sgl_add_words": "pppii:i",
        "sgl_add_without": "piii:i",
        "sgl_give_target": "pii:",
        "sgl_give_arcs": "pipii:i",
        "sgl_add_target": "pii:i",
        "sgl_give_threads": "pipi:i",
        "sgl_intern": "piiii:i",
        "sgl_add_thread": "pii:i",
        "sgl_give_moves": "pipipi:i",
        "sgl_add_counted": "piiiii:i",
        "sgl_add_guard": "piipii:i",
        "sgl_give_most": "piii:",
        "sgl_most": "ppiip:i",
        "sgl_plain": "pi:i",
        "sgl_plain_limit": "pi:i",
        "sgl_show_members": "pi:",
        "sgl_is_list": "pi:i",
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


class _BracketCell(ctypes.Structure):
    _fields_ = [("mask", ctypes.c_uint8 * 32), ("first", _LONG), ("number", _LONG)]


class _BracketMove(ctypes.Structure):
    _fields_ = [("origin", _INT), ("kind", _INT), ("target", _INT), ("unused", _INT)]


class _Fields(ctypes.Structure):
    """What is known here of `Subsets` in subsets.c."""

    _fields_ = [
        (name, kind)
        for kind, names in (
            (_POINTER, "entries symbols guards accepting reads_unique classes"),
            (_LONG, "num_rows width max_states num_states num_classes has_counters has_unique_texts"),
            (_POINTER, "needed"),
            (_LONG, "num_needed"),
            (ctypes.POINTER(_BracketCell), "shown_cells"),
            (ctypes.POINTER(_BracketMove), "shown_moves"),
            (_LONG, "num_shown_cells"),
            (_POINTER, "member"),
            (_LONG, "num_members"),
            (_INT, "kind expr target length"),
            (_POINTER, "text"),
            (_LONG, "plain_limit asked why"),
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
        self._library, self._tables = library, tables
        self.address: int = library.sgl_new()
        """Of the C's memory, for other C."""
        if not self.address:
            raise MemoryError
        weakref.finalize(self, library.sgl_free, self.address).atexit = False
        self._fields = _Fields.from_address(self.address)
        self._fields.max_states, self._fields.asked = max_states, NONE
        self._members: dict[int, tuple[Member, ...]] = {}
        self._numbers = Numbers(library, self.address, self._fields, builder)
        self._point()

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
        tables.has_counters, tables.has_unique_texts = bool(fields.has_counters), bool(fields.has_unique_texts)

    def state(self, members: Iterable[Member]) -> int:
        """As `SubsetsReference.state`."""
        chosen = np.array([origin << 32 | self._numbers.thread(thread) for origin, thread in members], np.uint64)
        while (found := self._library.sgl_state(self.address, chosen.ctypes.data, len(chosen))) < 0:
            self._make_room(-1 - found)
        self.take_over()
        return int(found)

    def expand(self, state: int, bracket: Bracket) -> None:
        """As `SubsetsReference.expand`."""
        answers, fields = None, self._fields
        # A walk may have asked for the row, and been told what is missing.
        why = fields.why if fields.asked == state else self._library.sgl_expand(self.address, state, None)
        while why:
            if why == _NEEDS:
                self._tell()
            elif why == _BRACKETS:
                self.take_over()
                found = [bracket(state, mask, moves) for mask, moves in self._brackets()]
                answers = np.array(found, np.int32).tobytes()
            else:
                self._make_room(why)
            why = self._library.sgl_expand(self.address, state, answers)
        fields.asked = NONE
        self.take_over()

    def members(self, state: int) -> tuple[Member, ...]:
        """As `SubsetsReference.members`."""
        found = self._members.get(state)
        if found is None:
            self._library.sgl_show_members(self.address, state)
            fields = self._fields
            shown = memoryview(ctypes.string_at(fields.member, 8 * fields.num_members)).cast("Q")
            found = tuple((member >> 32, self._numbers.thread_of(member & 0xFFFFFFFF)) for member in shown)
            self._members[state] = found
        return found

    def only_list(self, state: int) -> Member | None:
        """As `SubsetsReference.only_list`."""
        return self.members(state)[0] if self._library.sgl_is_list(self.address, state) else None

    def plain_limit(self, state: int) -> tuple[int, bool]:
        """As `SubsetsReference.plain_limit`."""
        is_alone = self._library.sgl_plain_limit(self.address, state)
        return self._fields.plain_limit, bool(is_alone)

    def most(self, states: Int32Array, most: Most, *, within: bool) -> Int64Array:
        """As `SubsetsReference.most`."""
        library, numbers = self._library, self._numbers
        found = np.zeros(len(states), np.int64)
        arguments = states.ctypes.data, len(states), within, found.ctypes.data
        while why := library.sgl_most(self.address, *arguments):
            if why == _NO_MEMORY:
                raise MemoryError
            for what, which in self._needs():
                if what == _SHORTEST:
                    text = shortest_rope(numbers.expr_of(which))
                    size = 0 if text is None else text.size
                else:
                    size = most(numbers.targets[which] if what == _BEHIND_TARGET else numbers.thread_of(which))
                library.sgl_give_most(self.address, what, which, min(size, _MOST))
        return found

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

    def _needs(self) -> Iterable[tuple[int, int]]:
        fields = self._fields
        needs = memoryview(ctypes.string_at(fields.needed, 8 * fields.num_needed)).cast("i").tolist()
        return dict.fromkeys(zip(needs[::2], needs[1::2], strict=True))

    def _tell(self) -> None:
        """Tell of the expressions, nodes and threads that the C has asked for."""
        for what, which in self._needs():
            if what == 0:
                self._tell_arcs(which)
            elif what == 1:
                node = self._numbers.targets[which]
                assert isinstance(node, Node)
                threads = self._numbers.list(node.threads())
                self._numbers.check(
                    self._library.sgl_give_threads(self.address, which, threads.ctypes.data, len(threads))
                )
            elif what == 2:
                self._tell_moves(which)
            else:
                _, keys, place = self._numbers.words[which]
                assert keys is not None
                self._library.sgl_give_target(self.address, which, self._numbers.target(keys.behind(place)))

    def _tell_arcs(self, number: int) -> None:
        expr = self._numbers.exprs[number]
        assert expr is not None
        arcs = [_ARC.pack(mask.to_bytes(32, "little"), self._numbers.expr(rest)) for mask, rest in expr.arcs()]
        packed, plain = b"".join(arcs), plain_kind(expr)
        self._numbers.check(self._library.sgl_give_arcs(self.address, number, packed, len(arcs), plain))

    def _tell_moves(self, number: int) -> None:
        moves, threads = [], list[Thread]()
        for mask, move in self._numbers.threads[number].moves():
            assert isinstance(move, Stay), "lexemes alone have brackets"
            parts = (_STAY, move.operation, len(threads), len(move.threads), NONE, 0)
            moves.append(_MOVE.pack(mask.to_bytes(32, "little"), *parts))
            threads += move.threads
        numbers = self._numbers.list(threads)
        self._numbers.check(
            self._library.sgl_give_moves(
                self.address, number, b"".join(moves), len(moves), numbers.ctypes.data, len(numbers)
            )
        )

    def _brackets(self) -> list[tuple[int, Ways]]:
        fields = self._fields
        found = []
        for i in range(fields.num_shown_cells):
            cell = fields.shown_cells[i]
            shown = fields.shown_moves[cell.first : cell.first + cell.number]
            moves = [(move.origin, self._move(move.kind, move.target)) for move in shown]
            found.append((int.from_bytes(cell.mask, "little"), moves))
        return found

    def _move(self, kind: int, target: int) -> Move:
        if kind == _STAY:
            return _SOME
        opening = self._numbers.targets[target]
        return Push(opening.schema, opening.then) if isinstance(opening, Opening) else POP


_SOME: Final = Stay((Finished(),), PLAIN)
"""A move that stays in the frame, where it does not matter to where."""
