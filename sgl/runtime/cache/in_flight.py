"""Prefixes that running requests compute now, so that others wait instead of computing them, too.

Keys and owners only: an announcement outlives splits, evictions and chunks; inserted parts are cache hits. The
scheduler announces each admitted prompt and asks before admitting the next.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter
from typing import NamedTuple

from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace, common_prefix


class Pending(NamedTuple):
    """`owner` computes the key: wait until `length` tokens match or `owner` is no longer in flight."""

    owner: int
    length: int  # tokens shared with the owner's key, a multiple of the page size


class InFlight:
    """Which owner computes which key; owners are the caller's numbers, with one key each.

    Keys are sorted in each namespace, so the longest common prefix is beside the bisection point: O(log owners).
    """

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._key_of: dict[int, tuple[Namespace, bytes]] = {}
        self._sorted: dict[Namespace, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, owner: int) -> bool:
        return owner in self._key_of

    def begin(self, owner: int, key: bytes, namespace: Namespace = None) -> None:
        """`owner` starts to compute `key` and inserts whole pages as they are done."""
        assert owner not in self._key_of, f"request {owner} has announced a key already"
        self._key_of[owner] = (namespace, key)
        keys = self._sorted.setdefault(namespace, [])
        keys.insert(bisect_left(keys, (key, owner)), (key, owner))

    def end(self, owner: int) -> None:
        """`owner` has inserted all of its key, or never will. Harmless if it announced none."""
        announced = self._key_of.pop(owner, None)
        if announced is None:
            return
        namespace, key = announced
        keys = self._sorted[namespace]
        del keys[bisect_left(keys, (key, owner))]
        if not keys:
            del self._sorted[namespace]

    def find(self, asker: int, key: bytes, cached_len: int, namespace: Namespace = None) -> Pending | None:
        """The other owner with the longest common prefix, if longer than `cached_len` tokens."""
        keys = self._sorted.get(namespace)
        if keys is None:
            return None
        right = bisect_left(keys, key, key=itemgetter(0))
        left = right - 1
        if right < len(keys) and keys[right][1] == asker:
            right += 1
        elif left >= 0 and keys[left][1] == asker:
            left -= 1
        best: Pending | None = None
        for at in (left, right):
            if 0 <= at < len(keys):
                other, owner = keys[at]
                length = common_prefix(other, key, 0, self._page_bytes) // TOKEN_BYTES
                if length > cached_len:
                    best, cached_len = Pending(owner, length), length
        return best
