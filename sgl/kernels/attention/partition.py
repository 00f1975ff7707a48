"""Cutting a ragged attention step into few rectangular pieces, and finding the pages that many rows share.

Works on the host integers of an `AttentionStep` alone. Backends that run dense kernels over padded batches call it
once a step; what a piece means on the device is theirs to decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

QUERY_BLOCK = 128
"""Longest run of query tokens in one rectangle row: past it, causal work above the diagonal is worth skipping."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """n runs of query tokens, padded to q tokens each, over p pages each.

    A shorter run repeats its last token; a shorter row of pages repeats its first page. Both are harmless: the
    former computes the same result twice, the latter lies past `positions` and is masked.
    """

    tokens: Int64Array  # [n, q] which query token of the step
    positions: Int64Array  # [n, q] its position
    key_starts: Int64Array  # [n] position of the first key of the first page
    num_keys: int  # keys that the longest row sees from key_starts on
    pages: Int64Array  # [n, p], p = ceil(num_keys / page_size)

    @property
    def is_full(self) -> bool:
        """Whether every query sees all num_keys keys, so that no causal mask is needed."""
        return bool((self.positions - self.key_starts[:, None] == self.num_keys - 1).all())


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows whose first `pages` are the same, and which all of their query tokens see in full."""

    rows: Int64Array  # [m] ascending
    pages: Int64Array  # [p]


def shared_prefixes(
    q_lens: Int32Array, kv_lens: Int32Array, page_table: Int32Array, page_size: int, min_saved_keys: int, max_q: int
) -> list[SharedPrefix]:
    """Disjoint groups of rows (of at most max_q query tokens) with common leading pages.

    Chosen so that the keys saved, (rows - 1) * shared keys, are as many as possible; groups saving fewer than
    min_saved_keys are left out.
    """
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


_Prefixes = list[tuple[bytes, int]]  # pages as bytes of int32, row; sorted, so that equal beginnings are neighbours


def _best_groups(prefixes: _Prefixes, min_saved: int) -> tuple[int, list[tuple[_Prefixes, int]]]:
    """Pages saved and (members, shared pages) of the best split: all in one group, or each branch for itself."""
    if len(prefixes) < 2:
        return 0, []
    common = _common_pages(prefixes[0][0], prefixes[-1][0])
    whole = (len(prefixes) - 1) * common
    saved, groups = 0, []
    for branch in _branches(prefixes, common):
        branch_saved, branch_groups = _best_groups(branch, min_saved)
        saved += branch_saved
        groups += branch_groups
    if whole >= max(saved, min_saved):
        return whole, [(prefixes, common)]
    return saved, groups


def _branches(prefixes: _Prefixes, depth: int) -> list[_Prefixes]:
    """The prefixes longer than depth pages, by the page at that depth."""
    branches: dict[bytes, _Prefixes] = {}
    for prefix in prefixes:
        page = prefix[0][4 * depth : 4 * depth + 4]
        if page:
            branches.setdefault(page, []).append(prefix)
    return [branch for branch in branches.values() if len(branch) > 1]


def _common_pages(a: bytes, b: bytes) -> int:
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter // 4
    differs = np.frombuffer(a[:shorter], np.int32) != np.frombuffer(b[:shorter], np.int32)
    return int(differs.argmax())


