"""Masks near the end of a token budget: they keep what still leads to a complete document.

A token is kept if a short way to the end behind it (`finish.py`) takes no more tokens than are left. That way is one of
the document's own, so a document that could be finished before a kept token can be finished behind it, and one that is
kept to its budget from the start is always finished, unless even its shortest text needs more tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton import Automaton
from sgl.grammar.finish import Finish
from sgl.grammar.masks import Mask
from sgl.grammar.notes import follow, suspects, used_texts
from sgl.grammar.place import Place
from sgl.grammar.vocabulary import Vocabulary
from sgl.grammar.walk import Walk
from sgl.grammar.word_walk import WordWalk, walk_words

Int32Array = npt.NDArray[np.int32]
FAR: Final = 1024
"""Budgets beyond so many tokens restrict nothing."""
_NEVER: Final = 1 << 40
_MAX_KNOWN: Final = 50_000
_KNOWN_ENDS: Final = 1024
_KNOWN_WAYS: Final = 32  # of four bytes a token each at most
_KNOWN_ROWS: Final = 512


class Budget:
    """Restricts the masks of one grammar."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        self.finish = Finish(automaton)
        self._tokens: dict[bytes, int] = {b"": 0}
        # Requests under one schema stand in the same places, and at times for many steps.
        self._end = lru_cache(_KNOWN_ENDS)(self.finish.text)
        self._ways_from = lru_cache(_KNOWN_WAYS)(self._ways)
        self._restricted: dict[tuple[Place, int, bytes], Int32Array] = {}

    def need(self, place: Place) -> int:
        """How many bytes suffice to end the document."""
        return len(self._end(place))

    def growth(self, mask: Mask, place: Place) -> int:
        """How many bytes more, at most, suffice behind a token of the mask than before it."""
        if mask.growth is None:
            need = self.need(place)
            grown = max((len(text) - need for _, text in self._ways_from(place) if text is not None), default=0)
            if self.automaton.has_notes:  # other keys may have to be longer, one byte for all that came before
                return grown + 16 + len(used_texts(place))
            frame = place.stack
            while frame is not None:
                if len(self.automaton.callers[frame.symbol]) > 1:
                    return grown  # what is shortest may hang on the frames below, so this holds here alone
                frame = frame.parent
            mask.growth = grown
        return mask.growth

    def restrict(
        self, place: Place, row: Int32Array, remaining: int, promise: bytes | None
    ) -> tuple[Int32Array, bytes]:
        """The mask of a place without the tokens behind which more than `remaining` - 1 would be needed; where that is
        all of them, without those behind which more than the least possible are. [words], not to be written to.

        `promise` is a text known to end the document here, if any. Returns the better one of that and our own too; its
        tokens are kept, so that what was promised once holds to the end.
        """
        own = self._end(place)
        text = own if promise is None or self._num_tokens(own) <= self._num_tokens(promise) else promise
        found = self._restricted.get((place, remaining, text))
        if found is None:
            while len(self._restricted) >= _KNOWN_ROWS:
                del self._restricted[next(iter(self._restricted))]
            found = self._restricted[place, remaining, text] = self._restrict(place, row, remaining, text)
        return found, text

    def _restrict(self, place: Place, row: Int32Array, remaining: int, promise: bytes) -> Int32Array:
        ids = self.vocabulary.ids
        promised = {
            ids[promise[:end]]: self._num_tokens(promise[end:])
            for end in range(1, min(len(promise), self.vocabulary.max_token_len) + 1)
            if promise[:end] in ids
        }
        ways = []
        for tokens, text in self._ways_from(place):
            if text is None:
                ways.append((tokens, _NEVER))
                continue
            is_surely_near = self.vocabulary.is_byte_complete and len(text) < remaining
            ways.append((tokens, len(text) if is_surely_near else self._num_tokens(text)))
        least = min([*promised.values(), *(needed for _, needed in ways)], default=0)
        most = max(remaining - 1, least)
        dropped = [tokens for tokens, needed in ways if needed > most]
        if dropped:
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            bits[np.concatenate(dropped)] = 0
            bits[[token for token, needed in promised.items() if needed <= most]] = 1
            row = np.packbits(bits, bitorder="little").view(np.int32)
            row.flags.writeable = False
        return row

    def _ways(self, place: Place) -> list[tuple[Int32Array, bytes | None]]:
        """The allowed tokens by what suffices behind them; None where it hangs on each token's own text, and one that
        stands for them is told.
        """
        trie = self.vocabulary.trie
        words = walk_words(self.automaton, trie, place.state, with_nearest=True)
        if words is not None:
            behind = self.finish.text(place._replace(state=words.then))
            tokens = trie.token[words.nodes].tolist()
            found: list[tuple[Int32Array, bytes | None]] = [
                (np.array([token, *trie.twins.get(node, ())], np.int32), text + behind)
                for token, node, text in zip(tokens, words.nodes.tolist(), words.nearest, strict=True)
                if token >= 0
            ]
            return found + self._beyond(place, words)
        allowed = np.zeros(self.vocabulary.words * 32, np.bool_)
        walk = Walk(self.automaton, self.vocabulary, place, allowed, counts=True)
        walk.groups = []
        walk.run()
        ways: list[tuple[Int32Array, bytes | None]] = []
        for group in self._by_notes(place, walk.groups):
            end = follow(self.automaton, place, self.vocabulary.token_bytes[group.item(0)])
            if end is None:
                continue  # notes forbid it
            ways.append((group, self.finish.text(end)))
            if end.notes != place.notes and len(group) > 1:
                ways[-1:] = (group[:1], ways[-1][1]), (group[1:], None)
        return ways

    def _by_notes(self, place: Place, groups: list[Int32Array]) -> list[Int32Array]:
        """Groups of tokens that lead to one place, but for what is noted there: those that may be forbidden alone."""
        if not self.automaton.has_notes:
            return groups
        alone = np.array(sorted(suspects(self.automaton, self.vocabulary, place)), np.int32)
        result = []
        for group in groups:
            is_alone = np.isin(group, alone)
            result += [*group[is_alone].reshape(-1, 1), group[~is_alone]]
        return [group for group in result if len(group)]

    def _beyond(self, place: Place, words: WordWalk) -> list[tuple[Int32Array, bytes | None]]:
        """As `_ways`, of the tokens that go on behind the end of a word."""
        trie = self.vocabulary.trie
        found: list[tuple[Int32Array, bytes | None]] = []
        stack = words.ends.tolist()
        while stack:
            node = stack.pop()
            for child in range(trie.child_start.item(node), trie.child_end.item(node)):
                token = trie.token.item(child)
                data = None if token < 0 else self.vocabulary.token_bytes[token]
                end = None if data is None else follow(self.automaton, place, data)
                if end is not None:
                    found.append((np.array([token, *trie.twins.get(child, ())], np.int32), self.finish.text(end)))
                stack.append(child)
        return found

    def _num_tokens(self, text: bytes) -> int:
        """The least number of tokens that spell a text."""
        found = self._tokens.get(text)
        if found is None:
            if len(self._tokens) > _MAX_KNOWN:
                self._tokens = {b"": 0}
            found = self._tokens[text] = self._count(text)
        return found

    def _count(self, text: bytes) -> int:
        ids, longest = self.vocabulary.ids, self.vocabulary.max_token_len
        needed = [0] * (len(text) + 1)  # of text[i:]
        for start in range(len(text) - 1, -1, -1):
            ends = range(start + 1, min(start + longest, len(text)) + 1)
            needed[start] = 1 + min((needed[end] for end in ends if text[start:end] in ids), default=_NEVER)
        return needed[0]
