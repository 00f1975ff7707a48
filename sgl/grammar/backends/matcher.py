"""The common part of the matchers of llguidance and outlines-core.

Both read tokens, not bytes: the vocabulary's, then one token for each byte. Neither keeps to a token budget.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Self

from sgl.grammar.token_matcher import Int32Array, TokenMatcher
from sgl.grammar.vocabulary.tokens import Vocabulary


class BackendMatcher(TokenMatcher):
    """A `TokenMatcher` over a backend that reads tokens and takes them back."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._steps: list[int] = []  # one entry of `_go` for each accepted step
        self._is_finished = False

    @abstractmethod
    def _go(self, ids: list[int]) -> bool:
        """Accept all tokens, perhaps none, as one step, and append to `_steps`; False changes nothing."""

    @abstractmethod
    def _undo(self, steps: list[int]) -> None:
        """Take back the last steps, given by their entries."""

    def accept(self, token_id: int) -> bool:
        if self._is_finished or not 0 <= token_id < self._vocabulary.size:
            return False
        if token_id in self._vocabulary.eos_ids:
            self._is_finished = self.is_accepting() and self._go([])
            return self._is_finished
        return bool(self._vocabulary.text_bytes[token_id]) and self._go([token_id])

    def accept_bytes(self, data: bytes) -> bool:
        return not self._is_finished and self._go([self._vocabulary.size + byte for byte in data])

    def fill_mask(self, row: Int32Array, remaining: int | None = None) -> None:
        row[: self._vocabulary.words] = self.mask(remaining)

    def is_finished(self) -> bool:
        return self._is_finished

    def rollback(self, num_steps: int) -> None:
        if not 0 <= num_steps <= len(self._steps):
            raise ValueError(f"{num_steps} steps cannot be taken back, {len(self._steps)} were accepted")
        if num_steps:
            undone = self._steps[-num_steps:]
            del self._steps[-num_steps:]
            self._is_finished = False
            self._undo(undone)

    def copy(self) -> Self:
        other = copy.copy(self)
        other._steps = self._steps.copy()
        return other
