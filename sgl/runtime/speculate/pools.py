"""Earlier outputs by origin, for later ones of the same origin to be looked up in: the same gen of the same program, or
the same schema, of the same client."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from sgl.runtime.batch import Int32Array
from sgl.runtime.speculate.history import History

POOL_TOKENS = 1 << 14
"""Of one origin; searched in microseconds."""
ALL_TOKENS = 1 << 22
"""Of all origins: 16 MB."""
MOST_ORIGINS = 1 << 14
"""Some 300 bytes each beside their tokens."""
START = -1
"""Stands before each output: no token, so that beginnings match beginnings."""


class Pools:
    """Bounded: the oldest outputs of an origin and the longest unused origins are forgotten first. What is kept under
    one origin is never shown to another."""

    def __init__(
        self, pool_tokens: int = POOL_TOKENS, all_tokens: int = ALL_TOKENS, most_origins: int = MOST_ORIGINS
    ) -> None:
        self._pool_tokens = pool_tokens
        self._all_tokens = all_tokens
        self._most_origins = most_origins
        self._pools: OrderedDict[Hashable, History] = OrderedDict()
        self.num_tokens = 0
        """In all pools."""

    def add(self, origin: Hashable, output_ids: Sequence[int]) -> None:
        """Keep an output, or as much of its beginning as a pool holds."""
        kept = [START, *output_ids[: self._pool_tokens // 2 - 1]]
        pool = self._pools.setdefault(origin, History())
        self._pools.move_to_end(origin)
        self.num_tokens += len(kept)
        if len(pool) + len(kept) > self._pool_tokens:
            dropped = min(len(pool), self._pool_tokens // 2)
            pool.drop_first(dropped)
            self.num_tokens -= dropped
        pool.extend(kept)
        while len(self._pools) > self._most_origins or (
            self.num_tokens > self._all_tokens and len(self._pools) > 1
        ):
            _, oldest = self._pools.popitem(last=False)
            self.num_tokens -= len(oldest)

    def ids(self, origin: Hashable) -> Int32Array | None:
        """[n] an origin's outputs, oldest first, with START before each; None if there are none. Not to be kept past
        the next `add`."""
        pool = self._pools.get(origin)
        if pool is None:
            return None
        self._pools.move_to_end(origin)
        return pool.ids

    def clear(self) -> None:
        """Forget all outputs."""
        self._pools.clear()
        self.num_tokens = 0