def rectangles(
    q_lens: Int32Array,
    kv_lens: Int32Array,
    page_table: Int32Array,
    page_size: int,
    *,
    skipped_pages: Int32Array,
    window: int | None,
    overhead_keys: int,
    max_pairs: int,
) -> list[Rectangle]:
    """Cover every query token of the step, over the keys from page skipped_pages[row] and the window's start on.

    overhead_keys: how many keys of padding cost as much as one more rectangle.
    max_pairs: bounds a rectangle's padded query-key pairs (a single query token may exceed it).
    """
    if window is None and len(q_lens) == 1 == q_lens[0]:  # the same as below, in half the time
        last, pages = kv_lens[None].astype(np.int64) - 1, page_table[:, : -(-int(kv_lens[0]) // page_size)]
        zero = np.zeros((1, 1), np.int64)
        return [Rectangle(zero, last, zero[0], int(kv_lens[0]), pages.astype(np.int64))]
    runs = _query_runs(q_lens, kv_lens, max_pairs)
    first_page = skipped_pages[runs.row].astype(np.int64)
    if window is not None:
        np.maximum(first_page, (runs.position - window + 1) // page_size, out=first_page)
    num_keys = runs.position + runs.length - first_page * page_size
    return [
        _rectangle(runs.take(members), first_page[members], num_keys[members], page_table, page_size)
        for members in _batches(runs.length, num_keys, overhead_keys, max_pairs)
    ]


@dataclass(frozen=True, slots=True)
class _QueryRuns:
    """Runs of consecutive query tokens, each of one row; all arrays int64 [r]."""

    row: Int64Array
    token: Int64Array  # the first one's index in the step
    position: Int64Array  # the first one's position
    length: Int64Array

    def take(self, members: Int64Array) -> _QueryRuns:
        return _QueryRuns(self.row[members], self.token[members], self.position[members], self.length[members])


def _query_runs(q_lens: Int32Array, kv_lens: Int32Array, max_pairs: int) -> _QueryRuns:
    lengths = q_lens.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    positions = kv_lens - lengths
    block = max(1, min(QUERY_BLOCK, max_pairs // int(kv_lens.max())))
    counts = -(-lengths // block)
    if (counts == 1).all():
        return _QueryRuns(np.arange(len(lengths)), starts, positions, lengths)
    row = np.repeat(np.arange(len(lengths)), counts)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * block
    return _QueryRuns(row, starts[row] + offset, positions[row] + offset, np.minimum(lengths[row] - offset, block))


def _batches(length: Int64Array, num_keys: Int64Array, overhead_keys: int, max_pairs: int) -> list[Int64Array]:
    """Which runs to pad to one shape: neighbours in size, while padding costs less than another rectangle.

    Single query tokens, for which kernels have shorter ways, are not padded to more.
    """
    if (length == length[0]).all():
        padded = len(length) * int(num_keys.max())
        if padded - int(num_keys.sum()) <= overhead_keys and padded * int(length[0]) <= max_pairs:
            return [np.arange(len(length))]
    batches: list[list[int]] = []
    q = keys = unpadded = 0  # shape of the last batch, and the cost of its runs if none were padded
    for run in np.lexsort((num_keys, length))[::-1].tolist():
        run_q, run_keys = int(length[run]), int(num_keys[run])
        cost = _cost(run_q, run_keys)
        if batches and (run_q > 1 or q == 1):
            size, wide = len(batches[-1]) + 1, max(keys, run_keys)
            padding = size * _cost(q, wide) - unpadded - cost
            if padding <= _cost(1, overhead_keys) and size * q * wide <= max_pairs:
                batches[-1].append(run)
                keys, unpadded = wide, unpadded + cost
                continue
        batches.append([run])
        q, keys, unpadded = run_q, run_keys, cost
    return [np.array(sorted(batch)) for batch in batches]


def _cost(q: int, keys: int) -> int:
    """In eighths of what one key costs one query: reading a key is worth seven queries."""
    return keys * (7 + q)


def _rectangle(
    runs: _QueryRuns, first_page: Int64Array, num_keys: Int64Array, page_table: Int32Array, page_size: int
) -> Rectangle:
    steps = np.minimum(np.arange(int(runs.length.max())), runs.length[:, None] - 1)
    longest = int(num_keys.max())
    columns = np.arange(-(-longest // page_size))
    columns = np.where(
        columns < -(-num_keys // page_size)[:, None], first_page[:, None] + columns, first_page[:, None]
    )
    return Rectangle(
        tokens=runs.token[:, None] + steps,
        positions=runs.position[:, None] + steps,
        key_starts=first_page * page_size,
        num_keys=longest,
        pages=page_table[runs.row[:, None], columns].astype(np.int64),
    )
