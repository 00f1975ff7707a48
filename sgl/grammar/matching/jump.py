"""Jump-forward: which tokens follow for certain, so that they need not be sampled one by one.

Where a grammar leaves no choice, the text that follows is known. It is cut into tokens as the tokenizer would have
cut it in its context, and only as far as no continuation could have been cut otherwise: an output with jumps is
tokenised like one without. If one token is left of that text, it is likely: a draft, for the sampler to confirm.

No continuation is cut otherwise before a seam: a place that no allowed token reaches across. There two tokens meet
whatever follows, and a tokenizer's merges never cross where two tokens meet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from sgl.grammar.automaton.finished import FinishedAutomaton
from sgl.grammar.automaton.place import Place
from sgl.grammar.token_matcher import TokenMatcher
from sgl.grammar.vocabulary.special import MARK
from sgl.grammar.vocabulary.tokens import Vocabulary

_TAIL_TOKENS = 8  # of the output so far, as context: more than any tokenizer looks back within JSON
_TAIL_BYTES = 32  # and at least so many, where tokens are short
MAX_TAIL_TOKENS = 64
"""Of the output, looked at."""
_LIKELY_BYTES = 64
_FEW_BYTES = 3  # ways on, of which the first is likely
_KNOWN_RUNS = 1024  # of one automaton
_ANCHOR = "\n"  # before the tail, so that a tokenizer that marks the beginning of a text marks this one


Encode = Callable[[Sequence[str]], list[Sequence[int]]]
"""The tokenizer's own tokens of each of several texts, without special tokens around them."""


class ForcedText(NamedTuple):
    """What follows an output for certain, not cut into tokens yet."""

    text: str
    """With the end of the output before it, as the tokenizer is to see it."""
    data: bytes
    """The same without what is put before it."""
    start: int
    """Where in the data the output ends."""
    seam: int
    """Where in the data two tokens meet, whatever follows it."""


class Jump(NamedTuple):
    """What follows an output."""

    token_ids: list[int]
    """Tokens that every allowed continuation begins with."""
    draft: int | None = None
    """One that is likely behind them, after which the text has a choice."""


def cut(texts: Sequence[ForcedText], encode: Encode) -> list[Sequence[int]]:
    """The tokens of each text, all of them in one call of `encode`: what `jump` takes. None where they cannot be told
    apart from what is put before it."""
    marks, *cuts = encode([_ANCHOR, *[ahead.text for ahead in texts]])
    return [ids[len(marks) :] if ids[: len(marks)] == marks else [] for ids in cuts]


def forced_text(matcher: TokenMatcher, vocabulary: Vocabulary, output_ids: Sequence[int]) -> ForcedText | None:
    """The text that every allowed continuation begins with; None where there is nothing to cut. Raises GrammarError.

    output_ids: what was generated so far; the matcher stands behind it and stays there.
    """
    forced, behind = _text_of(matcher.forced_bytes()), matcher.copy()
    if not forced or not behind.accept_bytes(forced):
        return None
    return _in_context(output_ids, forced, _seam(forced, list(behind.next_bytes()), vocabulary), vocabulary)


def jump(vocabulary: Vocabulary, ahead: ForcedText, ids: Sequence[int]) -> Jump:
    """How every allowed continuation begins, from a forced text and its tokens, as `cut` tells them. None
    where the tokenizer merges the end of the output with what follows, or writes the text another way."""
    at = 0
    kept: list[int] = []
    for token_id in ids:
        data, begin = vocabulary.token_bytes[token_id], at
        at += len(data)
        if not data or not ahead.data.startswith(data, begin) or begin < ahead.start < at:
            break
        if at > ahead.seam:
            return Jump(kept, token_id if at == len(ahead.data) else None)
        if begin >= ahead.start:
            kept.append(token_id)
    return Jump(kept)


