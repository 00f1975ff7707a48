"""The page pool hands every page out once, to one owner, and refuses moves that the owner forbids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl.runtime.cache.pages import DUMMY, FREE, PRIVATE, TREE, NeighbourPool, PagePool


def test_every_page_but_the_dummy_can_be_handed_out_once():
    pool = PagePool(9, 16)
    pages = pool.alloc(8)
    assert pages is not None
    assert pages.dtype == np.int32
    assert sorted(pages.tolist()) == list(range(1, 9))
    assert pool.num_free == 0
    assert pool.alloc(1) is None


def test_alloc_gives_all_or_nothing():
    pool = PagePool(5, 1)
    assert pool.alloc(5) is None
    assert pool.num_free == 4
    assert pool.alloc(4) is not None


def test_allocating_no_pages_is_possible_even_from_an_empty_pool():
    pool = PagePool(3, 1)
    assert pool.alloc(2) is not None
    none = pool.alloc(0)
    assert none is not None
    assert none.shape == (0,)
    pool.free(none)
    assert pool.num_free == 0


def test_owners_follow_the_pages():
    pool = PagePool(6, 4)
    pages = pool.alloc(4)
    assert pages is not None
    pool.adopt(pages[:2])
    pool.free(pages[2:3])
    assert pool.owner[0] == DUMMY
    assert pool.owner[pages].tolist() == [TREE, TREE, FREE, PRIVATE]
    pool.release(pages[:2])
    assert pool.num_free == 4


def test_freeing_a_page_twice_is_refused_and_changes_nothing():
    pool = PagePool(6, 1)
    pages = pool.alloc(3)
    assert pages is not None
    pool.free(pages[:1])
    with pytest.raises(AssertionError, match="is free, but the caller took it for private"):
        pool.free(pages)
    assert pool.num_free == 3
    pool.free(pages[1:])
    assert pool.num_free == 5


def test_a_page_listed_twice_is_refused():
    pool = PagePool(6, 1)
    pages = pool.alloc(3)
    assert pages is not None
    with pytest.raises(AssertionError, match="listed twice"):
        pool.free(pages[[0, 1, 0]])
    with pytest.raises(AssertionError, match="listed twice"):
        pool.adopt(pages[[2, 2]])
    assert pool.num_free == 2


@pytest.mark.parametrize("page", [0, 5])
def test_pages_that_nobody_took_cannot_be_freed_or_adopted(page: int):
    pool = PagePool(6, 1)
    with pytest.raises(AssertionError, match="but the caller took it for private"):
        pool.free(np.array([page], np.int32))
    with pytest.raises(AssertionError, match="but the caller took it for private"):
        pool.adopt(np.array([page], np.int32))


def test_pages_of_the_tree_cannot_be_freed_by_a_request():
    pool = PagePool(6, 1)
    pages = pool.alloc(2)
    assert pages is not None
    pool.adopt(pages)
    with pytest.raises(AssertionError, match="is in the tree, but the caller took it for private"):
        pool.free(pages)


def test_a_pool_without_a_page_to_give_is_refused():
    with pytest.raises(AssertionError, match="dummy page"):
        PagePool(1, 16)
    with pytest.raises(AssertionError, match="at least one token"):
        PagePool(8, 0)


@pytest.mark.parametrize("kind", [PagePool, NeighbourPool])
@given(st.lists(st.tuples(st.sampled_from(["alloc", "free", "adopt", "release"]), st.integers(0, 9)), max_size=60))
def test_free_private_and_tree_pages_are_all_pages_after_any_moves(
    kind: type[PagePool], moves: list[tuple[str, int]]
):
    pool = kind(13, 2)
    private: list[int] = []
    tree: list[int] = []
    for move, count in moves:
        if move == "alloc":
            pages = pool.alloc(count)
            assert (pages is None) == (count > 12 - len(private) - len(tree))
            private += [] if pages is None else pages.tolist()
        else:
            source = tree if move == "release" else private
            kept = max(len(source) - count, 0)
            moved, source[kept:] = source[kept:], []
            getattr(pool, move)(np.array(moved, np.int32))
            tree += moved if move == "adopt" else []
        free = pool.free_list().tolist()
        assert sorted(free + private + tree) == list(range(1, 13))
        assert pool.num_free == len(free)
        for pages, owner in ((free, FREE), (private, PRIVATE), (tree, TREE), ([0], DUMMY)):
            assert (pool.owner[pages] == owner).all()


def test_neighbours_are_handed_out_together_out_of_the_run_that_fits_best():
    pool = NeighbourPool(21, 1)
    taken = pool.alloc(20)
    assert taken is not None
    assert taken.tolist() == list(range(1, 21))
    for pages in ([18, 4, 3], [7, 9, 8, 10, 6], [20, 13, 14]):  # runs: 3-4, 6-10, 13-14, 18, 20
        pool.free(np.array(pages, np.int32))
    for count, expected in ((1, [18]), (1, [20]), (2, [3, 4]), (3, [6, 7, 8])):
        pages = pool.alloc(count)
        assert pages is not None
        assert pages.tolist() == expected
    pool.free(np.array([6, 16, 17, 18], np.int32))  # runs: 6, 9-10, 13-14, 16-18
    pages = pool.alloc(6)
    assert pages is not None
    assert pages.tolist() == [16, 17, 18, 9, 10, 13], "the longest first, then the lowest"
