"""Whether a byte may be a bracket of JSON in one reading of a text and plain text in another.

A stack moves by the byte alone, so nothing could tell which it is. Looks at texts outside of JSON values only: within
them, no other reading is alive.
"""

from __future__ import annotations

from typing import Final

from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.automaton.tables import AT, BELOW, LIMIT, POP_BIT, PUSH_BIT, TARGET_MASK

MOST_LOOKED_AT: Final = 20_000
"""States; what lies beyond tells when a text comes there."""


def check_brackets(automaton: Automaton) -> None:
    """Raise GrammarError where nothing tells a bracket from text."""
    tables = automaton.tables
    waiting, known = [automaton.start], {automaton.start}
    while waiting and len(known) < MOST_LOOKED_AT:
        state = waiting.pop()
        if tables.guards.item(state, LIMIT) >= 0:
            found = {tables.guards.item(state, BELOW), tables.guards.item(state, AT)}
        else:
            automaton.expand(state)
            entries = {entry for entry in tables.entries[state, : tables.num_classes].tolist() if entry >= 0}
            found = {entry & TARGET_MASK for entry in entries if not entry & (PUSH_BIT | POP_BIT)}
            for symbol in tables.symbols[state].tolist():
                if symbol >= 0:
                    found |= automaton.behind(symbol)
        waiting += found - known
        known |= found
