"""Jump-forward: which tokens follow for certain, so that they need not be sampled one by one.

Where a grammar leaves no choice, the text that follows is known. It is cut into tokens as the tokenizer would have
cut it in its context, and only as far as no continuation could have been cut otherwise: an output with jumps is
tokenised like one without. If one token is left of that text, it is likely: a draft, for the sampler to confirm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sgl.grammar.closure import Closed
from sgl.grammar.matcher import Matcher
from sgl.grammar.place import Place, advance
from sgl.grammar.trie import ROOT
from sgl.grammar.vocabulary import Vocabulary

Int32Array = npt.NDArray[np.int32]

_TAIL_TOKENS = 8  # of the output so far, as context: more than any tokenizer looks back within JSON
_FEW_WORDS = 256
_KNOWN_RUNS = 1024  # of one automaton
_ANCHOR = "\n"  # before the tail, so that a tokenizer that marks the beginning of a text marks this one


Encode = Callable[[Sequence[str]], list[Sequence[int]]]
"""The tokenizer's own tokens of each of several texts, without special tokens around them."""


class Foreseen(NamedTuple):
    """What follows an output for certain, not cut into tokens yet."""

    data: bytes
    text: str
    """With the end of the output before it, as the tokenizer is to see it."""
    tail_len: int
    """Bytes of the output in the text."""


class Jump(NamedTuple):
    """What follows an output."""

    token_ids: list[int]
    """Tokens that every allowed continuation begins with."""
    draft: int | None = None
    """One that is likely behind them, after which the text has a choice."""


def cut(foreseen: Sequence[Foreseen], encode: Encode) -> list[list[int]]:
    """The tokens of each text, all of them in one call of `encode`: what `jump` takes."""
    anchor, *cuts = encode([_ANCHOR, *[ahead.text for ahead in foreseen]])
    start, marks = len(anchor), list(anchor)
    return [list(ids[start:]) if list(ids[:start]) == marks else [] for ids in cuts]


def foresee(matcher: Matcher, vocabulary: Vocabulary, output_ids: Sequence[int]) -> Foreseen | None:
    """The text that every allowed continuation begins with; None where there is nothing to cut.

    output_ids: what was generated so far; the matcher stands behind it and stays there.
    """
    return _in_context(output_ids, matcher.forced_bytes(), vocabulary)


def jump(matcher: Matcher, vocabulary: Vocabulary, foreseen: Foreseen, ids: Sequence[int]) -> Jump:
    """How every allowed continuation begins, from what `foresee` found from the same place and the tokens of that, as
    `cut` tells them. The matcher stays where it is."""
    forced = _behind_tail(foreseen, ids, vocabulary)
    kept = _stable(matcher, vocabulary, forced, foreseen.data)
    return Jump(forced[:kept], forced[kept] if len(forced) == kept + 1 else None)


class ClosedRuns:
    """As `foresee` and `jump`, from places in a closed automaton and without drafts. Remembers what it found out of
    places: requests under one schema stand in the same ones."""

    def __init__(self, closed: Closed, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._closed = closed
        self._runs: dict[Place, tuple[bytes, Place]] = {}
        self._spills: dict[tuple[Place, bytes], bool] = {}

    def foresee(self, place: Place, output_ids: Sequence[int]) -> Foreseen | None:
        """The text that every continuation of a place begins with; None where there is nothing to cut."""
        forced, end = self._run(place)
        if not forced or self._may_spill(end, forced):  # asked first: cutting takes longer
            return None
        return _in_context(output_ids, forced, self._vocabulary)

    def jump(self, place: Place, foreseen: Foreseen, ids: Sequence[int]) -> Jump:
        """How every continuation of a place begins, from what was foreseen there."""
        _, end = self._run(place)
        kept: list[int] = []
        left = foreseen.data
        for token_id in _behind_tail(foreseen, ids, self._vocabulary):
            data = self._vocabulary.token_bytes[token_id]
            if not left.startswith(data) or (kept and self._may_spill(end, left)):
                break  # another cut of what follows may begin here
            kept.append(token_id)
            left = left[len(data) :]
        return Jump(kept)

    def _run(self, place: Place) -> tuple[bytes, Place]:
        if place not in self._runs:
            _make_room(self._runs)
            self._runs[place] = self._closed.run(place)
        return self._runs[place]

    def _may_spill(self, end: Place, forced: bytes) -> bool:
        if not self._vocabulary.trie.has_prefix(forced):
            return False
        key = end, forced
        if key not in self._spills:
            _make_room(self._spills)
            self._spills[key] = _spills(self._closed, self._vocabulary, end, forced)
        return self._spills[key]


def _make_room(known: dict[Any, Any]) -> None:
    if len(known) >= _KNOWN_RUNS:
        known.clear()


def _in_context(output_ids: Sequence[int], forced: bytes, vocabulary: Vocabulary) -> Foreseen | None:
    """Bytes that follow the output, in their context; None for none, and where they are no text with it."""
    if not forced:
        return None
    data = b"".join([vocabulary.token_bytes[token_id] for token_id in output_ids[-_TAIL_TOKENS:]])
    try:
        text = _ANCHOR + (data + forced).decode()
    except UnicodeDecodeError:  # the tail begins, or the run ends, within a character
        return None
    return Foreseen(forced, text, len(data))


def _behind_tail(foreseen: Foreseen, ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """The tokens of what follows the output; none where they cannot be cut apart from it."""
    left = foreseen.tail_len
    for at, token_id in enumerate(ids):
        if left <= 0:
            return list(ids[at:]) if left == 0 else []  # the tokenizer would merge across: the model chooses
        left -= len(vocabulary.token_bytes[token_id])
    return []


def _spills(closed: Closed, vocabulary: Vocabulary, end: Place, forced: bytes) -> bool:
    """Whether a token that begins with forced bytes, behind which the text is at `end`, is allowed to go on. Some
    token does begin with them."""
    trie = vocabulary.trie
    node = ROOT
    for byte in forced:
        node = trie.child(node, byte)
    reached = [(node, end)]
    while reached:
        node, place = reached.pop()
        for child in range(trie.child_start.item(node), trie.child_end.item(node)):
            following = advance(closed, place, bytes([trie.byte.item(child)]))
            if following is not None:
                if trie.token.item(child) >= 0:
                    return True
                reached.append((child, following))
    return False


def _stable(matcher: Matcher, vocabulary: Vocabulary, ids: list[int], forced: bytes) -> int:
    """How many of the leading tokens no allowed token that reaches beyond the forced bytes could stand for."""
    cursor = matcher.copy()
    left = len(forced)
    for number, token_id in enumerate(ids):
        if _reach(cursor.mask(), vocabulary) > left or not cursor.accept(token_id):
            return number  # another cut of what follows may begin here
        left -= int(vocabulary.lengths[token_id])
    return len(ids)


def _reach(allowed: Int32Array, vocabulary: Vocabulary) -> int:
    """Bytes of the longest allowed token, or more than that if many are allowed: within a forced run few are."""
    words = np.flatnonzero(allowed)
    if len(words) > _FEW_WORDS:
        return vocabulary.max_token_len
    bits = np.unpackbits(allowed[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    return int(vocabulary.lengths[words[word] * 32 + bit].max(initial=0))
