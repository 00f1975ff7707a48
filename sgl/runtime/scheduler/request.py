"""One generation in flight, as the host sees it: its tokens and how far they are computed, but no text and no
device. The scheduler moves it through its phases; the loop reads its output."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np

from sgl.runtime.batch import Float32Array, Int32Array, Logprobs
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.cache.node import Match, Node
from sgl.runtime.media.layout import Layout
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.transfer.params import TransferParams

Pooling = Literal["last", "mean"]
"""Of a prompt's hidden states: its last token's, or the mean of all tokens'."""


class Phase(Enum):
    """The state of a request. Every phase but DONE can be aborted."""

    WAITING = "waiting"  # queued: new or retracted
    PREFILL = "prefill"  # has a row; known tokens remain to be computed
    DECODE = "decode"  # has a row; samples one token each step
    VERIFY = "verify"  # has a row; drafts are being verified
    DRAINING = "draining"  # its last token is sampled, but not on the host yet
    DONE = "done"


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended. `matched`: the stop token id or stop text; `stop`: the stop string or source of the stop
    regex. A stop without either: the output is complete under its constraint."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    error: Exception | None = None  # for an abort: the caller's error
    stop: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One generation. Lengths count tokens; token ids are int32."""

    uid: int
    prompt_ids: Int32Array  # [prompt_len] >= 1
    params: SamplingParams
    seed: int
    max_new_tokens: int  # params.max_new_tokens, cut to the context
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    namespace: Namespace = None
    adapter: int = 0  # number of its LoRA adapter; 0: none
    origin: Hashable | None = None
    """What its output is one of: same client, program and gen. Outputs of the same origin resemble each other. Small:
    it outlives the request."""
    call: Hashable | None = None  # shared by the requests of one call; None: it was alone
    deadline: float | None = None  # monotonic seconds, for the whole request
    queue_deadline: float | None = None  # monotonic seconds, for its first admission
    logprob_start: int | None = None  # first scored prompt position; None: none
    top_logprobs: int = -1  # as in Batch
    token_ids_logprob: Int32Array | None = None
    pooling: Pooling | None = None  # which hidden states of the prompt are summed up; None: none
    layout: Layout | None = None  # of images in the prompt

    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    output_ids: list[int] = field(default_factory=list)
    input_logprobs: list[Logprobs] = field(default_factory=list)
    output_logprobs: list[Logprobs] = field(default_factory=list)
    pooled: Float32Array | None = None  # [hidden_size] the sum so far
    cached_len: int = 0  # tokens found in the cache at first admission
    num_retractions: int = 0
    forced: list[tuple[int, int]] = field(default_factory=list)
    """Runs of output tokens that were certain and not sampled: the first's place, and how many."""

    waits_for_grammar: bool = False  # its last known token waits for the constraint
    tick: int = 0  # scheduling round of its arrival
    order: int = 0  # serial number of arrival; 0: never waited
    program: Any = None  # its ProgramService, for the policy "program"; None: it is alone
    unit: Any = None  # of the requests that begin a fork's branches; None: it begins none
    is_critical: bool = True  # its program cannot go on meanwhile
    level: int = 0  # of its program's service when it arrived
    waits_in: Any = None  # the Order of the waiting queue
    group: Any = None  # its Group there
    row: int = -1
    target_len: int = 0  # prefill ends here: known tokens at admission, and drafts
    drafts: Sequence[int] = ()  # speculative next tokens, kept as far as they are sampled
    num_ahead: int = 0  # tokens sampled already, behind the latest that the loop was given
    num_drafted: int = 0  # drafts that were verified,
    stood: tuple[int, int] = (0, 0)  # those of them that stood, and the place in the output behind the last one
    shared_pages: int = 0  # leading pages lent by the cache at admission
    scored_len: int = 0  # next prompt position whose logits are wanted
    node: Node | None = None  # locked cache node for the first tree_len tokens
    above: Node | None = None  # the cache node above what is locked; None: all is
    tree_len: int = 0
    is_outdated: bool = False  # some of its KV is of weights that are gone
    match: Match | None = None  # of a waiting request, kept current by the policy
    asked_len: int = -1  # cached tokens when the tiers last had nothing to load for it
    loads_left: int = 2  # that may be begun for it, until it is admitted
    transfer: TransferParams | None = None  # another engine's pages of its prompt, that are not asked for yet
    offers_transfer: bool = False  # its prompt's pages are wanted by another engine
    offered: dict[str, Any] | None = None  # what that one is told
    owner: Any = None  # the loop's record
    known: bytes = b""  # last result of `key`; samples of one prompt share it

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_forced(self) -> int:
        """Output tokens that were certain and not sampled."""
        return sum(count for _, count in self.forced)

    @property
    def num_accepted(self) -> int:
        """Drafts that stood and are in the output: behind its end they are not."""
        return self.stood[0] - max(0, self.stood[1] - len(self.output_ids))

    @property
    def num_known(self) -> int:
        """Prompt and output tokens that the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def computable_len(self) -> int:
        """Tokens known at admission that may be computed."""
        return self.target_len - self.waits_for_grammar

    @property
    def is_timed(self) -> bool:
        """Whether it has any deadline."""
        return self.deadline is not None or self.queue_deadline is not None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, for any reason."""
        return self.phase is Phase.DONE

    @property
    def embedding(self) -> Float32Array | None:
        """[hidden_size] what was pooled, once the prompt is computed."""
        if self.pooled is None or self.pooling != "mean":
            return self.pooled
        return self.pooled / np.float32(self.prompt_len)

    def known_ids(self) -> Int32Array:
        """[num_known] prompt and output tokens."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.array(self.output_ids, np.int32)))

    def key(self) -> bytes:
        """The known tokens as a cache key; see `Layout.key_ids`."""
        if len(self.known) != 4 * self.num_known:
            prompt = self.prompt_ids if self.layout is None else self.layout.key_ids
            self.known = prompt.tobytes() + np.array(self.output_ids, np.int32).tobytes()
        return self.known

    @property
    def match_limit(self) -> int:
        """Tokens that a cached prefix may cover: the last one and every scored or pooled position must be computed."""
        if self.pooling == "mean":
            return 0
        limit = self.num_known - 1
        if self.logprob_start is not None and self.scored_len < self.prompt_len - 1:
            limit = min(limit, self.scored_len)
        return limit
