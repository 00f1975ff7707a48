"""Masks near the end of a token budget: they keep what still leads to a complete document.

A token is kept if a short way to the end behind it (`shortest_end.py`) takes no more tokens than are left. That way is
one of the document's own, so a document that could be finished before a kept token can be finished behind it, and one
that is kept to its budget from the start is always finished, unless even its shortest text needs more tokens.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from sgl.errors import GrammarTooLarge
from sgl.grammar.automaton.place import Place, start_of
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.automaton.shortest_end import ShortestEnds
from sgl.grammar.matching.unique_texts import follow, suspects, used_texts
from sgl.grammar.matching.walk import Walker
from sgl.grammar.matching.walk_plan import Mask
from sgl.grammar.matching.word_walk import walk_words
from sgl.grammar.regular.rope import Rope, rope
from sgl.grammar.vocabulary.token_counts import UNSPELLABLE, TokenCounts
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.time_limit import OutOfTime

Int32Array = npt.NDArray[np.int32]
Ways = tuple[Int32Array, list[Rope | None]]
"""[V]: the group of each token that is allowed, or -1; and what suffices behind each group's tokens, None where that
hangs on a token's own text."""
FAR: Final = 1024
"""Budgets beyond so many tokens restrict nothing."""
MAX_LENGTH: Final = 256 << 10
"""Bytes that the shortest text of a constraint may have: about the longest output of a context of 128k tokens."""
_LENGTHENING: Final = {
    "json_schema": "minLength, minItems, minContains, the counts of a pattern's repeats, or what is required",
    "regex": "the counts of its repeats",
    "structural_tag": "the bounds in its schemas and patterns",
}
_NEVER: Final = 1 << 60
_KNOWN_ENDS: Final = 1024
_KNOWN_WAYS: Final = 8  # of four bytes a token each at most
_KNOWN_ROWS: Final = 64


