"""Earlier outputs by origin, for later ones of the same origin to be looked up in: the same gen of the same program, or
the same schema, of the same client."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

from sgl.runtime.batch import Int32Array

POOL_TOKENS = 1 << 14
"""Of one origin; searched in microseconds."""
ALL_TOKENS = 1 << 22
"""Of all origins: 16 MB."""
MOST_ORIGINS = 1 << 14
"""Some 400 bytes each beside their tokens, up to 3 KB with long names."""
START = -1
"""Stands before each output: no token, so that beginnings match beginnings."""

_NOTHING = np.empty(0, np.int32)


class Pools:
    """Bounded: the oldest outputs of an origin and the longest unused origins are forgotten first. What is kept under
    one origin is never shown to another."""

    def __init__(
        self, pool_tokens: int = POOL_TOKENS, all_tokens: int = ALL_TOKENS, most_origins: int = MOST_ORIGINS
    ) -> None:
        self._pool_tokens = pool_tokens
        self._all_tokens = all_tokens
        self._most_origins = most_origins
        self._pools: OrderedDict[Hashable, Int32Array] = OrderedDict()
        self.num_tokens = 0
        """In all pools."""

    def add(self, origin: Hashable, output_ids: Sequence[int]) -> None:
        """Keep an output, or as much of its beginning as half a pool holds."""
        before = self._pools.pop(origin, _NOTHING)
        kept = np.array([START, *output_ids[: self._pool_tokens // 2 - 1]], np.int32)
        pool = self._pools[origin] = np.concatenate((before[len(kept) - self._pool_tokens :], kept))
        self.num_tokens += len(pool) - len(before)
        while len(self._pools) > self._most_origins or self.num_tokens > self._all_tokens:
            _, oldest = self._pools.popitem(last=False)
            self.num_tokens -= len(oldest)

    def ids(self, origin: Hashable) -> Int32Array:
        """[n] an origin's outputs, oldest first, with START before each."""
        if origin in self._pools:
            self._pools.move_to_end(origin)
        return self._pools.get(origin, _NOTHING)

    def clear(self) -> None:
        """Forget all outputs."""
        self._pools.clear()
        self.num_tokens = 0
