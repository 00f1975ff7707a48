"""Works out all of an automaton at once, where it is small enough: for walks that cannot stop to ask for more.

Follows calls as summaries: which results the frames opened in a state may close with, and so which states stand behind
them (Reps, Horwitz and Sagiv 1995).
"""

from __future__ import annotations

from array import array
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.place import Frame, Place, advance, start_of
from sgl.grammar.automaton.plain import ENDLESS
from sgl.grammar.automaton.pushdown import OPEN_BRACE, OPEN_BRACKET, Automaton
from sgl.grammar.automaton.shortest_end import ShortestEnds
from sgl.grammar.automaton.tables import AT, BELOW, COUNTER, LIMIT, POP_BIT, PUSH_BIT, TARGET_MASK, UNKNOWN, Tables

Level = int
"""A frame by the state that it begins in; what stands inside it, and in no frame within, belongs to the level."""

MAX_DEPTH: Final = 32
"""Frames on the stack of a place whose mask is left to a device."""
MAX_OPENED: Final = 4
"""Brackets that one token may open there."""
MAX_BYTES = 512 << 10
"""Automata that take more are not finished."""
_UNBOUNDED = 1 << 40
GUARD_BIT: Final = 1 << 29
FOR_EVER: Final = (1 << 31) - 2
Int32Array = npt.NDArray[np.int32]
_CHOICE = -1
_MAX_RUN = 4096  # bytes


class EndBounds(NamedTuple):
    """How many bytes suffice to bring texts to their end."""

    most_within: int
    """To the end of any frame, from outside of those that it holds."""
    ahead: array[int]
    """By state, to the end of its frame from there and from whatever can follow within; unbounded where frames nest
    without end."""
    behind: array[int]
    """By symbol, behind the frame that was pushed, to the end of the one around it."""
    ahead_behind: array[int]
    """By symbol, the same from whatever can follow there."""


class FinishedAutomaton:
    """All of an automaton, in arrays: walked like one (`place.advance`), and never in need of more. No lists: a
    garbage collection looks at each of their items, 8 ms for those of 512 automata, and halts all threads."""

    def __init__(self, automaton: Automaton, bounds: EndBounds) -> None:
        self.tables = tables = automaton.tables.trimmed()  # it never grows, and is sent between processes
        self.start = start_of(automaton)
        self._bounds = bounds
        self.arrays = device_arrays(tables, automaton.plain_limits())
        live = tables.entries[: tables.num_states][:, tables.classes] >= 0
        counts = live.sum(1)
        accepting = tables.accepting[: tables.num_states]
        only = np.where((counts == 1) & ~accepting, live.argmax(1), _CHOICE)
        self.only_byte = _integers(only)
        """By state, the one byte that leads on where the text may not end; negative where there is a choice."""
        behind = tables.entries[np.arange(len(only)), tables.classes[only]]
        self._only_state = _integers(np.where((only >= 0) & (behind <= TARGET_MASK), behind, _CHOICE))
        """By state, where that byte leads; negative where more than the state changes."""
        self.is_last: bytes = (accepting & (counts == 0)).tobytes()
        """By state, whether the text is complete and nothing can follow."""

    @property
    def nbytes(self) -> int:
        """The size of its arrays on a device, or a little more."""
        tables = self.tables
        of_states = tables.num_states * (4 * tables.num_classes + 36)
        return of_states + 4 * (tables.num_symbols + 1) * (tables.num_results + 1) + 2048

    @property
    def max_bytes_to_end(self) -> int:
        """An upper bound of `bytes_to_end` at every place that a text can reach."""
        return self._bounds.ahead[self.start.state]

    def bytes_to_end(self, place: Place, most_opened: int) -> int:
        """So many bytes suffice to end the text behind every token that may follow at a place and opens at most so
        many frames."""
        most_within, ahead, behind, ahead_behind = self._bounds
        if place.stack is None:
            return min(ahead[place.state], (most_opened + 1) * most_within)
        frames = []
        frame: Frame | None = place.stack
        while frame is not None:
            frames.append(frame.symbol)
            frame = frame.parent
        outer = sum(behind[symbol] for symbol in frames)
        one_token = outer + (most_opened + 1) * most_within
        most = outer + ahead[place.state]
        for symbol in frames:
            outer -= behind[symbol]
            most = max(most, outer + ahead_behind[symbol])
        return min(most, one_token)

    def run(self, place: Place) -> tuple[bytes, Place]:
        """What every continuation of a place begins with, and where it leads."""
        forced = bytearray()
        state = place.state
        while len(forced) < _MAX_RUN and (byte := self.only_byte[state]) >= 0:
            forced.append(byte)
            if self._only_state[state] >= 0:
                state = self._only_state[state]
                continue
            following = advance(self, place._replace(state=state), bytes([byte]))
            assert following is not None, "the byte leads on"
            place, state = following, following.state
        return bytes(forced), place._replace(state=state)

    def next_bytes(self, place: Place) -> list[int]:
        """The bytes that may follow a place."""
        found: list[int] = (self.tables.entries[place.state][self.tables.classes] >= 0).nonzero()[0].tolist()
        return found

    def expand(self, state: int) -> None:
        """As `Automaton.expand`: there is nothing left to do."""

    def returned(self, symbol: int, result: int) -> int:
        """As `Automaton.returned`."""
        return self.tables.returns.item(symbol, result)


