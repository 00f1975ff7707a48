"""How a page's bytes lie in rows of buffers: engines cut a model's layers and heads among other numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PageShape:
    """Of a whole model's page: of each stage, of each part of its heads, of each fragment (keys or values of a layer),
    of each token, the numbers of its heads. A row has the page, and then once more for ranks that hold the same
    heads."""

    num_layers: int
    num_fragments: int  # of a layer
    num_tokens: int
    num_heads: int  # with keys and values
    tp_size: int  # of the own engine
    pp_size: int  # likewise

    def num_parts(self, tp_size: int) -> int:
        """Ranks of a stage with other heads: where there are fewer heads than ranks, several hold the same one."""
        return min(tp_size, self.num_heads)

    def stages(self, pp_size: int) -> list[int]:
        """Fragments before each stage, and of all; layers are cut as in `Shard.layers_of`."""
        return [self.num_fragments * (stage * self.num_layers // pp_size) for stage in range(pp_size + 1)]

    def place(self, rank: int, fragment_bytes: int) -> slice:
        """Where a rank's page lies in a row; ranks of a stage follow each other. fragment_bytes: of a rank."""
        stages, parts = self.stages(self.pp_size), self.num_parts(self.tp_size)
        stage, rank = divmod(rank, self.tp_size)
        part, copy = divmod(rank, self.tp_size // parts)
        before, after = stages[stage : stage + 2]
        start = copy * parts * stages[-1] + parts * before + part * (after - before)
        return slice(start * fragment_bytes, (start + after - before) * fragment_bytes)

    def fit(self, row: npt.NDArray[np.uint8], tp_size: int, pp_size: int) -> None:
        """Turn a row that begins with the page of an engine of such sizes into the own engine's."""
        theirs, ours = self.num_parts(tp_size), self.num_parts(self.tp_size)
        num_bytes = len(row) * ours // self.tp_size
        page, tokens, stages = row[:num_bytes], self.num_tokens, self.stages(self.pp_size)
        unit = num_bytes // stages[-1]  # of a fragment, all heads
        if theirs != ours or pp_size != self.pp_size:
            by_stage = [page[first * unit : end * unit] for first, end in pairwise(self.stages(pp_size))]
            by_part = [its.reshape(theirs, -1, tokens, unit // tokens // theirs) for its in by_stage]
            whole = np.concatenate(
                [its.transpose(1, 2, 0, 3).reshape(-1, tokens, unit // tokens) for its in by_part]
            )
            for first, end in pairwise(stages):
                its = whole[first:end].reshape(end - first, tokens, ours, -1)
                page[first * unit : end * unit] = its.transpose(2, 0, 1, 3).reshape(-1)
        for start in range(num_bytes, len(row), num_bytes):
            row[start : start + num_bytes] = page
