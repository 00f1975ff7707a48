"""Candidates that are scored behind a prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl.errors import InvalidRequest
from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.keys import TOKEN_BYTES, common_prefix, key_of


@dataclass(frozen=True, slots=True)
class CandidateScore:
    """The log-probabilities of one candidate after its prefix; see Engine.score."""

    token_ids: list[int]
    logprobs: list[float | None]  # of each token given all before it; None only at position 0


def candidate_ids(encode: Callable[[str], Int32Array], prefix: Any, candidates: Any) -> tuple[list[list[int]], int]:
    """The tokens of prefix + candidate, and where scoring starts. Raises InvalidRequest."""
    if not candidates:
        raise InvalidRequest("score needs at least one candidate", param="candidates")
    if any(isinstance(candidate, str) != isinstance(prefix, str) for candidate in candidates):
        message = "prefix and candidates must both be texts or both be token ids"
        raise InvalidRequest(message, param="prefix")
    if isinstance(prefix, str):
        full = [encode(prefix + candidate).tolist() for candidate in candidates]
        alone = key_of(encode(prefix) if prefix else [])
        start = min(common_prefix(alone, key_of(ids), 0, TOKEN_BYTES) for ids in full) // TOKEN_BYTES
    else:
        full = [[*prefix, *candidate] for candidate in candidates]
        start = len(prefix)
    for i, ids in enumerate(full):
        if len(ids) <= start:
            raise InvalidRequest(f"candidate {i} is empty", param="candidates")
    return full, start
