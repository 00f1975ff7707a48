"""Token masks, kept for the next time: found again at any depth and count that cannot tell the difference.

Knows nothing of requests; `walk.py` works the masks out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from time import thread_time

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton import Automaton
from sgl.grammar.place import Place
from sgl.grammar.time_limit import time_limit
from sgl.grammar.vocabulary import Vocabulary
from sgl.grammar.walk import ANY_COUNT, Walk

Int32Array = npt.NDArray[np.int32]
MASK_SECONDS = 0.5
"""CPU time that one mask may take: a step waits for it."""


@dataclass(slots=True)
class Mask:
    """A mask and the places it holds for: counts of characters and of items (of the top frame, then of the ones
    below) within their bounds, first and last included."""

    row: Int32Array  # [words], read-only
    num_frames: int
    chars: tuple[int, int]
    items: tuple[tuple[int, int], ...]  # [num_frames + 1]
    came_through: Int32Array
    """The states that its tokens came through, and lead to."""
    opened: list[tuple[int, int]]
    """The frames that they open: of each the one around it, negative for those of the place, and its symbol."""
    longest_word: int
    """In a long list of words: bytes of the longest, which was not followed state by state; else 0."""
    growth: int | None = None
    most_behind: int | None = None
    """What `budget.py` found out about the mask."""

    def holds(self, place: Place) -> bool:
        """Whether the counts of a place with the same states and symbols are within the bounds."""
        if not self.chars[0] <= place.char_count <= self.chars[1]:
            return False
        low, high = self.items[0]
        if not low <= place.item_count <= high:
            return False
        frame = place.stack
        for low, high in self.items[1:]:
            assert frame is not None
            if not low <= frame.item_count <= high:
                return False
            frame = frame.parent
        return True


def without(row: Int32Array, token_ids: Iterable[int]) -> Int32Array:
    """A copy of a mask that allows none of some tokens."""
    row = row.copy()
    for token_id in token_ids:
        row[token_id // 32] &= ~np.left_shift(1, token_id % 32, dtype=np.int32)
    return row


class MaskCache:
    """The masks of one automaton over one vocabulary, the least recently used dropped beyond `max_bytes`."""

    def __init__(
        self, automaton: Automaton, vocabulary: Vocabulary, max_bytes: int, max_seconds: float = MASK_SECONDS
    ) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds
        """CPU time that one mask may take."""
        self.num_bytes = 0
        self.walks = 0
        """How many masks were computed, for measurements."""
        self._masks: OrderedDict[tuple[int, ...], list[Mask]] = OrderedDict()
        self._num_frames: dict[int, int] = {}
        self._allowed = np.zeros(vocabulary.words * 32, np.bool_)

    def find(self, place: Place) -> Mask:
        """The mask at a place. Raises GrammarTooLarge if it takes more than `max_seconds`."""
        num_frames = self._num_frames.get(place.state, 0)
        key = self._key(place, num_frames) if num_frames else (place.state,)
        for mask in self._masks.get(key, ()):
            if mask.holds(place):
                self._masks.move_to_end(key)
                return mask
        with time_limit(self.max_seconds, thread_time):
            mask = self._compute(place)
        if mask.num_frames > self._num_frames.get(place.state, 0):
            self._num_frames[place.state] = mask.num_frames
        self._keep(self._key(place, self._num_frames.get(place.state, 0)), mask)
        return mask

    def row(self, place: Place) -> Int32Array:
        """The mask at a place, [words], not to be written to."""
        return self.find(place).row

    def _key(self, place: Place, num_frames: int) -> tuple[int, ...]:
        key = [place.state]
        frame = place.stack
        while num_frames and frame is not None:
            key.append(frame.symbol)
            frame = frame.parent
            num_frames -= 1
        return tuple(key)

    def _keep(self, key: tuple[int, ...], mask: Mask) -> None:
        self._masks.setdefault(key, []).append(mask)
        self._masks.move_to_end(key)
        self.num_bytes += mask.row.nbytes
        while self.num_bytes > self.max_bytes and len(self._masks) > 1:
            _, dropped = self._masks.popitem(last=False)
            self.num_bytes -= sum(old.row.nbytes for old in dropped)

    def _compute(self, place: Place) -> Mask:
        self.walks += 1
        had_counters = self.automaton.has_counters
        walk = Walk(self.automaton, self.vocabulary, place, self._allowed, counts=had_counters)
        walk.run()
        if self.automaton.has_counters and not had_counters:
            # The first gate was met on the way, so counts were not kept.
            self._allowed[:] = False
            walk = Walk(self.automaton, self.vocabulary, place, self._allowed, counts=True)
            walk.run()
        if self.automaton.tables.accepting[place.state]:
            self._allowed[list(self.vocabulary.eos_ids)] = True
        row = np.packbits(self._allowed, bitorder="little").view(np.int32)
        row.flags.writeable = False
        self._allowed[:] = False
        items = [ANY_COUNT] * (walk.num_frames + 1)
        for source, bounds in walk.item_bounds.items():
            items[source] = bounds
        opened = [(around, symbol) for around, symbol, _, _ in walk.frames]
        came_through = np.fromiter(walk.visited, np.int32)
        return Mask(row, walk.num_frames, walk.char_bounds, tuple(items), came_through, opened, walk.longest_word)
