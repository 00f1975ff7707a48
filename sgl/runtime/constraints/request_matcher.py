"""Compiles a request's constraint and follows its output.

Compiling delays no step: the caller waits, up to a deadline. Only the loop's thread uses a compiled grammar.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial

import numpy as np

from sgl.errors import GrammarError, InvalidRequest
from sgl.grammar import Vocabulary
from sgl.grammar.automaton.finished import Configuration, finish
from sgl.grammar.compiler import Constraint, make_constraint
from sgl.grammar.compiler import compile as compile_grammar
from sgl.grammar.matching.jump import MAX_TAIL_TOKENS, Encode, ForcedText, Jump, cut, jump
from sgl.machine_limits import num_processors
from sgl.runtime.batch import TokenMask
from sgl.runtime.config import EngineConfig
from sgl.runtime.constraints.cursor import Cursor, FinishedCursor, FinishedGrammar, MatcherCursor
from sgl.runtime.constraints.process import MAX_FINISHED_STATES
from sgl.runtime.constraints.service import CompileService, GrammarFuture
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.text.known_texts import KnownTexts
from sgl.runtime.text.tokenizer import Tokenizer

_MAX_FINISHERS = 14  # processes, each its own Python
_KNOWN_TEXTS = 1 << 14  # cached tokenisations: forced texts recur
FEW_CONSTRAINTS = 8
"""Whose long texts are kept for the other prompts of a call, which may have thousands."""


class RequestMatcher:
    """Follows one request's output through its constraint, after compiling and `start`."""

    def __init__(self, compilation: GrammarFuture, encode: Encode) -> None:
        self.compilation = compilation
        self.encode = encode
        """The tokenizer's; all matchers of an engine share it."""
        self._cursor: Cursor
        self._failure: GrammarError | None = None
        self._pinned: list[int] = []  # forced tokens, last first
        self._was_pinned = False
        self._mask: TokenMask | None = None  # of the next token, where it was foreseen
        self._draft = -1
        self._behind: RequestMatcher | None = None  # the state after the draft
        self.likely: int | None = None
        """The token that probably comes next, if the forced text before it tells."""

    def start(self) -> None:
        """Take the compiled grammar. Raises the error of compiling."""
        grammar = self.compilation.result()
        if isinstance(grammar, FinishedGrammar):
            self._cursor = FinishedCursor(grammar)
        else:
            self._cursor = MatcherCursor(grammar)

    def next(self, remaining: int) -> TokenMask | None:
        """The mask of the next token, with `remaining` to come. None if no token is possible or the grammar grew
        too large; `accept` then raises."""
        if self._pinned:
            return self._pinned[-1]
        try:
            mask = self._cursor.mask(remaining)
        except GrammarError as error:
            self._failure = error
            return None
        if isinstance(mask, np.ndarray) and not np.count_nonzero(mask):
            self._failure = GrammarError("no token of the model's vocabulary continues what the constraint allows")
            return None
        return mask

    def check(self) -> None:
        """Raise the GrammarError of the last mask: the sampled token was unconstrained."""
        if self._failure is not None:
            raise self._failure

    def accept(self, token_id: int) -> None:
        """Advance by a token. Raises GrammarError if it is not allowed."""
        behind, self._behind, self.likely = self._behind, None, None
        if behind is not None and token_id == self._draft:
            self._adopt(behind)
            return
        if not self._cursor.accept(token_id):
            raise GrammarError(f"token {token_id} is none that the constraint allows here")
        self._was_pinned = bool(self._pinned)
        if self._pinned:
            self._pinned.pop()

    def accept_all(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens that `forced` returned."""
        self.check()
        number = 0
        while number < len(token_ids) and self._behind is not None and token_ids[number] == self._draft:
            self._adopt(self._behind)
            number += 1
        if number < len(token_ids):
            self._behind = None
            if not self._cursor.accept_all(token_ids[number:]):
                raise GrammarError(f"the constraint does not allow tokens {list(token_ids)} here")
        self.likely = None
        self._pinned, self._was_pinned = [], False

    def _adopt(self, behind: RequestMatcher) -> None:
        """Become the state behind the draft."""
        self.__dict__.update(behind.__dict__)
        self._cursor.gain()

    def draft_tokens(
        self,
        guess: Sequence[int],
        output_ids: Sequence[int],
        remaining: int,
        most: int,
        *,
        jumps: bool,
        stop_ids: Collection[int] = (),
    ) -> list[int]:
        """Walk a guess of the next tokens, with masks for `masks`; returns at most `most` drafts: the guess as far as
        it is allowed, with what is certain in it.

        remaining: as of `next`, more than `most`. jumps: whether `forced` tokens are appended.
        """
        drafts: list[int] = []
        left, at, likely = list(reversed(guess)), self, self.likely
        tail = list(output_ids[-MAX_TAIL_TOKENS:])
        self._behind = None
        while True:
            if not left and not at._pinned and likely is not None:
                left, likely = [likely], None
            if not (left or at._pinned) and not drafts:
                return drafts
            at._mask = at.next(remaining - len(drafts))
            if len(drafts) == most or at._failure is not None or not (left or at._pinned):
                return drafts
            token = at._pinned[-1] if at._pinned else left[-1]
            if left and left.pop() != token:
                left.clear()
            behind = at._after(token)
            if behind is None:
                return drafts
            at._draft, at._behind, at = token, behind, behind
            drafts.append(token)
            if token in stop_ids or at.is_complete():
                at._mask = None
                return drafts
            if jumps and (found := at._certain(tail + drafts, remaining - len(drafts))) is not None:
                at.pin(found.token_ids[: remaining - len(drafts)])
                likely = found.draft

    def _after(self, token: int) -> RequestMatcher | None:
        """The state behind a token; None if it is not allowed."""
        try:
            cursor = self._cursor.behind(token)
        except GrammarError:  # the token will be found out if it is sampled
            cursor = None
        if cursor is None:
            return None
        behind = object.__new__(type(self))  # `copy.copy` takes thrice as long
        behind.__dict__.update(self.__dict__)
        behind._cursor, behind._was_pinned, behind._pinned = cursor, bool(self._pinned), self._pinned[:-1]
        behind._behind = behind.likely = None
        return behind

    def _certain(self, output_ids: Sequence[int], remaining: int) -> Jump | None:
        """What `forced` will find."""
        try:
            ahead = self.forced_text(output_ids)
            return None if ahead is None else self.forced(ahead, cut([ahead], self.encode)[0], remaining)
        except GrammarError:
            return None

    def masks(self, num_drafts: int) -> list[TokenMask | None]:
        """The masks of the first `num_drafts` that `draft_tokens` returned, and of the token behind them."""
        masks, at = [self._mask], self
        while len(masks) <= num_drafts:
            assert at._behind is not None, "so many were foreseen"
            at = at._behind
            masks.append(at._mask)
        return masks

    def forced_text(self, output_ids: Sequence[int]) -> ForcedText | None:
        """The forced text that follows, for `grammar.jump.cut`; None if there is none, or after a pinned token,
        since a run must be cut alike whether it is appended or sampled. Raises GrammarError."""
        return None if self._was_pinned else self._cursor.forced_text(output_ids)

    def forced(self, ahead: ForcedText, ids: Sequence[int], remaining: int) -> Jump:
        """The forced tokens that follow, from the latest `forced_text` and its ids. Raises GrammarError."""
        return self._cursor.forced(ahead, ids, remaining)

    def likely_tokens(self, output_ids: Sequence[int], most_choices: int) -> tuple[list[int], int]:
        """How the output may go on where the constraint leaves little choice, and how often there was one, at most
        most_choices times; none after pinned tokens."""
        if self._pinned:
            return [], 0
        try:
            ahead, num_choices = self._cursor.likely_text(output_ids, most_choices)
            if ahead is None:
                return [], 0
            return jump(self._cursor.vocabulary, ahead, cut([ahead], self.encode)[0]).token_ids, num_choices
        except GrammarError:
            return [], 0

    def pin(self, token_ids: Sequence[int]) -> None:
        """Make `forced`'s tokens the next ones sampled; without any, earlier pins stay."""
        self._pinned = list(reversed(token_ids)) or self._pinned

    def is_complete(self) -> bool:
        """Whether the output matches and nothing can follow."""
        try:
            return self._cursor.is_complete()
        except GrammarError as error:
            self._failure = error
            return False


def _constraint(config: EngineConfig, vocabulary: Vocabulary, kind: str, text: str) -> Constraint:
    return make_constraint(
        {kind: text},
        vocabulary,
        whitespace=config.json_whitespace,
        additional_properties=config.json_additional_properties,
        backend=config.grammar_backend,
    )


class Constraints:
    """Compiles constraints for one engine's vocabulary. Safe from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        on_device: bool,
        is_launching: Callable[[], bool],
    ) -> None:
        """on_device: the runner computes masks, from finished automata. is_launching: see `ModelRunner`."""
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._num_finishers = min(_MAX_FINISHERS, max(1, num_processors() - 2)) if on_device else 0
        self._is_launching = is_launching
        self._service: CompileService | None = None
        self._lock = threading.Lock()
        self._encode = KnownTexts(self._tokens_of, _KNOWN_TEXTS)
        self._constraint = lru_cache(maxsize=FEW_CONSTRAINTS)(partial(_constraint, config))

    def warm_up(self) -> tuple[Vocabulary, Configuration]:
        """Start processes and build tables before the first constraint. Returns the vocabulary and a place to try
        masks at. Needs a tokenizer and masks on a device."""
        service = self._started()
        service.start()
        service.vocabulary.work_out()  # this and the next take half a second each
        self._encode(["{"])
        grammar = compile_grammar(json_schema=True, vocabulary=service.vocabulary)
        assert grammar.automaton is not None, "it was made from a schema"
        grammar.matcher().mask(remaining=1)
        finished = finish(grammar.automaton, MAX_FINISHED_STATES)
        assert finished is not None, "any JSON has few states"
        return service.vocabulary, Configuration(finished, finished.start)

    def matchers(self, params: SamplingParams) -> list[RequestMatcher | None]:
        """The matcher of each of the n samples, which share a compilation; None if unconstrained. Raises
        InvalidRequest without a tokenizer."""
        if params.constraint is None:
            return [None] * params.n
        kind, text = params.constraint
        if self._tokenizer is None:
            raise InvalidRequest(f"{kind} needs text, and this engine runs without a tokenizer", param=kind)
        service = self._started()
        constraint = self._constraint(service.vocabulary, kind, text)
        compilation = service.submit(constraint)
        return [RequestMatcher(compilation, self._encode) for _ in range(params.n)]

    def _prepare(self, grammar: FinishedGrammar) -> None:
        """Cache how its texts begin: many requests would need that in one step."""
        cursor = FinishedCursor(grammar)
        if (ahead := cursor.forced_text([])) is not None:
            [ids] = cut([ahead], self._encode)
            cursor.forced(ahead, ids)

    def close(self) -> None:
        """End threads and processes."""
        if self._service is not None:
            self._service.close()

    def _tokens_of(self, texts: Sequence[str]) -> list[list[int]]:
        assert self._tokenizer is not None, "there is no constraint without a tokenizer"
        return self._tokenizer.encode_all(texts, add_special_tokens=False, allow_special=False)

    def _started(self) -> CompileService:
        """The service, made with the vocabulary for the first constraint."""
        assert self._tokenizer is not None
        with self._lock:
            if self._service is None:
                vocabulary = Vocabulary.from_tokenizer(
                    self._tokenizer.table or self._tokenizer.hf,
                    eos_ids=self._eos_ids,
                    logits_width=self._vocab_size,
                )
                self._service = CompileService(
                    vocabulary,
                    deadline=self._config.constraint_timeout,
                    num_finishers=self._num_finishers,
                    prepare=self._prepare,
                    is_launching=self._is_launching,
                )
            return self._service
