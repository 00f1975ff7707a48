"""The radix tree against a model: a trie of single pages in a dictionary, each with its time of use and holders.

Both go through what requests do (match, lock, chunks, duplicates, finish, abort, eviction), and all that can be seen
is compared after every step, down to which pages an eviction freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.keys import key_of
from sgl.runtime.cache.ledger import check
from sgl.runtime.cache.node import Match, Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache

Pages = tuple[int, ...]  # a prefix, as the numbers of the patterns that its pages are filled with
NUM_PAGES = 24


@dataclass
class ModelPage:
    page: int
    serial: int  # tells a page that was evicted and stored again from the one it was
    used: int = 0
    holders: int = 0


class Model:
    """Every stored page under its namespace and the prefix that it ends."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str | None, Pages], ModelPage] = {}
        self.now = 0

    def path(self, namespace: str | None, prefix: Pages) -> list[ModelPage]:
        """The stored pages along `prefix`, as far as they go."""
        path = []
        for end in range(1, len(prefix) + 1):
            found = self.stored.get((namespace, prefix[:end]))
            if found is None:
                break
            path.append(found)
        return path

    def use(self, pages: list[ModelPage]) -> None:
        self.now += 1
        for page in pages:
            page.used = self.now

    def evict(self, count: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < count:
            inner = {(namespace, prefix[:-1]) for namespace, prefix in self.stored}
            leaves = [where for where, page in self.stored.items() if not page.holders and where not in inner]
            if not leaves:
                break
            oldest = min(self.stored[where].used for where in leaves)
            (where,) = [where for where in leaves if self.stored[where].used == oldest]
            freed.append(self.stored.pop(where).page)
        return freed


@dataclass(eq=False)
class Holder:
    """A request: a locked prefix of its prompt, and private pages for what it computed behind it."""

    namespace: str | None
    prompt: Pages
    node: Node
    held: int  # pages of the prompt that are locked in the tree
    table: list[int] = field(default_factory=list)  # pages of the prompt so far: held ones, then private ones

    @property
    def private(self) -> Int32Array:
        return np.array(self.table[self.held :], np.int32)


@dataclass
class Waiting:
    key: bytes
    prompt: Pages
    match: Match
    serials: list[int]
    version: int


lengths = st.sampled_from([3, 5, 2, 4, 6, 1, 7, 0])
prompts = lengths.flatmap(lambda n: st.tuples(*[st.sampled_from([0, 0, 1, 2])] * n))
namespaces = st.sampled_from([None, None, None, "a"])
choice = st.integers(0, 7)


class RadixMachine(RuleBasedStateMachine):
    page_size = 1

    @initialize(stored=st.lists(st.tuples(prompts, namespaces), max_size=6))
    def start(self, stored: list[tuple[Pages, str | None]]) -> None:
        self.pool = PagePool(NUM_PAGES + 1, self.page_size)
        self.cache = RadixCache(self.pool)
        self.model = Model()
        self.requests: list[Holder] = []
        self.waiting: list[Waiting] = []
        self.serial = 0
        for prompt, namespace in stored:
            self.store(prompt=prompt, namespace=namespace)

    def key(self, prompt: Pages, partial: int = 0) -> bytes:
        """Patterns differ in the first token of a page, the last, or both ways, so that every comparison counts."""
        size = self.page_size
        patterns = [[0] * size, [*[0] * (size - 1), 1], [2, *[0] * (size - 1)]]
        ids = [token_id for number in prompt for token_id in patterns[number]]
        return key_of(ids + [0] * min(partial, size - 1))

    def free_set(self) -> set[int]:
        return set(self.pool.free_list().tolist())

    def request(self, which: int) -> Holder:
        return self.requests[which % len(self.requests)]

    @rule(prompt=prompts, namespace=namespaces, partial=st.integers(0, 15))
    def match_and_wait(self, prompt: Pages, namespace: str | None, partial: int) -> None:
        key = self.key(prompt, partial)
        match = self.cache.match(key, namespace)
        path = self.model.path(namespace, prompt)
        self.model.use(path)
        assert match.length == len(path) * self.page_size
        assert match.pages.tolist() == [page.page for page in path]
        serials = [page.serial for page in path]
        self.waiting = [*self.waiting[-7:], Waiting(key, prompt, match, serials, self.cache.version)]

    @precondition(lambda self: self.waiting)
    @rule(which=choice)
    def refresh(self, which: int) -> None:
        waiting = self.waiting[which % len(self.waiting)]
        path = self.model.path(waiting.match.namespace, waiting.prompt)
        serials = [page.serial for page in path]
        current = serials == waiting.serials
        refreshed = self.cache.refresh(waiting.match, waiting.key)
        assert (refreshed is waiting.match) == current
        if not current:
            self.model.use(path)
        assert refreshed.length == len(path) * self.page_size
        assert refreshed.pages.tolist() == [page.page for page in path]
        assert self.cache.is_current(refreshed)
        waiting.match, waiting.serials, waiting.version = refreshed, serials, self.cache.version

    @rule(prompt=prompts, namespace=namespaces)
    def store(self, prompt: Pages, namespace: str | None) -> None:
        """A whole request in one go, so that the tree fills up."""
        request = self.add_request(prompt, namespace)
        if self.compute_pages(request, len(prompt)):
            self.insert_computed(request, from_root=False)
        self.remove_request(request)

    @precondition(lambda self: len(self.requests) < 4)
    @rule(prompt=prompts, namespace=namespaces)
    def admit(self, prompt: Pages, namespace: str | None) -> None:
        self.add_request(prompt, namespace)

    def add_request(self, prompt: Pages, namespace: str | None) -> Holder:
        match = self.cache.match(self.key(prompt), namespace)
        path = self.model.path(namespace, prompt)
        self.model.use(path)
        self.cache.lock(match.node)
        for page in path:
            page.holders += 1
        request = Holder(namespace, prompt, match.node, len(path), match.pages.tolist())
        self.requests.append(request)
        return request

    @precondition(lambda self: self.requests)
    @rule(which=choice, count=st.integers(1, 4))
    def compute(self, which: int, count: int) -> None:
        self.compute_pages(self.request(which), count)

    def compute_pages(self, request: Holder, count: int) -> bool:
        count = min(count, len(request.prompt) - len(request.table))
        before = self.free_set()
        available = len(before) + sum(not page.holders for page in self.model.stored.values())
        pages = self.cache.alloc(count)
        assert (pages is None) == (count > available)
        if pages is not None:
            evicted = self.model.evict(count - len(before))
            assert self.free_set() == (before | set(evicted)) - set(pages.tolist())
            request.table += pages.tolist()
        return pages is not None

    @precondition(lambda self: self.requests)
    @rule(which=choice, from_root=st.booleans())
    def insert(self, which: int, from_root: bool) -> None:
        self.insert_computed(self.request(which), from_root)

    def insert_computed(self, request: Holder, from_root: bool) -> None:
        """What a request does at the end of a chunk."""
        done = request.prompt[: len(request.table)]
        start = 0 if from_root else request.held
        table = np.array(request.table[start:], np.int32)
        after = None if from_root else request.node
        inserted = self.cache.insert(self.key(done[start:]), table, request.namespace, after)

        path = self.model.path(request.namespace, done)
        assert inserted.num_matched_tokens == (len(path) - start) * self.page_size
        assert inserted.pages.tolist() == [page.page for page in path[start:]]
        assert inserted.duplicates.tolist() == request.table[request.held : len(path)]
        assert inserted.node.length == len(done) * self.page_size
        request.table[start : len(path)] = inserted.pages.tolist()
        self.pool.free(inserted.duplicates)
        for end in range(len(path) + 1, len(done) + 1):
            self.serial += 1
            path.append(ModelPage(request.table[end - 1], self.serial))
            self.model.stored[request.namespace, done[:end]] = path[-1]
        self.model.use(path)

        self.cache.move_lock(request.node, inserted.node)
        for page in path[request.held :]:
            page.holders += 1
        request.node, request.held = inserted.node, len(done)

    @precondition(lambda self: self.requests)
    @rule(which=choice, keep=st.booleans())
    def finish(self, which: int, keep: bool) -> None:
        """Finish or retract (keep what was computed), or abort in the middle of a chunk."""
        request = self.request(which)
        if keep:
            self.insert_computed(request, from_root=False)
        self.remove_request(request)

    def remove_request(self, request: Holder) -> None:
        self.pool.free(request.private)
        self.cache.unlock(request.node)
        released = []
        for page in self.model.path(request.namespace, request.prompt)[: request.held]:
            page.holders -= 1
            if not page.holders:
                released.append(page)
        self.model.use(released)
        self.requests.remove(request)

    @rule(count=st.sampled_from([1, 2, 3, 5, 0, 8, NUM_PAGES]))
    def evict(self, count: int) -> None:
        before = self.free_set()
        freed = self.cache.evict(count)
        expected = self.model.evict(count)
        assert freed == len(expected)
        assert self.free_set() - before == set(expected)

    @precondition(lambda self: self.serial % 7 == 6)
    @rule()
    def reset(self) -> None:
        locked = self.cache.reset()
        self.model.evict(NUM_PAGES)
        assert locked == len(self.model.stored)

    @invariant()
    def the_ledger_is_clean(self) -> None:
        if not hasattr(self, "cache"):
            return
        private = [request.private for request in self.requests]
        assert check(self.pool, self.cache, private, [request.node for request in self.requests]) == []
        assert check(self.pool, self.cache, private) == []

    @invariant()
    def a_match_is_current_exactly_while_its_longest_prefix_is_the_same(self) -> None:
        for waiting in getattr(self, "waiting", []):
            path = self.model.path(waiting.match.namespace, waiting.prompt)
            current = self.cache.is_current(waiting.match)
            assert current == ([page.serial for page in path] == waiting.serials)
            assert current or self.cache.version != waiting.version

    @invariant()
    def every_holder_keeps_its_pages(self) -> None:
        for request in getattr(self, "requests", []):
            assert request.node.length == request.held * self.page_size
            assert request.node.pages_from().tolist() == request.table[: request.held]

    @invariant()
    def the_counters_agree_with_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        locked = sum(page.holders > 0 for page in self.model.stored.values())
        assert (self.cache.locked_pages, self.cache.evictable_pages) == (locked, len(self.model.stored) - locked)


def machine(size: int) -> type[RadixMachine]:
    return type(f"RadixMachineWithPagesOf{size}", (RadixMachine,), {"page_size": size})


class TestPagesOfOneToken(machine(1).TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestPagesOfTwoTokens(machine(2).TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


class TestPagesOfFourTokens(machine(4).TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


class TestPagesOfSixteenTokens(machine(16).TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_the_tree_agrees_with_the_model_on_a_long_random_walk(page_size: int):
    """The same steps, drawn so that the tree stays full and busy; a machine that starts over seldom gets there."""
    random = Random(page_size)
    walk = machine(page_size)()
    walk.start(stored=[])
    for _ in range(1500):
        prompt = tuple(random.choices([0, 1, 2], [4, 2, 1], k=random.randrange(9)))
        namespace = random.choice([None, None, "a"])
        which, flag = random.randrange(8), random.random() < 0.5
        match random.randrange(8):
            case 0:
                walk.store(prompt=prompt, namespace=namespace)
            case 1:
                walk.match_and_wait(prompt=prompt, namespace=namespace, partial=which)
            case 2 if walk.waiting:
                walk.refresh(which=which)
            case 3:
                walk.evict(count=which // 2)
            case 4 if len(walk.requests) < 4:
                walk.admit(prompt=prompt, namespace=namespace)
            case 5 if walk.requests:
                walk.compute(which=which, count=1 + which // 2)
            case 6 if walk.requests:
                walk.insert(which=which, from_root=flag)
            case 7 if walk.requests:
                walk.finish(which=which, keep=flag)
        if random.random() < 0.005:
            walk.reset()
        walk.the_ledger_is_clean()
        walk.a_match_is_current_exactly_while_its_longest_prefix_is_the_same()
        walk.every_holder_keeps_its_pages()
        walk.the_counters_agree_with_the_model()
