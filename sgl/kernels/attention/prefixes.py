"""Finds leading pages that rows of a step share, so that a backend attends to them once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl.kernels.attention.ragged import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows with the same leading pages, fully visible to all of their query tokens."""

    rows: Int64Array  # [m] ascending
    pages: Int64Array  # [p]


def shared_prefixes(
    q_lens: Int32Array, kv_lens: Int32Array, page_table: Int32Array, page_size: int, min_saved_keys: int, max_q: int
) -> list[SharedPrefix]:
    """Disjoint groups of rows (of at most max_q query tokens) with shared leading pages, for most saved keys, (rows
    - 1) * shared keys; groups that save fewer than min_saved_keys are omitted."""
    past_pages = (kv_lens - q_lens) // page_size
    rows = np.nonzero((past_pages > 0) & (q_lens <= max_q))[0]
    if len(rows) < 2 or (len(rows) - 1) * int(past_pages[rows].max()) * page_size < min_saved_keys:
        return []
    prefixes = sorted((page_table[row, : past_pages[row]].tobytes(), int(row)) for row in rows)
    groups: list[SharedPrefix] = []
    _, chosen = _best_groups(prefixes, -(-min_saved_keys // page_size))
    for members, num_pages in chosen:
        sharing = np.array(sorted(row for _, row in members), dtype=np.int64)
        groups.append(SharedPrefix(sharing, page_table[sharing[0], :num_pages].astype(np.int64)))
    return groups


_Prefixes = list[tuple[bytes, int]]  # pages as bytes of int32, row; sorted, so that equal prefixes are neighbours


def _best_groups(prefixes: _Prefixes, min_saved: int) -> tuple[int, list[tuple[_Prefixes, int]]]:
    """Pages saved and (members, shared pages) of the best split: all in one group, or each branch by itself."""
    if len(prefixes) < 2:
        return 0, []
    num_shared = _num_shared(prefixes[0][0], prefixes[-1][0])
    whole = (len(prefixes) - 1) * num_shared
    saved, groups = 0, []
    for branch in _branches(prefixes, num_shared):
        branch_saved, branch_groups = _best_groups(branch, min_saved)
        saved += branch_saved
        groups += branch_groups
    if whole >= max(saved, min_saved):
        return whole, [(prefixes, num_shared)]
    return saved, groups


def _branches(prefixes: _Prefixes, depth: int) -> list[_Prefixes]:
    branches: dict[bytes, _Prefixes] = {}
    for prefix in prefixes:
        page = prefix[0][4 * depth : 4 * depth + 4]
        if page:
            branches.setdefault(page, []).append(prefix)
    return [branch for branch in branches.values() if len(branch) > 1]


def _num_shared(a: bytes, b: bytes) -> int:
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter // 4
    differs = np.frombuffer(a[:shorter], np.int32) != np.frombuffer(b[:shorter], np.int32)
    return int(differs.argmax())
