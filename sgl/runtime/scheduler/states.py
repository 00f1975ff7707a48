"""The recurrent states of running requests: where they come from, and when they are kept.

A request's state lies in its row on the device. It begins empty or as a copy of the checkpoint of its cached prefix,
and is copied into checkpoints where others may want to go on: at the end of its prompt's last whole page, where it
leaves a stored prefix or others leave it (chunks end there), and now and then in its output. The runner copies in
stream order with the steps, so slots are given on as soon as a copy is scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sgl.runtime.batch import EMPTY_STATE, Int32Array
from sgl.runtime.cache.checkpoints import Checkpoints
from sgl.runtime.cache.node import Match, Node
from sgl.runtime.scheduler.packing import Chunk
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.rows import RowTable

INTERVAL = 64
"""Tokens of output between two checkpoints; a copy costs what two to three steps cost."""


@dataclass(slots=True)
class _Row:
    """A running request."""

    request: Request
    stops: set[int] = field(default_factory=set)  # lengths at which a checkpoint is wanted
    kept: list[tuple[int, int]] = field(default_factory=list)  # (length, slot), not in the tree yet, ascending


class RowStates:
    """States of one scheduler's rows. Single-threaded."""

    def __init__(self, rows: RowTable, page_size: int, num_checkpoints: int, interval: int = INTERVAL) -> None:
        """num_checkpoints: 0 if nothing is shared."""
        self.checkpoints = Checkpoints(num_checkpoints)
        self._table = rows
        self._page_size = page_size
        self._interval = -(-interval // page_size) * page_size
        self._rows: dict[int, _Row] = {}
        self._of_uid: dict[int, _Row] = {}
        self._loads: dict[int, int] = {}  # slots by row, for the next batch

    def usable(self, match: Match) -> Match:
        """The part of a match at whose end there is a checkpoint."""
        node = self.checkpoints.deepest(match.node)
        return match if node is match.node else Match(node, node.length, match.namespace, None)

    def enter(self, request: Request, node: Node, matched_len: int) -> None:
        """A request has a row: its state is that of `node`; the tree has matched_len of its tokens."""
        is_empty = node.parent is None
        self._loads[request.row] = EMPTY_STATE if is_empty else self.checkpoints.use(node)
        row = self._rows[request.row] = self._of_uid[request.uid] = _Row(request)
        last = (request.num_known - 1) // self._page_size * self._page_size
        if self.checkpoints.num_slots:
            row.stops = {length for length in (matched_len, last) if length > node.length}

    def leave(self, request: Request) -> None:
        """It gives its row back; what it kept for the tree is there."""
        row = self._rows.pop(request.row)
        del self._of_uid[request.uid]
        self._loads.pop(request.row, None)
        for _, slot in row.kept:
            self.checkpoints.release(slot)

    def want(self, uid: int, length: int) -> None:
        """Others will go on at this length of a running request's tokens."""
        row = self._of_uid[uid]
        if self.checkpoints.num_slots and length > self._table.kv_len[row.request.row]:
            row.stops.add(length)

    def stop_at_wanted(self, chunks: Sequence[Chunk]) -> None:
        """Shorten chunks that pass a length where a checkpoint is wanted."""
        for chunk in chunks:
            stops = self._rows[chunk.request.row].stops
            chunk.end = min((stop for stop in stops if chunk.start < stop < chunk.end), default=chunk.end)

    def copies(self, decode_rows: Int32Array, chunks: Sequence[Chunk]) -> tuple[Int32Array, Int32Array]:
        """`Batch.state_loads` and `state_saves` of the step with these decodes and chunks, whose kv_len is that after
        the step."""
        loads = _pairs([(slot, row) for row, slot in self._loads.items()])
        self._loads.clear()
        ended = decode_rows[self._table.kv_len[decode_rows] % self._interval == 0].tolist()
        for chunk in chunks:
            stops = self._rows[chunk.request.row].stops
            if chunk.end in stops:
                ended.append(chunk.request.row)
                stops.difference_update([stop for stop in stops if stop <= chunk.end])
        saves = [(row, slot) for row in ended if (slot := self._keep(self._rows[row])) is not None]
        return loads, _pairs(saves)

    def pop_kept(self, request: Request, length: int) -> tuple[int, int] | None:
        """The last (length, slot) that the request keeps of its first `length` tokens, for the tree; earlier ones are
        given up."""
        kept, found = self._rows[request.row].kept, None
        while kept and kept[0][0] <= length:
            if found is not None:
                self.checkpoints.release(found[1])
            found = kept.pop(0)
        return found

    def slots(self) -> list[int]:
        """Of all requests, for the ledger."""
        return [slot for row in self._rows.values() for _, slot in row.kept]

    def _keep(self, row: _Row) -> int | None:
        """A slot for the row's state after this step. The latest before it stays: the last token may not be known
        yet, and turn out to end the output."""
        if not self.checkpoints.num_slots:
            return None
        while len(row.kept) > 1:
            self.checkpoints.release(row.kept.pop(0)[1])
        if not self.checkpoints.free:
            for other in self._rows.values():
                if len(other.kept) > 1 and other.kept[1][0] <= other.request.num_known:
                    self.checkpoints.release(other.kept.pop(0)[1])
        slot = self.checkpoints.alloc()
        if slot is not None:
            row.kept.append((int(self._table.kv_len[row.request.row]), slot))
        return slot


def _pairs(pairs: list[tuple[int, int]]) -> Int32Array:
    return np.array(pairs, np.int32).reshape(-1, 2)
