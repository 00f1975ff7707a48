"""Scores candidates after one prefix with as few rows as their token trie allows.

The logits before a candidate's last token score it, so only paths to the deepest inner nodes need a row; shorter
candidates read theirs from a row that passes them. Candidates of one token each take a single row. Rows are
ordinary requests that share the prefix's pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sgl.runtime.batch import Int32Array
from sgl.runtime.scheduler.request import Request

Tokens = tuple[int, ...]


@dataclass(slots=True)
class TrieRow:
    """A computed path, and the token ids whose log-probabilities are wanted at every position."""

    path: Tokens
    last_tokens: list[int] = field(default_factory=list)


class CandidateTrie:
    """Candidates (at least one token each) after `prefix`. Without a prefix, first tokens have no score."""

    def __init__(self, prefix: Int32Array, candidates: Sequence[Tokens]) -> None:
        self._prefix = prefix
        self._candidates = candidates
        self._first = 0 if len(prefix) else 1  # index of the first scored token of a candidate
        paths = sorted({candidate[:-1] for candidate in candidates if len(candidate) > self._first})
        inner = {path for path, after in pairwise(paths) if after[: len(path)] == path}
        self.rows = [TrieRow(path) for path in paths if path not in inner]
        self._ends = [row.path for row in self.rows]
        wanted: list[set[int]] = [set() for _ in self.rows]
        for candidate in candidates:
            if len(candidate) > self._first:
                wanted[self._row_of(candidate)].add(candidate[-1])
        for row, tokens in zip(self.rows, wanted, strict=True):
            row.last_tokens = sorted(tokens)

    @property
    def logprob_start(self) -> int:
        """The prompt position whose logits score the first token."""
        return max(len(self._prefix) - 1, 0)

    def prompts(self) -> list[Int32Array]:
        """The tokens of each row."""
        return [np.concatenate((self._prefix, np.array(row.path, np.int32))) for row in self.rows]

    def logprobs(self, requests: Sequence[Request]) -> list[list[Any]]:
        """Candidates' log-probabilities from the rows' finished requests; None for first tokens without a prefix."""
        chosen, given = [], []
        for request in requests:
            parts = [*request.input_logprobs, *request.output_logprobs]
            chosen.append([value for part in request.input_logprobs for value in part.chosen.tolist()])
            given.append([row for part in parts if part.given is not None for row in part.given.tolist()])
        scores: list[list[Any]] = []
        for candidate in self._candidates:
            score: list[Any] = [None] * self._first
            if len(candidate) > self._first:
                at, depth = self._row_of(candidate), len(candidate) - 1 - self._first
                score += chosen[at][:depth]
                score.append(given[at][depth][bisect_left(self.rows[at].last_tokens, candidate[-1])])
            scores.append(score[: len(candidate)])
        return scores

    def _row_of(self, candidate: Tokens) -> int:
        """The row through the node before the candidate's last token."""
        return bisect_left(self._ends, candidate[:-1])
