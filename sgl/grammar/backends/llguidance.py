"""Constraints through llguidance, an optional extra: EBNF always, the others with `backend="llguidance"`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from time import thread_time
from typing import Any, Self, TypeVar

import numpy as np

from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar.backends.lark import is_lark, lark_of_constraint, lark_of_rules
from sgl.grammar.backends.matcher import BackendMatcher
from sgl.grammar.ebnf.cfg import MAX_RULES
from sgl.grammar.ebnf.reader import MAX_SOURCE, read_ebnf
from sgl.grammar.token_matcher import Int32Array, TokenMatcher
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.time_limit import check_size

T = TypeVar("T")
_NUM_MORE = 257  # tokens that llguidance is told of beyond the vocabulary
_MAX_FORCED = 4096
_LARK_NESTING = re.compile(r"[:(\[]")
_STACK_BYTES = 128 << 20  # 8 KB for each of MAX_RULES; what is not used takes no memory
_STACK_SIZE = threading.Lock()  # is the process's, while a thread starts
_MOST_SECONDS = 0.1
"""CPU time of one mask, or of accepting one token. It grows with the readings of a text, so the first token past it is
not far past it."""
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "step_max_items": 100_000,  # in one mask. JSON and programming languages need 50,000
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,  # at 1 to 2 KB
}
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'  # every way to cut forced text into tokens is allowed


class LlguidanceMatcher(BackendMatcher, TokenMatcher):
    """A matcher over llguidance. A token that llguidance gives up on is not accepted, and changes nothing."""

    num_bytes = 0  # llguidance does not tell

    def __init__(self, first: Any, vocabulary: Vocabulary) -> None:
        """first: llguidance's matcher at the start of the text, never advanced."""
        super().__init__(vocabulary)
        self._first = first
        self._current: Any = None  # `_found`; None if the text must be read again
        self._ids: list[int] = []  # consumed by `_found`; `_steps` holds the number of each step

    @property
    def _found(self) -> Any:
        if self._current is None:
            self._current = self._first.deep_copy()
            if self._ids:
                self._current.consume_tokens(self._ids)
        return self._current

    def accept(self, token_id: int) -> bool:
        """As `TokenMatcher.accept`. Raises GrammarError if llguidance gives up."""
        began = thread_time()
        is_allowed = super().accept(token_id)
        if is_allowed and thread_time() - began > _MOST_SECONDS:
            self.rollback(1)
            raise _too_ambiguous()
        return is_allowed

    def accept_bytes(self, data: bytes) -> bool:
        """As `TokenMatcher.accept_bytes`; False too if llguidance gives up."""
        try:
            return super().accept_bytes(data)
        except GrammarError:
            return False

    def _go(self, ids: list[int]) -> bool:
        taken = self._found.try_consume_tokens(ids)
        failure = _failure(self._found) if self._found.is_error() else None
        if taken < len(ids) or failure is not None:
            self._go_back_by(taken)
            if failure is not None:
                raise failure
            return False
        self._ids += ids
        self._steps.append(len(ids))
        return True

    def _undo(self, steps: list[int]) -> None:
        num_tokens = sum(steps)
        del self._ids[len(self._ids) - num_tokens :]
        self._go_back_by(num_tokens)

    def _go_back_by(self, num_tokens: int) -> None:
        """Undo what `_found` consumed beyond `_ids`. If llguidance cannot, it reads the text again when next used;
        most failed matchers are not."""
        if num_tokens and not self._found.is_error():
            self._found.rollback(num_tokens)
        if self._found.is_error():
            self._current = None

    def mask(self, remaining: int | None = None) -> Int32Array:
        """As `TokenMatcher.mask`, a new array; `remaining` restricts nothing. Raises GrammarError."""
        row = self._row()[: self._vocabulary.words] & _with_bytes(self._vocabulary)
        if not self._is_finished and self.is_accepting():
            for token_id in self._vocabulary.eos_ids:
                row.view(np.uint8)[token_id // 8] |= 1 << token_id % 8
        return row

    def _row(self) -> Int32Array:
        """The mask with the tokens behind the vocabulary. Raises GrammarError."""
        row = np.zeros((self._vocabulary.size + _NUM_MORE + 31) // 32, np.int32)
        if not self._is_finished:
            began = thread_time()
            self._found.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._found.is_error():
                failure = _failure(self._found)
                self._go_back_by(0)
                raise failure
            if thread_time() - began > _MOST_SECONDS:
                raise _too_ambiguous()
        return row

    def is_accepting(self) -> bool:
        return self._is_finished or bool(self._found.is_accepting())

    def forced_bytes(self) -> bytes:
        return b"" if self.is_accepting() else bytes(self._found.compute_ff_bytes())[:_MAX_FORCED]

    def next_bytes(self) -> Iterable[int]:
        """As `TokenMatcher.next_bytes`. Raises GrammarError."""
        bits = np.unpackbits(self._row().view(np.uint8), bitorder="little")
        found: list[int] = bits[self._vocabulary.size :][:256].nonzero()[0].tolist()
        return found

    def shortest_end(self) -> bytes:
        """Unknown: raises GrammarError."""
        raise GrammarError("llguidance does not know how a text can be ended")

    def copy(self) -> Self:
        other = super().copy()
        other._current, other._ids = self._found.deep_copy(), self._ids.copy()
        return other


def compile_ebnf(source: str, vocabulary: Vocabulary) -> LlguidanceMatcher:
    """A matcher at the start of the text. Raises GrammarError, also if llguidance is not installed."""
    if is_lark(source):
        check_size(len(source), MAX_SOURCE, "the grammar has more than {} characters")
        check_size(len(_LARK_NESTING.findall(source)), MAX_RULES, "the grammar has more than {} rules and groups")
        return _compile(source, vocabulary)
    rules = read_ebnf(source)
    rules.simplify()
    return _compile(lark_of_rules(rules), vocabulary)


def compile_llguidance(
    kind: str, source: Any, vocabulary: Vocabulary, whitespace: str, *, closes_objects: bool
) -> LlguidanceMatcher:
    """As `compile_ebnf`, of any constraint; source: as of `compile`, choices checked."""
    if kind == "ebnf":
        return compile_ebnf(source, vocabulary)
    lark = lark_of_constraint(kind, source, whitespace, closes_objects=closes_objects)
    try:
        return _compile(lark, vocabulary)
    except GrammarTooLarge:
        raise
    except GrammarError as error:
        raise GrammarError(f'grammar_backend "llguidance" cannot enforce this {kind}: {error}') from error


def _compile(lark: str, vocabulary: Vocabulary) -> LlguidanceMatcher:
    tokenizer = _tokenizer(vocabulary)
    import llguidance

    given = llguidance.LLMatcher.grammar_from_lark(lark + _OPTIONS)
    limits = llguidance.LLParserLimits(**_LIMITS)
    found = _on_a_deep_stack(lambda: llguidance.LLMatcher(tokenizer, given, log_level=0, limits=limits))
    if found.is_error():
        raise GrammarError(f"the grammar cannot be compiled: {_error_of(found)}")
    return LlguidanceMatcher(found, vocabulary)


def _on_a_deep_stack(function: Callable[[], T]) -> T:
    """The result of a function that recurses into nested rules: 3,000 of them overflow an ordinary stack."""
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            with_room = ThreadPoolExecutor(1, "sgl-ebnf")
            done = with_room.submit(function)
        except RuntimeError as error:
            raise MemoryError("there is no room for a deep stack") from error
        finally:
            threading.stack_size(before)
    with with_room:
        return done.result()


def _failure(found: Any) -> GrammarError:
    message = _error_of(found)
    if "Too many items" in message or "items; max is" in message:
        return _too_ambiguous()
    return GrammarError(f"llguidance gave up: {message}")


def _too_ambiguous() -> GrammarTooLarge:
    message = "the grammar has too many readings of the text: make it less ambiguous"
    return GrammarTooLarge(message, states=_LIMITS["step_max_items"], limit=_LIMITS["step_max_items"])


def _error_of(found: Any) -> str:
    """llguidance's message without its state."""
    return str(found.get_error()).partition("\n<state>")[0].strip()


class _Tokens:
    """The tokenizer that llguidance expects: the vocabulary, then a token for each byte and one for the end."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        size = vocabulary.size
        has_bytes = [*map(bool, vocabulary.text_bytes), *[True] * 256, False]
        texts = [*vocabulary.text_bytes, *[bytes([byte]) for byte in range(256)], b""]
        self.tokens = [text or b"<%d>" % token_id for token_id, text in enumerate(texts)]
        self.special_token_ids = [token_id for token_id, has in enumerate(has_bytes) if not has]
        self.eos_token_id = size + 256
        self.bos_token_id = None
        self._first_byte_id = size

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._first_byte_id + byte for byte in data]


@lru_cache(maxsize=4)
def _with_bytes(vocabulary: Vocabulary) -> Int32Array:
    """The mask of tokens with bytes: Lark may name others, which no constraint allows."""
    bits = np.zeros(32 * vocabulary.words, np.bool_)
    bits[: vocabulary.size] = vocabulary.lengths > 0
    return np.packbits(bits, bitorder="little").view(np.int32)


@lru_cache(maxsize=4)
def _tokenizer(vocabulary: Vocabulary) -> Any:
    try:
        import llguidance
        from llguidance import TokenizerWrapper
    except ImportError as error:
        raise GrammarError("this constraint needs llguidance: install sgl[ebnf]") from error
    return llguidance.LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))
