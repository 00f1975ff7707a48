"""One request's cursor in a grammar.

Knows where the text so far stands; the automaton and the masks are shared with every other cursor of the grammar.
Going back and copying cost nothing, since places are values.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.place import Place, start_of
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.matching.budget import FAR, Budget
from sgl.grammar.matching.masks import MaskCache
from sgl.grammar.matching.unique_texts import follow, hold_back
from sgl.grammar.vocabulary.tokens import Vocabulary

Int32Array = npt.NDArray[np.int32]
_MAX_FORCED = 4096


class Matcher:
    """Where one text stands in its grammar. Only one matcher of a grammar may be in use at a time."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary, masks: MaskCache, budget: Budget) -> None:
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._masks = masks
        self._budget = budget
        self._promise: bytes | None = None
        """What the last mask that kept to a budget promised to end the document with, if it still can."""
        self._place = start_of(automaton)
        self._history: list[Place | None] = []
        """Places before each accepted step; None stands for the end of the text having been accepted."""
        self._is_finished = False

    @property
    def num_bytes(self) -> int:
        """The size of what is kept for budgets, at most."""
        return self._budget.num_bytes

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changed, if the grammar does not allow it.

        An end-of-sequence token is allowed where the grammar accepts, and nothing behind it.
        """
        if self._is_finished or not 0 <= token_id < self._vocabulary.size:
            return False
        if token_id in self._vocabulary.eos_ids:
            if not self.is_accepting():
                return False
            self._history.append(None)
            self._is_finished = True
            return True
        data = self._vocabulary.token_bytes[token_id]
        promise = self._promise
        if not data or not self.accept_bytes(data):
            return False
        self._promise = promise[len(data) :] if promise is not None and promise.startswith(data) else None
        return True

    def accept_bytes(self, data: bytes) -> bool:
        """Go on by bytes, all of them or none; they count as one step for `rollback`."""
        if self._is_finished:
            return False
        place = follow(self._automaton, self._place, data)
        if place is None:
            return False
        self._history.append(self._place)
        self._place = place
        self._promise = None
        return True

    def fill_mask(self, row: Int32Array, remaining: int | None = None) -> None:
        """Write the token bitmask, [ceil(V / 32)]: bit i % 32 of word i // 32 is 1 if token i is allowed next.

        `remaining` is how many tokens may still be generated, this one included and without an end-of-sequence
        token: near the end the mask keeps only tokens from which the document can still be completed, or, if it
        can no more, the ones that come nearest. Budgets beyond 1,024 tokens restrict nothing. Raises
        GrammarTooLarge if the mask takes too long.
        """
        row[: self._vocabulary.words] = self.mask(remaining)

    def mask(self, remaining: int | None = None) -> Int32Array:
        """What `fill_mask` writes, [words], without a copy: the same array wherever the same mask was found again, so
        not to be written to.
        """
        if self._is_finished:
            return np.zeros(self._vocabulary.words, np.int32)
        mask = self._masks.look_up(self._place)
        if remaining is not None and remaining > FAR:
            remaining = None
        if remaining is None and not self._automaton.has_unique_texts:
            return mask.row
        with self._masks.in_time():
            row = hold_back(self._automaton, self._vocabulary, self._place, mask.row)
            if remaining is not None and not self._budget.is_ample(self._place, mask, remaining):
                row, self._promise = self._budget.restrict(self._place, row, remaining, self._promise)
        return row

    def shortest_end(self) -> bytes:
        """A short text that completes the document from here. Raises GrammarTooLarge if it has more than MAX_TEXT
        bytes."""
        return b"" if self._is_finished else self._budget.finish.end(self._place).text()

    def is_accepting(self) -> bool:
        """Whether the text may end here, or has ended."""
        return self._is_finished or self._automaton.tables.accepting.item(self._place.state)

    def is_finished(self) -> bool:
        """Whether an end-of-sequence token was accepted."""
        return self._is_finished

    def forced_bytes(self) -> bytes:
        """What every continuation begins with: empty where there is a choice, or where the text may end."""
        forced = bytearray()
        place = self._place
        automaton, tables = self._automaton, self._automaton.tables
        while len(forced) < _MAX_FORCED and not self._is_finished and not tables.accepting[place.state]:
            live = self._live(place)
            if len(live) != 1:
                break
            byte = bytes(live)
            following = follow(automaton, place, byte)
            if following is None:
                break
            forced += byte
            place = following
        return bytes(forced)

    def next_bytes(self) -> Iterable[int]:
        """The bytes that may come next, and some that may not where texts must differ from others."""
        return () if self._is_finished else self._live(self._place)

    def _live(self, place: Place) -> list[int]:
        self._automaton.expand(place.state)
        tables = self._automaton.tables
        found: list[int] = (tables.entries[place.state][tables.classes] >= 0).nonzero()[0].tolist()
        return found

    def rollback(self, num_steps: int) -> None:
        """Take back the last accepted steps; ValueError if there were fewer."""
        if not 0 <= num_steps <= len(self._history):
            raise ValueError(f"{num_steps} steps cannot be taken back, {len(self._history)} were accepted")
        self._promise = None
        for _ in range(num_steps):
            before = self._history.pop()
            if before is None:
                self._is_finished = False
            else:
                self._place = before

    def copy(self) -> Matcher:
        """A cursor at the same place that goes its own way."""
        other = object.__new__(type(self))  # `copy.copy` takes thrice as long
        other.__dict__.update(self.__dict__)
        other._history = self._history.copy()
        return other