def _integers(values: npt.NDArray[np.integer[Any]]) -> array[int]:
    return array("i", values.astype(np.intc).tobytes())


def device_arrays(tables: Tables, plain_limits: npt.NDArray[np.int64]) -> list[Int32Array]:
    """An automaton with these tables and limits (see `Automaton.plain_limits`), as a device walks it: entries [S, C];
    classes [256]; of each state [S, 8] its guard, symbols, limit (FOR_EVER if it is endless), and whether it accepts;
    and returns. Wherever a state is a guard, GUARD_BIT says so.
    """
    num_states = tables.num_states
    guards = tables.guards[:num_states].copy()
    is_guard = guards[:, LIMIT] >= 0
    for column in (BELOW, AT):
        guards[is_guard, column] |= np.where(is_guard[guards[is_guard, column]], GUARD_BIT, 0)
    entries = tables.entries[:num_states, : tables.num_classes].copy()
    stays = (entries >= 0) & (entries & (PUSH_BIT | POP_BIT) == 0)
    entries[stays] |= np.where(is_guard[entries[stays] & TARGET_MASK], GUARD_BIT, 0)
    returns = tables.returns[: max(tables.num_symbols, 1), : max(tables.num_results, 1)].copy()
    returns[returns >= 0] |= np.where(is_guard[returns[returns >= 0]], GUARD_BIT, 0)
    states = np.empty((num_states, 8), np.int32)
    states[:, :4] = guards[:, [LIMIT, COUNTER, BELOW, AT]]
    states[:, 4:6] = tables.symbols[:num_states]
    states[:, 6] = np.where(plain_limits == ENDLESS, FOR_EVER, plain_limits.clip(max=FOR_EVER - 1))
    states[:, 7] = tables.accepting[:num_states]
    return [entries, tables.classes.astype(np.int32), states, returns]


class Configuration(NamedTuple):
    """A place in a finished automaton, for a device to walk its arrays from."""

    automaton: FinishedAutomaton
    place: Place


def finish(automaton: Automaton, max_states: int) -> FinishedAutomaton | None:
    """All of an automaton; None if there are more than `max_states`, or more than MAX_BYTES of them, or if they are not
    all that there is to its places. Raises GrammarTooLarge as `Automaton.expand` does."""
    reach = _Reach(automaton, max_states)
    if not reach.run() or automaton.has_unique_texts:
        return None
    finished = FinishedAutomaton(automaton, reach.bounds())
    return finished if finished.nbytes <= MAX_BYTES else None


def complete(automaton: Automaton, max_states: int) -> bool:
    """Expand every state that a text can reach, and every return. False, and some of it left undone, if there are more
    than `max_states`. Raises GrammarTooLarge as `Automaton.expand` does.
    """
    return _Reach(automaton, max_states).run()


