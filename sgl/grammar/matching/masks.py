"""Token masks, kept for the next time: found again at any depth and count that cannot tell the difference.

Knows nothing of requests; `walk.py` works the masks out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from time import thread_time

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.place import Place
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.matching.walk import Walker
from sgl.grammar.matching.walk_plan import Mask, allow, likeness
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.time_limit import time_limit

Int32Array = npt.NDArray[np.int32]
MASK_SECONDS = 0.5
"""CPU time that one mask may take: a step waits for it."""


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
        self._walker = Walker(automaton, vocabulary)

    def look_up(self, place: Place) -> Mask:
        """The mask at a place. Raises GrammarTooLarge if it takes more than `max_seconds`, and OutOfTime only past an
        enclosing `time_limit`."""
        num_frames = self._num_frames.get(place.state, 0)
        key = self._key(place, num_frames) if num_frames else (place.state,)
        for mask in self._masks.get(key, ()):
            if mask.holds(place):
                self._masks.move_to_end(key)
                return mask
        with self.in_time():
            mask = self._compute(place)
        num_frames = max(num_frames, len(mask.items) - 1)
        self._num_frames[place.state] = num_frames
        self._keep(self._key(place, num_frames), mask)
        return mask

    def in_time(self) -> AbstractContextManager[None]:
        """A block in which one mask is worked out, or a part of one."""
        message = f"one token's mask takes more than {self.max_seconds:g} s to find: make the constraint simpler"
        return time_limit(self.max_seconds, thread_time, too_long=message)

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
        like = likeness(self.automaton, place)
        if like is None:
            mask = self._walker.walk(place)
        else:
            state, first = like
            mask = self._walker.walk_beside(place, self.look_up(place._replace(state=state)), first)
        if self.automaton.tables.accepting[place.state]:
            allow(mask.row, np.array(self.vocabulary.eos_ids, np.int32))
        mask.row.flags.writeable = False
        return mask
