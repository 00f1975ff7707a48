"""Attention of a model whose layers with a window have pages of a pool of their own: a backend for each pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionShape, AttentionStep, GraphAttention


def for_pools(shape: AttentionShape, make: Callable[[AttentionShape], AttentionBackend]) -> AttentionBackend:
    """What `make` makes of the shape, or for each pool of its pages."""
    return PooledAttention(shape, make) if shape.pooled_windows else make(shape)


class PooledAttention(GraphAttention):
    """A `GraphAttention` if those are that it is made of. A stage of a pipeline may have layers of one kind only."""

    def __init__(self, shape: AttentionShape, make: Callable[[AttentionShape], AttentionBackend]) -> None:
        self._windows = frozenset(shape.pooled_windows)
        self._backends: dict[bool, AttentionBackend] = {}
        """By whether it is that of pooled windows."""
        for is_windowed in (False, True):
            windows = tuple(each for each in shape.windows if (each in self._windows) == is_windowed)
            if windows:
                self._backends[is_windowed] = make(replace(shape, windows=windows, pooled_windows=()))
        self.max_queries = min(getattr(each, "max_queries", 1) for each in self._backends.values())

    def plan(self, step: AttentionStep) -> None:
        for is_windowed, backend in self._backends.items():
            backend.plan(_part(step, is_windowed))

    def run(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        window = args[0] if args else options.get("window")
        return self._backends[window in self._windows].run(query, key_cache, value_cache, *args, **options)

    def variants(self, num_rows: int) -> range:
        """See `GraphAttention.variants`: those of layers that see everything."""
        return self._graph(False).variants(num_rows)

    def variant(self, step: AttentionStep) -> int:
        return self._graph(False).variant(step)

    def plan_decode(
        self, step: AttentionStep, variant: int, inputs: Sequence[npt.NDArray[np.int64]]
    ) -> list[torch.Tensor]:
        self._graph(True).plan_decode(_part(step, True), 0, ())
        return self._graph(False).plan_decode(step, variant, inputs)

    def plan_verify(
        self, step: AttentionStep, queries: int, inputs: Sequence[npt.NDArray[np.int64]]
    ) -> list[torch.Tensor]:
        self._graph(True).plan_verify(_part(step, True), queries, ())
        return self._graph(False).plan_verify(step, queries, inputs)

    def _graph(self, is_windowed: bool) -> GraphAttention:
        return cast(GraphAttention, self._backends[is_windowed])


def _part(step: AttentionStep, is_windowed: bool) -> AttentionStep:
    if not is_windowed:
        return step
    assert step.windowed is not None, "the step has a page table for each pool"
    return step.windowed
