"""The radix tree finds the longest stored prefix, keeps what is held, and gives up the rest in LRU-leaf order;
the ledger notices when its books are wrong. test_radix_model.py compares it with a model."""

from __future__ import annotations

import numpy as np
import pytest

from sgl.runtime.cache.keys import key_of
from sgl.runtime.cache.ledger import check
from sgl.runtime.cache.node import Inserted, Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache


def new_cache(num_pages: int = 40, page_size: int = 1) -> RadixCache:
    return RadixCache(PagePool(num_pages + 1, page_size))


def store(cache: RadixCache, token_ids: list[int], namespace: str | None = None) -> Inserted:
    """Insert token ids, whole pages, from the start, and free the duplicates."""
    pages = cache.alloc(len(token_ids) // cache.pool.page_size)
    assert pages is not None
    inserted = cache.insert(key_of(token_ids), pages, namespace)
    cache.pool.free(inserted.duplicates)
    return inserted


def stored_len(cache: RadixCache, token_ids: list[int], namespace: str | None = None) -> int:
    return cache.match(key_of(token_ids), namespace).length


# ── lookup and growth ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_match_is_the_longest_stored_prefix_in_whole_pages():
    cache = new_cache(page_size=4)
    inserted = store(cache, list(range(12)))
    pages = inserted.node.pages_from()
    match = cache.match(key_of([*range(11), 99]))
    assert match.length == 8
    assert match.pages.tolist() == pages[:2].tolist()
    assert cache.match(key_of(range(3))).length == 0
    assert cache.match(key_of([*range(12), 1, 2, 3, 4])).pages.tolist() == pages.tolist()


def test_an_empty_key_matches_nothing():
    cache = new_cache()
    store(cache, [1])
    match = cache.match(b"")
    assert match.node is cache.root
    assert match.pages.shape == (0,)


def test_inserting_nothing_stores_nothing():
    cache = new_cache(page_size=2)
    inserted = store(cache, [])
    assert (inserted.node, inserted.num_matched_tokens, cache.num_nodes) == (cache.root, 0, 0)


def test_a_page_must_match_as_a_whole():
    cache = new_cache(page_size=4)
    store(cache, [1, 2, 3, 4])
    store(cache, [1, 2, 3, 5])
    assert cache.num_nodes == 2, "pages that differ in one token share nothing"
    assert stored_len(cache, [1, 2, 3, 5, 9]) == 4


def test_a_byte_shifted_key_does_not_match():
    cache = new_cache()
    store(cache, [0x01000000, 0x02000000])
    assert stored_len(cache, [0x00010000, 0x00020000]) == 0


def test_inserting_what_is_stored_gives_back_the_trees_pages_and_the_duplicates():
    cache = new_cache()
    first = store(cache, [1, 2, 3, 4]).node.pages_from()
    mine = cache.pool.alloc(6)
    assert mine is not None
    inserted = cache.insert(key_of([1, 2, 3, 9, 8, 7]), mine)
    assert inserted.num_matched_tokens == 3
    assert inserted.pages.tolist() == first[:3].tolist()
    assert inserted.duplicates.tolist() == mine[:3].tolist()
    assert inserted.node.pages_from().tolist() == [*first[:3], *mine[3:]]
    assert check(cache.pool, cache, [inserted.duplicates], []) == []


def test_pages_that_a_request_borrowed_are_not_its_duplicates():
    cache = new_cache()
    node = store(cache, [1, 2, 3]).node
    cache.lock(node)
    tail = cache.pool.alloc(2)
    assert tail is not None
    inserted = cache.insert(key_of([1, 2, 3, 4, 5]), np.concatenate([node.pages_from(), tail]))
    assert inserted.num_matched_tokens == 3
    assert inserted.duplicates.tolist() == []


def test_a_chunk_is_inserted_below_the_node_that_its_request_holds():
    cache = new_cache(page_size=2)
    head = store(cache, [1, 2, 3, 4], "ns").node
    cache.lock(head)
    store(cache, [1, 2, 9, 9], "ns")  # splits the held node
    tail = cache.pool.alloc(2)
    assert tail is not None
    inserted = cache.insert(key_of([5, 6, 7, 8]), tail, "ns", after=head)
    cache.move_lock(head, inserted.node)
    assert inserted.node.length == 8
    assert inserted.node.pages_from(4).tolist() == tail.tolist()
    assert stored_len(cache, [1, 2, 3, 4, 5, 6, 7, 8], "ns") == 8
    assert check(cache.pool, cache, [], [inserted.node]) == []


def test_the_tree_does_not_keep_the_callers_array():
    cache = new_cache()
    pages = cache.pool.alloc(3)
    assert pages is not None
    wanted = pages.tolist()
    cache.insert(key_of([1, 2, 3]), pages)
    pages[:] = 0
    assert cache.match(key_of([1, 2, 3])).pages.tolist() == wanted


def test_a_key_that_its_pages_do_not_hold_is_refused():
    cache = new_cache(page_size=4)
    pages = cache.pool.alloc(2)
    assert pages is not None
    with pytest.raises(AssertionError, match="2 pages do not hold 28 bytes"):
        cache.insert(key_of(range(7)), pages)


def test_pages_that_the_caller_does_not_own_are_refused():
    cache = new_cache()
    pages = store(cache, [1, 2]).node.pages_from()
    with pytest.raises(AssertionError, match="is in the tree"):
        cache.insert(key_of([3, 4]), pages)


def test_namespaces_share_nothing():
    cache = new_cache()
    store(cache, [1, 2, 3])
    store(cache, [1, 2], "tenant")
    assert stored_len(cache, [1, 2, 3]) == 3
    assert stored_len(cache, [1, 2, 3], "tenant") == 2
    assert stored_len(cache, [1, 2, 3], "other") == 0
    assert stored_len(cache, [1, 2, 3], "") == 0


def test_an_evicted_namespace_leaves_nothing_behind():
    cache = new_cache()
    for number in range(100):
        store(cache, [1, 2, 3], f"tenant {number}")
    assert cache.num_nodes == len(cache.root.children) == 14, "as many as 40 pages hold, the last one cut short"


# ── matches that wait ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_match_stays_current_through_splits_and_foreign_inserts():
    cache = new_cache()
    store(cache, [1, 2, 3, 4])
    match = cache.match(key_of([1, 2, 3, 4, 5]))
    version = cache.version
    cache.match(key_of([1, 2, 8]))
    assert cache.version == version, "a split changes no match"
    store(cache, [1, 2, 3, 9])
    store(cache, [1, 2, 3, 4, 6])
    assert cache.version != version
    assert cache.is_current(match)
    assert cache.refresh(match, key_of([1, 2, 3, 4, 5])) is match
    assert match.pages.tolist() == cache.match(key_of([1, 2, 3, 4])).pages.tolist()


def test_a_match_grows_when_its_next_page_is_inserted():
    cache = new_cache()
    key = key_of([1, 2, 3, 4])
    nothing = cache.match(key, "ns")
    store(cache, [1, 2], "other")
    assert cache.is_current(nothing)
    store(cache, [1, 2], "ns")
    assert not cache.is_current(nothing)
    match = cache.refresh(nothing, key)
    assert match.length == 2
    store(cache, [1, 2, 3, 7], "ns")
    assert cache.refresh(match, key).length == 3


def test_a_match_of_the_whole_key_cannot_grow():
    cache = new_cache(page_size=2)
    store(cache, [1, 2])
    match = cache.match(key_of([1, 2, 3]))
    store(cache, [1, 2, 3, 4])
    assert cache.is_current(match)


def test_a_match_shrinks_with_eviction_and_starts_over_when_all_is_gone():
    cache = new_cache()
    key = key_of([1, 2, 3, 4])
    store(cache, [1, 2, 3, 4])
    match = cache.match(key)
    version = cache.version
    cache.evict(1)
    assert cache.version != version
    assert not cache.is_current(match)
    with pytest.raises(AssertionError, match="has lost some of the 4 tokens"):
        _ = match.pages
    shorter = cache.refresh(match, key)
    assert shorter.length == 3
    cache.evict(3)
    assert not cache.is_current(shorter)
    store(cache, [1, 2])
    assert cache.refresh(shorter, key).length == 2


def test_pages_that_were_neighbours_are_handed_out_as_neighbours_again():
    cache = new_cache()
    for _ in range(3):
        pages = cache.alloc(6)
        assert pages is not None
        assert (np.diff(pages) == 1).all()
        cache.insert(key_of([1, 2, 3]), pages[:3])
        cache.insert(key_of([1, 2, 3, 4, 5, 6]), pages)
        assert cache.evict(6) == 6


# ── locks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_locked_prefix_survives_eviction():
    cache = new_cache()
    node = store(cache, [1, 2, 3]).node
    store(cache, [1, 2, 3, 4, 5])
    store(cache, [1, 9])
    cache.lock(node)
    assert (cache.locked_pages, cache.evictable_pages) == (3, 3)
    assert cache.evict(100) == 3
    assert stored_len(cache, [1, 2, 3, 4]) == 3
    cache.unlock(node)
    assert cache.evict(100) == 3
    assert cache.num_nodes == 0


def test_a_lock_on_the_lower_half_of_a_split_node_is_released_on_both():
    cache = new_cache()
    node = store(cache, [1, 2, 3, 4]).node
    cache.lock(node)
    upper = cache.match(key_of([1, 2])).node
    assert (upper.lock_ref, upper.length) == (1, 2)
    assert node.parent is upper
    cache.lock(upper)
    cache.unlock(node)
    assert (upper.lock_ref, node.lock_ref) == (1, 0)
    cache.unlock(upper)
    assert cache.locked_pages == 0
    assert check(cache.pool, cache, [], []) == []


def test_a_lock_moves_to_a_descendant_an_ancestor_or_a_stranger():
    cache = new_cache()
    low = store(cache, [1, 2, 3, 4]).node
    high = cache.match(key_of([1, 2])).node
    other = store(cache, [7, 8], "ns").node
    cache.lock(cache.root)
    held: Node = cache.root
    for node in (high, low, low, other, high, cache.root, low, high):
        cache.move_lock(held, node)
        held = node
        assert check(cache.pool, cache, [], [held]) == []


def test_unlocking_what_is_not_locked_is_refused():
    cache = new_cache()
    node = store(cache, [1]).node
    with pytest.raises(AssertionError, match="unlocked more often"):
        cache.unlock(node)


def test_a_node_that_is_gone_is_refused():
    cache = new_cache()
    node = store(cache, [1]).node
    cache.reset()
    with pytest.raises(AssertionError, match="gone from the tree"):
        cache.lock(node)
    with pytest.raises(AssertionError, match="gone from the tree"):
        cache.insert(b"", np.empty(0, np.int32), after=node)


# ── eviction ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_least_recently_used_leaf_goes_first_and_a_parent_after_its_last_child():
    cache = new_cache()
    for ids in ([1, 2, 3], [1, 2, 4], [5], [6]):
        store(cache, ids)
    cache.match(key_of([5]))
    cache.evict(2)
    assert [stored_len(cache, ids) for ids in ([1, 2, 3], [1, 2, 4], [6])] == [2, 2, 1]
    cache.evict(1)  # [5] was used before these three; now [1, 2], then [6]
    assert stored_len(cache, [5]) == 0
    cache.evict(1)
    assert stored_len(cache, [1, 2]) == 1


def test_a_leaf_is_cut_from_its_end_so_that_no_more_goes_than_was_asked():
    cache = new_cache(page_size=2)
    pages = store(cache, [1, 2, 3, 4, 5, 6]).node.pages_from()
    assert cache.evict(1) == 1
    assert cache.match(key_of([1, 2, 3, 4, 5, 6])).pages.tolist() == pages[:2].tolist()
    assert (cache.evictable_pages, cache.num_nodes) == (2, 1)
    store(cache, [1, 2, 3, 4, 7, 8])
    assert stored_len(cache, [1, 2, 3, 4, 7, 8]) == 6


def test_what_a_request_held_counts_as_used_when_it_lets_go():
    cache = new_cache()
    old = store(cache, [1]).node
    cache.lock(old)
    store(cache, [2])
    cache.unlock(old)
    cache.evict(1)
    assert (stored_len(cache, [1]), stored_len(cache, [2])) == (1, 0)


def test_alloc_evicts_only_what_is_missing_and_nothing_when_that_cannot_suffice():
    cache = new_cache(num_pages=6)
    held = store(cache, [1, 2]).node
    cache.lock(held)
    store(cache, [3, 4, 5])
    assert cache.alloc(5) is None
    assert cache.evictable_pages == 3
    pages = cache.alloc(3)
    assert pages is not None
    assert (len(pages), cache.evictable_pages, cache.pool.num_free) == (3, 1, 0)


def test_a_reset_drops_all_that_nobody_holds_and_says_what_stays():
    cache = new_cache()
    node = store(cache, [1, 2, 3], "ns").node
    store(cache, [1, 2, 3, 4], "ns")
    store(cache, [9])
    cache.lock(node)
    assert cache.reset() == 3
    assert cache.num_nodes == 1
    cache.unlock(node)
    assert cache.reset() == 0
    assert cache.pool.num_free == 40


def test_chains_of_thousands_of_nodes_need_no_recursion():
    cache = new_cache(num_pages=5000)
    node = cache.root
    cache.lock(node)
    for token_id in range(5000):
        page = cache.pool.alloc(1)
        assert page is not None
        below = cache.insert(key_of([token_id]), page, after=node).node
        cache.move_lock(node, below)
        node = below
    match = cache.match(key_of(range(5000)))
    assert (match.length, len(match.pages), cache.num_nodes) == (5000, 5000, 5000)
    assert check(cache.pool, cache, [], [node]) == []
    cache.unlock(node)
    assert cache.evict(4990) == 4990
    assert cache.refresh(match, key_of(range(5000))).length == 10


# ── the ledger ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_ledger_finds_a_lost_page():
    cache = new_cache()
    assert cache.pool.alloc(1) is not None
    assert check(cache.pool, cache, []) == ["page 1 is lost: nobody owns it"]


def test_the_ledger_finds_a_page_with_two_owners():
    cache = new_cache()
    pages = store(cache, [1]).node.pages_from()
    assert check(cache.pool, cache, [pages]) == [
        "page 1 is private, but the pool takes it for in the tree",
        "page 1 has 2 owners",
    ]


def test_the_ledger_finds_a_page_that_does_not_exist():
    cache = new_cache()
    assert check(cache.pool, cache, [np.array([99], np.int32)]) == ["there is no page 99, yet it is private"]


def test_the_ledger_finds_a_leaked_lock():
    cache = new_cache()
    node = store(cache, [1, 2]).node
    cache.lock(node)
    assert check(cache.pool, cache, []) == []
    assert check(cache.pool, cache, [], [node]) == []
    problems = check(cache.pool, cache, [], [])
    assert f"{node} has 0 holders" in problems
    assert "the tree counts 2 locked pages and has 0" in problems


def test_the_ledger_finds_a_holder_of_a_node_that_is_gone():
    cache = new_cache()
    node = store(cache, [1]).node
    cache.reset()
    assert check(cache.pool, cache, [], [node]) == [f"{node} is held, but not in the tree"]


def test_the_ledger_finds_broken_bookkeeping():
    cache = new_cache()
    node = store(cache, [1, 2]).node
    store(cache, [1, 3])
    parent = node.parent
    assert parent is not None
    cache.num_nodes += 1
    cache.lru.move_to_end(parent, last=False)
    del cache.lru[node]
    node.length += 1
    problems = check(cache.pool, cache, [])
    assert "the tree counts 4 nodes and has 3" in problems
    assert f"{node} is missing from the eviction order" in problems
    assert f"{node} has not the length of its parent, {parent}, and its own pages" in problems
    assert any(problem.endswith(f"comes after its parent, {parent}, in the eviction order") for problem in problems)
