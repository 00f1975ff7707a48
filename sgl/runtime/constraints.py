"""From a request's constraint to a compiled grammar, and from there to what each of its tokens may be.

Compiling happens where requests are taken in, in the caller's thread, and stops no step. A grammar that was handed
out is walked by the loop's thread alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from sgl import grammar
from sgl.errors import GrammarError, InvalidRequest
from sgl.grammar import Grammar, Vocabulary
from sgl.grammar.jump import forced_tokens
from sgl.runtime.batch import Int32Array
from sgl.runtime.config import JsonWhitespace
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.text.tokenizer import Tokenizer

_KINDS = ("regex", "json_schema", "ebnf", "structural_tag")
_MAX_GRAMMARS = 512
_WORDS_OF_BYTES = 8  # where most vocabularies have single bytes, one of which is allowed as a rule


class Guide:
    """Where one request's output stands in its grammar."""

    def __init__(self, grammar: Grammar, encode: Callable[[str], Sequence[int]]) -> None:
        """encode: the tokenizer's own, without special tokens around the text."""
        self._encode = encode
        self._matcher = grammar.matcher()
        self._vocabulary = grammar.vocabulary
        self._failure: GrammarError | None = None

    def mask(self, remaining: int | None = None) -> Int32Array | None:
        """The packed mask of the next token, [words], not to be written to; None, after which `accept` raises, if no
        token of the vocabulary is possible or the grammar grew too large.

        remaining: tokens that may still be generated; near the end only what can still be completed is allowed.
        """
        try:
            row = self._matcher.mask(remaining)
        except GrammarError as error:
            self._failure = error
            return None
        if not (row[:_WORDS_OF_BYTES].any() or row.any()):
            self._failure = GrammarError("no token of the model's vocabulary continues what the constraint allows")
            return None
        return row

    def check(self) -> None:
        """Raise the GrammarError that `mask` met."""
        if self._failure is not None:
            raise self._failure

    def accept(self, token_id: int) -> None:
        """Go on by a token. Raises GrammarError."""
        self.check()
        if not self._matcher.accept(token_id):
            raise GrammarError(f"token {token_id} is none that the constraint allows here")

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that follow the output for certain; see `grammar.jump`."""
        return forced_tokens(self._matcher, self._vocabulary, output_ids, self._encode)

    def is_complete(self) -> bool:
        """Whether the output matches and nothing can follow it."""
        if self._matcher.is_finished() or not self._matcher.is_accepting():
            return self._matcher.is_finished()
        mask = self.mask()
        if mask is None:
            return False
        row = mask.copy()
        for token_id in self._vocabulary.eos_ids:
            row[token_id // 32] &= ~np.left_shift(1, token_id % 32, dtype=np.int32)
        return not row.any()


class Constraints:
    """Compiles for one engine's vocabulary. Safe from any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: Iterable[int],
        whitespace: JsonWhitespace = "compact",
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._whitespace = whitespace
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._grammars: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()

    def guides(self, params: SamplingParams) -> list[Guide | None]:
        """What guides each of a request's n samples; None where it is free.

        Raises InvalidRequest without a tokenizer and for more than one constraint, and GrammarError for one that
        cannot be compiled.
        """
        given = [(kind, value) for kind in _KINDS if (value := getattr(params, kind)) is not None]
        if not given:
            return [None] * params.n
        if len(given) > 1:
            names = " and ".join(kind for kind, _ in given)
            raise InvalidRequest(f"give one constraint, not {names}", param=given[1][0])
        [key] = given
        if self._tokenizer is None:
            raise InvalidRequest(f"{key[0]} needs text, and this engine runs without a tokenizer", param=key[0])
        with self._lock:
            flight = self._grammars.get(key)
            if mine := flight is None:
                flight = self._grammars[key] = Future()
            self._grammars.move_to_end(key)
            while len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        if mine:
            try:
                flight.set_result(self._compile(*key))
            except BaseException as error:
                flight.set_exception(error)
                with self._lock:
                    self._grammars.pop(key, None)
        grammar = flight.result()
        return [Guide(grammar, self._encode) for _ in range(params.n)]

    def _compile(self, kind: str, source: str) -> Grammar:
        vocabulary = self._loaded_vocabulary()
        made = grammar.compile(**{kind: source}, vocabulary=vocabulary, whitespace=self._whitespace)  # type: ignore[arg-type]
        first = Guide(made, self._encode)  # the first mask takes longest, and only the caller waits for this thread
        first.mask()
        first.check()
        return made

    def _encode(self, text: str) -> Sequence[int]:
        assert self._tokenizer is not None, "there is no constraint without a tokenizer"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, allow_special=False).tolist()
        return ids

    def _loaded_vocabulary(self) -> Vocabulary:
        """The vocabulary with its trie, built for the first constraint."""
        assert self._tokenizer is not None
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.from_tokenizer(
                    self._tokenizer.hf, eos_ids=self._eos_ids, logits_width=self._vocab_size
                )
            return self._vocabulary
