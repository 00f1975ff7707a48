"""Texts that may not come twice in one frame: what an automaton of finitely many states cannot remember.

Beside its state a place keeps the texts that were seen in each open frame. In a state of `Automaton.reads_unique` one
more is being read; behind its closing quote what took it for such a text goes on only if it is none of those before
it. Masks are worked out as if there were no such texts, and `hold_back` then tries the few tokens that could end such a
text, or begin one that has no other end.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.nfa import UniqueText
from sgl.grammar.automaton.place import Frame, Place, SeenTexts, advance
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.automaton.tables import DEAD, TARGET_MASK
from sgl.grammar.matching.masks import without
from sgl.grammar.regular.expr import difference, is_empty, words
from sgl.grammar.vocabulary.tokens import Vocabulary

Int32Array = npt.NDArray[np.int32]
_QUOTE = 0x22


def follow(automaton: Automaton, place: Place, data: bytes) -> Place | None:
    """Where `data` leads from a place, or None if the grammar does not allow it."""
    after = advance(automaton, place, data)
    if after is None or not automaton.has_unique_texts:
        return after
    if _QUOTE not in data and after.stack is place.stack:
        text = (
            place.seen_texts.text + data
            if automaton.tables.reads_unique[place.state] and automaton.tables.reads_unique[after.state]
            else b""
        )
        after = after._replace(seen_texts=SeenTexts(text, place.seen_texts.used))
        return after if _can_end(automaton, after) else None
    for i in range(len(data)):
        before = place
        after = advance(automaton, before, data[i : i + 1])
        if after is None:  # only what took a text before for a new one went on so
            return None
        stack = before.stack
        if stack is not None and after.stack is stack.parent:
            place = after._replace(seen_texts=stack.seen_texts)
        elif after.stack is not stack:
            assert after.stack is not None, "a bracket opened it"
            place = after._replace(stack=after.stack._replace(seen_texts=before.seen_texts))
        else:
            seen = before.seen_texts
            if automaton.tables.reads_unique[before.state]:
                if _ends(seen, data[i]) and seen.text in seen.used:
                    other = automaton.but_unique(before.state, data[i])
                    if other == DEAD:
                        return None
                    assert other <= TARGET_MASK, "a closing quote counts nothing"
                    after = after._replace(state=other)
                seen = _with_byte(seen, data[i])
            if seen.text and not automaton.tables.reads_unique[after.state]:  # it was another reading's
                seen = SeenTexts(b"", seen.used)
            place = after._replace(seen_texts=seen)
    return place if _can_end(automaton, place) else None


def _is_escape(text: bytes) -> bool:
    """Whether the next byte is one half of an escape."""
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1


def _ends(seen: SeenTexts, byte: int) -> bool:
    """Whether the byte is the closing quote of the text that is being read."""
    return byte == _QUOTE and not _is_escape(seen.text)


def _with_byte(seen: SeenTexts, byte: int) -> SeenTexts:
    """What has been seen once one more byte of a text is read."""
    text, used = seen
    return SeenTexts(b"", used | {text}) if _ends(seen, byte) else SeenTexts(text + bytes((byte,)), used)


def rests(automaton: Automaton, place: Place) -> list[bytes]:
    """How the text that is being read may not go on to its end, if one is."""
    if not automaton.tables.reads_unique[place.state]:
        return []
    text, used = place.seen_texts
    return [other[len(text) :] for other in used if other.startswith(text)]


def _can_end(automaton: Automaton, place: Place) -> bool:
    """Whether the text that is being read, if one is, can become one that was not there before."""
    taken = words(rests(automaton, place)) if place.seen_texts.used else None
    if taken is None:
        return True
    return any(
        not isinstance(thread, UniqueText) or not is_empty(difference(thread.expr, taken))
        for _, thread in automaton.members(place.state)
    )


def used_texts(place: Place) -> frozenset[bytes]:
    """The texts seen in all open frames."""
    used = place.seen_texts.used
    frame: Frame | None = place.stack
    while frame is not None:
        used |= frame.seen_texts.used
        frame = frame.parent
    return used


def hold_back(automaton: Automaton, vocabulary: Vocabulary, place: Place, row: Int32Array) -> Int32Array:
    """A mask without the tokens that the texts before forbid: the same array if there are none."""
    if not automaton.has_unique_texts:
        return row
    found = np.fromiter(suspects(automaton, vocabulary, place), np.int64)
    dropped = [
        token
        for token in found[row[found // 32] >> (found % 32) & 1 == 1].tolist()
        if follow(automaton, place, vocabulary.token_bytes[token]) is None
    ]
    return without(row, dropped) if dropped else row


def suspects(automaton: Automaton, vocabulary: Vocabulary, place: Place) -> frozenset[int]:
    """The tokens that may end a text that came before, or leave no other end to it."""
    return frozenset(_suspects(automaton, vocabulary, place))


def _suspects(automaton: Automaton, vocabulary: Vocabulary, place: Place) -> Iterator[int]:
    by_quotes = _by_quotes(vocabulary)
    used = used_texts(place)
    begun = {text[:end] for text in used for end in range(1, len(text) + 1)}
    is_unique = automaton.tables.reads_unique[place.state]
    for token, parts in by_quotes.several:
        texts = [place.seen_texts.text + parts[0], *parts[1:-1]] if is_unique else parts[1:-1]
        if parts[-1] in begun or not used.isdisjoint(texts) or len(set(texts)) < len(texts):
            yield token
    for rest in rests(automaton, place):
        yield from by_quotes.heads.get(rest, ())
        for end in range(1, len(rest) + 1):
            if rest[:end] in vocabulary.ids:
                yield vocabulary.ids[rest[:end]]
                yield from by_quotes.duplicates.get(rest[:end], ())
    for start in begun:
        yield from by_quotes.tails.get(start, ())
    if is_unique and _is_escape(place.seen_texts.text):  # no telling where the parts of tokens end
        yield from by_quotes.quoted


class _ByQuotes(NamedTuple):
    quoted: list[int]
    """Tokens with quotes."""
    several: list[tuple[int, list[bytes]]]
    """Those with more than one that is not escaped, and what stands between them."""
    heads: dict[bytes, list[int]]
    """Those with one, by what stands before it."""
    tails: dict[bytes, list[int]]
    """Those with one, by what stands behind it."""
    duplicates: dict[bytes, list[int]]
    """Tokens with the bytes of an earlier one."""


@lru_cache(maxsize=4)
def _by_quotes(vocabulary: Vocabulary) -> _ByQuotes:
    found = _ByQuotes([], [], {}, {}, {})
    for token, data in enumerate(vocabulary.token_bytes):
        if _QUOTE in data:
            found.quoted.append(token)
            parts = _parts(data)
            if len(parts) > 2:
                found.several.append((token, parts))
            elif len(parts) == 2:
                found.heads.setdefault(parts[0], []).append(token)
                found.tails.setdefault(parts[1], []).append(token)
        if data and vocabulary.ids[data] != token:
            found.duplicates.setdefault(data, []).append(token)
    return found


def _parts(data: bytes) -> list[bytes]:
    """What stands between quotes that are not escaped."""
    first, *others = data.split(b'"')
    parts = [first]
    for part in others:
        if _is_escape(parts[-1]):
            parts[-1] += b'"' + part
        else:
            parts.append(part)
    return parts
