"""Leases on cached prefixes: they keep pages, give way to whoever runs, and never upset the page ledger."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.runtime.scheduler.leases import Lease
from sgl.runtime.scheduler.request import Phase, Request
from tests.scheduler_driver import Driver, Setting, assert_right, make_request, random_request

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2**31)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 100)),
        st.tuples(st.sampled_from(["lease", "share", "release", "expire"]), st.integers(0, 100)),
    ),
    max_size=60,
)


@given(
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
    st.sampled_from([3, 16, None]),
    actions,
)
@settings(max_examples=150)
def test_leases_in_any_interleaving_starve_nobody_and_keep_the_ledger(
    page_size: int, room: float, overlap: bool, budget: int | None, plan: list[tuple[str, int]]
) -> None:
    setting = Setting(page_size=page_size, overlap=overlap, budget=budget)
    least = -(-setting.context // page_size) + 1
    setting.num_pages = least + int(room * least)
    driver = Driver(setting)
    leases = driver.scheduler.memory.leases
    requests: list[Request] = []
    holds: list[Lease] = []
    for action, value in plan:
        if action == "add":
            requests.append(random_request(len(requests), value, setting.context))
            driver.scheduler.add(requests[-1])
        elif action == "step":
            for _ in range(value):
                driver.step()
                driver.check()
        elif action == "abort" and requests:
            driver.abort(requests[value % len(requests)])
        elif action == "lease" and requests:
            request = requests[value % len(requests)]
            lease = leases.take(request.key(), request.namespace)
            holds += [lease] if lease else []
        elif action == "share" and holds:
            lease = holds[value % len(holds)]
            lease.num_holders += 1
            holds.append(lease)
        elif action == "release" and holds:
            leases.release(holds.pop(value % len(holds)))
        elif action == "expire" and holds:
            leases.expire(holds[value % len(holds)])
        driver.check()
        assert len(leases) == len({lease for lease in holds if lease.lost is None})
        assert leases.num_pages >= 0
    driver.run()
    for request in requests:
        assert request.phase is Phase.DONE
        if request.finish_reason is not None and request.finish_reason.type != "abort":
            assert_right(request)
    for lease in holds:
        leases.release(lease)
    driver.check()
    assert len(leases) == leases.num_pages == driver.scheduler.memory.cache.locked_pages == 0


def run_one(driver: Driver, uid: int, prompt: list[int], max_new: int = 1) -> Request:
    request = make_request(uid, prompt, max_new)
    request.stop_ids = frozenset()
    driver.scheduler.add(request)
    driver.run()
    return request


def test_a_lease_outlasts_what_is_evicted_around_it() -> None:
    driver = Driver(Setting(page_size=4, num_pages=25, context=96, budget=None, overlap=False))
    leased, other = list(range(20)), list(range(30, 50))
    run_one(driver, 0, leased)
    run_one(driver, 1, other)
    lease = driver.scheduler.memory.leases.take(make_request(9, leased, 1).key(), None)
    assert lease is not None
    run_one(driver, 2, [60 + i for i in range(30)], 30)
    assert lease.lost is None
    assert run_one(driver, 3, [*leased, 91]).cached_len == 20
    assert run_one(driver, 4, [*other, 91]).cached_len < 20


def test_leases_give_way_oldest_first_and_only_as_many_as_are_needed() -> None:
    driver = Driver(Setting(page_size=4, num_pages=25, context=96, budget=None, overlap=False))
    leases = driver.scheduler.memory.leases
    taken = []
    for i in range(4):
        request = run_one(driver, i, [10 * i + k for k in range(16)])
        taken.append(leases.take(request.key(), None))
    assert driver.scheduler.memory.available_pages == 24 - 16
    run_one(driver, 10, [60 + i for i in range(30)], 20)
    assert [lease.lost for lease in taken if lease] == ["evicted", "evicted", None, None]
    driver.check()


def test_a_request_that_only_leases_keep_out_is_admitted_at_once() -> None:
    driver = Driver(Setting(page_size=4, num_pages=25, context=96, budget=None, overlap=False))
    for i in range(2):
        request = run_one(driver, i, [10 * i + k for k in range(16)])
        driver.scheduler.memory.leases.take(request.key(), None)
    for uid, length in ((2, 30), (3, 20)):
        request = make_request(uid, [60 + uid + i for i in range(length)], 10)
        driver.scheduler.add(request)
        driver.step()
        assert request.phase is Phase.DECODE
    assert len(driver.scheduler.memory.leases) == 1


def test_pages_that_a_lease_took_over_from_another_give_way_too() -> None:
    driver = Driver(Setting(page_size=4, num_pages=25, context=96, budget=None, overlap=False))
    leases = driver.scheduler.memory.leases
    request = run_one(driver, 0, list(range(40)), 8)
    first = leases.take(request.key()[: 4 * 40], None)
    assert first is not None
    assert leases.take(request.key(), None) is not None
    leases.release(first)
    assert leases.num_pages < 2 <= driver.scheduler.memory.cache.locked_pages
    for uid, length in ((1, 8), (2, 50)):
        request = make_request(uid, [60 - uid + i for i in range(length)], 5)
        driver.scheduler.add(request)
        driver.step()
        assert request.phase is Phase.DECODE
    assert len(leases) == 0
    driver.check()


def test_a_request_that_others_keep_out_costs_no_lease() -> None:
    driver = Driver(Setting(page_size=4, num_pages=25, context=96, budget=None, overlap=False))
    first = run_one(driver, 0, list(range(8)))
    lease = driver.scheduler.memory.leases.take(first.key(), None)
    assert lease is not None
    running = make_request(1, list(range(20, 60)), 40)
    running.stop_ids = frozenset()
    driver.scheduler.add(running)
    driver.step()
    driver.scheduler.add(make_request(2, list(range(60, 96)), 60))
    driver.step()
    assert running.phase is Phase.DECODE
    assert lease.lost is None


def test_nothing_is_leased_where_nothing_is_cached() -> None:
    driver = Driver(Setting(radix=False))
    request = run_one(driver, 0, list(range(16)))
    assert driver.scheduler.memory.leases.take(request.key(), None) is None
    assert not driver.scheduler.memory.leases.drop_oldest()


@pytest.mark.parametrize("end", ["release", "expire"])
def test_a_shared_lease_ends_with_its_last_holder_or_for_all(end: str) -> None:
    driver = Driver(Setting(page_size=4))
    leases = driver.scheduler.memory.leases
    request = run_one(driver, 0, list(range(16)))
    lease = leases.take(request.key(), None)
    assert lease is not None
    lease.num_holders += 1
    if end == "expire":
        leases.expire(lease)
    leases.release(lease)
    assert driver.scheduler.memory.cache.locked_pages == (0 if end == "expire" else 4)
    leases.release(lease)
    assert driver.scheduler.memory.cache.locked_pages == 0
    driver.check()
