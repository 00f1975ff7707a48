"""Whether a finished automaton's texts end without some bytes, which a model's vocabulary has no tokens of.

What a state does with such a byte, or with the character that it begins, a byte of the vocabulary's must do as well.
Then any text has another without them, no longer, at the same places: the shortest ends are still ends, and no place
is a dead one.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from sgl.grammar.automaton.tables import (
    AT,
    BELOW,
    COUNT_SHIFT,
    COUNTER,
    LIMIT,
    POP_BIT,
    PUSH_BIT,
    TARGET_MASK,
    Tables,
)

_CONTINUING = slice(0x80, 0xC0)
_LONGEST = 4  # bytes of a character
_MOST_EFFECTS = 256  # of one byte: more are not compared, which bounds the time
_Effect = Hashable
"""What one character does: its counter operations, where it leads, and what that depends on."""


def does_without(tables: Tables, missing: bytes) -> bool:
    """Whether that is so of complete tables. False, too, where it is only hard to see."""
    if not missing:
        return True
    try:
        return _Characters(tables, missing).all_have_others()
    except _TooMany:
        return False


class _TooMany(Exception):
    """There are more than _MOST_EFFECTS."""


class _Characters:
    def __init__(self, tables: Tables, missing: bytes) -> None:
        self._tables = tables
        number = tables.num_states
        self._rows = tables.entries[:number][:, tables.classes]  # [S, 256]
        live = self._rows >= 0
        continuing = live[:, _CONTINUING].any(1)
        self._is_within = (live.sum(1) == live[:, _CONTINUING].sum(1)) & continuing & ~tables.accepting[:number]
        self._missing = np.frombuffer(missing, np.uint8)
        self._known: dict[tuple[int, int], frozenset[_Effect]] = {}
        self._known_ends: dict[tuple[int, int], frozenset[_Effect]] = {}

    def all_have_others(self) -> bool:
        lacking = self._rows[:, self._missing]
        others = self._rows.copy()
        others[:, self._missing] = -1
        for state in np.flatnonzero((lacking >= 0).any(1)).tolist():
            asked = _entries(lacking[state])
            offered = _entries(others[state])
            if asked <= offered:
                continue
            effects = {effect for entry in offered for effect in self._effects(entry, 1)}
            if not all(self._effects(entry, _LONGEST) <= effects for entry in asked):
                return False
        return True

    def _effects(self, entry: int, most_bytes: int) -> frozenset[_Effect]:
        """What a character of at most so many bytes does whose first byte has this entry."""
        key = entry, most_bytes
        if key not in self._known:
            if entry & (PUSH_BIT | POP_BIT):
                found: set[_Effect] = {entry}
            else:
                operation = entry >> COUNT_SHIFT
                found = {(operation, end) for end in self._ends(entry & TARGET_MASK, most_bytes - 1)}
            self._known[key] = frozenset(found)
        return self._known[key]

    def _ends(self, state: int, more_bytes: int) -> frozenset[_Effect]:
        """Where a character may end that has come to a state or guard."""
        key = state, more_bytes
        if key not in self._known_ends:
            found = frozenset(self._found_ends(state, more_bytes))
            if len(found) > _MOST_EFFECTS:
                raise _TooMany
            self._known_ends[key] = found
        return self._known_ends[key]

    def _found_ends(self, state: int, more_bytes: int) -> set[_Effect]:
        guard = self._tables.guards[state]
        if guard[LIMIT] >= 0:
            name = int(guard[LIMIT]), int(guard[COUNTER])
            below, at = (self._ends(int(guard[side]), more_bytes) for side in (BELOW, AT))
            return {(*name, one, other) for one in below for other in at}
        if not self._is_within[state] or more_bytes == 0:
            return {state}
        entries = _entries(self._rows[state, _CONTINUING])
        if max(entries) > TARGET_MASK:  # counts within a character: not one of ours
            return {("within", state)}
        return {end for entry in entries for end in self._ends(entry, more_bytes - 1)}


def _entries(row: np.ndarray[tuple[int], np.dtype[np.int32]]) -> set[int]:
    return {entry for entry in row.tolist() if entry >= 0}
