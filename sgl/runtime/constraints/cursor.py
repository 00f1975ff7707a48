"""The state of one output in its constraint. `MatcherCursor` computes masks itself; `FinishedCursor` walks a
finished automaton and leaves masks to the device until the token budget is nearly used up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import thread_time
from typing import Final

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.finished import MAX_DEPTH, Configuration, FinishedAutomaton
from sgl.grammar.automaton.place import Place, advance
from sgl.grammar.compiler import Grammar
from sgl.grammar.matching.budget import FAR
from sgl.grammar.matching.jump import ForcedText, ForcedTexts, Jump, forced_text, jump, likely_bytes, likely_text
from sgl.grammar.matching.masks import without
from sgl.grammar.token_matcher import TokenMatcher
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.time_limit import check_time, collection_time, time_limit

Int32Array = npt.NDArray[np.int32]
ALLOWANCE: Final = 1.0
"""CPU seconds of its thread that one output may use at once."""
SECONDS_A_TOKEN: Final = 0.02
_KEPT = ALLOWANCE / 2  # by guesses, for the output itself
_TOO_LONG = f"the constraint takes more than {ALLOWANCE:g} s of the engine's time: make it simpler"
_MOST_MARGIN = 16  # tokens


class _Allowance:
    """CPU seconds left to an output and to all that is tried behind it."""

    def __init__(self) -> None:
        self.seconds = ALLOWANCE


class MatcherCursor:
    """A cursor that computes masks itself. It has ALLOWANCE seconds of CPU time and gains SECONDS_A_TOKEN with each
    token; when they are used up, any method raises GrammarTooLarge.

    text: an allowed beginning, read before.
    """

    def __init__(self, grammar: Grammar, text: bytes = b"") -> None:
        self._left = _Allowance()
        self._matcher = grammar.matcher()
        self.vocabulary = grammar.vocabulary
        with self._on_time():
            is_allowed = self._matcher.accept_bytes(text)
        assert is_allowed, "it was read in the same grammar"

    @contextmanager
    def _on_time(self, kept: float = 0.0) -> Iterator[None]:
        began = thread_time() - collection_time()
        try:
            with time_limit(self._left.seconds - kept, thread_time, too_long=_TOO_LONG):
                yield
        finally:
            self._left.seconds -= thread_time() - collection_time() - began

    def mask(self, remaining: int | None) -> Int32Array:
        """The packed, read-only mask with `remaining` tokens to come (see `Matcher.fill_mask`). Raises GrammarError."""
        with self._on_time():
            check_time()
            return self._matcher.mask(remaining)

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, without a change, if it is not allowed."""
        self.gain()
        with self._on_time():
            return self._matcher.accept(token_id)

    def gain(self) -> None:
        """A token of the output was accepted, here or by the cursor `behind` it."""
        self._left.seconds = min(self._left.seconds + SECONDS_A_TOKEN, ALLOWANCE)

    def accept_all(self, token_ids: Sequence[int]) -> bool:
        """Advance by tokens that `forced` returned."""
        return all(map(self.accept, token_ids))

    def forced_text(self, output_ids: Sequence[int]) -> ForcedText | None:
        """The forced text after the output; None if there is none. See `jump.py`."""
        with self._on_time():
            return forced_text(self._matcher, self.vocabulary, output_ids)

    def likely_text(self, output_ids: Sequence[int], most_choices: int) -> tuple[ForcedText | None, int]:
        """A text that may follow, where few bytes may, and how often there was a choice; None if time is short. See
        `likely_text`."""
        if self._left.seconds <= _KEPT:
            return None, 0
        with self._on_time(_KEPT):
            text, number = likely_bytes(_Ahead(self._matcher.copy()), most_choices)
        return likely_text(text, output_ids, self.vocabulary), number

    def forced(self, ahead: ForcedText, ids: Sequence[int], remaining: int | None = None) -> Jump:
        """The forced tokens after the output, cut where masks would forbid them with `remaining` to come.
        `ahead` is of the present state, `ids` from `jump.cut`. Raises GrammarError."""
        with self._on_time():
            found = jump(self.vocabulary, ahead, ids)
            if remaining is None or remaining - len(found.token_ids) > FAR:
                return found
            matcher = self._matcher.copy()
            for number, token in enumerate(found.token_ids):
                is_allowed = number < remaining and matcher.mask(remaining - number)[token // 32] >> token % 32 & 1
                if not is_allowed:
                    return Jump(found.token_ids[:number])
                matcher.accept(token)
            return found

    def behind(self, draft: int) -> MatcherCursor | None:
        """A cursor behind a draft; None if the draft is not allowed, or time is short. Both use the same seconds."""
        if self._left.seconds <= _KEPT:
            return None
        other = object.__new__(type(self))  # `copy.copy` takes thrice as long
        other.__dict__.update(self.__dict__)
        other._matcher = self._matcher.copy()
        with self._on_time(_KEPT):
            return other if other._matcher.accept(draft) else None

    def is_complete(self) -> bool:
        """Whether the output matches and nothing can follow."""
        if self._matcher.is_finished() or not self._matcher.is_accepting():
            return self._matcher.is_finished()
        with self._on_time():
            return not without(self._matcher.mask(), self.vocabulary.eos_ids).any()


class FinishedGrammar:
    """A finished automaton over one vocabulary. The host's grammar is built on demand."""

    def __init__(self, finished: FinishedAutomaton, vocabulary: Vocabulary, build: Callable[[], Grammar]) -> None:
        self.automaton = finished
        self.vocabulary = vocabulary
        self.runs = ForcedTexts(finished, vocabulary)
        self._build = build
        self._grammar: Grammar | None = None

    @property
    def num_bytes(self) -> int:
        """Of the automaton, and of the host's grammar if it was built."""
        return self.automaton.nbytes + (0 if self._grammar is None else self._grammar.num_bytes)

    def grammar(self) -> Grammar:
        """The grammar for masks on the host. Single-threaded."""
        if self._grammar is None:
            self._grammar = self._build()
        return self._grammar


_turns = itertools.count()


class FinishedCursor:
    """A cursor in a finished automaton. It falls back to a `MatcherCursor` when the stack is deep or the budget
    nearly used up, jittered by up to 16 tokens, so that requests that started together do not all replay in one
    step."""

    def __init__(self, grammar: FinishedGrammar) -> None:
        self._grammar = grammar
        self._automaton = grammar.automaton
        self._tokens = grammar.vocabulary.token_bytes
        self._eos_ids = grammar.vocabulary.eos_ids
        self._most_opened = grammar.vocabulary.most_opened
        self.vocabulary = grammar.vocabulary
        self._place = grammar.automaton.start
        self._text = bytearray()
        self._margin = next(_turns) % _MOST_MARGIN
        self._far = min(FAR, grammar.automaton.max_bytes_to_end)
        self._is_finished = False
        self._host: MatcherCursor | None = None

    def mask(self, remaining: int) -> Int32Array | Configuration:
        """Like `MatcherCursor`'s, or the place of which the device computes it."""
        if self._host is None:
            opened, frame = self._most_opened, self._place.stack
            depth = opened
            while frame is not None:
                depth, frame = depth + 1, frame.parent
            far = remaining - self._margin
            if depth <= MAX_DEPTH and (far > self._far or far > self._automaton.bytes_to_end(self._place, opened)):
                return Configuration(self._automaton, self._place)
            with time_limit(ALLOWANCE, thread_time, too_long=_TOO_LONG):
                grammar = self._grammar.grammar()
            self._host = MatcherCursor(grammar, bytes(self._text))
        return self._host.mask(remaining)

    def accept(self, token_id: int) -> bool:
        """See `MatcherCursor`."""
        if self._host is not None and not self._host.accept(token_id):
            return False
        if token_id in self._eos_ids:
            if self._is_finished or not self._automaton.tables.accepting.item(self._place.state):
                return False
            self._is_finished = True
            return True
        data = self._tokens[token_id] if token_id < len(self._tokens) else b""
        return bool(data) and not self._is_finished and self._follow(data)

    def accept_all(self, token_ids: Sequence[int]) -> bool:
        """See `MatcherCursor`."""
        if self._host is not None and not self._host.accept_all(token_ids):
            return False
        return self._follow(b"".join([self._tokens[token_id] for token_id in token_ids]))

    def _follow(self, data: bytes) -> bool:
        place = advance(self._automaton, self._place, data)
        if place is None:
            return False
        self._place = place
        self._text += data
        return True

    def forced_text(self, output_ids: Sequence[int]) -> ForcedText | None:
        """See `MatcherCursor`. Also used after falling back: earlier outputs may have found the text."""
        if self._is_finished or self._automaton.only_byte[self._place.state] < 0:
            return None
        return self._grammar.runs.forced_text(self._place, output_ids)

    def likely_text(self, output_ids: Sequence[int], most_choices: int) -> tuple[ForcedText | None, int]:
        """See `MatcherCursor`."""
        if self._is_finished:
            return None, 0
        text, number = likely_bytes(_AheadFinished(self._automaton, self._place), most_choices)
        return likely_text(text, output_ids, self.vocabulary), number

    def forced(self, ahead: ForcedText, ids: Sequence[int], remaining: int | None = None) -> Jump:
        """See `MatcherCursor`."""
        if self._host is not None:
            return self._host.forced(ahead, ids, remaining)
        found = jump(self._grammar.vocabulary, ahead, ids)
        if remaining is None or remaining - len(found.token_ids) > FAR:
            return found
        most_opened = 1  # by a byte
        return found if remaining > self._automaton.bytes_to_end(self._place, most_opened) else Jump([])

    def gain(self) -> None:
        """See `MatcherCursor`."""
        if self._host is not None:
            self._host.gain()

    def behind(self, draft: int) -> FinishedCursor | None:
        """See `MatcherCursor`."""
        host = None if self._host is None else self._host.behind(draft)
        if self._host is not None and host is None:
            return None
        other = object.__new__(type(self))  # `copy.copy` takes thrice as long
        other.__dict__.update(self.__dict__)
        other._host, other._text = None, self._text.copy()
        is_allowed = other.accept(draft)
        other._host = host
        return other if is_allowed else None

    def is_complete(self) -> bool:
        """See `MatcherCursor`."""
        if self._host is not None:
            return self._host.is_complete()
        return self._is_finished or bool(self._automaton.is_last[self._place.state])


Cursor = MatcherCursor | FinishedCursor


class _Ahead:
    """A matcher that goes ahead, byte by byte."""

    def __init__(self, matcher: TokenMatcher) -> None:
        self._matcher = matcher

    def live(self) -> Sequence[int]:
        """The bytes that may come next; none where the text may end."""
        return () if self._matcher.is_accepting() else sorted(self._matcher.next_bytes())

    def go(self, byte: int) -> bool:
        """Go on by one of them."""
        return self._matcher.accept_bytes(bytes((byte,)))


class _AheadFinished:
    """The same in a finished automaton."""

    def __init__(self, automaton: FinishedAutomaton, place: Place) -> None:
        self._automaton = automaton
        self._place = place

    def live(self) -> Sequence[int]:
        """See `_Ahead`."""
        if self._automaton.tables.accepting.item(self._place.state):
            return ()
        return sorted(self._automaton.next_bytes(self._place))

    def go(self, byte: int) -> bool:
        """See `_Ahead`."""
        place = advance(self._automaton, self._place, bytes((byte,)))
        if place is None:
            return False
        self._place = place
        return True
