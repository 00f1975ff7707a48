"""What of a vocabulary has to be walked at a place, and what a walk tells.

In a string nearly every token may follow, and most of them leave the place as it is: those come from masks worked out
once for a vocabulary, and what is walked is where the others stop being plain characters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.place import Place
from sgl.grammar.automaton.plain import ENDLESS, NOT_PLAIN
from sgl.grammar.automaton.pushdown import OPEN_BRACE, OPEN_BRACKET, Automaton
from sgl.grammar.automaton.tables import TARGET_MASK
from sgl.grammar.matching.word_walk import walk_words
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.grammar.vocabulary.trie import PlainTokens, Trie

Int32Array = npt.NDArray[np.int32]
ANY_COUNT: Final = (0, ENDLESS)
_FEW_BYTES: Final = 64


@dataclass(slots=True)
class Mask:
    """Which tokens may follow at a place, and for which other places that holds: those with the same state, the same
    symbols on the frames that were closed, and counts within the bounds, first and last included.

    `items` are the bounds in the top frame and in the one below each frame that was closed. `seen` are the states that
    tokens lead to or through, but for those between words of a long list, where `longest_word` are the bytes of the
    longest. `opened` are the frames that tokens open: the one around each, negative for the place's, and its symbol.
    """

    row: Int32Array  # [words]
    chars: tuple[int, int]
    items: list[tuple[int, int]]
    seen: Int32Array
    opened: list[tuple[int, int]]
    longest_word: int
    group_of: Int32Array | None  # [V], if asked for: tokens of one number lead to one place; -1 if not allowed
    firsts: list[int]  # a token of each number
    growth: int | None = None  # this and the next: what `budget.py` found out
    most_behind: int | None = None

    def holds(self, place: Place) -> bool:
        """Whether the counts of a place with the same state and symbols are within the bounds."""
        if not self.chars[0] <= place.char_count <= self.chars[1]:
            return False
        low, high = self.items[0]
        if not low <= place.item_count <= high:
            return False
        frame = place.stack
        for low, high in self.items[1:]:
            assert frame is not None
            if not low <= frame.item_count <= high:
                return False
            frame = frame.parent
        return True

    def add_group(self, tokens: Int32Array) -> None:
        """Give a number of their own to tokens that are allowed."""
        assert self.group_of is not None
        self.group_of[tokens] = len(self.firsts)
        self.firsts.append(int(tokens[0]))


@dataclass(slots=True)
class Plan:
    """What is left to be walked, of which trie.

    A walk goes through the nodes from starts[i, 0] up to starts[i, 1], starts[i, 2] characters behind the place: from
    the state of the first region that ends at a higher count of characters. Behind the last region nothing may follow.
    """

    trie: Trie
    starts: Int32Array
    regions: list[tuple[int, int]]  # the count at which it ends, and the state up to there
    row: Int32Array  # [words], the tokens that are allowed for certain
    num_plain: int = 0  # how many of the plain tokens these are, in their order
    chars: tuple[int, int] = ANY_COUNT  # the counts of characters at which the plan is the same
    seen: list[int] = field(default_factory=list)  # as in `Mask`, for those tokens
    longest_word: int = 0


def whole(vocabulary: Vocabulary, place: Place) -> Plan:
    """Everything is walked."""
    trie = vocabulary.trie
    return Plan(trie, trie.all_nodes, [(ENDLESS, place.state)], np.zeros(vocabulary.words, np.int32))


def make_plan(automaton: Automaton, vocabulary: Vocabulary, place: Place) -> Plan:
    """The shortest walk, which tells nothing of where plain tokens and words lead."""
    regions = _regions(automaton, place)
    if regions is not None:
        return _steady(vocabulary.plain_tokens, place, regions)
    found = whole(vocabulary, place)
    words = walk_words(automaton, found.trie, place.state, with_nearest=False)
    if words is not None:
        tokens, ends = found.trie.token[words.nodes], words.ends
        allow(found.row, tokens[tokens >= 0])
        found.starts = np.stack([ends + 1, found.trie.end[ends], np.zeros_like(ends)], axis=1).astype(np.int32)
        found.regions, found.seen, found.longest_word = [(ENDLESS, words.then)], [words.then], words.longest
    return found


def likeness(automaton: Automaton, place: Place) -> tuple[int, bytes] | None:
    """Where a plain character leads to a state in which all of them stay, as behind the first bytes of another key than
    the declared ones: that state, and the bytes that do not lead from it to where they lead from the place. None if
    there is none, or too many of them."""
    automaton.expand(place.state)
    tables, state = automaton.tables, place.state
    other = tables.entries.item(state, tables.class_of[0x20])
    if not 0 <= other <= TARGET_MASK or other == state or automaton.steady(other) != (ENDLESS, -1):
        return None
    differs = (tables.entries[state] != tables.entries[other])[tables.classes]
    for bracket, symbols in zip(
        (OPEN_BRACE, OPEN_BRACKET), zip(tables.symbols[state], tables.symbols[other], strict=True), strict=True
    ):
        differs[bracket] |= symbols[0] != symbols[1]
    found = np.flatnonzero(differs).astype(np.uint8).tobytes()
    return (other, found) if len(found) <= _FEW_BYTES else None


def beside(vocabulary: Vocabulary, place: Place, like: Mask, first: bytes) -> Plan:
    """What begins with other bytes is as in the mask of a like place; tokens that begin with these are walked."""
    trie, row = vocabulary.trie, like.row.copy()
    forbid(row, np.array(vocabulary.eos_ids, np.int32))  # the text may end there, but perhaps not here
    for byte in first:
        row &= ~vocabulary.beginning_with(byte)
    nodes = trie.step(np.zeros(len(first), np.int64), np.frombuffer(first, np.uint8))
    nodes = nodes[nodes >= 0]
    starts = np.stack([nodes, trie.end[nodes], np.zeros_like(nodes)], axis=1).astype(np.int32)
    return Plan(trie, starts, [(ENDLESS, place.state)], row, seen=like.seen.tolist())


def _steady(plain: PlainTokens, place: Place, regions: list[tuple[int, int]]) -> Plan:
    limit, most = regions[0][0], plain.most_chars
    chars = ANY_COUNT
    if limit != ENDLESS:
        is_far = place.char_count + most < limit
        chars = (0, limit - most - 1) if is_far else (place.char_count, place.char_count)
    number = int(plain.chars.searchsorted(np.int32(min(regions[-1][0] - place.char_count, plain.most_chars + 1))))
    states = [state for _, state in regions]
    return Plan(plain.rest, plain.exits, regions, plain.row(number), number, chars, states)


def _regions(automaton: Automaton, place: Place) -> list[tuple[int, int]] | None:
    """If plain characters leave the place as it is: the states in which it stands meanwhile, see `Plan`."""
    regions: list[tuple[int, int]] = []
    state = place.state
    while True:
        steady = automaton.steady(state)
        if steady is None or place.char_count >= steady[0]:
            return None
        limit, following = steady
        regions.append((limit, state))
        if limit == ENDLESS:
            return regions
        if automaton.plain_limit(following) == NOT_PLAIN:
            return [*regions, (limit + 1, following)]
        state = following


def allow(row: Int32Array, tokens: Int32Array) -> None:
    """Set the bits of some tokens."""
    np.bitwise_or.at(row, tokens >> 5, np.left_shift(1, tokens & 31, dtype=np.int32))


def forbid(row: Int32Array, tokens: Int32Array) -> None:
    """Clear the bits of some tokens."""
    np.bitwise_and.at(row, tokens >> 5, ~np.left_shift(1, tokens & 31, dtype=np.int32))