class Budget:
    """Restricts the masks of one grammar."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        self.finish = ShortestEnds(automaton)
        self.walks = 0
        """How many walks told ways, for measurements."""
        self._walker = Walker(automaton, vocabulary)
        # Requests under one schema stand in the same places, and at times for many steps.
        self._end = lru_cache(_KNOWN_ENDS)(self.finish.end)
        self._ways_from = lru_cache(_KNOWN_WAYS)(self._ways)
        self._restricted: dict[tuple[Place, int, bytes | None], Int32Array] = {}

    @cached_property
    def counts(self) -> TokenCounts:
        """How many tokens texts take."""
        return TokenCounts(self.vocabulary)

    @property
    def num_bytes(self) -> int:
        """The size of what is kept, at most."""
        ways = self._ways_from.cache_info().currsize * 4 * self.vocabulary.size
        return ways + len(self._restricted) * 4 * self.vocabulary.words

    def check_length(self, kind: str) -> None:
        """Raises GrammarTooLarge where even the shortest text is longer than any output, and OutOfTime. One that is too
        hard to find is asked for only where a budget comes near."""
        try:
            size = self._end(start_of(self.automaton)).size
        except OutOfTime:
            raise
        except GrammarTooLarge:
            return
        if size > MAX_LENGTH:
            shown = _shown(size)
            longest = self.finish.longest
            cause = (
                ""
                if longest is None or kind != "json_schema"
                else f"; {longest[0]} of {_shown(longest[1])} alone asks for more than that"
            )
            raise GrammarTooLarge(
                f"the shortest text that {kind} allows has {shown} bytes, and at most {MAX_LENGTH:,} can be asked for"
                f"{cause}: lower {_LENGTHENING.get(kind, 'what it asks for')}",
                states=0,
                limit=MAX_LENGTH,
            )

    def is_ample(self, place: Place, mask: Mask, remaining: int) -> bool:
        """Whether the document can surely be ended behind any token of the mask."""
        if not self.automaton.has_unique_texts and self.most_behind(mask, place) < remaining:
            return True
        return self._end(place).size + self._growth(mask, place) < remaining

    def most_behind(self, mask: Mask, place: Place) -> int:
        """How many bytes suffice to end the document behind any token of the mask, or a larger number. Found without
        a look at each token: from the states that tokens came through. Not for automata with unique texts."""
        if mask.most_behind is None:
            finish = self.finish
            most = finish.max_bytes_from_any(mask.seen)
            opened: list[int] = []  # by frame that a token may open: to the end of those around it
            for around, symbol in mask.opened:
                opened.append(finish.max_bytes_behind(symbol) + (opened[around] if around >= 0 else 0))
            mask.most_behind = mask.longest_word + most + max(opened, default=0)
        most = mask.most_behind
        frame = place.stack
        while frame is not None:
            most += self.finish.max_bytes_behind(frame.symbol)
            frame = frame.parent
        return most

    def _growth(self, mask: Mask, place: Place) -> int:
        """How many bytes more, at most, suffice behind a token of the mask than before it."""
        if mask.growth is None:
            need = self._end(place).size
            grown = max((text.size - need for text in self._ways_from(place)[1] if text is not None), default=0)
            # other keys may have to be longer, one byte for all that came before
            if self.automaton.has_unique_texts:
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
    ) -> tuple[Int32Array, bytes | None]:
        """The mask of a place without the tokens behind which more than `remaining` - 1 would be needed; where that is
        all of them, without those behind which more than the least possible are. [words], not to be written to.

        `promise` is a text known to end the document here, if any. Returns the better one of that and our own too; its
        tokens are kept, so that what was promised once holds to the end. Nothing is promised where the end is too far.
        """
        own = self._end(place)
        if own.is_short and (promise is None or self._num_tokens(own) <= self.counts.of(promise)[0]):
            promise = own.text()
        found = self._restricted.get((place, remaining, promise))
        if found is None:
            while len(self._restricted) >= _KNOWN_ROWS:
                del self._restricted[next(iter(self._restricted))]
            found = self._restricted[place, remaining, promise] = self._restrict(place, row, remaining, promise)
        return found, promise

    def _restrict(self, place: Place, row: Int32Array, remaining: int, promise: bytes | None) -> Int32Array:
        ids = self.vocabulary.ids
        promised: dict[int, int] = {}
        if promise is not None:
            counts = self.counts.of(promise)
            ends = range(1, min(len(promise), self.vocabulary.max_token_len) + 1)
            promised = {ids[promise[:end]]: counts[end] for end in ends if promise[:end] in ids}
        group_of, texts = self._ways_from(place)
        groups = np.array([self._tokens_behind(text, remaining) for text in texts] + [0])
        least = min([*promised.values(), *groups[:-1].tolist()], default=0)
        most = max(remaining - 1, least)
        if (groups > most).any():
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            bits[: len(group_of)][(groups > most)[group_of]] = 0
            bits[[token for token, needed in promised.items() if needed <= most]] = 1
            row = np.packbits(bits, bitorder="little").view(np.int32)
            row.flags.writeable = False
        return row

    def _tokens_behind(self, text: Rope | None, remaining: int) -> int:
        if text is None:
            return _NEVER
        is_surely_near = self.vocabulary.is_byte_complete and text.size < remaining
        return text.size if is_surely_near else self._num_tokens(text, remaining)

    def _ways(self, place: Place) -> Ways:
        self.walks += 1
        automaton, vocabulary = self.automaton, self.vocabulary
        mask = self._walker.walk(place, grouped=True)
        group_of, firsts = mask.group_of, dict(enumerate(mask.firsts))
        assert group_of is not None
        if automaton.has_unique_texts:
            for token in suspects(automaton, vocabulary, place):  # they may be forbidden alone
                if group_of[token] >= 0:
                    mask.add_group(np.array([token]))
            numbers, tokens = np.unique(group_of, return_index=True)
            firsts = dict(zip(numbers.tolist(), tokens.tolist(), strict=True))
        texts: list[Rope | None] = [None] * len(mask.firsts)
        for number, first in firsts.items():
            end = follow(automaton, place, vocabulary.token_bytes[first]) if number >= 0 else None
            if end is None:
                group_of[group_of == number] = -1  # a text would come twice
                continue
            texts[number] = self.finish.end(end)
            if end.seen_texts != place.seen_texts or automaton.tables.reads_unique[end.state]:
                group_of[first] = len(texts)
                texts.append(texts[number])
                texts[number] = None
        words = walk_words(automaton, vocabulary.trie, place.state, with_nearest=True)
        if words is not None:
            behind = self.finish.end(place._replace(state=words.then))
            found = vocabulary.trie.token[words.nodes]
            group_of[found[found >= 0]] = len(texts) + np.flatnonzero(found >= 0)
            first, other = vocabulary.duplicates.T
            group_of[other] = group_of[first]
            texts += [rope(text, behind) for text in words.nearest]
        return group_of, texts

    def _num_tokens(self, text: Rope, enough: int = FAR) -> int:
        """The least number of tokens that spell a text; where it surely is more than `enough`, a number beyond those of
        texts that are shorter."""
        if not text.is_short or text.size > enough * self.vocabulary.max_token_len:
            return UNSPELLABLE + text.size
        return self.counts.of(text.text())[0]


def _shown(number: int) -> str:
    return f"{number:,}" if number < 10**18 else f"more than {10**18:,}"
