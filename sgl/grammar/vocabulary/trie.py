"""Tokens as a trie in depth-first order: a walk goes through it from left to right and jumps over dead subtrees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]


class Trie:
    """Nodes by number, each before those below it, children by their bytes.

    `byte[n]` leads to node n, which is `depth[n]` bytes from the root; `end[n]` is the first node behind n that is not
    below it; `token[n]` is the token that ends there, or -1.
    """

    def __init__(self, token_bytes: Sequence[bytes], ids: Sequence[int]) -> None:
        """`ids` are tokens of different bytes, at least one each."""
        self.ids: Int32Array = np.array(sorted(ids, key=token_bytes.__getitem__), np.int32)
        texts = [token_bytes[i] for i in self.ids.tolist()]
        self.data: UInt8Array = np.frombuffer(b"".join(texts), np.uint8)
        """The bytes of all tokens."""
        self.lengths: Int64Array = np.fromiter(map(len, texts), np.int64, len(self.ids))
        self.starts: Int64Array = np.cumsum(self.lengths) - self.lengths
        data, lengths, starts = self.data, self.lengths, self.starts
        self.shared: Int64Array = _common_beginnings(data, starts, lengths)
        """By token, in the order of `ids`: with how many bytes of the one before it begins."""
        fresh = lengths - self.shared
        self.first: Int64Array = 1 + np.cumsum(fresh) - fresh
        """The first node that is not also on the way to the token before."""
        self.last: Int64Array = self.first + fresh - 1
        """The node that the token ends at."""
        size = 1 + int(fresh.sum())
        within = np.arange(size - 1) - np.repeat(self.first - 1, fresh) + np.repeat(self.shared, fresh)
        self.depth: Int32Array = np.concatenate(([0], within + 1)).astype(np.int32)
        self.byte: UInt8Array = np.concatenate((np.zeros(1, np.uint8), data[np.repeat(starts, fresh) + within]))
        self.token: Int32Array = np.full(size, -1, np.int32)
        self.token[self.last] = self.ids
        self.end: Int32Array = np.full(size, size, np.int32)
        self._parent: Int64Array = np.zeros(size, np.int64)
        order = np.argsort(self.depth, kind="stable")
        self._levels = np.split(order, np.cumsum(np.bincount(self.depth))[:-1])
        for above, here in pairwise(self._levels):
            parent = self._parent[here] = above[np.searchsorted(above, here) - 1]
            self.end[here] = np.minimum(np.append(here[1:], size), self.end[parent])

        self.all_nodes: Int32Array = np.array([[1, size, 0]], np.int32)
        """The `starts` of a plan (`walk_plan.py`) that has everything walked."""

    def __len__(self) -> int:
        return len(self.byte)

    @cached_property
    def nodes(self) -> Int32Array:
        """[nodes, 3]: end, token, and depth << 8 | byte, as walk.c reads them."""
        return np.stack([self.end, self.token, self.depth << 8 | self.byte], axis=1)

    def nodes_of(self, other: Trie) -> Int64Array:
        """By node: that with the same bytes of a trie which has all these tokens."""
        found = np.zeros(len(self), np.int64)
        for here in self._levels[1:]:
            found[here] = other.step(found[self._parent[here]], self.byte[here])
        return found

    @cached_property
    def _keys(self) -> tuple[Int64Array, Int64Array]:
        """Parent and byte of each node behind the root, sorted, and those nodes."""
        keys = self._parent[1:] << 8 | self.byte[1:]
        order = np.argsort(keys)
        return keys[order], order + 1

    def step(self, nodes: Int64Array, byte: UInt8Array) -> Int64Array:
        """The child of each node by its byte; -1 where there is none."""
        keys, children = self._keys
        wanted = nodes << 8 | byte
        found = np.searchsorted(keys, wanted).clip(max=max(len(keys) - 1, 0))
        return np.where(keys[found] == wanted, children[found], -1) if len(keys) else np.full(len(nodes), -1)


def _common_beginnings(data: UInt8Array, starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """With how many bytes of the text before each text begins."""
    found = np.zeros(len(starts), np.int64)
    active = np.arange(1, len(starts))
    depth = 0
    while len(active):
        active = active[np.minimum(lengths[active], lengths[active - 1]) > depth]
        active = active[data[starts[active] + depth] == data[starts[active - 1] + depth]]
        depth += 1
        found[active] = depth
    return found


class PlainTokens:
    """The *plain* tokens, whole characters that a JSON string holds as they are, and a trie of all others.

    `tokens` are sorted by `chars`, their numbers of characters. `exits`, [n, 3]: where the other tokens have the first
    byte that is not a plain character of ASCII: its node, the end of that node, and how many characters come before.
    By node of the trie of all tokens: `before`, how many plain tokens, `in_order`, end before it; `rest_of`, the node
    of `rest` with the same bytes, or -1; `row_of`, the row of `rows` that has the plain tokens below it, or -1.
    """

    def __init__(self, token_bytes: Sequence[bytes], plain: BoolArray, chars: Int32Array, trie: Trie) -> None:
        """`trie` has all tokens, `plain` and `chars`, [V], tell which ones are plain and how long."""
        found = np.flatnonzero(plain).astype(np.int32)
        self.tokens: Int32Array = found[np.argsort(chars[found], kind="stable")]
        self.chars: Int32Array = chars[self.tokens]
        self._words = (len(plain) + 31) // 32
        self._rows: dict[int, Int32Array] = {}
        self.rest = rest = Trie(token_bytes, trie.ids[~plain[trie.ids]].tolist())
        texts = [token_bytes[i] for i in rest.ids.tolist()]
        prefix = np.fromiter((_SPECIAL.search(text).start() for text in texts), np.int64, len(texts))  # type: ignore[union-attr]  # else it is plain
        chosen = rest.shared <= prefix
        nodes = (rest.first + prefix - rest.shared)[chosen]
        self.exits: Int32Array = np.stack([nodes, rest.end[nodes], prefix[chosen]], axis=1).astype(np.int32)
        is_plain = np.zeros(len(trie) + 1, np.bool_)
        is_plain[1:][trie.last] = plain[trie.ids]
        self.before: Int32Array = np.cumsum(is_plain, dtype=np.int32)
        self.in_order: Int32Array = trie.ids[plain[trie.ids]]
        self.rest_of: Int32Array = np.full(len(trie), -1, np.int32)
        self.rest_of[rest.nodes_of(trie)] = np.arange(len(rest))
        many = np.flatnonzero(self.before[trie.end] - self.before[:-1] >= _MANY)
        self.row_of: Int32Array = np.full(len(trie), -1, np.int32)
        self.row_of[many] = np.arange(len(many))
        self.rows: Int32Array = np.zeros((len(many), self._words), np.int32)
        for row, node in zip(self.rows, many.tolist(), strict=True):
            row[:] = self._packed(self.in_order[self.before[node] : self.before[trie.end[node]]])
        self.most_chars = max(self.chars.max(initial=0), prefix.max(initial=0))

    def row(self, count: int) -> Int32Array:
        """The token bitmask of the first tokens; a fresh copy."""
        if count not in self._rows:
            self._rows[count] = self._packed(self.tokens[:count])
        return self._rows[count].copy()

    def _packed(self, tokens: Int32Array) -> Int32Array:
        bits = np.zeros(self._words * 32, np.uint8)
        bits[tokens] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


_MANY: Final = 512
_SPECIAL: Final = re.compile(rb'["\\\x00-\x1f\x80-\xff]')
