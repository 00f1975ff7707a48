"""What a walk is, in NumPy: all tokens step together, byte by byte. `walk.c` does the same many times faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton import tables
from sgl.grammar.automaton.place import Frame, Place
from sgl.grammar.automaton.pushdown import OPEN_BRACE, Automaton
from sgl.grammar.matching.walk_plan import ANY_COUNT, Mask, Plan, allow
from sgl.time_limit import check_time

Int64Array = npt.NDArray[np.int64]
_TOKEN, _DEPTH, _STATE, _TOP, _CHARS, _CHARS_SOURCE, _ITEMS, _ITEMS_SOURCE = range(8)
_FIXED = -1
"""Source of a count that does not go on from one at the place; else 0 is its own, i that of its i-th frame."""


class Reference:
    """One walk by a plan."""

    def __init__(self, automaton: Automaton, place: Place, plan: Plan) -> None:
        self.automaton, self.place, self.plan = automaton, place, plan
        self.frames: dict[tuple[int, int, int, int], int] = {}
        """Those opened on the way, to their numbers: what is below (-1 - i: the place with i frames closed), symbol,
        and the count of items that its end returns to, with its source."""
        self.own: list[Frame] = []  # the place's, from the top
        while (frame := self.own[-1].parent if self.own else place.stack) is not None:
            self.own.append(frame)
        self.num_closed = 0
        self.bounds = {(True, 0): plan.chars}
        """By whether characters are counted, and by source."""

    def run(self, num_tokens: int | None) -> Mask:
        """Carry out the plan; tokens are grouped if their number is given."""
        automaton, trie, plan = self.automaton, self.plan.trie, self.plan
        known = automaton.tables
        lanes, ended, seen = self._lanes(), [np.zeros((0, 8), np.int64)], set(plan.seen)
        while len(lanes):
            check_time()
            states = lanes[:, _STATE]
            for state in np.unique(states[known.entries[states, 0] == tables.UNKNOWN]).tolist():
                automaton.expand(state)
            byte = trie.data[trie.starts[lanes[:, _TOKEN]] + lanes[:, _DEPTH]]
            entries = known.entries[states, known.classes[byte]].astype(np.int64)
            alive = entries >= 0
            lanes, byte, entries = lanes[alive], byte[alive], entries[alive]
            moved = np.flatnonzero(entries & (tables.PUSH_BIT | tables.POP_BIT))
            before = lanes[moved, _STATE].tolist()
            lanes[:, _STATE] = entries & tables.TARGET_MASK
            lanes[:, _DEPTH] += 1
            for i, state in zip(moved.tolist(), before, strict=True):
                self._move(lanes[i], entries.item(i), state, 0 if byte[i] == OPEN_BRACE else 1)
            operations = entries >> tables.COUNT_SHIFT
            operations[moved] = 0
            is_reset = (operations & tables.RESET_CHAR) != 0
            lanes[is_reset, _CHARS], lanes[is_reset, _CHARS_SOURCE] = 0, _FIXED
            lanes[:, _CHARS] += operations & tables.INC_CHAR
            lanes[:, _ITEMS] += (operations & tables.INC_ITEM) != 0
            self._land(lanes)
            seen.update(np.unique(lanes[:, _STATE]).tolist())
            is_over = lanes[:, _DEPTH] == trie.lengths[lanes[:, _TOKEN]]
            ended.append(lanes[is_over])
            lanes = lanes[~is_over]
        found = np.concatenate(ended)
        allow(plan.row, trie.ids[found[:, _TOKEN]])
        items = [self.bounds.get((False, source), ANY_COUNT) for source in range(self.num_closed + 1)]
        opened = [(below, symbol) for below, symbol, _, _ in self.frames]
        came_to = np.array(sorted(seen), np.int32)
        result = Mask(plan.row, self.bounds[True, 0], items, came_to, opened, plan.longest_word, None, [])
        if num_tokens is not None:
            result.group_of = np.full(num_tokens, -1, np.int32)
            where = found[:, [_STATE, _TOP, _CHARS, _ITEMS]]
            for key in np.unique(where, axis=0):
                result.add_group(trie.ids[found[(where == key).all(axis=1), _TOKEN]])
        return result

    def _lanes(self) -> Int64Array:
        """[n, 8]: the tokens that are walked, each where it starts."""
        trie, place = self.plan.trie, self.place
        nodes, ends, chars = self.plan.starts.T
        low, high = np.searchsorted(trie.last, nodes), np.searchsorted(trie.last, ends)
        start = np.repeat(np.arange(len(nodes)), high - low)
        token = np.arange(len(start)) + np.repeat(low - np.cumsum(high - low) + high - low, high - low)
        lanes = np.zeros((len(token), 8), np.int64)
        lanes[:, _TOKEN] = token
        lanes[:, _DEPTH] = trie.depth[nodes[start]] - 1
        lanes[:, _CHARS] = place.char_count + chars[start]
        limits, states = np.array([*self.plan.regions, (ANY_COUNT[1] + 1, -1)], np.int64).T
        lanes[:, _STATE] = states[np.searchsorted(limits, lanes[:, _CHARS], side="right")]
        lanes[:, _TOP] = -1
        lanes[:, _ITEMS] = place.item_count
        return lanes[lanes[:, _STATE] >= 0]

    def _move(self, lane: Any, entry: int, before: int, bracket: int) -> None:
        """Push or pop."""
        top = lane.item(_TOP)
        if entry & tables.PUSH_BIT:
            symbol = self.automaton.tables.symbols.item(before, bracket)
            frame = top, symbol, lane.item(_ITEMS), lane.item(_ITEMS_SOURCE)
            lane[_TOP] = self.frames.setdefault(frame, len(self.frames))
            lane[_ITEMS], lane[_ITEMS_SOURCE] = 0, _FIXED
            return
        if top >= 0:
            top, symbol, items, source = list(self.frames)[top]
        else:
            source, own = -top, self.own[-top - 1]
            symbol, items, top = own.symbol, own.item_count, top - 1
            self.num_closed = max(self.num_closed, source)
        lane[_STATE] = self.automaton.returned(symbol, entry & tables.TARGET_MASK)
        lane[_TOP], lane[_ITEMS], lane[_ITEMS_SOURCE] = top, items, source

    def _land(self, lanes: Int64Array) -> None:
        """Go on from guards to the states that they stand for, and note at which counts they do."""
        guards = self.automaton.tables.guards
        waiting = np.flatnonzero(guards[lanes[:, _STATE], tables.LIMIT] >= 0)
        while len(waiting):
            guard = guards[lanes[waiting, _STATE]].astype(np.int64)
            of_chars = guard[:, tables.COUNTER] == tables.CHARS
            count = np.where(of_chars, lanes[waiting, _CHARS], lanes[waiting, _ITEMS])
            source = np.where(of_chars, lanes[waiting, _CHARS_SOURCE], lanes[waiting, _ITEMS_SOURCE])
            is_at = count >= guard[:, tables.LIMIT]
            turns = np.stack([guard[:, tables.LIMIT] - count, of_chars, source, is_at], axis=1)[source != _FIXED]
            for left, counts_chars, number, was_at in np.unique(turns, axis=0).tolist():
                self._bound(bool(counts_chars), number, left, was_at=bool(was_at))
            lanes[waiting, _STATE] = np.where(is_at, guard[:, tables.AT], guard[:, tables.BELOW])
            waiting = waiting[guards[lanes[waiting, _STATE], tables.LIMIT] >= 0]

    def _bound(self, of_chars: bool, source: int, left: int, *, was_at: bool) -> None:
        """A guard turns at `left` more than the count at the place."""
        place = self.place
        items = self.own[source - 1].item_count if source else place.item_count
        turn = left + (place.char_count if of_chars else items)
        low, high = self.bounds.get((of_chars, source), ANY_COUNT)
        self.bounds[of_chars, source] = (max(low, turn), high) if was_at else (low, min(high, turn - 1))
