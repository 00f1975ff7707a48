"""The sampling parameters of request rows, on the host: what samplers upload, and what a step can skip."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import Float32Array, Int64Array, RowSetup
from sgl.runtime.sampling_params import SamplingParams

# columns of the float table
TEMPERATURE, TOP_P, MIN_P, FREQUENCY, PRESENCE, REPETITION = range(6)
# columns of the integer table
SEED, TOP_K = range(2)

_MAX_TEMPERATURE = 1e6  # uniform by then; -inf divided by it stays -inf
_MIN_REPETITION = 1e-4  # logits divided by it stay finite

_NO_IDS: Int64Array = np.empty(0, np.int64)


class RowSettings:
    """Of max_rows request rows, and a last one of padding. `is_drawn`, `top_k` (0: off), `has_top_p` and `has_min_p`
    are about rows that draw."""

    def __init__(self, max_rows: int, vocab_size: int, eos_ids: Collection[int]) -> None:
        """eos_ids: not sampled before min_new_tokens, unless a request ignores them."""
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self.floats = np.zeros((max_rows + 1, 6), np.float32)
        self.ints = np.zeros((max_rows + 1, 2), np.int64)
        self.is_drawn = np.zeros(max_rows, np.bool_)
        self.top_k = np.zeros(max_rows, np.int64)
        self.has_top_p = np.zeros(max_rows, np.bool_)
        self.has_min_p = np.zeros(max_rows, np.bool_)
        self.has_penalties = np.zeros(max_rows, np.bool_)
        self.has_any_cuts = False
        """Whether any row may have top-k, top-p or min-p."""
        self.has_any_penalties = False  # likewise
        self._has_bias = np.zeros(max_rows, np.bool_)
        self._biases: dict[int, tuple[Int64Array, Float32Array]] = {}  # row → ids, values
        self._may_end = np.zeros(max_rows, np.int64)  # the first position at which the row may end
        self._ending: dict[int, Int64Array] = {}  # row → ids not to sample before

    @property
    def has_edits(self) -> bool:
        """Whether any row may have edits."""
        return bool(self._biases or self._ending)

    def setup(self, setups: list[RowSetup]) -> Int64Array:
        """Replace the requests of these rows, and return the rows, [N]."""
        for setup in setups:
            params, row = setup.params, setup.row
            is_drawn = not params.is_greedy and params.top_k != 1
            top_k = params.top_k if is_drawn and 0 < params.top_k < self._vocab_size else 0
            top_p = params.top_p if is_drawn else 1.0
            min_p = params.min_p if is_drawn else 0.0
            self.floats[row] = (
                min(params.temperature, _MAX_TEMPERATURE) if is_drawn else 0.0,
                top_p,
                min_p,
                params.frequency_penalty,
                params.presence_penalty,
                max(params.repetition_penalty, _MIN_REPETITION),
            )
            self.ints[row] = setup.seed, top_k or self._vocab_size
            self.is_drawn[row] = is_drawn
            self.top_k[row] = top_k
            self.has_top_p[row] = top_p < 1.0
            self.has_min_p[row] = min_p > 0.0
            self.has_penalties[row] = params.has_penalties
            self._set_edits(row, params, len(setup.prompt_ids))
        self.has_any_cuts = bool(self.top_k.any() or self.has_top_p.any() or self.has_min_p.any())
        self.has_any_penalties = bool(self.has_penalties.any())
        return np.array([setup.row for setup in setups], np.int64)

    def cuts(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Which rows have top-k, top-p or min-p."""
        return (self.top_k[rows] > 0) | self.has_top_p[rows] | self.has_min_p[rows]

    def _set_edits(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        self._biases.pop(row, None)
        self._ending.pop(row, None)
        self._may_end[row] = 0
        self._has_bias[row] = bool(params.logit_bias)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64)
            self._biases[row] = ids, np.fromiter(params.logit_bias.values(), np.float32)
        if params.min_new_tokens:
            ending = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
            ids = np.array(sorted(ending), np.int64)
            ids = ids[ids < self._vocab_size]
            if len(ids):
                self._ending[row] = ids
                self._may_end[row] = prompt_len + params.min_new_tokens

    def edits(self, rows: Int64Array, positions: Int64Array) -> tuple[Int64Array, Int64Array, Float32Array]:
        """Index into `rows`, token id and value of every addition to the logits. positions: of the tokens to
        sample."""
        indices, ids, values = [_NO_IDS], [_NO_IDS], [np.empty(0, np.float32)]
        for i in np.flatnonzero(self._has_bias[rows]).tolist():
            bias_ids, bias = self._biases[int(rows[i])]
            indices.append(np.full(len(bias_ids), i))
            ids.append(bias_ids)
            values.append(bias)
        for i in np.flatnonzero(positions < self._may_end[rows]).tolist():
            ending = self._ending[int(rows[i])]
            indices.append(np.full(len(ending), i))
            ids.append(ending)
            values.append(np.full(len(ending), -np.inf, np.float32))
        return np.concatenate(indices), np.concatenate(ids), np.concatenate(values)