class ForcedTexts:
    """As `forced_text`, from places in a finished automaton and as far as tokens are certain. Remembers what it found:
    requests under one schema stand in the same places."""

    def __init__(self, finished: FinishedAutomaton, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._automaton = finished
        self._runs: dict[Place, bytes] = {}

    def forced_text(self, place: Place, output_ids: Sequence[int]) -> ForcedText | None:
        """The text that every continuation of a place begins with; None where none of its tokens is certain."""
        if place not in self._runs:
            if len(self._runs) >= _KNOWN_RUNS:
                self._runs.clear()
            forced, end = self._automaton.run(place)
            text = _text_of(forced)
            following = self._automaton.next_bytes(end) if text == forced else MARK
            self._runs[place] = text[: _seam(text, following, self._vocabulary)]
        forced = self._runs[place]
        return _in_context(output_ids, forced, len(forced), self._vocabulary) if forced else None


class Ahead(Protocol):
    """Goes ahead in a constraint, byte by byte."""

    def live(self) -> Sequence[int]:
        """The bytes that may come next, ascending; none where the text may end."""

    def go(self, byte: int) -> bool:
        """Go on by one of them; False, where it cannot."""


def likely_bytes(ahead: Ahead, most_choices: int) -> tuple[bytes, int]:
    """What may come next as long as there are few ways on, by the first of them, and how often there were several, at
    most most_choices times."""
    text, number = bytearray(), 0
    while len(text) < _LIKELY_BYTES:
        live = ahead.live()
        if not 0 < len(live) <= _FEW_BYTES or (len(live) > 1 and number == most_choices):
            break
        if not ahead.go(live[0]):
            break
        number += len(live) > 1
        text.append(live[0])
    return bytes(text), number


def likely_text(text: bytes, output_ids: Sequence[int], vocabulary: Vocabulary) -> ForcedText | None:
    """A text that may follow, for `cut`; None where there is none that can be cut."""
    text = _text_of(text)
    return _in_context(output_ids, text, len(text), vocabulary) if text else None


def _text_of(forced: bytes) -> bytes:
    """Forced bytes up to a special token, which is sampled."""
    return forced.partition(MARK)[0]


def _in_context(output_ids: Sequence[int], forced: bytes, seam: int, vocabulary: Vocabulary) -> ForcedText | None:
    """Forced bytes in the context of the output; None where they are no text with it."""
    tail = _tail(output_ids, vocabulary)
    data = tail + forced
    try:
        return ForcedText(_ANCHOR + data.decode(), data, len(tail), len(tail) + seam)
    except UnicodeDecodeError:  # the output is no text, or a run begins or ends within a character
        return None


def _tail(output_ids: Sequence[int], vocabulary: Vocabulary) -> bytes:
    """The end of an output, from a character that is no white space: that would be cut with what is put before it."""
    tail = b""
    for number, token_id in enumerate(reversed(output_ids[-MAX_TAIL_TOKENS:])):
        if (
            number >= _TAIL_TOKENS
            and len(tail) >= _TAIL_BYTES
            and tail[0] & 0xC0 != 0x80
            and not tail[:1].isspace()
        ):
            break
        data = vocabulary.token_bytes[token_id]
        if data.startswith(MARK):  # tokenizers cut the text there
            break
        tail = data + tail
    return tail


def _seam(forced: bytes, following: Collection[int], vocabulary: Vocabulary) -> int:
    """The last seam in forced bytes or at their end; 0 for none. following: the bytes that may come behind them."""
    for at in range(len(forced), 0, -1):
        if _is_seam(forced[max(0, at - 4) : at], following, vocabulary):
            return at
        following = forced[at - 1 : at]
    return 0


def _is_seam(before: bytes, following: Collection[int], vocabulary: Vocabulary) -> bool:
    """Whether no token joins the end of a text with what may follow, and nothing else does: a character that is not
    complete, white space that tokenizers leave to what follows, and marks, which may make another character of the last
    one."""
    last = before.decode(errors="replace")[-1]
    texts = [byte for byte in following if byte != MARK[0]]
    if not texts and texts != list(following):  # special tokens join nothing
        return last != "\ufffd"
    if last.isspace() or last == "\ufffd":
        return False
    row = before[-1] << 8
    return not any(byte >= 0x80 or vocabulary.pairs[row | byte] for byte in texts)
