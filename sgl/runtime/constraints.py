"""From a request's constraint to a compiled grammar, and from there to what each of its tokens may be.

Compiling happens where requests are taken in and stops no step: the caller waits, up to a deadline. A grammar that was
handed out is walked by the loop's thread alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sgl.errors import GrammarError, InvalidRequest
from sgl.grammar import Grammar, Vocabulary
from sgl.grammar.compiler import make_constraint
from sgl.grammar.jump import forced_tokens
from sgl.grammar.service import CompileService
from sgl.runtime.batch import Int32Array, TokenMask
from sgl.runtime.config import JsonWhitespace
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.text.tokenizer import Tokenizer

_KINDS = ("regex", "json_schema", "ebnf", "structural_tag")
_WORDS_OF_BYTES = 8  # where most vocabularies have single bytes, one of which is allowed as a rule


class Guide:
    """Where one request's output stands in its grammar."""

    def __init__(self, grammar: Grammar, encode: Callable[[str], Sequence[int]]) -> None:
        """encode: the tokenizer's own, without special tokens around the text."""
        self._encode = encode
        self._matcher = grammar.matcher()
        self._vocabulary = grammar.vocabulary
        self._failure: GrammarError | None = None
        self._pinned: list[int] = []  # the tokens that follow for certain, last first
        self._was_pinned = False

    def next(self, remaining: int) -> TokenMask | None:
        """What the next token may be: the one that is pinned, or as `mask` says."""
        return self._pinned[-1] if self._pinned else self.mask(remaining)

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
        self._was_pinned = bool(self._pinned)
        if self._pinned:
            self._pinned.pop()

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """The tokens that follow the output for certain; see `grammar.jump`. None behind one that was pinned: a run is
        cut in the same places whether it is appended or sampled."""
        if self._was_pinned:
            return []
        return forced_tokens(self._matcher, self._vocabulary, output_ids, self._encode)

    def pin(self, token_ids: Sequence[int]) -> None:
        """Let these be the next tokens: what `forced` returned."""
        self._pinned = list(reversed(token_ids))

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
        deadline: float = 10.0,
    ) -> None:
        """deadline: seconds that compiling may take."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._whitespace = whitespace
        self._deadline = deadline
        self._service: CompileService | None = None
        self._lock = threading.Lock()

    def guides(self, params: SamplingParams) -> list[Guide | None]:
        """What guides each of a request's n samples; None where it is free.

        Raises InvalidRequest without a tokenizer, and GrammarError for a constraint that cannot be compiled.
        """
        given = {kind: value for kind in _KINDS if (value := getattr(params, kind)) is not None}
        if not given:
            return [None] * params.n
        if self._tokenizer is None:
            [kind] = given
            raise InvalidRequest(f"{kind} needs text, and this engine runs without a tokenizer", param=kind)
        constraint = make_constraint(given, whitespace=self._whitespace)
        grammar = self._started().submit(constraint).result()
        guides = [Guide(grammar, self._encode) for _ in range(params.n)]
        return list(guides)

    def close(self) -> None:
        """End what compiles."""
        if self._service is not None:
            self._service.close()

    def _encode(self, text: str) -> Sequence[int]:
        assert self._tokenizer is not None, "there is no constraint without a tokenizer"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, allow_special=False).tolist()
        return ids

    def _started(self) -> CompileService:
        """The service; it and the vocabulary's trie are made for the first constraint."""
        assert self._tokenizer is not None
        with self._lock:
            if self._service is None:
                vocabulary = Vocabulary.from_tokenizer(
                    self._tokenizer.hf, eos_ids=self._eos_ids, logits_width=self._vocab_size
                )
                self._service = CompileService(vocabulary, deadline=self._deadline)
            return self._service
