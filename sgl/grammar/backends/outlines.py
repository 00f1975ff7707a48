"""Constraints through outlines-core: a regex becomes a finite automaton over all tokens of the vocabulary.

outlines-core searches where we match in full, and drops states behind a match. So each regex ends in U+10FFFF: a text
matches where that may follow, and never contains it. interegular decides whether there is any text.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import interegular
import numpy as np
import numpy.typing as npt
import outlines_core

from sgl.errors import GrammarError
from sgl.grammar.backends.matcher import BackendMatcher
from sgl.grammar.backends.outlines_schema import schema_regex
from sgl.grammar.backends.plain_regex import NOTHING, plain_regex, refusal, regex_of_choices
from sgl.grammar.token_matcher import Int32Array, TokenMatcher
from sgl.grammar.vocabulary.tokens import Vocabulary

_END = "\U0010ffff"
_MASK_BYTES = 64 << 20
_MAX_FORCED = 4096
_CONTINUES = range(0x80, 0xC0)  # bytes within a character


def compile_outlines(kind: str, source: Any, vocabulary: Vocabulary, whitespace: str) -> OutlinesMatcher:
    """A matcher at the start of the text; source: as of `compile`, choices checked. Raises GrammarError."""
    match kind:
        case "json_schema":
            regex = schema_regex(source, whitespace)
        case "regex":
            regex = plain_regex(source, "outlines")
        case "choices":
            regex = regex_of_choices(source)
        case _:
            raise refusal("outlines", f"{kind}: it knows regular languages")
    if NOTHING in regex:
        automaton: Any = interegular.parse_pattern(regex).to_fsm()
        if automaton.empty():
            raise GrammarError(f"{kind} can match nothing at all")
        raise refusal("outlines", "a class without characters beside others")
    try:
        index = outlines_core.Index(f"(?:{regex}){_END}", _tokens(vocabulary))
    except ValueError as error:
        message = str(error).partition(" regex '")[0][:300]
        raise GrammarError(f'grammar_backend "outlines" cannot compile {kind}: {message}') from error
    return OutlinesMatcher(_TokenFsm(index, vocabulary))


@lru_cache(maxsize=4)
def _tokens(vocabulary: Vocabulary) -> Any:
    """The tokens, then one for each byte and one for `_END`."""
    ids: dict[bytes, list[int]] = {}
    end = _END.encode()
    for token_id, data in enumerate(vocabulary.text_bytes):
        if data and end not in data:
            ids.setdefault(data, []).append(token_id)
    for byte in range(256):
        ids.setdefault(bytes([byte]), []).append(vocabulary.size + byte)
    ids[end] = [vocabulary.size + 256]
    return outlines_core.Vocabulary(vocabulary.size + 257, ids)


class _Next(NamedTuple):
    row: Int32Array
    following: list[int]
    """The possible next bytes."""


class _TokenFsm:
    """The automaton of one constraint, shared by its matchers, with a cache of masks by state."""

    def __init__(self, index: Any, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.start: int = index.get_initial_state()
        self.num_bytes = 2 * len(pickle.dumps(index)) + _MASK_BYTES
        """The approximate size of the automaton and of all masks it may cache."""
        self._index = index
        self._masks: OrderedDict[int, _Next] = OrderedDict()
        self._real: dict[int, bool] = {}

    def follow(self, state: int, token_id: int) -> int | None:
        """The state after a token, or None if it is not allowed."""
        found: int | None = self._index.get_next_state(state, token_id)
        return found if found is not None and self._is_real(found) else None

    def is_accepting(self, state: int) -> bool:
        found = self._index.get_next_state(state, self.vocabulary.size + 256)
        return found is not None and bool(self._index.is_final_state(found))

    def next(self, state: int) -> _Next:
        """The mask, read-only, and bytes that may follow."""
        found = self._masks.pop(state, None)
        if found is None:
            found = self._find(state)
            while (len(self._masks) + 1) * found.row.nbytes > _MASK_BYTES and self._masks:
                self._masks.popitem(last=False)
        self._masks[state] = found
        return found

    def _find(self, state: int) -> _Next:
        size = self.vocabulary.size
        allowed = np.array(self._index.get_allowed_tokens(state), np.int64)
        bits = np.zeros(max(32 * self.vocabulary.words, size + 258), np.bool_)
        bits[allowed] = True
        for token_id in np.flatnonzero(bits & _partial(self.vocabulary)).tolist():
            bits[token_id] = self.follow(state, token_id) is not None
        following = np.flatnonzero(bits[size : size + 256]).tolist()
        bits[size:] = False
        if self.is_accepting(state):
            bits[list(self.vocabulary.eos_ids)] = True
        row = np.packbits(bits[: 32 * self.vocabulary.words], bitorder="little").view(np.int32)
        row.flags.writeable = False
        return _Next(row, following)

    def _is_real(self, state: int) -> bool:
        """Whether a text leads here: not within or behind `_END`."""
        known = self._real.get(state)
        if known is None:
            known = self._real[state] = not self._index.is_final_state(state) and self._goes_on(state)
        return known

    def _goes_on(self, state: int) -> bool:
        size = self.vocabulary.size
        if self.is_accepting(state) or self._index.get_next_state(state, size + 256) is not None:
            return True  # not within a character
        for byte in range(256):
            after = self._index.get_next_state(state, size + byte)
            if after is not None and (byte not in _CONTINUES or self._is_real(after)):
                return True
        return False


@lru_cache(maxsize=4)
def _partial(vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
    """Tokens, and the bytes behind them, that end within a character: they may lead into `_END`."""
    found = np.zeros(max(32 * vocabulary.words, vocabulary.size + 258), np.bool_)
    for token_id, data in enumerate(vocabulary.text_bytes):
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError:
                found[token_id] = True
    found[vocabulary.size + 128 : vocabulary.size + 256] = True
    return found


class OutlinesMatcher(BackendMatcher, TokenMatcher):
    """A state of a token automaton. `_steps` holds the state before each step."""

    def __init__(self, fsm: _TokenFsm) -> None:
        super().__init__(fsm.vocabulary)
        self._fsm = fsm
        self._state = fsm.start

    @property
    def num_bytes(self) -> int:
        """As of `_TokenFsm`."""
        return self._fsm.num_bytes

    def _go(self, ids: list[int]) -> bool:
        state: int | None = self._state
        for token_id in ids:
            state = self._fsm.follow(state, token_id) if state is not None else None
        if state is None:
            return False
        self._steps.append(self._state)
        self._state = state
        return True

    def _undo(self, steps: list[int]) -> None:
        self._state = steps[0]

    def mask(self, remaining: int | None = None) -> Int32Array:
        """As `TokenMatcher.mask`; `remaining` restricts nothing."""
        if self._is_finished:
            return np.zeros(self._vocabulary.words, np.int32)
        return self._fsm.next(self._state).row

    def is_accepting(self) -> bool:
        return self._is_finished or self._fsm.is_accepting(self._state)

    def forced_bytes(self) -> bytes:
        forced, state = bytearray(), self._state
        while len(forced) < _MAX_FORCED and not self._is_finished and not self._fsm.is_accepting(state):
            following = self._fsm.next(state).following
            after = self._fsm.follow(state, self._vocabulary.size + following[0]) if following else None
            if len(following) != 1 or after is None:
                break
            forced += bytes(following)
            state = after
        return bytes(forced)

    def next_bytes(self) -> Iterable[int]:
        return () if self._is_finished else self._fsm.next(self._state).following

    def shortest_end(self) -> bytes:
        """Unknown: raises GrammarError."""
        raise refusal("outlines", "a shortest end")
