"""The pages of running requests: their rows of the page table and places in the radix tree.

A row's pages are [lent by the tree | shared with it | private tail]; the tree owns the first `request.tree_len`
tokens, held by one lock on `request.node`. Changes of the page table wait for the next batch. Running requests take
precedence over leases.

Where every layer attends to a window, a request gives the pages behind it back: they stay in the tree, unlocked, while
there is room. Where some layers do, these have pages of another pool, and only those are given back (`RowWindows`). The
page table on the device keeps entries that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.in_flight import InFlight
from sgl.runtime.cache.ledger import check, check_states
from sgl.runtime.cache.node import Match, Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.windows import give_back_unit, pages_in_window
from sgl.runtime.scheduler.leases import Leases
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.rows import RowTable
from sgl.runtime.scheduler.states import RowStates
from sgl.runtime.scheduler.tiers import NO_TIERS, Tiers
from sgl.runtime.scheduler.transfers import NO_TRANSFERS, Transfers
from sgl.runtime.scheduler.windows import RowWindows


class RowMemory:
    """Rows, pages and the tree of one scheduler. Without `share` the tree stays empty. num_checkpoints: of recurrent
    states; None: the model has none. window: tokens that a token sees in any layer, itself included; None: all.
    window_pool: pages of the layers with that window, if others see all tokens."""

    def __init__(
        self,
        pool: PagePool,
        num_rows: int,
        max_pages: int,
        num_checkpoints: int | None = None,
        window: int | None = None,
        window_pool: PagePool | None = None,
        tiers: Tiers | None = None,
        transfers: Transfers | None = None,
        *,
        share: bool,
    ) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.cache = RadixCache(pool)
        self.rows = RowTable(num_rows, max_pages)
        self.windows: RowWindows | None = None
        if window is not None and window_pool is not None:
            self.windows = RowWindows(window_pool, self.cache, self.rows, window)
        self.leases = Leases(self.cache, None if self.windows is None else self.windows.pages)
        self.running: dict[int, Request] = {}
        """Requests by row, in order of admission."""
        self.states: RowStates | None = None
        if num_checkpoints is not None:
            self.states = RowStates(self.rows, pool.page_size, num_checkpoints if share else 0)
            self.cache.end_watcher = self.states.checkpoints
        self._shares = share
        self._window = window if window_pool is None else None
        self._least_given = give_back_unit(window or 0, pool.page_size)
        self._in_flight = InFlight(pool.page_size)
        self._page_writes: list[Int32Array] = []
        self.on_flush: list[Callable[[], None]] = []
        """Called by `flush`, for others that keep something of earlier requests."""
        self.tiers = tiers
        """Host memory and files; None: only the device's memory."""
        if tiers is not None:
            assert share, "what is not shared is not kept"
            states = None if self.states is None else self.states.checkpoints
            windows = None if self.windows is None else self.windows.pages
            tiers.attach(self.cache, self._in_flight, self.leases, states, windows)
        self.transfers = transfers
        """Pages to or from other engines; None: this one is for prompts and outputs alike."""
        if transfers is not None:
            assert share and self.states is None and self.windows is None, "only whole pages of all layers go"  # noqa: PT018
            transfers.attach(self.cache, self._in_flight, self.leases)

    @property
    def available_pages(self) -> int:
        """Free or evictable pages."""
        return self.pool.num_free + self.cache.evictable_pages

    def available_by_pool(self) -> tuple[int, int]:
        """`available_pages`, and those of the layers with a window if they have a pool of their own, else 0."""
        return self.available_pages, 0 if self.windows is None else self.windows.pages.available

    @property
    def _obtainable_pages(self) -> int:
        """Pages that rows can get, of each pool."""
        pages, windowed = self.available_by_pool()
        return pages if self.windows is None else min(pages, windowed)

    def pop_page_writes(self) -> Int32Array:
        """The page table's changes since the last batch, [n, 3] of (row, index, page), without repeats."""
        writes, self._page_writes = self._page_writes, []
        return writes[0] if len(writes) == 1 else np.concatenate([np.empty((0, 3), np.int32), *writes])

    def current_match(self, request: Request) -> Match:
        """A waiting request's longest usable cached prefix, looked up again only after a change."""
        match = request.match
        if match is None or not self.cache.is_current(match):
            key = request.key()[: 4 * request.match_limit]
            cache = self.cache
            match = cache.match(key, request.namespace) if match is None else cache.refresh(match, key)
            request.match = match
        return match

    def entry_match(self, request: Request) -> Match:
        """The part of a waiting request's match that it can take over."""
        match = self.current_match(request)
        if self.windows is not None:
            match = self.windows.pages.usable(match)
        return match if self.states is None else self.states.usable(match)

    def lock(self, match: Match) -> Node | None:
        """Lock what a request reads that goes on behind the match: what comes below the node returned."""
        above = self._unneeded(match)
        self.cache.lock(match.node, above)
        if self.windows is not None:
            self.windows.pages.hold(match.node)
        return above

    def unlock(self, match: Match, above: Node | None) -> None:
        """Undo `lock`, right after it."""
        if self.windows is not None:
            self.windows.pages.release(self.windows.pages.seen_behind(match.node)[1], is_end=True)
        self.cache.unlock(match.node, above)

    def _unneeded(self, match: Match) -> Node | None:
        """The node at whose end begins what a request reads that goes on behind the match; None: the root."""
        first = (match.length - (self._window or match.length)) // self.page_size
        return self.cache.cut(match.node, first * self.page_size) if first > 0 else None

    def most_pages(self, request: Request, step_tokens: int | None) -> int | None:
        """Pages that a request holds at most, with prompts in parts of step_tokens; None: any number."""
        if self._window is None:
            return None
        return pages_in_window(self._window, self.page_size, step_tokens or request.num_known)

    def computed_by(self, request: Request) -> int | None:
        """Who will soon insert this request's next tokens: the uid of a running request, or a load's owner."""
        match = self.current_match(request)
        cached_len = match.length if self.windows is None else self.windows.pages.usable_length(match.node)
        key = request.key()[: 4 * request.match_limit]
        pending = self._in_flight.find(request.uid, key, cached_len, request.namespace)
        if pending is None:
            owner = None
            if self.transfers is not None and self.transfers.imports is not None:
                owner = self.transfers.imports.computes_or_pulls(request, cached_len, match.node)
            if owner is None and self.tiers is not None:
                owner = self.tiers.loads.computes_or_loads(request, cached_len, match.node)
            return owner
        if self.states is not None and pending.owner >= 0:  # else it is a load, which has what there is
            self.states.want(pending.owner, pending.length)
        if self.windows is not None and pending.owner >= 0:
            self.windows.want(pending.owner, pending.length)
        return pending.owner

    def left_queue(self, request: Request) -> None:
        """A request has a row, or has ended: nothing more need be brought for it."""
        if self.tiers is not None:
            self.tiers.loads.entered(request)
        if self.transfers is not None:
            self.transfers.left_queue(request)

    @property
    def is_bringing(self) -> bool:
        """Whether requests may wait for pages under way, from a tier or another engine."""
        tiers, transfers = self.tiers, self.transfers
        return (tiers is not None and tiers.loads.is_busy) or (transfers is not None and transfers.is_busy)

    def is_in_flight(self, uid: int) -> bool:
        """Whether that request will still insert tokens."""
        return uid in self._in_flight

    def enter(self, request: Request, above: Node | None) -> None:
        """Give a waiting request a row with its cached prefix, which `lock` has locked below `above`."""
        match, matched_len = self.entry_match(request), self.current_match(request).length
        request.row = self.rows.take()
        self.running[request.row] = request
        self.rows.kv_len[request.row] = match.length
        self.rows.offset[request.row] = 0 if request.layout is None else request.layout.offset
        self.rows.has_images |= request.layout is not None
        request.node, request.tree_len, request.match = match.node, match.length, None
        request.is_outdated = False
        request.above = above
        if above is not None:
            self.rows.skip(request.row, above.length // self.page_size)
        if match.length:
            pages = match.node.pages_from(0 if above is None else above.length)
            self._page_writes.append(self.rows.append(request.row, pages))
        if self.states is not None:
            self.states.enter(request, match.node, matched_len)
        if self.windows is not None:
            self.windows.enter(request, match.node, matched_len)
        if self._shares:
            self._in_flight.begin(request.uid, request.key(), request.namespace)

    def leave(self, request: Request) -> None:
        """Take the request's row. Whole pages go to the tree, others to the free list."""
        row = request.row
        assert request.node is not None, "a request with a row has its place in the tree"
        if request.node.is_attached:  # else nobody would find it
            self.share(request)
        self.pool.free(self.rows.held_from(row, request.tree_len // self.page_size).copy())
        self.prompt_is_computed(request)
        if self.states is not None:
            self.states.leave(request)
        if self.windows is not None:
            self.windows.leave(request, request.tree_len // self.page_size)
        self.cache.unlock(request.node, request.above)
        if self.tiers is not None:
            self.tiers.saves.settle(request.node)
        request.node, request.above, request.tree_len, request.row = None, None, 0, -1
        del self.running[row]
        self.rows.give_back(row)
        self._page_writes = [writes[writes[:, 0] != row] for writes in self._page_writes]

    def share(self, request: Request) -> None:
        """Hand full pages of known, computed tokens to the tree, with a state that was kept of them."""
        if request.is_outdated and request.node is self.cache.root:
            return  # others would find them there
        num_pages = min(int(self.rows.kv_len[request.row]), request.num_known) // self.page_size
        if self.states is not None and (kept := self.states.pop_kept(request, num_pages * self.page_size)):
            length, slot = kept
            self._share(request, length // self.page_size)
            assert request.node is not None, "it is where these pages end"
            self.states.checkpoints.attach(request.node, slot)
        self._share(request, num_pages)

    def _share(self, request: Request, num_pages: int) -> None:
        held, row = request.node, request.row
        assert held is not None, "a request with a row has its place in the tree"
        first = request.tree_len // self.page_size
        if num_pages <= first or not self._shares:
            return
        key = request.key()[4 * request.tree_len : 4 * num_pages * self.page_size]
        mine = self.rows.pages[row, first:num_pages]
        inserted = self.cache.insert(key, mine, request.namespace, after=held)
        self.cache.move_lock(held, inserted.node)
        if self.windows is not None:
            self.windows.share(row, inserted.node, first, num_pages)
        request.node, request.tree_len = inserted.node, num_pages * self.page_size
        if len(inserted.duplicates):  # another request computed the same tokens meanwhile
            mine[: len(inserted.pages)] = inserted.pages
            self._page_writes.append(self.rows.writes(row, first, len(inserted.pages)))
            self.pool.free(inserted.duplicates)

    def give_back(self, request: Request) -> None:
        """Give back the pages of what no token sees that the request computes from here on. A few together: each time
        splits a node of the tree."""
        row = request.row
        if self.windows is not None and self.windows.may_give_back(request):
            if self._shares:
                self.share(request)
            self.windows.give_back(request, request.tree_len // self.page_size if self._shares else None)
        given = int(self.rows.given_back[row])
        if self._window is None:
            return
        last = int(self.rows.kv_len[row]) - 1  # a draft may have to be computed again
        num_pages = (last - self._window + 1) // self.page_size
        if num_pages - given < self._least_given:
            return
        if self._shares:
            self.share(request)
            assert request.node is not None, "a request with a row has its place in the tree"
            num_pages = min(num_pages, request.tree_len // self.page_size - 1)  # the node stays its own
            if num_pages <= given:
                return
            length = num_pages * self.page_size
            request.above = self.cache.give_back(request.node, request.above, length)
        else:
            self.pool.free(self.rows.pages[row, given:num_pages].copy())
        self.rows.skip(row, num_pages)

    def prompt_is_computed(self, request: Request) -> None:
        """Nobody needs to wait for this prompt any more."""
        self._in_flight.end(request.uid)

    def reach(self, request: Request, end: int) -> int:
        """Give the request pages up to token `end`, if available; returns the token reached."""
        held = int(self.rows.num_pages[request.row])
        self._reclaim(-(-end // self.page_size) - held)
        end = min(end, (held + self._obtainable_pages) * self.page_size)
        missing = -(-end // self.page_size) - held
        if missing > 0:
            pages = self.cache.alloc(missing)
            assert pages is not None, "evictable and free pages were counted"
            if self.windows is not None:
                self.windows.extend(request.row, held, missing)
            self._page_writes.append(self.rows.append(request.row, pages))
        return end

    def grow(self, rows: Int32Array) -> bool:
        """Give each row one more page, or none; returns which."""
        self._reclaim(len(rows))
        pages = self.cache.alloc(len(rows)) if self._obtainable_pages >= len(rows) else None
        if pages is None:
            return False
        index = self.rows.num_pages[rows]
        if self.windows is not None:
            self.windows.grow(rows, index)
        self.rows.pages[rows, index] = pages
        self.rows.num_pages[rows] = index + 1
        self._page_writes.append(np.stack((rows, index, pages), axis=1))
        return True

    @property
    def moved(self) -> int:
        """See `Batch.moved`."""
        return 0 if self.tiers is None else self.tiers.loads.moved

    @property
    def is_busy(self) -> bool:
        """Whether requests run or pages are under way: either gives pages back in the end."""
        return bool(self.running) or self.is_bringing

    @property
    def is_full(self) -> bool:
        """Whether loads left no page, not even of what room was reserved for."""
        brings = self.tiers is not None or self.transfers is not None
        return brings and not self._obtainable_pages and not len(self.leases)

    def state(self) -> dict[str, Any]:
        """For users: what is cached where, in tokens, and what moved since the start."""
        size, tiers = self.page_size, self.tiers
        state = {
            "kv_available_tokens": self.pool.num_free * size,
            "kv_evictable_tokens": self.cache.evictable_pages * size,
            "evicted_tokens": self.cache.evicted_pages * size,
        }
        if self.windows is not None:
            num_free = self.windows.pool.num_free
            state["windowed_available_tokens"] = num_free * size
            state["windowed_evictable_tokens"] = (self.windows.pages.available - num_free) * size
        state |= NO_TRANSFERS if self.transfers is None else self.transfers.state()
        return state | (NO_TIERS if tiers is None else tiers.state())

    def flush(self) -> int:
        """Forget all that is cached and that nobody holds. Returns how many pages remain locked."""
        for forget in self.on_flush:
            forget()
        if self.transfers is not None:
            self.transfers.clear()
        return self.cache.reset() if self.tiers is None else self.tiers.clear(self.cache.reset)

    def outdate(self) -> None:
        """Let no request find what is cached now: its weights are gone. Running ones go on with what they have, leases
        are lost. Only while `tiers` moves nothing."""
        for forget in self.on_flush:
            forget()
        for request in self.running.values():
            request.is_outdated = True
            self.prompt_is_computed(request)  # nobody can share it
        self.leases.outdate()
        if self.tiers is None:
            self.cache.reset(detach=True)
        else:
            self.tiers.outdate(lambda: self.cache.reset(detach=True))

    def forget(self, adapter: int) -> None:
        """Forget what is cached of a LoRA adapter."""
        if self.tiers is None:
            self.cache.forget(adapter)
        else:
            self.tiers.forget(adapter, lambda: self.cache.forget(adapter))

    def _reclaim(self, num_pages: int) -> None:
        while self._obtainable_pages < num_pages and self.leases.drop_oldest():
            pass

    def close(self) -> None:
        """End what writes files or talks to other engines. After the last step. Idempotent."""
        for each in (self.tiers, self.transfers):
            if each is not None:
                each.close()

    def check(self) -> list[str]:
        """Breaches of ownership; empty if every page and every checkpoint has one owner."""
        running = self.running.items()
        private = [self.rows.held_from(row, r.tree_len // self.page_size) for row, r in running]
        locked = [(request.node, request.above) for _, request in running if request.node is not None]
        problems, beside = [], None
        if self.tiers is not None:
            beside = self.tiers.beside
            private += self.tiers.loads.private()
            locked += [(node, None) for node in self.tiers.loads.locked()]
            problems = self.tiers.check()
        incoming: list[Int32Array] = []
        if self.transfers is not None:
            problems += self.transfers.check()
            locked += [(node, None) for node in self.transfers.locked()]
            incoming = self.transfers.incoming()
        problems += check(self.pool, self.cache, private, [*locked, *self.leases.nodes()], incoming)
        if self.states is not None:
            slots = self.states.slots() + ([] if beside is None else np.concatenate(beside.private()).tolist())
            problems += check_states(self.states.checkpoints, self.cache, slots)
        if self.windows is not None:
            problems += self.windows.check(self.running, self.leases, beside)
        return problems
