"""The tokens of a vocabulary as a trie in level order, laid out for walks that step all live nodes of a level at once.

There are two tries in one numbering: of all tokens, and, behind it, of the tokens that are not *plain* (whole characters that
a JSON string holds as they are). A walk that comes to where every plain character is allowed takes the plain tokens below
as one range and goes on in the second trie, a thirtieth the size of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    `child_start[n]` to `child_end[n]` are the children of n, `byte[n]` is the byte that leads to it, `token[n]` the token that
    ends there or -1; tokens with the bytes of another are in `twins` by that one's node. `ragged[n]` is the node of the
    second trie with the same bytes: the last node of all, which leads nowhere, if there is none. `plain_tokens[plain_start[n]:plain_end[n]]` are the
    plain tokens below n, with `plain_chars` characters each; `chars[n]` characters begin on the way to n.
    """

    def __init__(self, token_bytes: Sequence[bytes], plain: BoolArray, chars: Int32Array) -> None:
        order = sorted((i for i, data in enumerate(token_bytes) if data), key=token_bytes.__getitem__)
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
        self.token: Int32Array = np.concatenate([full.token, ragged.token, np.full(1, -1, np.int32)])
        self.twins: dict[int, list[int]] = full.twins | {node + size: t for node, t in ragged.twins.items()}
        self.has_twins: BoolArray = np.zeros(len(self.byte), np.bool_)
        self.has_twins[list(self.twins)] = True
        before = np.concatenate(([0], np.cumsum(is_plain)))
        self.plain_tokens: Int32Array = ids[is_plain]
        self.plain_chars: Int32Array = chars[self.plain_tokens]
        self.most_plain_chars = int(self.plain_chars.max(initial=0))
        self.plain_start: Int64Array = before[full.first]
        self.plain_end: Int64Array = before[full.last]
        is_lead = (full.byte & 0xC0) != 0x80
        is_lead[ROOT] = False
        self.chars: Int32Array = np.zeros(size, np.int32)
        for low, high in full.levels[1:]:
            self.chars[low:high] = self.chars[full.parent[low:high]] + is_lead[low:high]
        self.ragged: Int64Array = np.full(size, len(self.byte) - 1, np.int64)
        self._match(full, ragged)

    def _match(self, full: _Levels, ragged: _Levels) -> None:
        """Find the node of each ragged one in the full trie, level by level: both list a level in the same order."""
        where = np.zeros(len(ragged.byte), np.int64)
        for (low, high), (ragged_low, ragged_high) in zip(full.levels[1:], ragged.levels[1:], strict=False):
            keys = full.parent[low:high] << 8 | full.byte[low:high]
            wanted = where[ragged.parent[ragged_low:ragged_high]] << 8 | ragged.byte[ragged_low:ragged_high]
            where[ragged_low:ragged_high] = low + np.searchsorted(keys, wanted)
        self.ragged[where] = np.arange(len(where)) + self.full_size

    def __len__(self) -> int:
        return len(self.byte)


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
