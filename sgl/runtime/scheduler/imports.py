"""Prompts that a prefill engine has computed, on their way into a decode engine's tree.

    a request with `kv_transfer_params` arrives ─▶ read into the buffer ─▶ copied to the device ─▶ in the tree

A prefix under way is announced like one that a request computes, so requests that begin with it are held, and others
run. Of what cannot be read, nothing enters the tree, and the request computes it. Pages that a read may still write to
are INCOMING until it is quiet: not even a request that was cancelled gives them back before.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sgl.runtime.batch import Int32Array, PendingMoves
from sgl.runtime.cache.in_flight import InFlight
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.scheduler.leases import Lease, Leases
from sgl.runtime.scheduler.request import Phase, Request
from sgl.runtime.transfer.params import PageLayout, prompt_hash
from sgl.runtime.transfer.reader import Read, Reader

logger = logging.getLogger(__name__)

_MOST_INCOMING = 0.5  # of the device's pages, for pulls and for what is pulled and not taken over yet
_HELD_SECONDS = 30.0  # for which a pulled prefix waits for its prompt
_MOST_PARTS = 256
_FIRST_OWNER = -(1 << 40)  # apart from the owners of loads
POLL_SECONDS = 3e-4  # between looks, where nothing else can be done


@dataclass(slots=True, eq=False)
class _Pull:
    """A prefix on its way."""

    owner: int  # in the table of prefixes in flight
    key: bytes
    namespace: Namespace
    node: Node  # locked: what need not be pulled
    request: Request | None  # None: it has ended
    read: Read
    rows: Int32Array  # of the buffer
    pages: Int32Array  # of the device
    move: PendingMoves | None = None
    is_taken: bool = False  # for a move


@dataclass(slots=True)
class Pulled:
    """Counts since the start."""

    num_pulls: int = 0
    num_failed: int = 0  # nothing of them arrived
    pages: int = 0
    seconds: float = 0.0  # of reads
    parts: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=_MOST_PARTS))  # of the last ones


class Imports:
    """Of one scheduler. Single-threaded."""

    def __init__(
        self,
        reader: Reader,
        layout: PageLayout,
        pool: PagePool,
        first_row: int,
        clock: Callable[[], float],
    ) -> None:
        """pool: of the buffer's pages, whose rows follow first_row."""
        self.counts = Pulled()
        self._reader = reader
        self._layout = layout
        self._pool = pool
        self._first_row = first_row
        self._clock = clock
        self._pulling: dict[int, _Pull] = {}
        self._cut: list[_Pull] = []  # given up, and not quiet yet
        self._held: dict[int, tuple[Lease, float]] = {}  # pulled prefixes by their request's uid
        self._pairs: list[Int32Array] = []
        self._next_owner = _FIRST_OWNER

    def attach(self, cache: RadixCache, in_flight: InFlight, leases: Leases) -> None:
        """The device's side."""
        self._cache, self._in_flight, self._leases = cache, in_flight, leases

    def computes_or_pulls(self, request: Request, cached: int, node: Node) -> int | None:
        """The owner of a pull that a waiting request should wait for; None: it computes what is behind its `cached`
        tokens, which end at `node`. Begins the pull."""
        params, size = request.transfer, self._pool.page_size
        if params is None:
            return None
        end = min(request.match_limit // size * size, params.num_tokens)
        room = self._pool.num_pages - 1
        missing = min((end - cached) // size, room, int(_MOST_INCOMING * self._cache.pool.num_pages))
        key, namespace = request.key()[: TOKEN_BYTES * params.num_tokens], request.namespace
        prompt = prompt_hash(self._layout, namespace, key)
        if missing <= 0:
            request.transfer = None
            if params.lease:
                self._reader.read(params, prompt, 0, [])
            return None
        room_for = self._alloc(missing, node)
        if room_for is None:
            return next(iter(self._pulling), None)  # there may be room when that one ends
        request.transfer = None
        rows, pages = room_for
        read = self._reader.read(params, prompt, cached // size, [self._first_row + row for row in rows.tolist()])
        key = key[: TOKEN_BYTES * (cached + missing * size)]
        pull = _Pull(self._next_owner, key, namespace, node, request, read, rows, pages)
        self._next_owner -= 1
        self._pulling[pull.owner] = pull
        self._in_flight.begin(pull.owner, key, namespace)
        self.counts.num_pulls += 1
        return pull.owner

    def _alloc(self, num_pages: int, node: Node) -> tuple[Int32Array, Int32Array] | None:
        """Rows of the buffer and pages of the device, which follow `node`: it is locked. None if there is no room."""
        busy = sum(len(pull.pages) for pull in (*self._pulling.values(), *self._cut))
        busy += sum(lease.num_pages for lease, _ in self._held.values())
        if busy + num_pages > _MOST_INCOMING * self._cache.pool.num_pages or num_pages > self._pool.num_free:
            return None
        self._cache.lock(node)  # first: else it might give way to what follows it
        pages = self._cache.alloc(num_pages)
        if pages is None:
            self._cache.unlock(node)
            return None
        rows = self._pool.alloc(num_pages)
        assert rows is not None, "free ones were counted"
        self._pool.expect(rows)
        self._cache.pool.expect(pages)
        return rows, pages

    # ── between steps ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_busy(self) -> bool:
        """Whether a pull is under way."""
        return bool(self._pulling or self._cut)

    def poll(self) -> None:
        """Take up what has arrived."""
        for pull in list(self._pulling.values()):
            self._go_on(pull)
        for pull in [pull for pull in self._cut if pull.read.is_quiet]:
            self._cut.remove(pull)
            self._give_back(pull)
        for uid in [uid for uid, (lease, until) in self._held.items() if lease.lost or until <= self._clock()]:
            self._leases.release(self._held.pop(uid)[0])

    def take(self) -> list[Int32Array]:
        """The (row, device page) pairs of the next move."""
        pairs, self._pairs = self._pairs, []
        return pairs

    def launched(self, move: PendingMoves) -> None:
        """What was taken is under way."""
        for pull in self._pulling.values():
            if pull.is_taken:
                pull.move = pull.move or move

    def _go_on(self, pull: _Pull) -> None:
        read = pull.read
        if pull.is_taken:
            if pull.move is not None and pull.move.is_loaded():
                self._end(pull)
        elif read.is_cut or (read.is_done and not read.num_good):
            self.counts.num_failed += 1
            if not read.is_cut:
                logger.warning("a prompt's pages could not be pulled, and are computed: %s", read.error)
            self._give_up(pull)
        elif read.is_done and read.is_quiet:
            if read.error is not None:
                logger.warning("%d of %d pages were pulled: %s", read.num_good, len(pull.pages), read.error)
            self._trim(pull, read.num_good)
            self._pairs.append(np.stack((pull.rows + np.int32(self._first_row), pull.pages), axis=1))
            pull.is_taken = True
            self.counts.pages += read.num_good
            self.counts.seconds += read.seconds
            self.counts.parts.append(read.parts)

    def _give_up(self, pull: _Pull) -> None:
        del self._pulling[pull.owner]
        self._in_flight.end(pull.owner)
        self._cache.unlock(pull.node)
        self._cut.append(pull)

    def _give_back(self, pull: _Pull) -> None:
        for pool, pages in ((self._pool, pull.rows), (self._cache.pool, pull.pages)):
            pool.arrived(pages)
            pool.free(pages)

    def _trim(self, pull: _Pull, good: int) -> None:
        """Give back what did not arrive."""
        for pool, pages in ((self._pool, pull.rows[good:]), (self._cache.pool, pull.pages[good:])):
            pool.arrived(pages)
            pool.free(pages)
        pull.rows, pull.pages = pull.rows[:good], pull.pages[:good]

    def _end(self, pull: _Pull) -> None:
        """The pages are on the device: they enter the tree like computed ones."""
        del self._pulling[pull.owner]
        self._pool.arrived(pull.rows)
        self._pool.free(pull.rows)
        self._cache.pool.arrived(pull.pages)
        node = pull.node
        if node.is_attached:
            start, size = node.length * TOKEN_BYTES, len(pull.pages) * self._pool.page_size * TOKEN_BYTES
            inserted = self._cache.insert(pull.key[start : start + size], pull.pages, pull.namespace, after=node)
            self._cache.pool.free(inserted.duplicates)
            self._cache.move_lock(node, inserted.node)
            node = inserted.node
            if pull.request is not None and pull.request.phase is Phase.WAITING:
                self._held[pull.request.uid] = self._leases.hold(node), self._clock() + _HELD_SECONDS
        else:  # the cache was flushed meanwhile: nobody would find them
            self._cache.pool.free(pull.pages)
        self._cache.unlock(node)
        self._in_flight.end(pull.owner)

    def left_queue(self, request: Request) -> None:
        """A request has a row, or has ended: what was pulled for it need not be held, and its pull not go on."""
        held = self._held.pop(request.uid, None)
        if held is not None:
            self._leases.release(held[0])
        for pull in self._pulling.values():
            if pull.request is request:
                pull.request = None
                pull.read.cut()

    # ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────

    def clear(self) -> None:
        """Hold nothing for prompts that are to come."""
        for lease, _ in self._held.values():
            self._leases.release(lease)
        self._held.clear()

    def close(self) -> None:
        """Cut all reads, and wait until they are quiet. Idempotent."""
        self._reader.close()

    def incoming(self) -> tuple[list[Int32Array], list[Int32Array]]:
        """Device pages, and pages of the buffer, that are under way, for the ledger."""
        pulls = [*self._pulling.values(), *self._cut]
        return [pull.pages for pull in pulls], [pull.rows for pull in pulls]

    def locked(self) -> list[Node]:
        """The device nodes that pulls hold, for the ledger."""
        return [pull.node for pull in self._pulling.values()]
