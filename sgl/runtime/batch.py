"""The contract between scheduler and runner: what one step computes, and its results.

Everything is plain ints and NumPy, so a `Batch` could be shipped to another rank. Each row is one request; decodes,
prompt chunks, forced runs and scored candidates differ only in `q_lens`, `samples` and `score_from`. Row numbers
index all per-request tables on the device (page table, sampling parameters, last sampled token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.finished import Configuration
from sgl.runtime.media.item import MediaRun
from sgl.runtime.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

TokenMask = Int32Array | Configuration | int
"""What a row may sample: a packed mask, int32 [ceil(V / 32)], where bit i % 32 of word i // 32 allows token i; a
place in a grammar; or the only token possible. Masks are never written to: the same array means the same mask."""
TokenMasks = Sequence[TokenMask | None]
"""[S] one for each position of `Batch.sampling`; None allows every token."""

BROADCAST = -1
"""As a token mask: rank 0 sends it."""

FROM_DEVICE = -1
"""In `Batch.token_ids`: the row's last sampled token, which the host may not know yet."""


EMPTY_STATE = -1
"""In `Batch.state_loads`: a state before any token."""


@dataclass(slots=True)
class RowSetup:
    """What the device must know of a request before its first step in `row`, also after a retract."""

    row: int
    params: SamplingParams
    seed: int  # uint63; token position and seed alone decide the draw
    prompt_ids: Int32Array  # [prompt_len]
    output_ids: Int32Array  # [n]; empty unless the request resumes after a retract


@dataclass(slots=True)
class Batch:
    """One ragged step over B rows and T = q_lens.sum() tokens. Row b computes positions kv_lens[b] - q_lens[b] to
    kv_lens[b] - 1 of its request."""

    rows: Int32Array  # [B] request rows, each at most once
    q_lens: Int32Array  # [B] >= 1
    kv_lens: Int32Array  # [B] tokens in KV after this step
    token_ids: Int32Array  # [T], or FROM_DEVICE
    page_writes: Int32Array  # [W, 3] (row, index in its page table, page), to apply before the step
    samples: npt.NDArray[np.bool_]  # [B] whether the row samples a token from its last position
    score_from: Int32Array  # [B] first query index whose logits score the next input token; -1: none
    top_logprobs: Int32Array  # [B] -1: no logprobs; 0: of the sampled token; k: also of the k likeliest
    setups: list[RowSetup] = field(default_factory=list)
    adapters: Int32Array | None = None
    """[B] the slot of each row's LoRA adapter, or -1; None: no row has one."""
    adapter_writes: list[tuple[int, int]] = field(default_factory=list)
    """(slot, number of an adapter), to copy in before the step."""
    score_targets: dict[int, Int32Array] = field(default_factory=dict)
    """By b: the tokens after query indices score_from[b] onwards, [n <= q_len - score_from[b]]. Exactly n positions
    are scored."""
    drafts: dict[int, Int32Array] = field(default_factory=dict)
    """By b: the row's last k tokens, which are speculative, [1 <= k < q_len]. It samples before each of them (to verify
    it) and after the last."""
    pool_from: dict[int, int] = field(default_factory=dict)
    """By b: first query index whose hidden states are summed up, to the row's last."""
    token_ids_logprob: dict[int, Int32Array] = field(default_factory=dict)
    """By b: token ids whose logprobs are wanted at every scored and sampled position."""
    window_writes: Int32Array | None = None
    """page_writes to the page table of layers with a window. None: all layers have the same."""
    state_loads: Int32Array | None = None
    """[N, 2] (checkpoint or EMPTY_STATE, row): recurrent states to copy before the step. None: the model has none."""
    state_saves: Int32Array | None = None
    """[N, 2] (row, checkpoint): those to copy after it."""
    offsets: Int32Array | None = None
    """[B] what positions of rows behind images are ahead of their indices; None: nothing anywhere."""
    places: dict[int, Int32Array] = field(default_factory=dict)
    """By b of rows that begin before the end of an image: positions in time, height and width, [3, q_len]."""
    media: list[MediaRun] = field(default_factory=list)
    """Images among the T tokens."""
    moved: int = 0
    """The number of the last `PendingMoves` of which its rows read something."""
    is_streamed: bool = False
    """Whether a client reads tokens as they come and so needs a core, too."""
    is_observed: bool = False
    """Whether a runner's observer sees it: then it is no replayed decode step, on any rank."""
    is_ahead: bool = False
    """Whether it begins as if all drafts of the step before stood, in the same rows; the device knows how many did, and
    its drafts."""
    _sampling: tuple[Int64Array, Int64Array] | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        num_rows, num_tokens = len(self.rows), len(self.token_ids)
        return num_tokens // num_rows if num_rows in (1, num_tokens) else int(self.q_lens.max())

    @property
    def sampling(self) -> tuple[Int64Array, Int64Array]:
        """The S positions to sample from: their b, ascending, and how many more of them follow in the same row. Of a
        finished batch, and never written to."""
        if self._sampling is None:
            self._sampling = self._positions_to_sample()
        return self._sampling

    def _positions_to_sample(self) -> tuple[Int64Array, Int64Array]:
        rows = self.samples.nonzero()[0]
        if not self.drafts:
            return rows, np.zeros(len(rows), np.int64)
        if len(self) == 1:
            count = 1 + len(self.drafts[0])
            return np.zeros(count, np.int64), np.arange(count - 1, -1, -1)
        counts = np.ones(len(self), np.int64)
        counts[list(self.drafts)] += [len(ids) for ids in self.drafts.values()]
        counts = counts[rows]
        ends = np.repeat(np.cumsum(counts), counts)
        return np.repeat(rows, counts), ends - 1 - np.arange(len(ends))


