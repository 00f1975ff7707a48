"""The contract between the scheduler and the runner: what one step computes, and what came of it.

Everything here is plain ints and NumPy. A `Batch` is deterministic data: it could be shipped to another rank.
Every row is one request: a decode (q_len 1), a prompt chunk, a forced run or a scored candidate differ only in
`q_lens`, `samples` and `score_from`. Rows are named by the *request row* they occupy, the index into every
per-request table on the device (page table, sampling parameters, last sampled token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.finished import Standing
from sgl.runtime.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

TokenMask = Int32Array | Standing | int
"""What a row may sample: [ceil(V / 32)], where bit i % 32 of word i // 32 is 1 if token i is allowed (never written to,
and an array that comes again is the same mask); or what its grammar allows at a place; or the one token that follows
for certain."""
TokenMasks = Sequence[TokenMask | None]
"""[S] what may be sampled at each position of `Batch.sampling`; None: everything."""

FROM_DEVICE = -1
"""In `Batch.token_ids`: the token that the row sampled last, which the host may not know yet."""


@dataclass(slots=True)
class RowSetup:
    """What the device must know of a request before its first step in `row` (again after a retract)."""

    row: int
    params: SamplingParams
    seed: int  # uint63; with the token's position it decides the draw, so neither batch nor order matters
    prompt_ids: Int32Array  # [prompt_len]
    output_ids: Int32Array  # [n]; not empty only when the request resumes after a retract


@dataclass(slots=True)
class Batch:
    """One ragged step over B rows and T = q_lens.sum() tokens; row b covers positions
    kv_lens[b] - q_lens[b] … kv_lens[b] - 1 of its request."""

    rows: Int32Array  # [B] request rows, each at most once
    q_lens: Int32Array  # [B] >= 1
    kv_lens: Int32Array  # [B] tokens in KV after this step
    token_ids: Int32Array  # [T], FROM_DEVICE where the row's last sampled token is meant
    page_writes: Int32Array  # [W, 3] (row, index in its page table, page), to apply before the step
    samples: npt.NDArray[np.bool_]  # [B] whether the row samples a token from its last position
    score_from: Int32Array  # [B] first query index whose logits score the following input token; -1: none
    top_logprobs: Int32Array  # [B] -1: no logprobs; 0: of the sampled token; k: of the k likeliest too
    setups: list[RowSetup] = field(default_factory=list)
    score_targets: dict[int, Int32Array] = field(default_factory=dict)
    """Per scored b: the tokens that follow the query indices from score_from[b] on, [n <= q_len - score_from[b]];
    exactly those n positions are scored."""
    drafts: set[int] = field(default_factory=set)
    """Each b, among those that sample, whose last token is a draft: such a row samples at the position before as well,
    and where that gives the draft, what it samples from its last position counts too."""
    token_ids_logprob: dict[int, Int32Array] = field(default_factory=dict)
    """Per b: ids whose logprobs are wanted at every scored and sampled position."""
    is_streamed: bool = False
    """Whether somebody reads tokens as they come, and so wants a core too."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sampling(self) -> tuple[Int64Array, Int64Array]:
        """The S positions that are sampled from: b of each, rising, and how many tokens of its row come behind it."""
        rows = np.flatnonzero(self.samples)
        if not self.drafts:
            return rows, np.zeros(len(rows), np.int64)
        rows = np.sort(np.concatenate((rows, np.array(list(self.drafts), np.int64))))
        return rows, np.append(rows[1:] == rows[:-1], False).astype(np.int64)


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities at n positions, of the model's own logits: before penalties, bias, temperature, mask."""

    chosen: Float32Array  # [n] of the sampled or following token
    top_values: Float32Array | None = None  # [n, k], falling
    top_ids: Int32Array | None = None  # [n, k]
    given: Float32Array | None = None  # [n, m] of token_ids_logprob


@dataclass(slots=True)
class StepResult:
    """What one step computed, on the host."""

    next_tokens: Int32Array  # [B]; -1 in rows that do not sample
    checks: dict[int, int] = field(default_factory=dict)  # by b of drafts: what was sampled in place of the draft
    output_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by b, n = 1
    input_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by b, n = len(score_targets[b])


class PendingStep(Protocol):
    """A step on its way."""

    def wait(self) -> StepResult:
        """Block until the step is computed. To be called once."""
        ...


class Runner(Protocol):
    """Executes batches in the order in which they are launched, each in two phases: what a constrained row may sample
    is not known before the step ahead of it was handled, and its forward pass need not wait for that."""

    def forward(self, batch: Batch) -> Any:
        """Start the forward pass of a step; for `sample`. Its reads and writes of KV come after those of every batch
        launched before."""
        ...

    def sample(self, launched: Any, masks: TokenMasks | None = None) -> PendingStep:
        """Sample behind the forward pass that was launched last. masks: None where no row is constrained."""
        ...
