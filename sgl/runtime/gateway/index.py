"""Which worker has which beginnings computed: exactly, as far as its KV events say, and beside it what was sent where.

A beginning is a chain of blocks, each named by a hash of all tokens up to its end. What was sent to a worker counts as
computed from then on: its events come later. Where they come, they replace the guess, which ends after a while; a
worker without events is thought to keep what it got last, as much as it has room for.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

REMEMBERED = 200_000
"""Blocks of a worker whose room is not known."""
MOST_ROOM = 1_000_000
"""Blocks that a worker is thought to have room for, whatever it says."""
GUESS_SECONDS = 1800.0
"""After that, a worker that tells its events would have told."""

_NOBODY: frozenset[str] = frozenset()


def namespace_of(salt: Any, adapter: Any) -> str | None:
    """Of blocks of token ids: those of another extra_key, or with another LoRA adapter, are others."""
    return json.dumps([salt, adapter]) if salt is not None or adapter is not None else None


class PrefixIndex:
    """Blocks by worker. Costs depend on the blocks asked for, not on what is stored. Single-threaded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stored: dict[int, frozenset[str]] = {}
        self._guessed: dict[int, frozenset[str]] = {}
        self._alone: dict[
            str, frozenset[str]
        ] = {}  # each worker: most blocks have one, and sets take time and room
        self._blocks: dict[str, set[int]] = {}  # stored, of workers that tell
        self._sent: dict[str, OrderedDict[int, float]] = {}  # guessed, and when; the one sent longest ago first
        self._room: dict[str, int] = {}

    def set_room(self, worker: str, blocks: int) -> None:
        """A worker keeps so many blocks."""
        self._room[worker] = min(blocks, MOST_ROOM)

    def tells(self, worker: str) -> bool:
        """Whether events of this worker have come."""
        return worker in self._blocks

    def sent(self, worker: str, blocks: Sequence[int]) -> None:
        """A request that begins with these blocks goes to that worker."""
        order, now = self._sent.setdefault(worker, OrderedDict()), self._clock()
        self._add(self._guessed, blocks, worker)
        for block in blocks:
            order[block] = now
            order.move_to_end(block)
        if (over := len(order) - self._room.get(worker, REMEMBERED)) > 0:
            _discard(self._guessed, [order.popitem(last=False)[0] for _ in range(over)], worker)
        while order and self._has_expired(worker, next(iter(order)), now):
            _discard(self._guessed, [order.popitem(last=False)[0]], worker)

    def stored(self, worker: str, blocks: Iterable[int]) -> None:
        """The worker has computed them."""
        blocks = list(blocks)
        self._blocks.setdefault(worker, set()).update(blocks)
        self._add(self._stored, blocks, worker)

    def removed(self, worker: str, blocks: Iterable[int]) -> None:
        """The worker has dropped them."""
        blocks, order = list(blocks), self._sent.get(worker, OrderedDict())
        self._blocks.setdefault(worker, set()).difference_update(blocks)
        _discard(self._stored, blocks, worker)
        _discard(self._guessed, [block for block in blocks if order.pop(block, None) is not None], worker)

    def cleared(self, worker: str) -> None:
        """The worker has dropped everything, or told what cannot be told apart from that: events were lost."""
        _discard(self._stored, self._blocks.get(worker, ()), worker)
        _discard(self._guessed, self._sent.pop(worker, ()), worker)
        if worker in self._blocks:
            self._blocks[worker] = set()

    def tells_no_more(self, worker: str) -> None:
        """What the worker has told holds no longer; what it was sent counts."""
        _discard(self._stored, self._blocks.pop(worker, ()), worker)

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self.cleared(worker)
        self._blocks.pop(worker, None)
        self._room.pop(worker, None)
        self._alone.pop(worker, None)

    def found(self, blocks: Sequence[int]) -> dict[str, int]:
        """How many of these blocks, from the first on, each worker has that has any."""
        found: dict[str, int] = {}
        left: set[str] | None = None
        now = self._clock()
        for number, block in enumerate(blocks):
            holders = self._stored.get(block, _NOBODY)
            if guesses := self._guessed.get(block):
                holders = holders | {its for its in guesses if not self._has_expired(its, block, now)}
            if left is None:
                left = set(holders)
            elif not left <= holders:
                for worker in left - holders:
                    found[worker] = number
                left &= holders
            if not left:
                return found
        for worker in left or ():
            found[worker] = len(blocks)
        return found

    def _add(self, holders: dict[int, frozenset[str]], blocks: Iterable[int], worker: str) -> None:
        alone = self._alone.setdefault(worker, frozenset((worker,)))
        for block in blocks:
            if (its := holders.get(block)) is None:
                holders[block] = alone
            elif worker not in its:
                holders[block] = its | alone

    def _has_expired(self, worker: str, block: int, now: float) -> bool:
        return worker in self._blocks and now - self._sent[worker][block] > GUESS_SECONDS


def _discard(holders: dict[int, frozenset[str]], blocks: Iterable[int], worker: str) -> None:
    for block in blocks:
        its = holders.get(block, _NOBODY)
        if len(its) > 1:
            holders[block] = its - {worker}
        elif worker in its:
            del holders[block]
