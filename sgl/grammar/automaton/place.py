"""Where a text stands in its grammar, as a value, and where bytes lead from there."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from sgl.grammar.automaton.pushdown import OPEN_BRACE, Automaton
from sgl.grammar.automaton.tables import (
    COUNT_SHIFT,
    DEAD,
    INC_CHAR,
    INC_ITEM,
    POP_BIT,
    PUSH_BIT,
    RESET_CHAR,
    TARGET_MASK,
    UNKNOWN,
    Tables,
)


class SeenTexts(NamedTuple):
    """What is remembered of a frame in which texts may not come twice; `unique_texts.py` keeps it."""

    text: bytes = b""
    """What has been read of one that is being read."""
    used: frozenset[bytes] = frozenset()


NONE_SEEN: Final = SeenTexts()


class Frame(NamedTuple):
    """One open object or array: what its end returns to."""

    parent: Frame | None
    symbol: int
    item_count: int
    """Commas of the frame that is returned to."""
    seen_texts: SeenTexts = NONE_SEEN
    """Those of the frame that is returned to."""


class Place(NamedTuple):
    """Where a text stands in its grammar."""

    state: int
    stack: Frame | None
    char_count: int
    item_count: int
    seen_texts: SeenTexts = NONE_SEEN


def start_of(automaton: Automaton) -> Place:
    """Where every text begins."""
    return Place(automaton.tables.landing(automaton.start, 0, 0), None, 0, 0)


class Walkable(Protocol):
    """What places are advanced in; see `Automaton`."""

    @property
    def tables(self) -> Tables:
        """What each byte does in each state, as far as that was worked out."""

    def expand(self, state: int) -> None:
        """Work out the row of a state."""

    def returned(self, symbol: int, result: int) -> int:
        """The state behind a frame that was pushed as `symbol` and closed with `result`."""


def advance(automaton: Walkable, place: Place, data: bytes) -> Place | None:
    """Where `data` leads from a place, or None if the automaton does not allow it; see `unique_texts.follow`."""
    tables = automaton.tables
    state, stack, char_count, item_count, _ = place
    for byte in data:
        entry = tables.entries.item(state, tables.class_of[byte])
        if entry == UNKNOWN:
            automaton.expand(state)
            entry = tables.entries.item(state, tables.class_of[byte])
        if entry <= TARGET_MASK:
            if entry == DEAD:
                return None
            state = entry
            continue
        if entry & PUSH_BIT:
            symbol = tables.symbols.item(state, 0 if byte == OPEN_BRACE else 1)
            stack = Frame(stack, symbol, item_count)
            item_count = 0
            state = entry & TARGET_MASK
            continue
        if entry & POP_BIT:
            assert stack is not None, "the outermost frame is never closed"
            state = automaton.returned(stack.symbol, entry & TARGET_MASK)
            item_count = stack.item_count
            stack = stack.parent
            continue
        operation = entry >> COUNT_SHIFT
        if operation & RESET_CHAR:
            char_count = 0
        char_count += operation & INC_CHAR
        item_count += (operation & INC_ITEM) != 0
        state = tables.landing(entry & TARGET_MASK, char_count, item_count)
    return Place(state, stack, char_count, item_count)
