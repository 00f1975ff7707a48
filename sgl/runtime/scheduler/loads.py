"""Cached pages on their way up: from files into host memory, and from there to the device.

A prefix that is being loaded is announced like one that a request computes: prompts that begin with it are held until
it is in the tree, and others run. That is when it is loaded, or when its layers come no later than a step with the
prompt's rest needs them. It is then leased until its prompt is admitted; like any lease it gives way, so loads
never keep a request out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl.runtime.batch import Int32Array, PendingMoves
from sgl.runtime.cache.files import PageFiles
from sgl.runtime.cache.host import HostCache
from sgl.runtime.cache.in_flight import InFlight
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace
from sgl.runtime.cache.node import NO_PAGES, Node
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.rates import Rates
from sgl.runtime.scheduler.beside import Beside
from sgl.runtime.scheduler.counters import TierCounters
from sgl.runtime.scheduler.file_reads import FileReads, Read
from sgl.runtime.scheduler.leases import Lease, Leases
from sgl.runtime.scheduler.request import Phase, Request
from sgl.runtime.scheduler.saves import Saves

_MOST_LOADING = 0.5  # of the device's pages, for loads and for what is loaded and not taken over yet
_HELD_SECONDS = 30.0  # for which a loaded prefix waits for its prompt
_EARLY_SHARE = 0.8  # of a step in which the rest of a load may come
_EARLY_TOKENS = 2048  # of a prompt in one step, at most


@dataclass(slots=True, eq=False)
class _Load:
    """A prefix on its way to the device."""

    owner: int  # in the table of prefixes in flight; below 0
    key: bytes
    namespace: Namespace
    node: Node  # on the device, locked: what need not be loaded
    host: Node  # its copy, locked
    request: Request | None
    began: float = 0.0
    reading: Read | None = None  # what follows the copy, from files
    pages: Int32Array = field(default_factory=lambda: NO_PAGES)  # private ones of the device, once it is read
    beside: Any = None  # of `Beside`
    move: PendingMoves | None = None
    due: float = 0.0  # when it will have been loaded


class Loads:
    """Of one scheduler. Single-threaded."""

    def __init__(
        self,
        cache: RadixCache,
        in_flight: InFlight,
        leases: Leases,
        saves: Saves,
        host: HostCache,
        rates: Rates,
        files: PageFiles | None,
        counters: TierCounters,
        beside: Beside,
        clock: Callable[[], float],
    ) -> None:
        self.moved = 0
        """The number of the last move whose loads the tree has."""
        self._cache, self._in_flight, self._leases = cache, in_flight, leases
        self.reads = FileReads(files, host, rates, counters, beside)
        self._host, self._saves, self._rates = host, saves, rates
        self._counters, self._beside, self._clock = counters, beside, clock
        self._pairs: list[Int32Array] = []  # for the next move
        self._loading: dict[int, _Load] = {}
        self._arriving: list[_Load] = []  # of those in the tree
        self._due = 0.0  # when all loads will have been loaded
        self._held: OrderedDict[int, tuple[Lease, float]] = OrderedDict()  # loaded prefixes by owner
        self._owners: dict[int, int] = {}  # of these, by the request's uid
        self._next_owner = -1

    def computes_or_loads(self, request: Request, cached: int, node: Node) -> int | None:
        """The owner of a load that a waiting request should wait for; None: it computes what is behind its `cached`
        tokens, of those that end at `node`. Begins the load."""
        if request.asked_len == cached or not request.loads_left:
            return None
        limit = request.match_limit // self._host.page_size * self._host.page_size
        key = request.key()[: TOKEN_BYTES * limit]
        began = self._begin(key, request.namespace, node, request)
        if began is None:
            return None
        if not began:
            request.asked_len = cached
            return None
        load = self._loading[began]
        if load.request is request:
            request.loads_left -= 1
        return began

    def prefetch(self, key: bytes, namespace: Namespace) -> None:
        """Begin to load a prefix whose prompt will come, if that pays."""
        key = key[: len(key) // self._page_bytes * self._page_bytes]
        match = self._cache.match(key, namespace)
        if self._in_flight.find(0, key, match.length, namespace) is None:
            self._begin(key, namespace, match.node, None)

    def _begin(self, key: bytes, namespace: Namespace, node: Node, request: Request | None) -> int | None:
        """The owner of a new load; 0 if none pays, None if there is no room for one now."""
        page_size, tree = self._host.page_size, self._host.tree
        match = tree.match(key, namespace)
        copy, usable = self._beside.copied(match.node), self._beside.usable(node)
        there = max(match.length, node.length)
        stored = self.reads.find(key, namespace, match.node, there, max(copy.length, usable), request)
        if stored is None and copy.length <= usable:
            return 0
        ahead = sum(len(load.key) // TOKEN_BYTES - load.node.length for load in self._loading.values())
        in_files, to_read = (copy.length, 0) if stored is None else (stored.end, stored.num_tokens)
        end = self._rates.worth_loading(usable, copy.length, in_files, ahead, to_read)
        if end <= usable:
            self._counters.num_declined += request is not None
            return 0
        missing = max(0, end - node.length) // page_size
        most = _MOST_LOADING * self._cache.pool.num_pages
        if missing > most:
            return 0
        if self._busy_pages + missing > most or missing > self._cache.pool.num_free + self._cache.evictable_pages:
            return next(iter(self._loading), None)  # there may be room when that one ends
        if stored is not None and end > copy.length:
            copy, length = match.node, min(end, node.length)
            if copy.length < length:  # what is read has to follow a copy
                copy, pairs = self._host.add(node, length // page_size, length)
                self._saves.queue(copy, pairs)
            if copy.length < length:
                return 0
            copy = tree.cut(copy, min(end, copy.length))
        else:
            stored = None
        node = self._cache.cut(node, min(node.length, end))
        load = _Load(self._next_owner, key[: end * TOKEN_BYTES], namespace, node, copy, request, self._clock())
        self._next_owner -= 1
        self._cache.lock(node)
        tree.lock(copy)
        if stored is not None:
            load.reading = self.reads.begin(stored, copy)
        if load.reading is None and not (self._falls_back(load) and self._begin_loading(load)):
            self._cache.unlock(load.node)
            tree.unlock(load.host)
            return None
        self._loading[load.owner] = load
        self._in_flight.begin(load.owner, load.key, namespace)
        self._counters.num_loads += 1
        return load.owner

    def _falls_back(self, load: _Load) -> bool:
        """Load what there are copies of; False if others could go on no later than without."""
        copy = self._beside.copied(load.host)
        if copy.length <= self._beside.usable(load.node):
            return False
        self._host.tree.move_lock(load.host, copy)
        load.host, load.key = copy, load.key[: TOKEN_BYTES * copy.length]
        node = self._cache.cut(load.node, min(load.node.length, copy.length))
        self._cache.move_lock(load.node, node)
        load.node = node
        return True

    def _begin_loading(self, load: _Load) -> bool:
        """Allocate device pages, and what goes with them, for what has a copy; False if there are none."""
        first = load.node.length // self._host.page_size
        load.beside = self._beside.load(load.node, load.host)  # first: what is evicted for pages is copied
        if load.beside is None:
            return False
        pages = self._cache.alloc(load.host.length // self._host.page_size - first)
        if pages is None:
            self._beside.cancel(load.beside)
            return False
        load.pages = pages
        self._pairs.append(np.stack((load.host.pages_from(0)[first:], pages), axis=1))
        return True

    @property
    def _page_bytes(self) -> int:
        return self._host.page_size * TOKEN_BYTES

    @property
    def _busy_pages(self) -> int:
        """Device pages of loads, and of loaded prefixes that wait for their prompts."""
        loading = sum(len(load.key) // self._page_bytes for load in self._loading.values())
        return loading + sum(lease.num_pages for lease, _ in self._held.values())

    # ── between steps ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_busy(self) -> bool:
        """Whether a load is under way."""
        return bool(self._loading)

    @property
    def is_moving(self) -> bool:
        """Whether copies are under way, also of what is in the tree."""
        return bool(self._loading or self._arriving)

    def poll(self) -> None:
        """Take up what has arrived."""
        self._arriving = [load for load in self._arriving if not self._has_arrived(load)]
        self.reads.poll()
        for load in list(self._loading.values()):
            self._go_on(load)
        while self._held:
            owner, (lease, until) = next(iter(self._held.items()))
            if lease.lost is None and until > self._clock():
                break
            self._release(owner)

    def take(self) -> list[Int32Array]:
        """The (host page, device page) pairs of the next move."""
        pairs, self._pairs = self._pairs, []
        return pairs

    def launched(self, move: PendingMoves) -> None:
        """What was taken is under way."""
        begun = [load for load in self._loading.values() if load.reading is None and load.move is None]
        num_tokens = self._host.page_size * sum(len(load.pages) for load in begun)
        self._due = max(self._due, self._clock()) + num_tokens * self._rates.load.seconds
        for load in begun:
            load.move, load.due = move, self._due

    def _go_on(self, load: _Load) -> None:
        if load.reading is not None:
            if not self.reads.has_ended(load.reading, self._clock() - load.began):
                return
            follows = load.key[TOKEN_BYTES * load.host.length :]
            load.host = self.reads.end(load.reading, follows, load.namespace, load.host)
            load.reading = None
            if not (self._falls_back(load) and self._begin_loading(load)):
                self._end(load)
        elif load.move is not None and (load.move.is_loaded() or self._comes_in_time(load, load.move)):
            self._counters.loaded_pages += len(load.pages)
            self.moved = max(self.moved, load.move.number)
            self._host.tree.lock(load.host)
            self._insert(load)
            self._end(load)
            if not self._has_arrived(load):
                self._arriving.append(load)

    def _comes_in_time(self, load: _Load, move: PendingMoves) -> bool:
        """Whether its prompt can be admitted: by then, or while a step with it computes the layers before."""
        request = load.request
        if request is None or request.phase is not Phase.WAITING or not move.comes_by_layer():
            return False
        rest = min(request.num_known - len(load.key) // TOKEN_BYTES, _EARLY_TOKENS)
        step = self._rates.step + rest * self._rates.compute.seconds
        return load.due - self._clock() < _EARLY_SHARE * step

    def _has_arrived(self, load: _Load) -> bool:
        """Whether a prefix in the tree was loaded: then its copy may go."""
        assert load.move is not None, "it is under way"
        if not load.move.is_loaded():
            return False
        if len(load.pages):  # else nothing was timed
            self._rates.note_load(len(load.pages) * self._host.page_size, load.move.load_seconds)
        self._host.tree.unlock(load.host)
        return True

    def _insert(self, load: _Load) -> None:
        """Have the tree take what was loaded, held for its prompt."""
        key, request = load.key[load.node.length * TOKEN_BYTES :], load.request
        inserted = self._cache.insert(key, load.pages, load.namespace, after=load.node)
        self._cache.pool.free(inserted.duplicates)
        self._cache.move_lock(load.node, inserted.node)
        load.node = inserted.node
        lease = self._leases.hold(load.node)
        lease.window_pages = self._beside.arrived(load.beside, load.node)
        if request is None or request.phase is Phase.WAITING:
            self._held[load.owner] = lease, self._clock() + _HELD_SECONDS
            if request is not None:
                self._owners[request.uid] = load.owner
        else:
            self._leases.release(lease)

    def _end(self, load: _Load) -> None:
        del self._loading[load.owner]
        self._cache.unlock(load.node)
        self._host.tree.unlock(load.host)
        self._in_flight.end(load.owner)

    def entered(self, request: Request) -> None:
        """A request has a row, or has ended: what was loaded for it need not be held."""
        self.reads.forget(request)
        owner = self._owners.pop(request.uid, None)
        if owner is not None:
            self._release(owner)

    def _release(self, owner: int) -> None:
        lease, _ = self._held.pop(owner, (None, 0.0))
        if lease is not None:
            self._leases.release(lease)

    # ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────

    def clear(self) -> None:
        """Hold nothing for prompts that are to come."""
        self.reads.clear()
        for owner in list(self._held):
            self._release(owner)

    def private(self) -> list[Int32Array]:
        """Device pages of loads, for the ledger."""
        return [load.pages for load in self._loading.values()]

    def locked(self) -> list[Node]:
        """The device nodes that loads hold, for the ledger."""
        return [load.node for load in self._loading.values()]

    def locked_copies(self) -> list[Node]:
        """The host nodes that loads hold, for the ledger."""
        return [load.host for load in [*self._loading.values(), *self._arriving]]
