"""One generation in flight, as the host sees it.

A Request knows its tokens and how far they are computed; it knows no text and no device. The scheduler moves it
through its phases, the loop reads what it produced.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np

from sgl.runtime.batch import Int32Array, Logprobs
from sgl.runtime.cache.radix import Match, Node
from sgl.runtime.sampling_params import SamplingParams


class Phase(Enum):
    """Where a request stands. Every phase but DONE can be aborted."""

    WAITING = "waiting"  # in the queue: new, or retracted
    PREFILL = "prefill"  # has a row; known tokens are still to be computed
    DECODE = "decode"  # has a row; every step samples one more token
    VERIFY = "verify"  # has a row; a draft is being verified, and what follows hangs on the result
    DRAINING = "draining"  # its last token is sampled on the device, the result is under way
    DONE = "done"


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended; `matched` is the stop token id or the text of a stop, where one ended it, and `stop` the
    stop string or the source of the stop regex that it matched. A stop without one: the output matches its constraint,
    and nothing could follow."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    error: Exception | None = None  # for an abort: what the caller is told
    stop: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One generation. Sequence lengths count tokens; token ids are int32."""

    uid: int
    prompt_ids: Int32Array  # [prompt_len] >= 1
    params: SamplingParams
    seed: int
    max_new_tokens: int  # params.max_new_tokens, cut to the context
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    namespace: str | None = None
    call: Hashable | None = None  # what made it along with others; None: it was made alone
    deadline: float | None = None  # monotonic seconds, for the whole request
    queue_deadline: float | None = None  # monotonic seconds, for its first admission
    logprob_start: int | None = None  # first prompt position that is scored; None: none
    top_logprobs: int = -1  # as in Batch
    token_ids_logprob: Int32Array | None = None

    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    output_ids: list[int] = field(default_factory=list)
    input_logprobs: list[Logprobs] = field(default_factory=list)
    output_logprobs: list[Logprobs] = field(default_factory=list)
    cached_len: int = 0  # tokens that the first admission found in the cache
    num_retractions: int = 0
    num_forced: int = 0  # output tokens that followed for certain and were not sampled

    waits_for_grammar: bool = False  # its last known token is not computed: what may follow is not known yet
    tick: int = 0  # the scheduling round in which it arrived
    order: int = 0  # its place among all that ever waited; 0: it has not
    standing: Any = None  # the part of the queue that it waits in
    group: Any = None  # and that part's own record of it
    row: int = -1
    target_len: int = 0  # known tokens at admission, and a draft: prefill ends there
    draft: int | None = None  # a token that may be the next: computed with what is known, and kept if it is sampled
    shared_pages: int = 0  # leading pages that the cache lent at admission
    scored_len: int = 0  # next prompt position whose logits are still wanted
    node: Node | None = None  # the locked cache node, which covers the first tree_len tokens
    tree_len: int = 0
    match: Match | None = None  # of a waiting request, kept up to date by the policy
    owner: Any = None  # the loop's own record of this request
    known: bytes = b""  # what `key` last returned; samples of one prompt share it

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_known(self) -> int:
        """Prompt and output tokens that the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def computable_len(self) -> int:
        """How many of the tokens known at admission may be computed."""
        return self.target_len - self.waits_for_grammar

    @property
    def is_timed(self) -> bool:
        """Whether it may end because its time is up."""
        return self.deadline is not None or self.queue_deadline is not None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, for whichever reason."""
        return self.phase is Phase.DONE

    def known_ids(self) -> Int32Array:
        """[num_known] prompt and output tokens."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.array(self.output_ids, np.int32)))

    def key(self) -> bytes:
        """The known tokens as the cache's key: int32 bytes."""
        if len(self.known) != 4 * self.num_known:
            self.known = self.known_ids().tobytes()
        return self.known

    @property
    def match_limit(self) -> int:
        """Tokens that a cached prefix may cover: one must be left to compute, and every position whose
        logits are wanted."""
        limit = self.num_known - 1
        if self.logprob_start is not None and self.scored_len < self.prompt_len - 1:
            limit = min(limit, self.scored_len)
        return limit
