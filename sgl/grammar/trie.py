"""The tokens of a vocabulary as a trie in level order, laid out for walks that step all live nodes of a level at
once.

There are two tries in one numbering: of all tokens, and, behind it, of the tokens that are not *plain* (whole
characters that a JSON string holds as they are). A walk that comes to where every plain character is allowed takes
the plain tokens below as one range and goes on in the second trie, a thirtieth the size of the first.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]

ROOT: Final = 0


class Trie:
    """Nodes by number; the children of a node lie side by side.

    `child_start[n]` to `child_end[n]` are the children of n, `byte[n]` is the byte that leads to it, `token[n]` the
    token that ends there or -1; tokens with the bytes of another are in `twins` by that one's node. `ragged[n]` is
    the node of the second trie with the same bytes: the last node of all, which leads nowhere, if there is none.
    `plain_tokens[plain_start[n]:plain_end[n]]` are the plain tokens below n, with `plain_chars` characters each;
    `chars[n]` characters begin on the way to n. Where `is_plain_below[n]`, in the second trie, nothing but plain
    characters follows: its tokens are `ragged_tokens[ragged_start[n]:ragged_end[n]]`.
    """

    def __init__(self, token_bytes: Sequence[bytes], plain: BoolArray, chars: Int32Array) -> None:
        order = sorted((i for i, data in enumerate(token_bytes) if data), key=token_bytes.__getitem__)
        self._in_order = [token_bytes[i] for i in order]
        ids = np.array(order, np.int32)
        is_plain = plain[ids] if len(ids) else np.zeros(0, np.bool_)
        full = _Levels(token_bytes, ids)
        ragged = _Levels(token_bytes, ids[~is_plain])
        size = len(full.byte)
        self.full_size = size
        """Nodes from here on belong to the second trie; this one is its root."""
        nowhere = np.zeros(1, np.int64)
        self.byte: UInt8Array = np.concatenate([full.byte, ragged.byte, np.zeros(1, np.uint8)])
        self.child_start: Int64Array = np.concatenate([full.child_start, ragged.child_start + size, nowhere])
        self.child_end: Int64Array = np.concatenate([full.child_end, ragged.child_end + size, nowhere])
        self.width: Int64Array = self.child_end - self.child_start
        self.token: Int32Array = np.concatenate([full.token, ragged.token, np.full(1, -1, np.int32)])
        self.twins: dict[int, list[int]] = full.twins | {node + size: t for node, t in ragged.twins.items()}
        self.has_twins: BoolArray = np.zeros(len(self.byte), np.bool_)
        self.has_twins[list(self.twins)] = True
        before = np.concatenate(([0], np.cumsum(is_plain)))
        self.plain_tokens: Int32Array = ids[is_plain]
        self.plain_chars: Int32Array = chars[self.plain_tokens]
        self.plain_start: Int64Array = before[full.first]
        self.plain_end: Int64Array = before[full.last]
        self.chars: Int32Array = np.concatenate([full.chars(), ragged.chars(), np.zeros(1, np.int32)])
        self.nowhere = len(self.byte) - 1
        self.ragged: Int64Array = np.full(size, self.nowhere, np.int64)
        self._match(full, ragged)
        self.ragged_tokens: Int32Array = ids[~is_plain]
        self.ragged_chars: Int32Array = chars[self.ragged_tokens]
        self.most_chars = int(chars.max(initial=0))
        self.ragged_start: Int64Array = np.concatenate([np.zeros(size, np.int64), ragged.first, nowhere])
        self.ragged_end: Int64Array = np.concatenate([np.zeros(size, np.int64), ragged.last, nowhere])
        self.is_plain_below: BoolArray = np.zeros(len(self.byte), np.bool_)
        self._find_plain_below(token_bytes, ragged)
        self.is_plain_path: BoolArray = np.zeros(len(self.byte), np.bool_)
        self._find_plain_paths(ragged)

    def _match(self, full: _Levels, ragged: _Levels) -> None:
        """Find the node of each ragged one in the full trie, level by level: both list them in the same order."""
        where = np.zeros(len(ragged.byte), np.int64)
        for (low, high), (ragged_low, ragged_high) in zip(full.levels[1:], ragged.levels[1:], strict=False):
            keys = full.parent[low:high] << 8 | full.byte[low:high]
            wanted = where[ragged.parent[ragged_low:ragged_high]] << 8 | ragged.byte[ragged_low:ragged_high]
            where[ragged_low:ragged_high] = low + np.searchsorted(keys, wanted)
        self.ragged[where] = np.arange(len(where)) + self.full_size

    def _find_plain_below(self, token_bytes: Sequence[bytes], ragged: _Levels) -> None:
        """Which nodes of the second trie have only plain characters below them."""
        starts = [plain_from(token_bytes[i]) for i in self.ragged_tokens.tolist()]
        last_start = np.array([*starts, 0], np.int64)  # one more, for reduceat
        for depth, (low, high) in enumerate(ragged.levels):
            bounds = np.stack([ragged.first[low:high], ragged.last[low:high]], axis=1).ravel()
            if len(bounds) and len(starts):
                highest = np.maximum.reduceat(last_start, bounds)[::2]
                self.is_plain_below[self.full_size + low : self.full_size + high] = highest <= depth

    def _find_plain_paths(self, ragged: _Levels) -> None:
        """Which nodes of the second trie lie behind plain characters alone, and which ones leave them first."""
        partial: list[bytes | None] = [b""]  # by node: what has come of a character; None behind anything else
        for parent, byte in zip(ragged.parent[1:].tolist(), ragged.byte[1:].tolist(), strict=True):
            before = partial[parent]
            partial.append(None if before is None else _with_byte(before, byte))
        paths = np.array([item == b"" for item in partial])
        self.is_plain_path[self.full_size : self.full_size + len(paths)] = paths
        special = (ragged.byte < 0x20) | (ragged.byte == 0x22) | (ragged.byte == 0x5C) | (ragged.byte >= 0x80)
        exits = np.flatnonzero(paths[ragged.parent] & special)
        exits = exits[exits > 0]
        self.exits: Int64Array = exits + self.full_size
        """The nodes of the second trie behind plain characters and one byte that is not, or begins a longer one."""
        self.exit_chars: Int32Array = ragged.chars()[ragged.parent[exits]]

    @cached_property
    def _keys(self) -> Int64Array:
        """Parent and byte of the nodes of the first trie behind the root, which rise."""
        widths = self.child_end[: self.full_size] - self.child_start[: self.full_size]
        parents = np.repeat(np.arange(self.full_size), widths)
        return parents << 8 | self.byte[1 : self.full_size]

    def has_prefix(self, data: bytes) -> bool:
        """Whether a token begins with `data`."""
        at = bisect_left(self._in_order, data)
        return at < len(self._in_order) and self._in_order[at].startswith(data)

    def child(self, node: int, byte: int) -> int:
        """The child of a node by its byte; -1 if there is none."""
        start = self.child_start.item(node)
        found = self.byte[start : self.child_end.item(node)].tobytes().find(byte)
        return -1 if found < 0 else start + found

    def children(self, nodes: Int64Array, byte: UInt8Array) -> Int64Array:
        """The child of each node of the first trie by its byte; -1 where there is none."""
        wanted = nodes << 8 | byte
        found = np.searchsorted(self._keys, wanted)
        is_there = self._keys[found.clip(max=len(self._keys) - 1)] == wanted
        return np.where(is_there, found + 1, -1)

    def __len__(self) -> int:
        return len(self.byte)


def _with_byte(partial: bytes, byte: int) -> bytes | None:
    """What has come of a character once `byte` follows `partial`: b"" if it is complete, None if it is none."""
    data = partial + bytes([byte])
    if byte < 0x80:
        return None if partial or byte < 0x20 or byte in (0x22, 0x5C) else b""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data if error.reason == "unexpected end of data" else None
    return b""


_NOT_PLAIN = re.compile(rb'["\\\x00-\x1f]')


def plain_from(data: bytes) -> int:
    """Where the last run of plain characters begins that goes to the end of `data`: 0 if all of it is plain, behind
    its end if the end is no whole character.
    """
    start = 0
    for match in _NOT_PLAIN.finditer(data):
        start = match.end()
    while start < len(data):
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            if start + error.end >= len(data) and error.reason == "unexpected end of data":
                return len(data) + 1
            start += error.end
        else:
            break
    return start


class _Levels:
    """One trie over tokens that are sorted by their bytes."""

    def __init__(self, token_bytes: Sequence[bytes], ids: Int32Array) -> None:
        texts = [token_bytes[i] for i in ids.tolist()]
        data = np.frombuffer(b"".join(texts), np.uint8)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        offsets = np.cumsum(lengths) - lengths
        byte_levels = [np.zeros(1, np.uint8)]
        parent_levels = [np.full(1, -1, np.int64)]
        first_levels = [np.zeros(1, np.int64)]
        last_levels = [np.full(1, len(ids), np.int64)]
        self.levels = [(0, 1)]
        ends: list[tuple[Int64Array, Int64Array]] = []
        size = 1
        active = np.arange(len(ids))
        nodes = np.zeros(len(ids), np.int64)  # of each active token: the node it has come to
        depth = 0
        while len(active):
            at = data[offsets[active] + depth]
            fresh = np.ones(len(active), np.bool_)
            fresh[1:] = (nodes[1:] != nodes[:-1]) | (at[1:] != at[:-1])
            starts = np.flatnonzero(fresh)
            byte_levels.append(at[starts])
            parent_levels.append(nodes[starts])
            # Tokens below a node lie side by side in sorted order, those that end in it first.
            first_levels.append(active[starts])
            last_levels.append(active[np.append(starts[1:], len(active)) - 1] + 1)
            nodes = size - 1 + np.cumsum(fresh)
            self.levels.append((size, size + len(starts)))
            size += len(starts)
            depth += 1
            done = lengths[active] == depth
            ends.append((nodes[done], active[done]))
            active, nodes = active[~done], nodes[~done]
        self.byte: UInt8Array = np.concatenate(byte_levels)
        self.parent: Int64Array = np.concatenate(parent_levels)
        self.first: Int64Array = np.concatenate(first_levels)
        self.last: Int64Array = np.concatenate(last_levels)
        bounds = np.searchsorted(self.parent, np.arange(size + 1))
        self.child_start: Int64Array = bounds[:-1]
        self.child_end: Int64Array = bounds[1:]
        self.token: Int32Array = np.full(size, -1, np.int32)
        self.twins: dict[int, list[int]] = {}
        for end_nodes, end_tokens in ends:
            is_first = np.ones(len(end_nodes), np.bool_)
            is_first[1:] = end_nodes[1:] != end_nodes[:-1]
            self.token[end_nodes[is_first]] = ids[end_tokens[is_first]]
            twins = zip(end_nodes[~is_first].tolist(), ids[end_tokens[~is_first]].tolist(), strict=True)
            for node, token_id in twins:
                self.twins.setdefault(node, []).append(token_id)

    def chars(self) -> Int32Array:
        """How many characters begin on the way to each node."""
        is_lead = (self.byte & 0xC0) != 0x80
        found = np.zeros(len(self.byte), np.int32)
        for low, high in self.levels[1:]:
            found[low:high] = found[self.parent[low:high]] + is_lead[low:high]
        return found
