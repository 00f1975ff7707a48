"""The radix tree where requests give back the beginnings of their prefixes: nothing is found whose pages are gone, and
what is still read stays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.keys import key_of
from sgl.runtime.cache.ledger import check
from sgl.runtime.cache.node import Match, Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache

Pages = tuple[int, ...]  # a prefix, as the numbers with which its pages are filled
NUM_PAGES, PAGE_SIZE = 16, 2
which = st.integers(0, 7)
prompts = st.tuples(st.integers(2, 8), st.integers(0, 8)).map(
    lambda pair: tuple([0] * min(pair) + [1] * max(pair[0] - pair[1], 0))
)


@dataclass(eq=False)
class Holder:
    """A request: it reads the pages of its prompt from `given` on."""

    prompt: Pages
    node: Node
    shared: int  # pages of the prompt in the tree
    given: int = 0
    above: Node | None = None
    table: list[int] = field(default_factory=list)

    @property
    def private(self) -> Int32Array:
        return np.array(self.table[self.shared :], np.int32)


class WindowMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.pool = PagePool(NUM_PAGES + 1, PAGE_SIZE)
        self.cache = RadixCache(self.pool)
        self.page_of: dict[Pages, int] = {}  # what is found
        self.holders: list[Holder] = []
        self.kept: list[tuple[Pages, Match, list[int]]] = []

    def free(self) -> set[int]:
        return set(self.pool.free_list().tolist())

    def found(self, prompt: Pages) -> list[int]:
        """The pages of the longest prefix that is stored."""
        pages = []
        while (page := self.page_of.get(prompt[: len(pages) + 1])) is not None and len(pages) < len(prompt):
            pages.append(page)
        return pages

    def evicted(self, freed: set[int]) -> None:
        """Pages are gone, and with them the way to what is behind them."""
        read = {page for holder in self.holders for page in holder.table[holder.given : holder.shared]}
        assert not freed & read, "a page was evicted that a request reads"
        gone = {prefix for prefix, page in self.page_of.items() if page in freed}
        lost = {prefix for prefix in self.page_of if any(prefix[: len(each)] == each for each in gone)}
        for prefix in lost:
            del self.page_of[prefix]

    @rule(prompt=prompts)
    def admit(self, prompt: Pages) -> None:
        if len(self.holders) < 4:
            match = self.cache.match(key(prompt))
            assert match.pages.tolist() == self.found(prompt)
            num_pages = match.length // PAGE_SIZE
            self.cache.lock(match.node)
            self.holders.append(Holder(prompt, match.node, num_pages, table=match.pages.tolist()))

    @rule(prompt=prompts, skipped=st.integers(0, 3))
    def admit_with_the_end_only(self, prompt: Pages, skipped: int) -> None:
        match = self.cache.match(key(prompt))
        num_pages = match.length // PAGE_SIZE
        given = num_pages - 1 - skipped
        if len(self.holders) < 4 and given > 0:
            pages = match.pages.tolist()
            assert pages == self.found(prompt)
            above = self.cache.cut(match.node, given * PAGE_SIZE)
            self.cache.lock(match.node, above)
            self.holders.append(Holder(prompt, match.node, num_pages, given, above, pages))

    @precondition(lambda self: self.holders)
    @rule(at=which, count=st.integers(1, 5), shares=st.booleans())
    def compute(self, at: int, count: int, shares: bool) -> None:
        holder = self.holders[at % len(self.holders)]
        count = min(count, len(holder.prompt) - len(holder.table))
        before, available = self.free(), self.pool.num_free + self.cache.evictable_pages
        pages = self.cache.alloc(count)
        assert (pages is None) == (count > available)
        if pages is not None:
            self.evicted((self.free() | set(pages.tolist())) - before)
            holder.table += pages.tolist()
        if shares:
            self.share_of(holder)

    @precondition(lambda self: self.holders)
    @rule(at=which)
    def share(self, at: int) -> None:
        self.share_of(self.holders[at % len(self.holders)])

    def share_of(self, holder: Holder) -> None:
        first, done = holder.shared, holder.prompt[: len(holder.table)]
        inserted = self.cache.insert(key(done[first:]), holder.private, after=holder.node)
        if holder.node.is_attached:
            known = self.found(done)[first:]
            assert inserted.pages.tolist() == known
            holder.table[first : first + len(known)] = known
            for end in range(first + len(known), len(done)):
                self.page_of[done[: end + 1]] = holder.table[end]
        else:
            holder.table[first : first + len(inserted.pages)] = inserted.pages.tolist()
        self.pool.free(inserted.duplicates)
        self.cache.move_lock(holder.node, inserted.node)
        holder.node, holder.shared = inserted.node, len(done)

    @precondition(lambda self: self.holders)
    @rule(at=which, number=st.integers(1, 6))
    def give_back(self, at: int, number: int) -> None:
        holder = self.holders[at % len(self.holders)]
        given = min(holder.given + number, holder.shared - 1)
        if given > holder.given:
            holder.above = self.cache.give_back(holder.node, holder.above, given * PAGE_SIZE)
            holder.given = given

    @precondition(lambda self: self.holders)
    @rule(at=which)
    def finish(self, at: int) -> None:
        holder = self.holders.pop(at % len(self.holders))
        self.pool.free(holder.private)
        self.cache.unlock(holder.node, holder.above)

    @rule(count=st.sampled_from([1, 2, 3, 5, 0, 8, NUM_PAGES]))
    def evict(self, count: int) -> None:
        before, evictable = self.free(), self.cache.evictable_pages
        lost = {page for node in self.cache.lru if not node.is_attached for page in node.pages.tolist()}
        assert self.cache.evict(count) == min(count, evictable)
        freed = self.free() - before
        assert len(freed) == min(count, evictable)
        assert freed <= lost or lost <= freed, "what nothing finds goes first"
        self.evicted(freed)

    @precondition(lambda self: self.holders)
    @rule(at=which)
    def keep_a_match(self, at: int) -> None:
        prompt = self.holders[at % len(self.holders)].prompt
        match = self.cache.match(key(prompt))
        self.kept = [*self.kept[-7:], (prompt, match, match.pages.tolist())]

    @precondition(lambda self: self.kept)
    @rule(at=which)
    def refresh_a_match(self, at: int) -> None:
        prompt, match, pages = self.kept[at % len(self.kept)]
        refreshed = self.cache.refresh(match, key(prompt))
        assert refreshed.pages.tolist() == self.found(prompt)
        assert refreshed is not match or pages == self.found(prompt)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        private = [holder.private for holder in self.holders]
        locked = [(holder.node, holder.above) for holder in self.holders]
        assert check(self.pool, self.cache, private, locked) == []

    @invariant()
    def what_is_read_is_there(self) -> None:
        for holder in self.holders:
            start = holder.given * PAGE_SIZE
            assert holder.node.pages_from(start).tolist() == holder.table[holder.given : holder.shared]


def key(prompt: Pages) -> bytes:
    return key_of([number * 10 + i for number in prompt for i in range(PAGE_SIZE)])


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
