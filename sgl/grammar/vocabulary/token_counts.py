"""How many tokens spell a text, at least."""

from __future__ import annotations

from typing import Final

from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.time_limit import check_time

UNSPELLABLE: Final = 1 << 40
"""Of a text that no tokens spell, at least so many."""
_OFTEN = 256  # bytes between two looks at the time


class TokenCounts:
    """Counts for one vocabulary. What was found of a text's end is used again for the next: ends of one document are
    mostly the same."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._lengths = vocabulary.lengths_by_beginning
        self._text = b""
        self._counts = [0]
        self.steps = 0
        """How many bytes of texts were looked at, for measurements."""

    def of(self, text: bytes) -> list[int]:
        """The least number of tokens that spell each end of a text, text[i:]: [len(text) + 1]."""
        same = _common_end(text, self._text)
        left = len(text) - same
        counts = [0] * left + self._counts[len(self._text) - same :]
        ids, lengths, size = self._ids, self._lengths, len(text)
        self.steps += left
        for start in range(left - 1, -1, -1):
            if not start % _OFTEN:
                check_time()
            best = UNSPELLABLE
            for length in lengths.get(text[start : start + 2], _ONE):
                end = start + length
                if end <= size and counts[end] < best and text[start:end] in ids:
                    best = counts[end]
            counts[start] = 1 + best
        self._text, self._counts = text, counts
        return counts


_ONE = (1,)


def _common_end(one: bytes, other: bytes) -> int:
    """How many bytes two texts end with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.endswith(other[len(other) - middle :]):
            low = middle
        else:
            high = middle - 1
    return low