def no_pairs() -> Int32Array:
    """[0, 2]."""
    return np.empty((0, 2), np.int32)


def joined(parts: Sequence[Int32Array]) -> Int32Array:
    """All pairs, [n, 2]."""
    return np.concatenate([no_pairs(), *parts])


@dataclass(slots=True)
class PageMoves:
    """What to copy between the device and host memory: first saves, then loads."""

    saves: Int32Array  # [n, 2] (device page, host page), as they are before batches that are launched later
    loads: Int32Array  # [m, 2] (host page, device page)
    state_saves: Int32Array = field(default_factory=no_pairs)  # (checkpoint, host state)
    state_loads: Int32Array = field(default_factory=no_pairs)  # (host state, checkpoint)
    window_saves: Int32Array = field(default_factory=no_pairs)  # as saves, of layers with pages of their own
    window_loads: Int32Array = field(default_factory=no_pairs)  # likewise


class PendingMoves(Protocol):
    """Launched copies."""

    number: int
    """1 for a mover's first."""

    @property
    def load_seconds(self) -> float:
        """What the loads of pages, of which there are some, took, once they are done, without the time for which they
        waited."""

    def is_loaded(self) -> bool:
        """Whether all loads are done: batches may read the device pages."""
        ...

    def is_saved(self) -> bool:
        """Whether all saves are done: anybody may read the host pages."""
        ...

    def comes_by_layer(self) -> bool:
        """Whether batches may use the device pages before all loads are done, since they wait for each layer's."""
        ...


class Mover(Protocol):
    """Copies pages, in the order of the calls."""

    def move(self, moves: PageMoves) -> PendingMoves:
        """Start copies, after all batches launched before. Never waits for them."""
        ...


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities at n positions, from the model's raw logits: no penalties, bias, temperature or mask."""

    chosen: Float32Array  # [n] of the sampled or following token
    top_values: Float32Array | None = None  # [n, k], descending
    top_ids: Int32Array | None = None  # [n, k]
    given: Float32Array | None = None  # [n, m] of token_ids_logprob

    def split(self) -> list[Logprobs]:
        """Those of each position."""
        if len(self.chosen) == 1:
            return [self]
        columns = self.chosen, self.top_values, self.top_ids, self.given
        parts = [[None if its is None else its[i : i + 1] for its in columns] for i in range(len(self.chosen))]
        return [Logprobs(*part) for part in parts]  # type: ignore[arg-type]  # the first is there


@dataclass(slots=True)
class StepResult:
    """The results of one step, on the host."""

    next_tokens: Int32Array  # [B]; -1 in rows that do not sample
    checks: dict[int, Int32Array] = field(default_factory=dict)  # by b: tokens sampled in drafts' places
    drafts: dict[int, Int32Array] = field(default_factory=dict)  # by b, of a batch that is ahead
    output_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by b, n = 1 + its drafts
    input_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by b, n = len(score_targets[b])
    pooled: dict[int, Float32Array] = field(default_factory=dict)  # by b of pool_from: the sum, [hidden_size]


class PendingStep(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the step is computed. Call it once."""
        ...


class Runner(Mover, Protocol):
    """Executes batches in launch order, each in two phases. Masks depend on the previous step's result; the forward
    pass does not wait for them."""

    def forward(self, batch: Batch) -> Any:
        """Start a step's forward pass. It reads and writes KV after all batches launched before it."""
        ...

    def sample(self, launched: Any, masks: TokenMasks | None = None) -> PendingStep:
        """Sample from the latest forward pass. masks: None if no row is constrained."""
        ...
