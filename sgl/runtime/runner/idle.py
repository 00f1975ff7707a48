"""Batches of no request, for warming up."""

from __future__ import annotations

import numpy as np

from sgl.runtime.batch import Batch, RowSetup
from sgl.runtime.sampling_params import SamplingParams


def idle_batch(
    q_lens: list[int], temperature: float, adapter: int | None = None, *, top_logprobs: int = -1
) -> Batch:
    """Prompts of token 0 on the dummy page, for warming up. adapter: slot of the first row's. top_logprobs: of all
    rows, see `Batch`."""
    params = SamplingParams(temperature=temperature)
    empty = np.empty(0, np.int32)
    return Batch(
        rows=np.arange(len(q_lens), dtype=np.int32),
        q_lens=np.array(q_lens, np.int32),
        kv_lens=np.array(q_lens, np.int32),
        token_ids=np.zeros(sum(q_lens), np.int32),
        page_writes=np.empty((0, 3), np.int32),
        samples=np.ones(len(q_lens), np.bool_),
        score_from=np.full(len(q_lens), -1, np.int32),
        top_logprobs=np.full(len(q_lens), top_logprobs, np.int32),
        setups=[RowSetup(row, params, 0, empty, empty) for row in range(len(q_lens))],
        adapters=None if adapter is None else np.array([adapter, *[-1] * (len(q_lens) - 1)], np.int32),
    )
