"""Announced keys: a follower learns who computes most of what it needs, and never waits for nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl.runtime.cache.in_flight import InFlight, Pending
from sgl.runtime.cache.keys import common_prefix, key_of
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache


def test_a_key_is_the_int32_ids_in_memory_order():
    assert key_of([1, 258]) == np.array([1, 258], np.int32).tobytes()
    assert key_of(np.array([7, 8], np.int64)) == key_of([7, 8])
    assert key_of([]) == b""


@given(
    left=st.lists(st.integers(0, 1), max_size=300),
    right=st.lists(st.integers(0, 1), max_size=300),
    same=st.integers(0, 300),
    start=st.integers(0, 5),
    unit=st.sampled_from([1, 2, 3, 16, 40]),
)
def test_common_prefix_is_what_comparing_unit_by_unit_gives(left, right, same, start, unit):
    right = right[:start] + left[:same] + right[start:]
    start = min(start, len(right))
    a, b = key_of(left), key_of(right)
    expected = 0
    while (
        expected + unit <= min(len(left), len(right) - start)
        and left[expected : expected + unit] == right[start + expected : start + expected + unit]
    ):
        expected += unit
    assert common_prefix(a, b, 4 * start, 4 * unit) == 4 * expected


def test_a_follower_waits_for_whoever_computes_its_prefix_and_then_hits():
    pool = PagePool(20, 4)
    cache = RadixCache(pool)
    in_flight = InFlight(4)
    prompt = key_of(range(16))
    follower = key_of([*range(12), 99, 98, 97, 96])
    pages = pool.alloc(4)
    assert pages is not None
    in_flight.begin(1, prompt)

    match = cache.match(follower)
    assert in_flight.find(2, follower, match.length) == Pending(1, 12)

    head = cache.insert(prompt[: 4 * 8], pages[:2])  # the owner's first chunk: half of it is a hit by now
    cache.lock(head.node)
    match = cache.refresh(match, follower)
    assert match.length == 8
    assert in_flight.find(2, follower, match.length) == Pending(1, 12)

    tail = cache.insert(prompt[4 * 8 :], pages[2:], after=head.node)
    cache.move_lock(head.node, tail.node)
    match = cache.refresh(match, follower)
    assert match.length == 12
    assert in_flight.find(2, follower, match.length) is None, "all that is shared is cached, before the owner ends"


def test_a_follower_proceeds_when_the_owner_is_gone():
    in_flight = InFlight(1)
    in_flight.begin(1, key_of([1, 2, 3]))
    pending = in_flight.find(2, key_of([1, 2, 3, 4]), 0)
    assert pending == Pending(1, 3)
    assert pending.owner in in_flight
    in_flight.end(1)
    in_flight.end(1)
    assert pending.owner not in in_flight
    assert in_flight.find(2, key_of([1, 2, 3, 4]), 0) is None
    assert len(in_flight) == 0


def test_nobody_waits_for_itself():
    in_flight = InFlight(1)
    key = key_of([5, 6])
    in_flight.begin(1, key)
    assert in_flight.find(1, key, 0) is None
    in_flight.begin(2, key)
    assert in_flight.find(1, key, 0) == Pending(2, 2)
    assert in_flight.find(2, key, 0) == Pending(1, 2)


def test_the_longest_share_wins_on_either_side_and_beyond_the_askers_own_key():
    in_flight = InFlight(1)
    for owner, ids in enumerate(([1, 2, 3, 4, 0], [1, 2, 3, 4, 5], [1, 2, 9])):
        in_flight.begin(owner, key_of(ids))
    asked = key_of([1, 2, 3, 4, 6])
    assert in_flight.find(9, asked, 0) == Pending(1, 4)
    assert in_flight.find(1, asked, 0) == Pending(0, 4)
    assert in_flight.find(2, key_of([1, 2, 8]), 1) == Pending(1, 2)
    in_flight.end(1)
    in_flight.end(0)
    assert in_flight.find(9, asked, 0) == Pending(2, 2)


def test_namespaces_do_not_wait_for_each_other():
    in_flight = InFlight(1)
    in_flight.begin(1, key_of([5, 6]), "tenant")
    assert in_flight.find(2, key_of([5, 6]), 0) is None
    assert in_flight.find(2, key_of([5, 6]), 0, "tenant") == Pending(1, 2)


def test_less_than_a_page_in_common_is_not_worth_a_wait():
    in_flight = InFlight(4)
    in_flight.begin(1, key_of(range(8)))
    assert in_flight.find(2, key_of([0, 1, 2, 9, 9, 9, 9, 9]), 0) is None
    assert in_flight.find(2, key_of([0, 1, 2, 3, 4, 9, 9, 9]), 0) == Pending(1, 4)


def test_announcing_twice_is_refused():
    in_flight = InFlight(1)
    in_flight.begin(1, key_of([1]))
    with pytest.raises(AssertionError, match="announced a key already"):
        in_flight.begin(1, key_of([2]))


tokens = st.lists(st.integers(0, 2), max_size=8)
namespaces = st.sampled_from([None, "a"])


@given(
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 5), namespaces, tokens), max_size=30),
    asker=st.integers(0, 6),
    asked=tokens,
    namespace=namespaces,
    cached_len=st.integers(0, 4),
    page_size=st.sampled_from([1, 2, 4]),
)
def test_find_gives_the_longest_share_of_all_announced_keys(events, asker, asked, namespace, cached_len, page_size):
    in_flight = InFlight(page_size)
    live: dict[int, tuple[str | None, list[int]]] = {}
    for begins, owner, space, ids in events:
        in_flight.end(owner)
        live.pop(owner, None)
        if begins:
            in_flight.begin(owner, key_of(ids), space)
            live[owner] = (space, ids)
    shares = {
        owner: max(n for n in range(0, len(asked) + 1, page_size) if n <= len(ids) and ids[:n] == asked[:n])
        for owner, (space, ids) in live.items()
        if space == namespace and owner != asker
    }
    longest = max(shares.values(), default=0)
    found = in_flight.find(asker, key_of(asked), cached_len, namespace)
    if longest <= cached_len:
        assert found is None
    else:
        assert found is not None
        assert found.length == longest == shares[found.owner]
    assert len(in_flight) == len(live)
    assert all(owner in in_flight for owner in live)
