"""A grammar as a lazily determinised visibly pushdown automaton over bytes.

A state is a set of threads run in parallel, each with its *origin*: which of the values that the frame may be it
reads. An opening bracket pushes what stands behind each of those values; a closing bracket pops with the set of
origins that are complete, and the state behind is a function of what was pushed and of that set. So a union of
schemas needs no backtracking (Alur and Madhusudan 2004). States are numbered as they are met and their rows filled
on first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from sgl.errors import GrammarError
from sgl.grammar.automaton.arrays import ArrayPlan
from sgl.grammar.automaton.nfa import (
    Builder,
    Counted,
    Finished,
    Guard,
    Lexeme,
    Move,
    Node,
    Pop,
    Push,
    Stay,
    Thread,
    UniqueText,
)
from sgl.grammar.automaton.objects import ObjectPlan
from sgl.grammar.automaton.tables import (
    COUNT_SHIFT,
    DEAD,
    LIMIT,
    POP_BIT,
    PUSH_BIT,
    TARGET_MASK,
    UNKNOWN,
    Tables,
)
from sgl.grammar.regular.byteset import byte_range, refine
from sgl.grammar.regular.expr import EMPTY, Expr
from sgl.grammar.shape import Array, Object, Schema
from sgl.time_limit import check_size, check_time

Member = tuple[int, Thread]
Callers = tuple[tuple[tuple[int, Node], ...], ...]
"""By origin of the new frame: (origin, node) of every thread of the old one that waits for that value."""

OPEN_BRACE, OPEN_BRACKET = 0x7B, 0x5B
MAX_STATES: Final = 100_000
NOT_PLAIN: Final = -1
ENDLESS: Final = 1 << 60
_NEVER_REACHED: Final = 1 << 30  # characters or items: no text is so long


class Automaton:
    """The states met so far, and in `tables` what each byte does in them, as far as it was asked for."""

    def __init__(self, builder: Builder, start: Node, max_states: int = MAX_STATES) -> None:
        self.builder = builder
        self.max_states = max_states
        self.tables = Tables()
        self.members: list[tuple[Member, ...]] = []
        self.has_counters = False
        self.reads_unique: list[bool] = []
        """By state: whether a text is being read that may not come twice in its frame; see `unique_texts.py`."""
        self.has_unique_texts = False
        self.callers: list[Callers] = []
        self.results: list[tuple[int, ...]] = []
        self._numbers: dict[frozenset[Member], int] = {}
        self._symbols: dict[Callers, int] = {}
        self._results: dict[tuple[int, ...], int] = {}
        self._plain_loops: dict[Expr, bool] = {}
        self.start = self.state((0, thread) for thread in start.threads())

    def __len__(self) -> int:
        return len(self.members)

    def state(self, members: Iterable[Member]) -> int:
        """The number of a set of members, which may hold guards."""
        chosen = frozenset(members)
        number = self._numbers.get(chosen)
        return self._new_state(chosen) if number is None else number

    def _new_state(self, chosen: frozenset[Member]) -> int:
        number = len(self.members)
        check_size(number + 1, self.max_states, "the automaton has more than {} states")
        kinds = {type(thread) for _, thread in chosen}
        self.tables.add_state(accepting=Finished in kinds)
        self._numbers[chosen] = number
        self.members.append(tuple(chosen))
        self.reads_unique.append(UniqueText in kinds)
        self.has_unique_texts |= self.reads_unique[-1]
        if Guard in kinds:
            guards = [(origin, thread) for origin, thread in chosen if isinstance(thread, Guard)]
            self._split_guards(number, chosen, guards)
        return number

    def _split_guards(self, number: int, chosen: frozenset[Member], guards: list[tuple[int, Guard]]) -> None:
        """A state of guards becomes two: below the lowest limit all guards open downwards, at it those with that
        limit.
        """
        self.has_counters = True
        counter, limit = min((guard.counter, guard.limit) for _, guard in guards)
        assert all(guard.counter == counter for _, guard in guards), "one byte moves one counter"
        below = set(chosen.difference(guards))
        at = set(below)
        for origin, guard in guards:
            below.update((origin, thread) for thread in guard.below)
            if guard.limit == limit:
                at.update((origin, thread) for thread in guard.at)
            else:
                at.add((origin, guard))
        below_state, at_state = self.state(below), self.state(at)
        self.tables.guards[number] = min(limit, _NEVER_REACHED), counter, below_state, at_state

    def expand(self, state: int) -> None:
        """Fill the row of a state. Raises GrammarTooLarge if that takes too many states or too long."""
        if self.tables.entries.item(state, 0) != UNKNOWN:
            return
        check_time()
        cells: list[tuple[int, list[tuple[int, Move]]]] = []
        members = self.members[state]
        for origin, thread in members:
            for mask, move in thread.moves():
                if len(members) == 1:
                    cells.append((mask, [(origin, move)]))
                else:
                    refine(cells, mask, (origin, move))
        row: dict[int, int] = {}
        for mask, moves in cells:
            entry = self._entry(state, mask, moves)
            if entry != DEAD:
                row[entry] = row.get(entry, 0) | mask
        self.tables.set_row(state, row)

    def _entry(self, state: int, mask: int, moves: list[tuple[int, Move]]) -> int:
        if len(moves) == 1:
            [(origin, move)] = moves
            if isinstance(move, Stay) and move.threads:
                return self.state([(origin, thread) for thread in move.threads]) | move.operation << COUNT_SHIFT
        members: list[Member] = []
        operation = 0
        complete: set[int] = set()
        pushes: list[tuple[int, Push]] = []
        for origin, move in moves:
            if isinstance(move, Stay):
                operation |= move.operation
                members += [(origin, thread) for thread in move.threads]
            elif isinstance(move, Push):
                pushes.append((origin, move))
            else:
                assert isinstance(move, Pop)
                complete.add(origin)
        if bool(members) + bool(complete) + bool(pushes) > 1:
            byte = bytes([mask.bit_length() - 1])
            raise GrammarError(
                f"{byte!r} may open or close a JSON value here, and may be text of a regex as well, so that nothing "
                "tells which it is: let the regex of a structural tag exclude what ends it"
            )
        if complete:
            return POP_BIT | self._result(tuple(sorted(complete)))
        if pushes:
            return self._push(state, mask.bit_length() - 1, pushes)
        if not members:
            return DEAD
        return self.state(members) | operation << COUNT_SHIFT

    def but_unique(self, state: int, byte: int) -> int:
        """The state behind a byte for what is read there other than unique texts; DEAD if that is nothing."""
        moves = [
            (origin, move)
            for origin, thread in self.members[state]
            if not isinstance(thread, UniqueText)
            for mask, move in thread.moves()
            if mask >> byte & 1
        ]
        return self._entry(state, 1 << byte, moves)

    def _result(self, origins: tuple[int, ...]) -> int:
        found = self._results.get(origins)
        if found is None:
            found = self._results[origins] = self.tables.add_result()
            self.results.append(origins)
        return found

    def _push(self, state: int, bracket: int, pushes: list[tuple[int, Push]]) -> int:
        waiting: dict[Schema, list[tuple[int, Node]]] = {}
        for origin, push in pushes:
            waiting.setdefault(push.schema, []).append((origin, push.then))
        members = [
            (origin, thread)
            for origin, schema in enumerate(waiting)
            for thread in self._threads_inside(schema, bracket)
        ]
        if not members:
            return DEAD
        callers = tuple(tuple(sorted(set(nodes), key=_by_identity)) for nodes in waiting.values())
        symbol = self._symbols.get(callers)
        if symbol is None:
            symbol = self._symbols[callers] = self.tables.add_symbol()
            self.callers.append(callers)
        self.tables.symbols[state, 0 if bracket == OPEN_BRACE else 1] = symbol
        return PUSH_BIT | self.state(members)

    def _threads_inside(self, schema: Schema, bracket: int) -> list[Thread]:
        threads: list[Thread] = []
        for shape in schema.alternatives():
            if bracket == OPEN_BRACE and isinstance(shape, Object):
                threads += self.builder.one(ObjectPlan, self.builder, shape).threads_at_start()
            elif bracket == OPEN_BRACKET and isinstance(shape, Array):
                threads += self.builder.one(ArrayPlan, self.builder, shape).threads_at_start()
        return list(dict.fromkeys(threads))

    def returned(self, symbol: int, result: int) -> int:
        """The state behind a frame that was pushed as `symbol` and closed with `result`."""
        found = self.tables.returns.item(symbol, result)
        if found == UNKNOWN:
            callers = self.callers[symbol]
            found = self.state(
                (caller, thread)
                for origin in self.results[result]
                for caller, node in callers[origin]
                for thread in node.threads()
            )
            self.tables.returns[symbol, result] = found
            self.tables.version += 1
        return found

    def plain_limits(self) -> npt.NDArray[np.int64]:
        """`plain_limit` of all states."""
        return np.array([self.plain_limit(state) for state in range(len(self))], np.int64)

    def plain_limit(self, state: int) -> int:
        """Up to how many characters of a string a plain character keeps some thread of the state where it is, and keeps
        no other alive: ENDLESS if for ever, whatever others do; NOT_PLAIN if there is no such thread.
        """
        if self.tables.guards.item(state, LIMIT) >= 0:  # no place to stay
            return NOT_PLAIN
        limits = {thread: self._thread_limit(thread) for _, thread in self.members[state]}
        limit = max(limits.values(), default=NOT_PLAIN)
        others = (thread for thread, each in limits.items() if each == NOT_PLAIN)
        return NOT_PLAIN if NOT_PLAIN < limit < ENDLESS and any(map(_moves_on_plain, others)) else limit

    def steady(self, state: int) -> tuple[int, int] | None:
        """If plain characters leave `state` as it is: up to which count of characters, and the state that stands
        there from then on. ENDLESS and -1 if it is for ever; None if they do not, or lead other threads elsewhere."""
        others = [thread for _, thread in self.members[state] if self._thread_limit(thread) == NOT_PLAIN]
        if len(others) + 1 != len(self.members[state]) or any(map(_moves_on_plain, others)):
            return None
        self.expand(state)
        tables = self.tables
        behind = tables.entries.item(state, tables.class_of[0x20]) & TARGET_MASK
        if behind == state:
            return ENDLESS, -1
        limit, _, below, at = tables.guards[behind].tolist()
        return (limit, tables.landing(at, limit, 0)) if limit >= 0 and below == state else None

    def _thread_limit(self, thread: Thread) -> int:
        if isinstance(thread, Counted):
            if thread.rest is not None or thread.region == 2 or not self._is_plain_loop(thread.text.loop):
                return NOT_PLAIN
            return ENDLESS if thread.text.high is None else min(thread.text.high, _NEVER_REACHED)
        if isinstance(thread, Lexeme | UniqueText) and self._is_plain_loop(thread.expr):
            return ENDLESS
        return NOT_PLAIN

    def _is_plain_loop(self, expr: Expr) -> bool:
        found = self._plain_loops.get(expr)
        if found is None:
            found = self._plain_loops[expr] = is_plain_loop(expr)
        return found


def _by_identity(item: tuple[int, Node]) -> tuple[int, int]:
    return item[0], id(item[1])


_PLAIN_ASCII: Final = byte_range(0x20, 0x7F) & ~(1 << 0x22 | 1 << 0x5C)
_PLAIN_OR_LONGER: Final = _PLAIN_ASCII | byte_range(0x80, 0xFF)
_CONTINUED: Final = byte_range(0x80, 0xBF)
_LONGER_CHARS: Final = (
    (byte_range(0xC2, 0xDF), _CONTINUED),
    (byte_range(0xE0, 0xE0), byte_range(0xA0, 0xBF), _CONTINUED),
    (byte_range(0xE1, 0xEF) & ~(1 << 0xED), _CONTINUED, _CONTINUED),
    (byte_range(0xED, 0xED), byte_range(0x80, 0x9F), _CONTINUED),
    (byte_range(0xF0, 0xF0), byte_range(0x90, 0xBF), _CONTINUED, _CONTINUED),
    (byte_range(0xF1, 0xF3), _CONTINUED, _CONTINUED, _CONTINUED),
    (byte_range(0xF4, 0xF4), byte_range(0x80, 0x8F), _CONTINUED, _CONTINUED),
)


def _moves_on_plain(thread: Thread) -> bool:
    return any(mask & _PLAIN_OR_LONGER for mask, _ in thread.moves())


def is_plain_loop(expr: Expr) -> bool:
    """Whether every character that JSON strings hold as it stands leads from the expression back to itself."""
    if expr.step(0x20) is not expr:
        return False
    return all(_reached(expr, char) == {expr} for char in ((_PLAIN_ASCII,), *_LONGER_CHARS))


def _reached(expr: Expr, char: tuple[int, ...]) -> set[Expr]:
    """Where the byte strings of a product of byte sets lead; EMPTY among them if some lead nowhere."""
    places = {expr}
    for mask in char:
        following = set()
        for place in places:
            left = mask
            for arc, target in place.arcs():
                if arc & mask:
                    following.add(target)
                    left &= ~arc
            if left:
                following.add(EMPTY)
        places = following
    return places
