"""What the ranks of a group tell each other while they begin, through torch's store."""

from __future__ import annotations

from typing import Any

import msgspec


class Exchange:
    """This rank's end. All ranks make the same calls in the same order."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._count = 0

    def allgather(self, data: Any) -> list[Any]:
        """What each rank gave, in their order."""
        self._count += 1
        self._store.set(f"{self._count}/{self._rank}", msgspec.msgpack.encode(data))
        return [
            msgspec.msgpack.decode(bytes(self._store.get(f"{self._count}/{rank}"))) for rank in range(self._size)
        ]
