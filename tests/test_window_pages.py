"""Windowed pages beside a radix tree: a prefix is taken over where all of its window is there, what is held stays, and
pages give way where nobody goes on first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.ledger import check, check_windows
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.window_pages import WindowPages
from tests.test_radix_windows import PAGE_SIZE, Pages, key, prompts, which

NUM_PAGES = 24


@dataclass(eq=False)
class Holder:
    """A request: it reads the full pages of its prompt, and windowed ones from `given` on."""

    prompt: Pages
    node: Node
    shared: int  # pages of the prompt in the tree
    table: list[int]
    given: int
    windowed: Int32Array = field(default_factory=lambda: np.zeros(9, np.int32))


class PagesMachine(RuleBasedStateMachine):
    @initialize(window=st.integers(1, 9), num_windowed=st.sampled_from([9, 14, 40]))
    def start(self, window: int, num_windowed: int) -> None:
        self.window = window
        self.pool, self.window_pool = PagePool(NUM_PAGES + 1, PAGE_SIZE), PagePool(num_windowed + 1, PAGE_SIZE)
        self.cache = RadixCache(self.pool)
        self.pages = WindowPages(self.window_pool, self.cache, window)
        self.there: dict[Pages, int] = {}  # windowed pages of the tree
        self.holders: list[Holder] = []
        self.leases: list[tuple[Node, Int32Array]] = []

    def first(self, num_pages: int) -> int:
        """The first page that a token behind so many sees."""
        return max(0, num_pages * PAGE_SIZE - self.window + 1) // PAGE_SIZE

    def is_whole(self, prefix: Pages) -> bool:
        return all(prefix[: end + 1] in self.there for end in range(self.first(len(prefix)), len(prefix)))

    def drop(self, freed: set[int]) -> None:
        held = {int(page) for holder in self.holders for page in holder.windowed[: holder.shared] if page}
        held |= {int(page) for _, pages in self.leases for page in pages}
        assert not freed & held, "a page was evicted that somebody holds"
        self.there = {prefix: page for prefix, page in self.there.items() if page not in freed}

    @rule(prompt=prompts)
    def admit(self, prompt: Pages) -> None:
        if len(self.holders) == 4:
            return
        match = self.cache.match(key(prompt))
        usable = self.pages.usable(match)
        stored = range(match.length // PAGE_SIZE, 0, -1)
        expected = next((prompt[:n] for n in stored if self.is_whole(prompt[:n])), ())
        assert usable.length == len(expected) * PAGE_SIZE
        self.cache.lock(usable.node)
        first, seen = self.pages.seen_behind(usable.node)
        assert first == self.first(len(expected))
        assert seen.tolist() == [self.there[expected[: n + 1]] for n in range(first, len(expected))]
        self.pages.hold(usable.node)
        holder = Holder(prompt, usable.node, len(expected), usable.pages.tolist(), first)
        holder.windowed[first : len(expected)] = seen
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(at=which, count=st.integers(1, 5), shares=st.booleans())
    def compute(self, at: int, count: int, shares: bool) -> None:
        holder = self.holders[at % len(self.holders)]
        start = len(holder.table)
        count = min(count, len(holder.prompt) - start)
        if count <= self.pool.num_free + self.cache.evictable_pages and count <= self.pages.available:
            full = self.cache.alloc(count)
            self.drop(set(self.window_pool.free_list().tolist()))  # of nodes that are gone
            windowed = self.pages.alloc(count)
            assert full is not None
            assert windowed is not None
            self.drop(set(self.window_pool.free_list().tolist()) | set(windowed.tolist()))
            holder.table += full.tolist()
            holder.windowed[start : start + count] = windowed
        if shares:
            self.share(holder)

    def share(self, holder: Holder) -> None:
        first, done = holder.shared, holder.prompt[: len(holder.table)]
        mine = np.array(holder.table[first:], np.int32)
        inserted = self.cache.insert(key(done[first:]), mine, after=holder.node)
        self.pool.free(inserted.duplicates)
        self.cache.move_lock(holder.node, inserted.node)
        holder.table[first : first + len(inserted.pages)] = inserted.pages.tolist()
        before = holder.windowed.copy()
        replaced = self.pages.insert(inserted.node, holder.windowed[first : len(done)])
        for end in range(first, len(done)):
            prefix, page = done[: end + 1], int(before[end])
            if page and prefix in self.there:
                assert end - first in replaced.tolist()
                assert holder.windowed[end] == self.there[prefix]
            elif page:
                self.there[prefix] = page
                assert holder.windowed[end] == page
        holder.node, holder.shared = inserted.node, len(done)

    @precondition(lambda self: self.holders)
    @rule(at=which, number=st.integers(1, 6), is_end=st.booleans())
    def give_back(self, at: int, number: int, is_end: bool) -> None:
        holder = self.holders[at % len(self.holders)]
        given = min(holder.given + number, holder.shared)
        if given > holder.given:
            self.pages.release(holder.windowed[holder.given : given].copy(), is_end)
            holder.windowed[holder.given : given] = 0
            holder.given = given

    @precondition(lambda self: self.holders)
    @rule(at=which)
    def finish(self, at: int) -> None:
        holder = self.holders.pop(at % len(self.holders))
        self.pool.free(np.array(holder.table[holder.shared :], np.int32))
        self.window_pool.free(holder.windowed[holder.shared : len(holder.table)].copy())
        self.pages.release(holder.windowed[holder.given : holder.shared].copy(), is_end=True)
        self.cache.unlock(holder.node)

    @rule(prompt=prompts)
    def lease(self, prompt: Pages) -> None:
        match = self.cache.match(key(prompt))
        if match.length and len(self.leases) < 2:
            self.cache.lock(match.node)
            self.leases.append((match.node, self.pages.hold(self.pages.usable(match).node)))

    @precondition(lambda self: self.leases)
    @rule()
    def let_go(self) -> None:
        node, pages = self.leases.pop(0)
        self.pages.release(pages, is_end=True)
        self.cache.unlock(node)

    @rule(count=st.sampled_from([1, 2, 3, 5, NUM_PAGES]))
    def evict(self, count: int) -> None:
        self.cache.evict(count)
        self.drop(set(self.window_pool.free_list().tolist()))

    @rule(count=st.sampled_from([1, 2, 3, 5]))
    def evict_windowed_pages(self, count: int) -> None:
        passed, ends = (list(each) for each in self.pages.evictable)
        before, num_nodes = set(self.window_pool.free_list().tolist()), self.cache.num_nodes
        count = min(count, len(passed) + len(ends))
        self.pages.evict(count)
        freed = set(self.window_pool.free_list().tolist()) - before
        assert freed == set((passed + ends)[:count])
        assert self.cache.num_nodes == num_nodes
        self.drop(freed)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        private = [np.array(holder.table[holder.shared :], np.int32) for holder in self.holders]
        locked = [*(holder.node for holder in self.holders), *(node for node, _ in self.leases)]
        assert check(self.pool, self.cache, private, locked) == []
        tails = [holder.windowed[holder.shared : len(holder.table)] for holder in self.holders]
        held = [holder.windowed[holder.given : holder.shared] for holder in self.holders]
        assert check_windows(self.pages, tails, [*held, *(pages for _, pages in self.leases)]) == []


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=100, stateful_step_count=40)
