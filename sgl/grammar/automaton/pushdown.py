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

from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar.automaton.arrays import ArrayPlan
from sgl.grammar.automaton.nfa import Builder, Node, Pop, Push, Stay, Thread, UniqueText
from sgl.grammar.automaton.objects import ObjectPlan
from sgl.grammar.automaton.plain import ENDLESS, NOT_PLAIN
from sgl.grammar.automaton.subsets import make_subsets
from sgl.grammar.automaton.subsets_reference import Member, Ways
from sgl.grammar.automaton.tables import COUNT_SHIFT, DEAD, LIMIT, POP_BIT, PUSH_BIT, TARGET_MASK, UNKNOWN, Tables
from sgl.grammar.shape import Array, Object, Schema
from sgl.time_limit import check_time

Callers = tuple[tuple[tuple[int, Node], ...], ...]
"""By origin of the new frame: (origin, node) of every thread of the old one that waits for that value."""

OPEN_BRACE, OPEN_BRACKET = 0x7B, 0x5B
MAX_STATES: Final = 100_000


class Automaton:
    """The states met so far, and in `tables` what each byte does in them, as far as it was asked for."""

    def __init__(self, builder: Builder, start: Node, max_states: int = MAX_STATES) -> None:
        self.builder = builder
        self.max_states = max_states
        self.tables = Tables()
        self.callers: list[Callers] = []
        self.results: list[tuple[int, ...]] = []
        self.subsets = make_subsets(self.tables, builder, max_states)
        """The states as sets of threads."""
        self._symbols: dict[Callers, int] = {}
        self._results: dict[tuple[int, ...], int] = {}
        self._inside: dict[tuple[int, tuple[Schema, ...]], int] = {}
        self._steady: dict[int, tuple[int, int] | None] = {}
        self.start = self.state((0, thread) for thread in start.threads())

    def __len__(self) -> int:
        return self.tables.num_states

    @property
    def has_counters(self) -> bool:
        """Whether any state met so far counts characters or items."""
        return self.tables.has_counters

    @property
    def has_unique_texts(self) -> bool:
        """Whether a text that may not come twice in its frame is read in any state met so far."""
        return self.tables.has_unique_texts

    def members(self, state: int) -> tuple[Member, ...]:
        """The threads that a state is, each with its origin."""
        return self.subsets.members(state)

    def state(self, members: Iterable[Member]) -> int:
        """The number of a set of members, which may hold guards. Raises GrammarTooLarge."""
        return self.subsets.state(members)

    def expand(self, state: int) -> None:
        """Fill the row of a state. Raises GrammarTooLarge if that takes too many states or too long."""
        if self.tables.entries.item(state, 0) == UNKNOWN:
            check_time()
            try:
                self.subsets.expand(state, self._bracket)
            except RecursionError as error:
                raise GrammarTooLarge("parts of the constraint are nested too deeply", states=0, limit=0) from error

    def _bracket(self, state: int, mask: int, ways: Ways) -> int:
        """The entry of a state for bytes that may open or close a frame."""
        complete = sorted({origin for origin, move in ways if isinstance(move, Pop)})
        pushes = [(origin, move) for origin, move in ways if isinstance(move, Push)]
        stays = any(isinstance(move, Stay) and move.threads for _, move in ways)
        if stays + bool(complete) + bool(pushes) > 1:
            byte = bytes([mask.bit_length() - 1])
            raise GrammarError(
                f"{byte!r} may open or close a JSON value here, and may be text of a regex as well, so that nothing "
                "tells which it is: let the regex of a structural tag exclude what ends it"
            )
        if complete:
            return POP_BIT | self._result(tuple(complete))
        return self._push(state, mask.bit_length() - 1, pushes)

    def but_unique(self, state: int, byte: int) -> int:
        """The state behind a byte for what is read there other than unique texts; DEAD if that is nothing."""
        operation, members = 0, []
        for origin, thread in self.members(state):
            for mask, move in () if isinstance(thread, UniqueText) else thread.moves():
                if mask >> byte & 1:
                    assert isinstance(move, Stay), "a quote is no bracket"
                    operation |= move.operation
                    members += [(origin, each) for each in move.threads]
        return self.state(members) | operation << COUNT_SHIFT if members else DEAD

    def _result(self, origins: tuple[int, ...]) -> int:
        found = self._results.get(origins)
        if found is None:
            found = self._results[origins] = self.tables.add_result()
            self.results.append(origins)
        return found

    def _push(self, state: int, bracket: int, pushes: list[tuple[int, Push]]) -> int:
        waiting: dict[Schema, list[tuple[int, Node]]] = {}
        for origin, push in sorted(pushes, key=_by_schema):
            waiting.setdefault(push.schema, []).append((origin, push.then))
        inside = self._state_inside(bracket, tuple(waiting))
        if inside == DEAD:
            return DEAD
        callers = tuple(tuple(sorted(set(nodes), key=_by_identity)) for nodes in waiting.values())
        symbol = self._symbols.get(callers)
        if symbol is None:
            symbol = self._symbols[callers] = self.tables.add_symbol()
            self.callers.append(callers)
        self.tables.symbols[state, 0 if bracket == OPEN_BRACE else 1] = symbol
        return PUSH_BIT | inside

    def _state_inside(self, bracket: int, schemas: tuple[Schema, ...]) -> int:
        """Where values of schemas begin, by origin, behind their opening bracket."""
        found = self._inside.get((bracket, schemas))
        if found is None:
            members = [
                (origin, thread)
                for origin, schema in enumerate(schemas)
                for thread in self._threads_inside(schema, bracket)
            ]
            found = self._inside[bracket, schemas] = self.state(members) if members else DEAD
        return found

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
        return found

    def behind(self, symbol: int) -> set[int]:
        """The states behind a frame of a symbol, if it closes with one of the values that it may be, or with all."""
        origins = range(len(self.callers[symbol]))
        results = {(origin,) for origin in origins} | {tuple(origins)}
        return {self.returned(symbol, self._result(each)) for each in results}

    def plain_limits(self) -> npt.NDArray[np.int64]:
        """`plain_limit` of all states; NOT_PLAIN where nobody has asked for a row."""
        known = (self.tables.entries[: len(self), 0] != UNKNOWN).tolist()
        return np.array([self.plain_limit(i) if known[i] else NOT_PLAIN for i in range(len(known))], np.int64)

    def plain_limit(self, state: int) -> int:
        """Up to how many characters of a string a plain character keeps some thread of the state where it is, and keeps
        no other alive: ENDLESS if for ever, whatever others do; NOT_PLAIN if there is no such thread.
        """
        if self.tables.guards.item(state, LIMIT) >= 0:  # no place to stay
            return NOT_PLAIN
        self.expand(state)
        return self.subsets.plain_limit(state)[0]

    def steady(self, state: int) -> tuple[int, int] | None:
        """If plain characters leave `state` as it is: up to which count of characters, and the state that stands
        there from then on. ENDLESS and -1 if it is for ever; None if they do not, or lead other threads elsewhere."""
        if state not in self._steady:
            self.expand(state)
            self._steady[state] = self._find_steady(state)
        return self._steady[state]

    def _find_steady(self, state: int) -> tuple[int, int] | None:
        if not self.subsets.plain_limit(state)[1]:
            return None
        tables = self.tables
        behind = tables.entries.item(state, tables.class_of[0x20]) & TARGET_MASK
        if behind == state:
            return ENDLESS, -1
        limit, _, below, at = tables.guards[behind].tolist()
        return (limit, tables.landing(at, limit, 0)) if limit >= 0 and below == state else None


def _by_schema(item: tuple[int, Push]) -> int:
    return id(item[1].schema)


def _by_identity(item: tuple[int, Node]) -> tuple[int, int]:
    return item[0], id(item[1])