class _Reach:
    def __init__(self, automaton: Automaton, max_states: int) -> None:
        self.automaton = automaton
        self.max_states = max_states
        self.seen: set[tuple[Level, int]] = set()
        self.waiting: list[tuple[Level, int]] = []
        self.callers: dict[Level, set[tuple[Level, int]]] = {}
        """By level: the levels that open it, and the symbols they push."""
        self.results: dict[Level, set[int]] = {}

    def run(self) -> bool:
        start = self.automaton.start
        self._reach(start, start)
        while self.waiting:
            if len(self.automaton) > self.max_states:
                return False
            self._expand(*self.waiting.pop())
        return True

    def bounds(self) -> EndBounds:
        """How far the ends of texts can be. To be called when all has run."""
        finish, num_symbols = ShortestEnds(self.automaton), self.automaton.tables.num_symbols
        states: dict[Level, dict[int, int]] = {}  # and what suffices to end the level there
        seen = list(self.seen)
        sizes = finish.max_bytes_within(np.array([state for _, state in seen], np.int32)).tolist()
        for (level, state), size in zip(seen, sizes, strict=True):
            states.setdefault(level, {})[state] = size
        most_within = max(max(its_states.values()) for its_states in states.values())
        behind, ahead_behind = [0] * num_symbols, [0] * num_symbols
        calls: dict[Level, set[Level]] = {level: set() for level in states}
        for inner, callers in self.callers.items():
            for level, symbol in callers:
                calls[level].add(inner)
                for state in self._behind(symbol, inner):
                    behind[symbol] = max(behind[symbol], states[level][state])
        ahead = [0] * self.automaton.tables.num_states
        most = dict.fromkeys(states, _UNBOUNDED)
        waiting = set(states)
        while ready := [level for level in waiting if waiting.isdisjoint(calls[level])]:
            for level in ready:
                found = self._ahead(states[level], behind, most)
                most[level] = max(found.values())
                states[level] = found
            waiting.difference_update(ready)
        for level, its_states in states.items():
            for state, value in its_states.items():
                ahead[state] = max(ahead[state], _UNBOUNDED if level in waiting else value)
        for inner, callers in self.callers.items():
            for _, symbol in callers:
                ahead_behind[symbol] = max([ahead[state] for state in self._behind(symbol, inner)], default=0)
        return EndBounds(most_within, *(array("q", values) for values in (ahead, behind, ahead_behind)))

    def _ahead(self, within: dict[int, int], behind: list[int], most: dict[Level, int]) -> dict[int, int]:
        """By state of a level, the most that suffices to end it from whatever can follow."""
        tables = self.automaton.tables
        values = dict(within)
        before: dict[int, list[int]] = {state: [] for state in within}
        for state in within:
            for column, bracket in enumerate((OPEN_BRACE, OPEN_BRACKET)):
                entry = tables.entries.item(state, tables.class_of[bracket])
                if entry >= 0 and entry & PUSH_BIT:
                    symbol, inner = tables.symbols.item(state, column), entry & TARGET_MASK
                    values[state] = max(values[state], behind[symbol] + most[inner])
                    for following in self._behind(symbol, inner):
                        before[following].append(state)
            for entry in set(tables.entries[state, : tables.num_classes].tolist()):
                if entry >= 0 and not entry & (PUSH_BIT | POP_BIT):
                    for following in _sides(tables.guards, entry & TARGET_MASK):
                        before[following].append(state)
        found: dict[int, int] = {}
        for state in sorted(within, key=values.__getitem__, reverse=True):
            reached = [state]
            while reached:
                one = reached.pop()
                if one not in found:
                    found[one] = values[state]
                    reached += before[one]
        return found

    def _behind(self, symbol: int, inner: Level) -> list[int]:
        """The states that can stand behind a frame."""
        tables = self.automaton.tables
        results = self.results.get(inner, ())
        return [state for one in results for state in _sides(tables.guards, tables.returns.item(symbol, one))]

    def _expand(self, level: Level, state: int) -> None:
        tables = self.automaton.tables
        self.automaton.expand(state)
        for column, bracket in enumerate((OPEN_BRACE, OPEN_BRACKET)):
            entry = tables.entries.item(state, tables.class_of[bracket])
            if entry >= 0 and entry & PUSH_BIT:
                self._call(level, tables.symbols.item(state, column), entry & TARGET_MASK)
        for entry in set(tables.entries[state, : tables.num_classes].tolist()):
            if entry < 0 or entry & PUSH_BIT:
                continue
            target = entry & TARGET_MASK
            if entry & POP_BIT:
                self._close(level, target)
            else:
                self._reach(level, target)

    def _call(self, level: Level, symbol: int, inner: Level) -> None:
        callers = self.callers.setdefault(inner, set())
        if (level, symbol) not in callers:
            callers.add((level, symbol))
            self._reach(inner, inner)
            for result in tuple(self.results.get(inner, ())):
                self._return(level, symbol, result)

    def _close(self, level: Level, result: int) -> None:
        results = self.results.setdefault(level, set())
        if result not in results:
            results.add(result)
            for caller, symbol in tuple(self.callers.get(level, ())):
                self._return(caller, symbol, result)

    def _return(self, level: Level, symbol: int, result: int) -> None:
        found = self.automaton.tables.returns.item(symbol, result)
        self._reach(level, self.automaton.returned(symbol, result) if found == UNKNOWN else found)

    def _reach(self, level: Level, state: int) -> None:
        """Both sides of a guard count as reached: which one it is depends on counts."""
        guard = self.automaton.tables.guards[state]
        if guard[LIMIT] >= 0:
            self._reach(level, int(guard[BELOW]))
            self._reach(level, int(guard[AT]))
        elif (level, state) not in self.seen:
            self.seen.add((level, state))
            self.waiting.append((level, state))


def _sides(guards: npt.NDArray[np.int32], guard: int) -> list[int]:
    """The states that a guard may stand for."""
    if guards[guard, LIMIT] < 0:
        return [guard]
    return _sides(guards, int(guards[guard, BELOW])) + _sides(guards, int(guards[guard, AT]))
