"""Works out all of an automaton at once, where it is small enough: for walks that cannot stop to ask for more.

Follows calls as summaries: which results the frames opened in a state may close with, and so which states stand behind
them (Reps, Horwitz and Sagiv 1995).
"""

from __future__ import annotations

from sgl.grammar.automaton import Automaton
from sgl.grammar.tables import AT, BELOW, LIMIT, POP_BIT, PUSH_BIT, TARGET_MASK, UNKNOWN

Level = int
"""A frame by the state that it begins in; what stands inside it, and in no frame within, belongs to the level."""


def complete(automaton: Automaton, max_states: int) -> bool:
    """Expand every state that a text can reach, and every return. False, and some of it left undone, if there are more
    than `max_states`. Raises GrammarTooLarge as `Automaton.expand` does.
    """
    return _Closure(automaton, max_states).run()


class _Closure:
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

    def _expand(self, level: Level, state: int) -> None:
        tables = self.automaton.tables
        self.automaton.expand(state)
        for class_, entry in enumerate(tables.entries[state, : tables.num_classes].tolist()):
            if entry < 0:
                continue
            target = entry & TARGET_MASK
            if entry & PUSH_BIT:
                is_array = tables.class_of[ord("[")] == class_
                self._call(level, tables.symbols.item(state, int(is_array)), target)
            elif entry & POP_BIT:
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
        """Both sides of a gate count as reached: which one it is depends on counts."""
        gate = self.automaton.tables.gates[state]
        if gate[LIMIT] >= 0:
            self._reach(level, int(gate[BELOW]))
            self._reach(level, int(gate[AT]))
        elif (level, state) not in self.seen:
            self.seen.add((level, state))
            self.waiting.append((level, state))
