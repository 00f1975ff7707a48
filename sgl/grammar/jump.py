"""Jump-forward: which tokens follow for certain, so that they need not be sampled one by one.

Where a grammar leaves no choice, the text that follows is known. It is cut into tokens as the tokenizer would have
cut it in its context, and only as far as no continuation could have been cut otherwise: an output with jumps is
tokenised like one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sgl.grammar.matcher import Matcher
from sgl.grammar.vocabulary import Vocabulary

Int32Array = npt.NDArray[np.int32]

MIN_TOKENS = 1
"""One is enough: it is computed in the step that the token before it needs anyway."""

_TAIL_TOKENS = 8  # of the output so far, as context: more than any tokenizer looks back within JSON
_FEW_WORDS = 256
_ANCHOR = "\n"  # before the tail, so that a tokenizer that marks the beginning of a text marks this one


def forced_tokens(
    matcher: Matcher,
    vocabulary: Vocabulary,
    output_ids: Sequence[int],
    encode: Callable[[str], Sequence[int]],
) -> list[int]:
    """Token ids that every allowed continuation begins with; empty where there are less than MIN_TOKENS.

    output_ids: what was generated so far; the matcher stands behind it and stays there. encode: the tokenizer's
    own, without special tokens around the text.
    """
    forced = matcher.forced_bytes()
    if len(forced) < MIN_TOKENS:
        return []
    tail = [int(token_id) for token_id in output_ids[-_TAIL_TOKENS:]]
    data = b"".join(vocabulary.token_bytes[token_id] for token_id in tail)
    try:
        text = _ANCHOR + (data + forced).decode()
    except UnicodeDecodeError:  # the tail begins, or the run ends, within a character
        return []
    before = [*encode(_ANCHOR), *tail]
    ids = [int(token_id) for token_id in encode(text)]
    if ids[: len(before)] != before:
        return []  # the tokenizer would merge across the boundary: let the model choose
    return _stable(matcher, vocabulary, ids[len(before) :], forced)


def _stable(matcher: Matcher, vocabulary: Vocabulary, ids: list[int], forced: bytes) -> list[int]:
    """The leading tokens behind which no allowed token reaches beyond the forced bytes."""
    cursor = matcher.copy()
    allowed = np.zeros(vocabulary.words, np.int32)
    kept: list[int] = []
    left = len(forced)
    for token_id in ids:
        cursor.fill_mask(allowed)
        if _reach(allowed, vocabulary) > left or not cursor.accept(token_id):
            break  # another cut of what follows may begin here
        kept.append(token_id)
        left -= int(vocabulary.lengths[token_id])
    return kept if len(kept) >= MIN_TOKENS else []


def _reach(allowed: Int32Array, vocabulary: Vocabulary) -> int:
    """Bytes of the longest allowed token, or more than that if many are allowed: within a forced run few are."""
    words = np.flatnonzero(allowed)
    if len(words) > _FEW_WORDS:
        return vocabulary.max_token_len
    bits = np.unpackbits(allowed[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    return int(vocabulary.lengths[words[word] * 32 + bit].max(initial=0))
