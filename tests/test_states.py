"""Recurrent states: where checkpoints are taken, who goes on from them, and who gives way."""

from __future__ import annotations

from sgl.runtime.batch import EMPTY_STATE
from sgl.runtime.cache.checkpoints import Checkpoints
from sgl.runtime.cache.keys import key_of
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.scheduler.request import Phase, Request
from tests.mock_runner import expected_output
from tests.scheduler_driver import STOPS, Driver, Setting, assert_right, make_request

STEM = list(range(32))


def run(driver: Driver, *requests: Request) -> None:
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    driver.check()
    for request in requests:
        assert_right(request, recurrent=True)


def computed(driver: Driver) -> int:
    """Tokens of all batches so far."""
    return sum(int(batch.q_lens.sum()) for batch in driver.runner.batches)


def long_request(uid: int, stem: list[int], max_new: int) -> Request:
    """One with max_new tokens of output: no stop token comes before."""
    for first in range(97):
        request = make_request(uid, [first, *stem], max_new)
        output = expected_output([first, *stem], max_new, request.seed, STOPS, recurrent=True)
        if len(output) == max_new and output[-1] not in STOPS:
            return request
    raise AssertionError("no such prompt")


def driver_with(**options: object) -> Driver:
    driver = Driver(Setting(**{"budget": 64, "overlap": False, "checkpoints": 20, **options}))  # type: ignore[arg-type]
    driver.runner.keep_batches = True
    return driver


def test_a_prompt_is_taken_over_up_to_its_last_whole_page() -> None:
    driver = driver_with()
    first, second = make_request(1, [*STEM, 40, 41], 1), make_request(2, [*STEM, 40, 41], 1)
    run(driver, first)
    run(driver, second)
    assert second.cached_len == 32
    assert [batch.q_lens.tolist() for batch in driver.runner.batches] == [[32], [2], [2]]


def test_followers_wait_and_go_on_where_they_leave_a_prompt_that_is_being_computed() -> None:
    """It is computed up to the page where they leave it, whose state they copy."""
    driver = driver_with()
    first = make_request(0, [*STEM, *range(50, 70)], 2)
    followers = [make_request(i, [*STEM[:21], 90 + i], 2) for i in range(1, 6)]
    run(driver, first, *followers)
    assert [request.cached_len for request in followers] == [20] * 5
    assert computed(driver) == 52 + 5 * 2 + 6


def test_one_that_leaves_a_stored_prompt_keeps_the_state_there_for_the_next() -> None:
    driver = driver_with()
    requests = [make_request(i, [*STEM[:21], *range(90 - 9 * i, 97 - 9 * i)], 1) for i in range(1, 4)]
    for request in requests:
        run(driver, request)
    assert [request.cached_len for request in requests] == [0, 0, 20]


def test_a_continued_output_is_taken_over() -> None:
    driver = driver_with(overlap=True)
    first = long_request(2, STEM, 30)
    run(driver, first)
    whole = [*first.prompt_ids.tolist(), *first.output_ids]
    second = make_request(3, [*whole, 1, 2, 3], 1)
    run(driver, second)
    assert second.cached_len >= (len(whole) - 1) // 4 * 4 - 4


def test_a_retracted_request_resumes_from_its_deepest_checkpoint() -> None:
    driver = driver_with(num_pages=40, conservativeness=0.01)
    requests = [long_request(uid, STEM[:uid], 40) for uid in range(20, 24)]
    for request in requests:
        driver.scheduler.add(request)
    starts = {}
    for _ in range(2000):
        if not driver.step():
            break
        batch = driver.runner.batches[-1]
        for setup in batch.setups:
            (load,) = [its for its in batch.state_loads.tolist() if its[1] == setup.row]  # type: ignore[union-attr]
            if len(setup.output_ids):
                starts[setup.row] = load[0]
    for request in requests:
        assert_right(request, recurrent=True)
    assert any(request.num_retractions for request in requests)
    assert set(starts.values()) != {EMPTY_STATE}


def test_without_shared_prefixes_no_state_is_kept_and_no_chunk_is_cut_for_one() -> None:
    for options in ({"radix": False}, {"checkpoints": 0}):
        driver = driver_with(**options)
        run(driver, make_request(1, [*STEM, 40, 41], 8))
        assert driver.runner.batches[0].q_lens.tolist() == [34]
        assert all(len(batch.state_saves) == 0 for batch in driver.runner.batches)  # type: ignore[arg-type]


def test_an_output_keeps_two_states_at_most_and_gives_the_older_up_when_others_need_it() -> None:
    driver = driver_with(checkpoints=3, overlap=True)
    first, second = long_request(2, STEM, 40), long_request(4, STEM[:9], 40)
    for request in (first, second):
        driver.scheduler.add(request)
    states = driver.scheduler.memory.states
    assert states is not None
    while driver.step():
        driver.check()
        kept = [len(row.kept) for row in states._rows.values()]
        assert max(kept, default=0) <= 2
    for request in (first, second):
        assert request.phase is Phase.DONE
        assert_right(request, recurrent=True)


def stored(cache: RadixCache, *tokens: int) -> Node:
    pages = cache.pool.alloc(len(tokens))
    assert pages is not None
    return cache.insert(key_of(list(tokens)), pages).node


def test_checkpoints_give_way_by_last_use_those_of_unlocked_nodes_first() -> None:
    cache = RadixCache(PagePool(40, 1))
    checkpoints = Checkpoints(3)
    cache.end_watcher = checkpoints
    nodes = [stored(cache, number, number) for number in range(3)]
    for node in nodes:
        slot = checkpoints.alloc()
        assert slot is not None
        checkpoints.attach(node, slot)
    cache.lock(nodes[0])
    checkpoints.use(nodes[1])
    assert checkpoints.alloc() is not None
    assert list(checkpoints.of_node) == [nodes[0], nodes[1]]
    assert checkpoints.alloc() is not None
    assert list(checkpoints.of_node) == [nodes[0]]
    assert checkpoints.alloc() is not None
    assert not checkpoints.of_node
    assert checkpoints.alloc() is None


def test_a_node_that_is_cut_or_evicted_loses_its_checkpoint() -> None:
    cache = RadixCache(PagePool(40, 1))
    checkpoints = Checkpoints(2)
    cache.end_watcher = checkpoints
    node = stored(cache, 1, 2, 3)
    slot = checkpoints.alloc()
    assert slot is not None
    checkpoints.attach(node, slot)
    upper = cache.match(key_of([1, 2, 9])).node
    assert checkpoints.deepest(node) is node
    assert checkpoints.deepest(upper) is cache.root
    cache.evict(1)
    assert checkpoints.deepest(upper) is cache.root
    assert len(checkpoints.free) == 2
