"""Jump-forward: which tokens follow for certain, so that they need not be sampled one by one.

Where a grammar leaves no choice, the text that follows is known. It is cut into tokens as the tokenizer would have
cut it in its context, and only as far as no continuation could have been cut otherwise: an output with jumps is
tokenised like one without. If one token is left of that text, it is likely: a draft, for the sampler to confirm.

In every whole text one token reaches the end of the known part or beyond it. Wherever it begins, the tokens before it
are those of the text up to there: a tokenizer's merges never cross where two tokens meet. So the known text is cut up
to each place where such a token may begin, and what all cuts begin with is certain.
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
_TAIL_BYTES = 32  # and at least so many, where tokens are short
_MAX_TAIL_TOKENS = 64
_MAX_ENDS = 16
_FEW_WORDS = 256
_FEW_SPILLS = 4  # more would take longer to cut than the tokens are worth
_KNOWN_RUNS = 1024  # of one automaton
_ANCHOR = "\n"  # before the tail, so that a tokenizer that marks the beginning of a text marks this one
_MARKS = [bytes([lead]) for lead in (0xCC, 0xCD, 0xE0, 0xE1, 0xE3)]  # how characters begin that merge with a letter


Encode = Callable[[Sequence[str]], list[Sequence[int]]]
"""The tokenizer's own tokens of each of several texts, without special tokens around them."""


class Foreseen(NamedTuple):
    """What follows an output for certain, not cut into tokens yet."""

    data: bytes
    text: str
    """With the end of the output before it, as the tokenizer is to see it."""
    tail_len: int
    """Bytes of the output in the text."""
    ends: tuple[End, ...] = ()
    """Where else in the data tokens may end."""


class End(NamedTuple):
    """A place within forced bytes, between two characters, where a token that reaches beyond them may begin."""

    text: str
    """As that of `Foreseen`, up to there."""
    beyond: tuple[str, ...] = ()
    """The text up to the end of each such token; none where they are many, or where the tokens before depend on what
    follows."""


Spills = set[bytes] | None
"""Tokens that begin within forced bytes and are allowed to reach beyond them; None if they are not a few."""
Ends = dict[int, tuple[bytes, ...]]
"""Places in forced bytes, between two characters, where the last token within them may end, and the few tokens that may
begin there and reach beyond; none where they are many, or where the tokens before depend on what follows."""


class Cut(list[int]):
    """The tokens of a text that was foreseen; none where they cannot be told apart from what is put before it."""

    def __init__(self, token_ids: Sequence[int], num_certain: int) -> None:
        """num_certain: how many of the leading ones the text begins with, whatever follows it."""
        super().__init__(token_ids)
        self.num_certain = num_certain


class Jump(NamedTuple):
    """What follows an output."""

    token_ids: list[int]
    """Tokens that every allowed continuation begins with."""
    draft: int | None = None
    """One that is likely behind them, after which the text has a choice."""


def cut(foreseen: Sequence[Foreseen], encode: Encode) -> list[Cut]:
    """The tokens of each text, all of them in one call of `encode`: what `jump` takes."""
    texts = [_ANCHOR]
    for ahead in foreseen:
        texts.append(ahead.text)
        for end in ahead.ends:
            texts += end.text, *end.beyond
    found = iter(encode(texts))
    marks = list(next(found))
    start = len(marks)
    cuts = []
    for ahead in foreseen:
        ids = list(next(found))
        num_certain = len(ids)
        for end in ahead.ends:
            before, *behind = next(found), *(next(found) for _ in end.beyond)
            # Where a token begins behind another, it does so in the text that ends with it.
            if not behind or any(tuple(longer[:-1]) == tuple(before) for longer in behind):
                num_certain = min(num_certain, _num_shared(ids, before))
        is_apart = ids[:start] == marks
        cuts.append(Cut(ids[start:], max(num_certain - start, 0)) if is_apart else Cut([], 0))
    return cuts


