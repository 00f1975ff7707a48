"""Context-free grammars in Lark's or EBNF's notation, through llguidance, behind the interface of `Grammar`.

llguidance is an optional extra. Its matchers walk tokens, not bytes, and know no token budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl.errors import GrammarError
from sgl.grammar.matcher import Matcher
from sgl.grammar.vocabulary import Vocabulary

Int32Array = npt.NDArray[np.int32]


class EbnfMatcher(Matcher):
    """As `Matcher`, over llguidance."""

    def __init__(self, found: Any, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self._found = found
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._steps: list[int] = []  # tokens of each accepted step; 0 for the end of the text

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        if self.is_finished() or not 0 <= token_id < self._vocabulary.size:
            return False
        if token_id in self._vocabulary.eos_ids:
            if not self.is_accepting():
                return False
            self._steps.append(0)
            return True
        return bool(self._vocabulary.token_bytes[token_id]) and self._accept_all([token_id])

    def accept_bytes(self, data: bytes) -> bool:
        """As `Matcher.accept_bytes`; False too for bytes that no tokens spell."""
        if self.is_finished():
            return False
        ids = self._tokenizer.tokenize_bytes(data)
        if b"".join(self._vocabulary.token_bytes[i] for i in ids) != data:
            return False
        return self._accept_all(ids)

    def _accept_all(self, ids: Sequence[int]) -> bool:
        taken = self._found.try_consume_tokens(list(ids))
        if taken < len(ids):
            self._found.rollback(taken)
            self._check()
            return False
        self._steps.append(len(ids))
        return True

    def mask(self, remaining: int | None = None) -> Int32Array:
        """As `Matcher.mask`, and always another array; `remaining` restricts nothing."""
        row = np.zeros(self._vocabulary.words, np.int32)
        if self.is_finished():
            return row
        self._found.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        for token_id in self._vocabulary.eos_ids:
            bit = np.left_shift(1, token_id % 32, dtype=np.int32)
            row[token_id // 32] = row[token_id // 32] | bit if self.is_accepting() else row[token_id // 32] & ~bit
        return row

    def is_accepting(self) -> bool:
        """As `Matcher.is_accepting`."""
        return self.is_finished() or bool(self._found.is_accepting())

    def is_finished(self) -> bool:
        """As `Matcher.is_finished`."""
        return bool(self._steps) and self._steps[-1] == 0

    def forced_bytes(self) -> bytes:
        """As `Matcher.forced_bytes`."""
        return b"" if self.is_finished() or self.is_accepting() else bytes(self._found.compute_ff_bytes())

    def shortest_end(self) -> bytes:
        """Unknown: raises GrammarError."""
        raise GrammarError("llguidance does not know how a text can be ended")

    def rollback(self, num_steps: int) -> None:
        """As `Matcher.rollback`."""
        if not 0 <= num_steps <= len(self._steps):
            raise ValueError(f"{num_steps} steps cannot be taken back, {len(self._steps)} were accepted")
        for _ in range(num_steps):
            self._found.rollback(self._steps.pop())

    def copy(self) -> EbnfMatcher:
        """As `Matcher.copy`."""
        other = EbnfMatcher(self._found.deep_copy(), self._tokenizer, self._vocabulary)
        other._steps = self._steps.copy()
        return other

    def _check(self) -> None:
        if self._found.is_error():
            raise GrammarError(f"llguidance gave up: {self._found.get_error()}")


def compile_ebnf(source: str, vocabulary: Vocabulary) -> EbnfMatcher:
    """A matcher at the start of the text. Raises GrammarError, also where llguidance is not installed."""
    tokenizer = _tokenizer(vocabulary)
    import llguidance

    try:
        if "::=" in source:
            from llguidance.gbnf_to_lark import any_to_lark

            source = any_to_lark(source)
        found = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(source))
    except Exception as error:  # the converter raises whatever its parser comes upon
        raise GrammarError(f"the grammar cannot be read: {error}") from error
    if found.is_error():
        raise GrammarError(f"the grammar cannot be compiled: {found.get_error()}")
    return EbnfMatcher(found, tokenizer, vocabulary)


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0] if vocabulary.eos_ids else vocabulary.size
        self.bos_token_id = None
        data = vocabulary.token_bytes
        self.tokens = [one or b"<%d>" % i for i, one in enumerate(data)]
        if not vocabulary.eos_ids:
            self.tokens.append(b"<end>")
        self.special_token_ids = [i for i in range(len(self.tokens)) if i >= len(data) or not data[i]]
        self.ids = vocabulary.ids
        self.longest = vocabulary.max_token_len

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        found, start = [], 0
        while start < len(data):
            for end in range(min(start + self.longest, len(data)), start, -1):
                if data[start:end] in self.ids:
                    found.append(self.ids[data[start:end]])
                    start = end
                    break
            else:
                break
        return found


@lru_cache(maxsize=4)
def _tokenizer(vocabulary: Vocabulary) -> Any:
    try:
        import llguidance
        from llguidance import TokenizerWrapper
    except ImportError as error:
        raise GrammarError("ebnf needs llguidance: install sgl[ebnf]") from error
    return llguidance.LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))
