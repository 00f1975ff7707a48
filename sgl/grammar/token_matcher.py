"""What every backend's matcher can do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class TokenMatcher(Protocol):
    """Where one text stands in its constraint; `Matcher` says what each method means, and what the others lack."""

    @property
    def num_bytes(self) -> int:
        """About the size of what it shares with the other matchers of its grammar, as far as `Grammar` knows nothing
        of it."""

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changed, if it is not allowed."""

    def accept_bytes(self, data: bytes) -> bool:
        """Go on by bytes, all of them or none, as one step."""

    def fill_mask(self, row: Int32Array, remaining: int | None = None) -> None:
        """Write the token bitmask. Only our own keeps to a budget of `remaining` tokens."""

    def mask(self, remaining: int | None = None) -> Int32Array:
        """The token bitmask, [words], not to be written to."""

    def is_accepting(self) -> bool:
        """Whether the text may end here, or has ended."""

    def is_finished(self) -> bool:
        """Whether an end-of-sequence token was accepted."""

    def forced_bytes(self) -> bytes:
        """What every continuation begins with."""

    def next_bytes(self) -> Iterable[int]:
        """The bytes that may come next."""

    def shortest_end(self) -> bytes:
        """A short text that completes the document. Raises GrammarError where that is not known."""

    def rollback(self, num_steps: int) -> None:
        """Take back the last accepted steps; ValueError if there were fewer."""

    def copy(self) -> TokenMatcher:
        """A matcher at the same place that goes its own way."""
