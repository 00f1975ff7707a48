"""The arrays of an automaton: all that a walk needs, on a CPU or, copied there, on a GPU.

**Configuration** of a text: `state`, a stack of frames `(symbol, item_count)`, and two counters `char_count`,
`item_count`; at first the automaton's start state, an empty stack, 0 and 0.

**One byte** b leads from a state s to `e = entries[s, classes[b]]`:

    e == DEAD (-1)      b is not allowed
    e == UNKNOWN (-2)   nobody has asked yet (the whole row is UNKNOWN then): `Automaton.expand(s)` works it out
    e & PUSH_BIT        push (symbols[s, b == "["], item_count); item_count = 0; the state is e & TARGET_MASK
    e & POP_BIT         pop (symbol, count); item_count = count; the state is returns[symbol, e & TARGET_MASK],
                        where UNKNOWN asks for `Automaton.returned`
    otherwise           by the bits above COUNT_SHIFT, RESET_CHAR: char_count = 0; INC_CHAR: char_count += 1;
                        INC_ITEM: item_count += 1 (of the top frame); then the state is e & TARGET_MASK

and while `guards[s, LIMIT] >= 0`, s is no place to stay but stands for `guards[s, AT]` if the counter that
`guards[s, COUNTER]` names (0 char_count, 1 item_count) is at least `guards[s, LIMIT]`, else for `guards[s, BELOW]`.
Only targets with counter operations can be guards. The text may end where `accepting[s]`; the stack is empty there.

States, symbols, results and classes are only ever added, and what is known never changes, except that bytes of one
class may come apart: their class keeps its number and the new one gets a copy of its column. So a copy is brought
up to date by `entries[:num_states, :num_classes]` and the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sgl.grammar.regular.byteset import bytes_of

Int32Array = npt.NDArray[np.int32]

DEAD: Final = -1
UNKNOWN: Final = -2
TARGET_BITS: Final = 24
TARGET_MASK: Final = (1 << TARGET_BITS) - 1
PUSH_BIT: Final = 1 << 24
POP_BIT: Final = 1 << 25
COUNT_SHIFT: Final = 26
INC_CHAR: Final = 1
"""Counter operations of a move: one more character of the string, the first of a string, one more item."""
RESET_CHAR: Final = 2
INC_ITEM: Final = 4
LIMIT, COUNTER, BELOW, AT = range(4)
"""The columns of `guards`."""
CHARS: Final = 0
"""Which counter a guard asks: characters of the current string, or commas of the current array."""
ITEMS: Final = 1
_FEW: Final = 32
_MANY: Final = 128


class Tables:
    """Arrays that grow; see above for what they mean.

    classes uint8 [256]; entries int32 [≥ num_states, ≥ num_classes]; symbols int32 [≥ num_states, 2], -1 where
    nothing is pushed; guards int32 [≥ num_states, 4], LIMIT -1 where there is none; accepting bool [≥ num_states];
    reads_unique bool [≥ num_states], where a text is read that may not come twice in its frame, see `unique_texts.py`;
    returns int32 [≥ num_symbols, ≥ num_results].
    """

    def __init__(self) -> None:
        self.num_states = 0
        self.num_classes = 1
        self._num_filled = 0  # rows that are set out, of states or of those to come
        self.num_symbols = 0
        self.num_results = 0
        self.has_counters = False
        self.has_unique_texts = False
        self.classes: npt.NDArray[np.uint8] = np.zeros(256, np.uint8)
        self.class_of: Sequence[int] = self.classes.data
        """`classes` again, faster to ask for one byte."""
        self.entries: Int32Array = np.empty((_MANY, 48), np.int32)
        self.symbols: Int32Array = np.empty((_MANY, 2), np.int32)
        self.guards: Int32Array = np.empty((_MANY, 4), np.int32)
        self.accepting: npt.NDArray[np.bool_] = np.empty(_MANY, np.bool_)
        self.reads_unique: npt.NDArray[np.bool_] = np.empty(_MANY, np.bool_)
        self.returns: Int32Array = np.full((4, 4), UNKNOWN, np.int32)
        self._members = [(1 << 256) - 1]  # of each class, as a set of bytes
        self._columns: dict[int, list[int]] = {}  # by set of bytes: its classes

    def trimmed(self) -> Tables:
        """A copy without room to grow."""
        other = copy(self)
        num_states = self.num_states
        other.entries = self.entries[:num_states, : self.num_classes].copy()
        other.symbols, other.guards = self.symbols[:num_states].copy(), self.guards[:num_states].copy()
        other.accepting, other.reads_unique = (
            self.accepting[:num_states].copy(),
            self.reads_unique[:num_states].copy(),
        )
        other.classes, other.class_of = self.classes.copy(), self.classes.tobytes()
        other.returns = self.returns[: max(self.num_symbols, 1), : max(self.num_results, 1)].copy()
        return other

    @property
    def nbytes(self) -> int:
        """The size of what is in use."""
        used = self.num_classes * 4 + self.symbols.itemsize * 2 + self.guards.itemsize * 4 + 2
        return self.num_states * used + self.num_symbols * self.num_results * 4 + 256

    def landing(self, state: int, char_count: int, item_count: int) -> int:
        """The state that a guard stands for at these counts; other states stand for themselves."""
        guards = self.guards
        while (limit := guards.item(state, LIMIT)) >= 0:
            count = char_count if guards.item(state, COUNTER) == CHARS else item_count
            state = guards.item(state, AT if count >= limit else BELOW)
        return state

    def grow_rows(self) -> None:
        """Make room for more states."""
        self.entries, self.symbols = _grown(self.entries, 2), _grown(self.symbols, 2)
        self.guards = _grown(self.guards, 2)
        self.accepting, self.reads_unique = _grown(self.accepting, 2), _grown(self.reads_unique, 2)

    def grow_columns(self) -> None:
        """Make room for more classes."""
        self.entries = _grown(self.entries, columns=1.5)

    def add_state(self, *, accepting: bool, reads_unique: bool = False) -> int:
        """A new state, its row unknown."""
        number = self.num_states
        if number == len(self.entries):
            self.grow_rows()
        if number == self._num_filled:
            self._fill(number + _FEW)
        self.accepting[number], self.reads_unique[number] = accepting, reads_unique
        self.has_unique_texts |= reads_unique
        self.num_states += 1
        return number

    def _fill(self, number: int) -> None:
        """Set out the rows of the next states, up to a number: many at once cost as much as one."""
        new = slice(self._num_filled, number)
        self.entries[new] = UNKNOWN
        self.symbols[new] = self.guards[new] = -1
        self._num_filled = number

    def add_symbol(self) -> int:
        """A new symbol to push."""
        if self.num_symbols == len(self.returns):
            self.returns = _grown(self.returns, 2)
        self.returns[self.num_symbols] = UNKNOWN
        self.num_symbols += 1
        return self.num_symbols - 1

    def add_result(self) -> int:
        """A new result of pops."""
        if self.num_results == self.returns.shape[1]:
            self.returns = _grown(self.returns, columns=1.5)
        self.returns[:, self.num_results] = UNKNOWN
        self.num_results += 1
        return self.num_results - 1

    def set_row(self, state: int, cells: dict[int, int]) -> None:
        """Fill the row of a state: each entry with its set of bytes; all others are dead."""
        columns = self._columns
        for mask in cells.values():
            if mask not in columns:
                columns[mask] = self._find_columns(mask)
        row = self.entries[state]
        row[: self.num_classes] = DEAD
        for entry, mask in cells.items():
            found = columns[mask]
            if len(found) == 1:  # for which NumPy is five times as fast
                row[found[0]] = entry
            else:
                row[found] = entry

    def _find_columns(self, mask: int) -> list[int]:
        """The classes of a set of bytes. Where it has some bytes of a class alone, they come into one of their own."""
        for old in range(self.num_classes):
            apart = self._members[old] & mask
            if apart and apart != self._members[old]:
                new = self.num_classes
                if new == self.entries.shape[1]:
                    self.grow_columns()
                self.entries[: self._num_filled, new] = self.entries[: self._num_filled, old]
                self._members[old] ^= apart
                self._members.append(apart)
                self.num_classes += 1
                for columns in self._columns.values():
                    if old in columns:
                        columns.append(new)
                self.classes[list(bytes_of(apart))] = new
        return [number for number, members in enumerate(self._members) if members & mask]


def _grown(array: npt.NDArray[Any], rows: int = 1, columns: float = 1) -> npt.NDArray[Any]:
    """So many times as large; what is new is not filled, so that no memory is touched before it is used."""
    height, *width = array.shape
    larger = np.empty((height * rows, *(int(size * columns) for size in width)), array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger
