"""Prefixes that a running request computes right now, so that others wait for them and do not compute them too.

It knows keys and owners, neither the tree nor its nodes: an announcement outlives splits, evictions and chunks, and
the part that its owner has inserted already is simply a hit for everybody else. The scheduler announces a request's
prompt when it admits it and asks before it admits the next.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter
from typing import NamedTuple

from sgl.runtime.cache.keys import TOKEN_BYTES, common_prefix


class Pending(NamedTuple):
    """Somebody computes what is asked for: wait until `length` tokens match or `owner` is in flight no more."""

    owner: int
    length: int  # tokens in common with the owner's key, a multiple of the page size


class InFlight:
    """Who computes which key. Owners are numbers of the caller's, at most one key each.

    A namespace keeps its keys sorted: the one that has most in common with a given key is then next to where that
    would stand, so a look-up is a bisection and two comparisons, O(log owners).
    """

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._key_of: dict[int, tuple[str | None, bytes]] = {}
        self._sorted: dict[str | None, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, owner: int) -> bool:
        return owner in self._key_of

    def begin(self, owner: int, key: bytes, namespace: str | None = None) -> None:
        """`owner` computes `key`, from its beginning, and inserts whole pages of it as they are done."""
        assert owner not in self._key_of, f"request {owner} has announced a key already"
        self._key_of[owner] = (namespace, key)
        keys = self._sorted.setdefault(namespace, [])
        keys.insert(bisect_left(keys, (key, owner)), (key, owner))

    def end(self, owner: int) -> None:
        """`owner` has inserted all of its key, or never will. Without effect if it has announced none."""
        announced = self._key_of.pop(owner, None)
        if announced is None:
            return
        namespace, key = announced
        keys = self._sorted[namespace]
        del keys[bisect_left(keys, (key, owner))]
        if not keys:
            del self._sorted[namespace]

    def find(self, asker: int, key: bytes, cached_len: int, namespace: str | None = None) -> Pending | None:
        """Who but `asker` computes the most of `key`, if that is more than the `cached_len` tokens it matches."""
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
