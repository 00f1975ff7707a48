"""Context-free grammars in Lark's or EBNF's notation, through llguidance, behind the interface of `Grammar`.

llguidance is an optional extra. Its matchers walk tokens, not bytes, and know no token budget.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl.errors import GrammarError
from sgl.grammar.matcher import Matcher
from sgl.grammar.vocabulary import Vocabulary

Int32Array = npt.NDArray[np.int32]
_NUM_MORE = 257  # tokens that llguidance is told of beyond the vocabulary
_MAX_FORCED = 4096
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'  # every way to cut forced text into tokens is allowed


class EbnfMatcher(Matcher):
    """As `Matcher`, over llguidance. `accept` and `accept_bytes` never raise: what llguidance gives up on is not
    accepted, and the text stays as it was."""

    def __init__(self, first: Any, vocabulary: Vocabulary) -> None:
        """first: llguidance's matcher at the start of the text, never advanced."""
        self._first = first
        self._found = first.deep_copy()
        self._vocabulary = vocabulary
        self._ids: list[int] = []  # what `_found` has consumed
        self._steps: list[int] = []  # how many of them each accepted step brought
        self._is_finished = False

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        if self._is_finished or not 0 <= token_id < self._vocabulary.size:
            return False
        if token_id in self._vocabulary.eos_ids:
            if not self.is_accepting():
                return False
            self._steps.append(0)
            self._is_finished = True
            return True
        return bool(self._vocabulary.token_bytes[token_id]) and self._accept_all([token_id])

    def accept_bytes(self, data: bytes) -> bool:
        """As `Matcher.accept_bytes`."""
        return not self._is_finished and self._accept_all([self._vocabulary.size + byte for byte in data])

    def _accept_all(self, ids: list[int]) -> bool:
        taken = self._found.try_consume_tokens(ids)
        if taken < len(ids) or self._found.is_error():
            self._go_back_by(taken)
            return False
        self._ids += ids
        self._steps.append(len(ids))
        return True

    def _go_back_by(self, num_tokens: int) -> None:
        """Undo what `_found` consumed beyond `_ids`. Not all that llguidance reads can be taken back: then it reads
        the text again."""
        if num_tokens and not self._found.is_error():
            self._found.rollback(num_tokens)
        if self._found.is_error():
            self._found = self._first.deep_copy()
            self._found.consume_tokens(self._ids)

    def mask(self, remaining: int | None = None) -> Int32Array:
        """As `Matcher.mask`, and always another array; `remaining` restricts nothing. Raises GrammarError."""
        size = self._vocabulary.size
        row = np.zeros((size + _NUM_MORE + 31) // 32, np.int32)
        if not self._is_finished:
            self._found.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._found.is_error():
                raise GrammarError(f"llguidance gave up: {_error_of(self._found)}")
            row.view(np.uint8)[size // 8 + 1 :] = 0
            row.view(np.uint8)[size // 8] &= (1 << size % 8) - 1
            if self.is_accepting():
                for token_id in self._vocabulary.eos_ids:
                    row.view(np.uint8)[token_id // 8] |= 1 << token_id % 8
        return row[: self._vocabulary.words]

    def is_accepting(self) -> bool:
        """As `Matcher.is_accepting`."""
        return self._is_finished or bool(self._found.is_accepting())

    def is_finished(self) -> bool:
        """As `Matcher.is_finished`."""
        return self._is_finished

    def forced_bytes(self) -> bytes:
        """As `Matcher.forced_bytes`."""
        return b"" if self.is_accepting() else bytes(self._found.compute_ff_bytes())[:_MAX_FORCED]

    def shortest_end(self) -> bytes:
        """Unknown: raises GrammarError."""
        raise GrammarError("llguidance does not know how a text can be ended")

    def rollback(self, num_steps: int) -> None:
        """As `Matcher.rollback`."""
        if not 0 <= num_steps <= len(self._steps):
            raise ValueError(f"{num_steps} steps cannot be taken back, {len(self._steps)} were accepted")
        if num_steps:
            num_tokens = sum(self._steps[-num_steps:])
            del self._steps[-num_steps:]
            del self._ids[len(self._ids) - num_tokens :]
            self._is_finished = False
            self._go_back_by(num_tokens)

    def copy(self) -> EbnfMatcher:
        """As `Matcher.copy`."""
        other = EbnfMatcher.__new__(EbnfMatcher)
        other.__dict__.update(self.__dict__, _found=self._found.deep_copy())
        other._ids, other._steps = self._ids.copy(), self._steps.copy()
        return other


def compile_ebnf(source: str, vocabulary: Vocabulary) -> EbnfMatcher:
    """A matcher at the start of the text. Raises GrammarError, also where llguidance is not installed."""
    tokenizer = _tokenizer(vocabulary)
    import llguidance

    try:
        if "::=" in source:
            from llguidance.gbnf_to_lark import any_to_lark

            source = any_to_lark(source)
        found = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(source + _OPTIONS))
    except Exception as error:  # the converter raises whatever its parser comes upon
        raise GrammarError(f"the grammar cannot be read: {error}") from error
    if found.is_error():
        raise GrammarError(f"the grammar cannot be compiled: {_error_of(found)}")
    return EbnfMatcher(found, vocabulary)


def _error_of(found: Any) -> str:
    """What llguidance says, without its own state."""
    return str(found.get_error()).partition("\n<state>")[0].strip()


class _Tokens:
    """What llguidance asks of a tokenizer: the vocabulary, and behind it a token for each byte and the end of texts."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        size = vocabulary.size
        has_bytes = [*map(bool, vocabulary.token_bytes), *[True] * 256, False]
        texts = [*vocabulary.token_bytes, *[bytes([byte]) for byte in range(256)], b""]
        self.tokens = [text or b"<%d>" % token_id for token_id, text in enumerate(texts)]
        self.special_token_ids = [token_id for token_id, has in enumerate(has_bytes) if not has]
        self.eos_token_id = size + 256
        self.bos_token_id = None
        self._first_byte_id = size

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._first_byte_id + byte for byte in data]


@lru_cache(maxsize=4)
def _tokenizer(vocabulary: Vocabulary) -> Any:
    try:
        import llguidance
        from llguidance import TokenizerWrapper
    except ImportError as error:
        raise GrammarError("ebnf needs llguidance: install sgl[ebnf]") from error
    return llguidance.LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))
