"""Whether looks for drafts pay where steps have to wait for them: the tokens that steps behind a look give in their
time, beside those that others give in theirs.

What a look costs and gives is more than its own time and drafts. A step that waits does not run ahead; but it also
computes what is certain behind the latest token at once, where one that ran ahead would have computed in vain.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sgl.runtime.speculate.budget import LONGEST_STEP, SHORTEST_STEP, size_of

_FADE = {True: 0.9, False: 0.95}  # of what was seen of steps behind a look, and of others, with each more
_MOST_LONGER = (
    4.0  # a step counts as at most so many times the mean one: others had the processor; and the other way
)
_BLIND = 16  # looks, while no step behind one could be measured


@dataclass(slots=True)
class _Seen:
    """Of steps of one kind, the latest of which count most."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    has_begun: bool = False
    asked: int = 0  # before any was seen

    def add(self, num_tokens: int, seconds: float, fade: float) -> None:
        if not self.has_begun:  # the first one may have taken any time
            self.has_begun = True
            return
        seconds = min(max(SHORTEST_STEP, seconds), LONGEST_STEP)
        if self.steps:
            self.seconds = min(self.seconds, _MOST_LONGER * seconds * self.steps)
            seconds = min(seconds, _MOST_LONGER * self.seconds / self.steps)
        self.steps = self.steps * fade + 1
        self.tokens = self.tokens * fade + num_tokens
        self.seconds = self.seconds * fade + seconds


class Looks:
    """Of one engine, by rows."""

    def __init__(self) -> None:
        self._seen: defaultdict[tuple[int, bool], _Seen] = defaultdict(_Seen)

    def saw(self, num_rows: int, num_tokens: int, seconds: float, *, looked: bool) -> None:
        """A step of so many rows gave so many tokens, that long behind the one before. looked: for drafts, before
        it."""
        self._seen[size_of(num_rows), looked].add(num_tokens, seconds, _FADE[looked])

    def rest(self, num_rows: int) -> None:
        """There are none for a while: what is seen of them then counts more than what was."""
        behind = self._seen[size_of(num_rows), True]
        behind.steps, behind.tokens, behind.seconds = behind.steps / 2, behind.tokens / 2, behind.seconds / 2

    def pay(self, num_rows: int) -> bool:
        """Whether they do; as long as nobody knows, a few do."""
        behind, others = (self._seen[size_of(num_rows), looked] for looked in (True, False))
        if not behind.steps:
            behind.asked += 1
            return behind.asked <= _BLIND
        return behind.tokens * others.seconds >= others.tokens * behind.seconds
