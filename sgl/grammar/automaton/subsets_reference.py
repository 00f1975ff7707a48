"""The subset construction, in Python: sets of threads are numbered as they are met, and bytes lead between them.

What a state is, and where there is no compiler. `subsets.c` does the same many times faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.nfa import Finished, Guard, Lexeme, Move, Stay, Thread, UniqueText
from sgl.grammar.automaton.plain import ENDLESS, NEVER_REACHED, NOT_PLAIN, moves_on_plain, stays, thread_limit
from sgl.grammar.automaton.tables import COUNT_SHIFT, DEAD, Tables
from sgl.grammar.regular.byteset import refine
from sgl.grammar.regular.expr import Concat, Expr, Words
from sgl.time_limit import check_size

Member = tuple[int, Thread]
"""A thread of a state, and its origin."""
Ways = list[tuple[int, Move]]
"""By origin, the moves that a byte allows."""
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Most = Callable[[Any], int]
"""Of a thread or a node."""
Bracket = Callable[[int, int, Ways], int]
"""The entry of a state for a set of bytes of which some move opens or closes a frame."""


class SubsetsReference:
    """The states of one automaton, in its tables."""

    def __init__(self, tables: Tables, max_states: int) -> None:
        self._tables = tables
        self._max_states = max_states
        self._members: list[tuple[Member, ...]] = []
        self._numbers: dict[frozenset[Member], int] = {}

    def members(self, state: int) -> tuple[Member, ...]:
        """The threads that a state is."""
        return self._members[state]

    def only_list(self, state: int) -> Member | None:
        """The thread of a state that is nothing but one inside a list of words; None for any other."""
        for origin, thread in self._members[state] if len(self._members[state]) == 1 else ():
            if isinstance(thread, Lexeme) and begins_with_list(thread.expr):
                return origin, thread
        return None

    def most(self, states: Int32Array, most: Most, *, within: bool) -> Int64Array:
        """How many bytes suffice to end the frame that each state stands in, [S], if `most` says so of threads and
        nodes: whichever thread is the only one to go on; `within`, whichever origin, by the nearest of its threads."""
        found = np.zeros(len(states), np.int64)
        for i, state in enumerate(states.tolist()):
            sizes: dict[int, list[int]] = {}
            for origin, thread in self._members[state]:
                sizes.setdefault(origin, []).append(most(thread))
            found[i] = max(map(min if within else max, sizes.values()), default=0)
        return found

    def plain_limit(self, state: int) -> tuple[int, bool]:
        """See `Automaton.plain_limit`; and whether plain characters keep one thread where it is and end all others. The
        state is expanded."""
        limits = [(thread, thread_limit(thread)) for _, thread in self._members[state]]
        limit = max((each for _, each in limits), default=NOT_PLAIN)
        others = [thread for thread, each in limits if each == NOT_PLAIN]
        is_alone = not any(map(moves_on_plain, others))
        return (
            limit if is_alone or limit == ENDLESS else NOT_PLAIN,
            is_alone and [stays(thread) for thread, each in limits if each != NOT_PLAIN] == [True],
        )

    def take_over(self) -> None:
        """There is nothing that others have added."""

    def state(self, members: Iterable[Member]) -> int:
        """The number of a set of members, which may hold guards. Raises GrammarTooLarge."""
        chosen = frozenset(members)
        number = self._numbers.get(chosen)
        return self._new_state(chosen) if number is None else number

    def _new_state(self, chosen: frozenset[Member]) -> int:
        number = len(self._members)
        check_size(number + 1, self._max_states, "the automaton has more than {} states")
        kinds = {type(thread) for _, thread in chosen}
        self._tables.add_state(accepting=Finished in kinds, reads_unique=UniqueText in kinds)
        self._numbers[chosen] = number
        self._members.append(tuple(chosen))
        if Guard in kinds:
            guards = [(origin, thread) for origin, thread in chosen if isinstance(thread, Guard)]
            self._split_guards(number, chosen, guards)
        return number

    def _split_guards(self, number: int, chosen: frozenset[Member], guards: list[tuple[int, Guard]]) -> None:
        """A state of guards becomes two: below the lowest limit all guards open downwards, at it those with that
        limit.
        """
        self._tables.has_counters = True
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
        self._tables.guards[number] = min(limit, NEVER_REACHED), counter, below_state, at_state

    def expand(self, state: int, bracket: Bracket) -> None:
        """Fill the row of a state. Raises GrammarTooLarge, and what `bracket` does."""
        cells: list[tuple[int, Ways]] = []
        for origin, thread in self._members[state]:
            for mask, move in thread.moves():
                refine(cells, mask, (origin, move))
        row: dict[int, int] = {}
        for mask, ways in cells:
            stays = [(origin, move) for origin, move in ways if isinstance(move, Stay)]
            entry = self._entry(stays) if len(stays) == len(ways) else bracket(state, mask, ways)
            if entry != DEAD:
                row[entry] = row.get(entry, 0) | mask
        self._tables.set_row(state, row)

    def _entry(self, stays: list[tuple[int, Stay]]) -> int:
        members = [(origin, thread) for origin, stay in stays for thread in stay.threads]
        if not members:
            return DEAD
        operation = 0
        for _, stay in stays:
            operation |= stay.operation
        return self.state(members) | operation << COUNT_SHIFT


def begins_with_list(expr: Expr) -> bool:
    """Whether an expression begins with one of several words."""
    head = expr.head if isinstance(expr, Concat) else expr
    return isinstance(head, Words) and head.high - head.low > 1