def _num_shared(ids: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    for number, (one, two) in enumerate(zip(ids, other, strict=False)):
        if one != two:
            return number
    return min(len(ids), len(other))


def foresee(matcher: Matcher, vocabulary: Vocabulary, output_ids: Sequence[int]) -> Foreseen | None:
    """The text that every allowed continuation begins with; None where there is nothing to cut. Raises GrammarError.

    output_ids: what was generated so far; the matcher stands behind it and stays there.
    """
    forced = matcher.forced_bytes()

    def spills(start: int) -> Spills:
        cursor = matcher.copy()
        is_allowed = not start or cursor.accept_bytes(forced[:start])
        return _longer(cursor.mask(), len(forced) - start, vocabulary) if is_allowed else None

    def may_follow(data: bytes) -> bool:
        return matcher.copy().accept_bytes(forced + data)

    return _in_context(output_ids, forced, _ends(forced, vocabulary, spills, may_follow), vocabulary)


def jump(matcher: Matcher, vocabulary: Vocabulary, foreseen: Foreseen, ids: Cut) -> Jump:
    """How every allowed continuation begins, from what `foresee` found from the same place and the tokens of that, as
    `cut` tells them. The matcher stays where it is."""
    forced, num_certain = _behind_tail(foreseen, ids, vocabulary)
    cursor = matcher.copy()
    kept = 0
    while kept < num_certain and cursor.accept(forced[kept]):
        kept += 1
    return Jump(forced[:kept], forced[kept] if len(forced) == kept + 1 else None)


class ClosedRuns:
    """As `foresee` and `jump`, from places in a closed automaton and without drafts. Remembers what it found out of
    places: requests under one schema stand in the same ones."""

    def __init__(self, closed: Closed, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._closed = closed
        self._runs: dict[Place, tuple[bytes, Ends]] = {}
        self._spills: dict[tuple[Place, bytes], Spills] = {}

    def foresee(self, place: Place, output_ids: Sequence[int]) -> Foreseen | None:
        """The text that every continuation of a place begins with; None where none of its tokens is certain."""
        forced, ends = self._run(place)
        if 0 in ends and not ends[0]:  # cutting takes longer than to see that it tells nothing
            return None
        return _in_context(output_ids, forced, ends, self._vocabulary)

    def jump(self, place: Place, foreseen: Foreseen, ids: Cut) -> Jump:
        """How every continuation of a place begins, from what was foreseen there."""
        forced, num_certain = _behind_tail(foreseen, ids, self._vocabulary)
        kept = 0
        left, _ = self._run(place)
        for token_id in forced[:num_certain]:
            data = self._vocabulary.token_bytes[token_id]
            if not data or not left.startswith(data):
                break
            left = left[len(data) :]
            kept += 1
        return Jump(forced[:kept])

    def _run(self, place: Place) -> tuple[bytes, Ends]:
        """What every continuation begins with, and where tokens may end in it."""
        if place not in self._runs:
            forced, end = self._closed.run(place)

            def spills(start: int) -> Spills:
                return self._spills_at(end, forced[start:])

            def may_follow(data: bytes) -> bool:
                return advance(self._closed, end, data) is not None

            _make_room(self._runs)
            self._runs[place] = forced, _ends(forced, self._vocabulary, spills, may_follow)
        return self._runs[place]

    def _spills_at(self, end: Place, begun: bytes) -> Spills:
        key = end, begun
        if key not in self._spills:
            _make_room(self._spills)
            self._spills[key] = _spills(self._closed, self._vocabulary, end, begun)
        return self._spills[key]


def _make_room(known: dict[Any, Any]) -> None:
    if len(known) >= _KNOWN_RUNS:
        known.clear()


def _in_context(output_ids: Sequence[int], forced: bytes, ends: Ends, vocabulary: Vocabulary) -> Foreseen | None:
    """Forced bytes up to the last of their ends, in the context of the output; None for none, and where they are no
    text with it."""
    last = max(ends, default=0)
    if not last:
        return None
    tail = _tail(output_ids, vocabulary)

    def text(data: bytes) -> str:
        return _ANCHOR + (tail + data).decode()

    try:
        whole = text(forced[:last])
        others = [
            End(text(forced[:end]), tuple([text(forced[:end] + one) for one in ends[end]]))
            for end in sorted(ends)
            if end < last
        ]
    except UnicodeDecodeError:  # the output is no text, or ends within a character
        return None
    return Foreseen(forced[:last], whole, len(tail), tuple(others))


def _tail(output_ids: Sequence[int], vocabulary: Vocabulary) -> bytes:
    """The end of an output, from a character that is no white space: that would be cut with what is put before it."""
    tail = b""
    for number, token_id in enumerate(reversed(output_ids[-_MAX_TAIL_TOKENS:])):
        begins_apart = _is_between(tail, 0) and not tail[:1].isspace()
        if number >= _TAIL_TOKENS and len(tail) >= _TAIL_BYTES and begins_apart:
            break
        tail = vocabulary.token_bytes[token_id] + tail
    return tail


def _behind_tail(foreseen: Foreseen, ids: Cut, vocabulary: Vocabulary) -> tuple[list[int], int]:
    """The tokens of what follows the output, and how many of them are certain; none where they cannot be cut apart from
    it."""
    tail = foreseen.text[len(_ANCHOR) :].encode()[: foreseen.tail_len]
    for at, token_id in enumerate(ids):
        if not tail:
            return list(ids[at:]), max(ids.num_certain - at, 0)
        data = vocabulary.token_bytes[token_id]
        if not data or not tail.startswith(data):  # the tokenizer merges across, or writes the tail another way
            break
        tail = tail[len(data) :]
    return [], 0


def _ends(
    forced: bytes, vocabulary: Vocabulary, spills: Callable[[int], Spills], may_follow: Callable[[bytes], bool]
) -> Ends:
    """Where the last token that lies within forced bytes may end, whatever follows. None where that may be before the
    first character, or where there are too many such places.

    spills: the tokens that may begin at a byte, if some have all the bytes from there. may_follow: whether bytes may
    come behind the last one.
    """
    longest, last = vocabulary.max_token_len, len(forced)
    letter = forced[_last_char(forced) :].decode(errors="ignore")
    may_merge = letter.isalpha() and any(map(may_follow, _MARKS))
    if may_merge:  # it may become another letter, of which other tokens are made
        last = _last_char(forced)
    reached: dict[int, Spills] = {last: None}
    for start in range(max(0, last + 1 - longest), last):
        if vocabulary.trie.has_prefix(forced[start:last]):
            found = None if may_merge else spills(start)
            if found is None or found:
                reached[start] = found
    ends: Ends = {}
    for end in range(last, -1, -1):
        if end not in reached:
            continue
        if _is_between(forced, end):
            few = reached[end] or ()
            space = _loose_space(forced[:end])
            is_clear = not space and all(map(_is_clear, few))
            ends[end] = tuple(sorted(few)) if is_clear and end not in ends else ()
            if space:
                ends[end - space] = ()
        elif end == 0:
            return {}
        else:  # the token before it begins elsewhere
            before = [at for at in range(max(0, end - longest), end) if forced[at:end] in vocabulary.ids]
            reached.update(dict.fromkeys(before))
    return ends if len(ends) <= _MAX_ENDS else {}


def _is_clear(token: bytes) -> bool:
    """Whether a token is text whose last character no other one changes."""
    try:
        return not token.decode()[-1].isspace()
    except UnicodeDecodeError:
        return False


def _last_char(data: bytes) -> int:
    """Where the last character begins."""
    return max([at for at in range(max(0, len(data) - 4), len(data)) if data[at] & 0xC0 != 0x80], default=0)


def _is_between(data: bytes, at: int) -> bool:
    """Whether no character stands on both sides of a place in a text."""
    if at < len(data):
        return data[at] & 0xC0 != 0x80
    try:
        data[_last_char(data) :].decode()
    except UnicodeDecodeError:
        return False
    return True


def _loose_space(data: bytes) -> int:
    """Bytes of the white space at the end that tokenizers leave to what follows, if it is no white space and more of it
    comes before."""
    text = data[-8:].decode(errors="ignore")
    return len(text[-1].encode()) if text and text[-2:].isspace() else 0


def _spills(closed: Closed, vocabulary: Vocabulary, end: Place, forced: bytes) -> Spills:
    """The tokens that begin with forced bytes, behind which the text is at `end`, and are allowed to go on. Some token
    does begin with them."""
    trie = vocabulary.trie
    node = ROOT
    for byte in forced:
        node = trie.child(node, byte)
    found: set[bytes] = set()
    reached = [(node, end, forced)]
    while reached:
        node, place, text = reached.pop()
        for child in range(trie.child_start.item(node), trie.child_end.item(node)):
            longer = text + bytes([trie.byte.item(child)])
            following = advance(closed, place, longer[-1:])
            if following is not None:
                if trie.token.item(child) >= 0:
                    found.add(longer)
                    if len(found) > _FEW_SPILLS:
                        return None
                reached.append((child, following, longer))
    return found


def _longer(allowed: Int32Array, length: int, vocabulary: Vocabulary) -> Spills:
    """The allowed tokens of more than so many bytes. Within a forced run few tokens are allowed, and those begin with
    what is left of it."""
    words = np.flatnonzero(allowed)
    if len(words) > _FEW_WORDS:
        return None
    bits = np.unpackbits(allowed[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    ids = words[word] * 32 + bit
    found = {vocabulary.token_bytes[token_id] for token_id in ids[vocabulary.lengths[ids] > length].tolist()}
    return found if len(found) <= _FEW_SPILLS else None
