"""Host memory and files beside the device's: nothing is lost, nothing wrong is read, and nothing waits for a copy."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.tiers_soak import Episode
from sgl.runtime.cache.rates import Rates
from sgl.runtime.scheduler.request import Phase, Request
from tests.patience import PATIENCE, wait_until
from tests.scheduler_driver import Driver, Setting, assert_right, make_request

PROMPTS = [[(13 * k + 31 * j) % 97 for k in range(40)] for j in range(6)]


def tiered(**fields: object) -> Driver:
    """A device of 24 pages, of which a prompt takes ten, and plenty of host memory."""
    defaults: dict[str, object] = {"num_pages": 25, "context": 80, "budget": None, "overlap": False}
    return Driver(Setting(**{**defaults, "host_pages": 200, "lateness": 0.0, **fields}))  # type: ignore[arg-type]


def run_one(driver: Driver, uid: int, prompt: list[int], max_new: int = 2, **fields: object) -> Request:
    request = make_request(uid, prompt, max_new, **fields)
    request.stop_ids = frozenset()
    driver.scheduler.add(request)
    driver.run()
    driver.check()
    assert_right(request, recurrent=driver.setting.checkpoints is not None, window=driver.setting.window)
    return request


def num_loads(driver: Driver) -> int:
    assert driver.tiers is not None
    return driver.tiers.counters.num_loads


def settle(driver: Driver) -> None:
    """Until no copy is under way."""
    assert driver.tiers is not None
    deadline = time.monotonic() + PATIENCE
    while driver.tiers.poll_seconds is not None:
        assert time.monotonic() < deadline, "a copy does not end"
        driver.step()


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(10))
def test_random_operations_over_all_tiers_lose_no_page_and_no_token(seed: int, tmp_path: Path) -> None:
    episode = Episode(random.Random(seed), tmp_path)
    episode.run(1200)
    assert episode.finished > 0


def test_what_was_evicted_is_loaded_and_not_computed_again() -> None:
    driver = tiered()
    for uid, prompt in enumerate(PROMPTS):
        assert run_one(driver, uid, prompt).cached_len == 0
    again = run_one(driver, 10, PROMPTS[0])
    assert again.cached_len == 36
    assert num_loads(driver) == 1


def test_a_copy_that_stays_costs_nothing_when_its_pages_go_again() -> None:
    driver = tiered()
    for uid in range(18):
        run_one(driver, uid, PROMPTS[uid % 6])
    assert driver.tiers is not None
    assert driver.tiers.counters.saved_pages <= 6 * 11


def test_others_run_while_a_prompt_is_loaded() -> None:
    driver = tiered(lateness=1.0, num_pages=41)
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    held, other = make_request(10, PROMPTS[0], 2), make_request(11, [5] * 8, 6)
    held.stop_ids = other.stop_ids = frozenset()
    driver.scheduler.add(held)
    driver.scheduler.add(other)
    for _ in range(20):
        driver.step()
        driver.check()
    assert other.phase is Phase.DONE
    assert held.phase is Phase.WAITING
    assert len(other.output_ids) == 6
    driver.mover._lateness = 0.0
    driver.run()
    assert_right(held)
    assert held.cached_len == 36


def test_pages_that_a_load_takes_are_not_given_to_the_next_prompt() -> None:
    driver = tiered()
    for uid, prompt in enumerate(PROMPTS[:3]):
        run_one(driver, uid, prompt)
    running, loaded = make_request(10, [7] * 53, 20), make_request(11, [*PROMPTS[0], 1], 2)
    driver.scheduler.add(running)
    driver.step()
    assert driver.scheduler.memory.available_pages == 10
    computed = make_request(12, [9] * 30, 2)
    for request in (loaded, computed):
        driver.scheduler.add(request)
    driver.step()
    assert driver.tiers is not None
    assert driver.tiers.loads.is_busy
    assert computed.phase is Phase.WAITING
    driver.run()
    for request in (running, loaded, computed):
        assert_right(request)
    assert driver.scheduler.counters.retractions == 0


def test_a_load_serves_all_who_wait_for_it() -> None:
    driver = tiered(lateness=0.9, num_pages=41)
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    waiting = [make_request(10 + i, [*PROMPTS[0], i], 2) for i in range(4)]
    for request in waiting:
        driver.scheduler.add(request)
    driver.run()
    assert num_loads(driver) == 1
    assert [request.cached_len for request in waiting] == [40] * 4


def test_an_aborted_request_leaves_its_load_to_others() -> None:
    driver = tiered(lateness=0.9)
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    gone = make_request(10, PROMPTS[0], 2)
    driver.scheduler.add(gone)
    driver.step()
    driver.abort(gone)
    settle(driver)
    driver.check()
    assert run_one(driver, 11, PROMPTS[0]).cached_len == 36
    assert driver.scheduler.memory.cache.locked_pages == 0


def test_names_of_pages_are_made_once_for_a_request_that_finds_no_room(tmp_path: Path) -> None:
    before = tiered(folder=tmp_path)
    run_one(before, 0, PROMPTS[0])
    assert before.tiers is not None
    before.tiers.saves.save_all_later()
    settle(before)
    before.tiers.close()
    driver = tiered(folder=tmp_path)
    long, waiting = make_request(1, PROMPTS[1], 36), make_request(2, PROMPTS[0], 2)
    long.stop_ids = waiting.stop_ids = frozenset()
    driver.scheduler.add(long)
    while len(long.output_ids) < 20:
        driver.step()
    driver.scheduler.add(waiting)
    assert driver.files is not None
    with mock.patch.object(driver.files, "names", wraps=driver.files.names) as named:
        for _ in range(10):
            driver.step()
        assert waiting.phase is Phase.WAITING
        assert named.call_count == 1
    driver.run()
    assert_right(waiting)
    assert waiting.cached_len == 36
    assert driver.tiers is not None
    assert not driver.tiers.loads.reads._named
    driver.tiers.close()


def test_files_that_do_not_answer_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiered(folder=tmp_path)
    for uid, prompt in enumerate(PROMPTS):
        run_one(before, uid, prompt)
    settle(before)
    assert before.files is not None
    before.files.close()
    driver = tiered(folder=tmp_path)
    assert driver.tiers is not None
    assert driver.files is not None
    preadv, goes_on = os.preadv, threading.Event()
    reads: list[int] = []

    def slow(*arguments: Any) -> int:
        reads.append(arguments[0])
        assert len(reads) < 3 or goes_on.wait(PATIENCE)
        return preadv(*arguments)

    def others_ran() -> bool:
        driver.step()
        return other.phase is Phase.DONE and len(reads) == 3

    monkeypatch.setattr(os, "preadv", slow)
    request, other = make_request(10, PROMPTS[0], 2), make_request(11, [5] * 8, 2)
    driver.scheduler.add(request)
    driver.scheduler.add(other)
    wait_until(others_ran)
    driver.now += 2 * 36 + 2.9  # computing a token takes a second here
    for _ in range(20):
        driver.step()
        driver.check()
    assert request.phase is Phase.WAITING
    driver.now += 0.2
    driver.run()
    driver.check()
    assert_right(request)
    assert request.cached_len == 8, "two pages had come"
    assert run_one(driver, 12, PROMPTS[1]).cached_len == 0, "no other read waits behind it"
    assert driver.tiers.counters.num_late == 1
    goes_on.set()
    wait_until(lambda: not (driver.step() or driver.tiers.loads.reads._given_up))
    driver.check()
    assert run_one(driver, 13, PROMPTS[2]).cached_len == 36
    driver.files.close()


def test_a_load_that_would_not_pay_is_computed() -> None:
    driver = tiered()
    assert driver.tiers is not None
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    driver.tiers.rates.compute.seconds = 1e-7
    assert run_one(driver, 10, PROMPTS[0]).cached_len == 0
    assert driver.tiers.counters.num_declined == 1


def test_nothing_is_copied_where_no_load_can_pay() -> None:
    driver = tiered()
    assert driver.tiers is not None
    driver.tiers.rates.compute.seconds = 1e-7
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    assert driver.tiers.counters.saved_pages == 0


def test_namespaces_share_no_copies() -> None:
    driver = tiered()
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt, namespace="a")
    assert run_one(driver, 10, PROMPTS[0], namespace="b").cached_len == 0
    assert run_one(driver, 11, PROMPTS[0], namespace="a").cached_len == 36


def test_an_adapter_that_goes_takes_its_copies_along() -> None:
    driver = tiered()
    assert driver.tiers is not None
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt, namespace=(1, None))
    settle(driver)
    driver.scheduler.memory.forget(1)
    assert driver.tiers.host.num_used == 0
    assert driver.pool.num_free == 24


def test_a_flush_leaves_no_copy() -> None:
    driver = tiered()
    assert driver.tiers is not None
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    settle(driver)
    assert driver.scheduler.memory.flush() == 0
    assert driver.tiers.host.num_used == 0
    assert run_one(driver, 10, PROMPTS[0]).cached_len == 0


def test_a_lease_that_gives_way_keeps_a_copy() -> None:
    driver = tiered(host_pages=24)
    leases = driver.scheduler.memory.leases
    first = run_one(driver, 0, PROMPTS[0])
    lease = leases.take(first.key(), None)
    assert lease is not None
    for uid, prompt in enumerate(PROMPTS[1:] * 3, 1):
        run_one(driver, uid, prompt, 20)
    assert lease.lost == "demoted"
    driver.check()
    assert run_one(driver, 50, [*PROMPTS[0], 1]).cached_len == 40
    leases.release(lease)
    settle(driver)
    driver.now += 100
    driver.step()
    assert driver.tiers is not None
    assert driver.tiers.host.tree.locked_pages == 0


def test_what_has_a_copy_already_takes_no_room_from_copies_for_leases() -> None:
    driver = tiered(host_pages=24, num_pages=41)
    assert driver.tiers is not None
    memory, saves = driver.scheduler.memory, driver.tiers.saves
    for uid in range(2):
        lease = memory.leases.take(run_one(driver, uid, PROMPTS[uid]).key(), None)
        assert lease is not None
        assert saves.demote(lease, now=True)
        settle(driver)
    assert saves.save(memory.cache.match(make_request(9, PROMPTS[0], 1).key()).node)
    assert len(saves._pinned) == 2
    driver.check()


def test_a_lease_that_expires_is_copied_at_once() -> None:
    driver = tiered()
    first = run_one(driver, 0, PROMPTS[0])
    lease = driver.scheduler.memory.leases.take(first.key(), None)
    assert lease is not None
    driver.scheduler.memory.leases.expire(lease)
    settle(driver)
    assert driver.tiers is not None
    assert driver.tiers.host.length(first.key(), None) == 40


def test_finished_streams_go_first_and_without_a_copy() -> None:
    driver = tiered(num_pages=33)
    leases = driver.scheduler.memory.leases
    finished = run_one(driver, 0, PROMPTS[0])
    lease = leases.take(finished.key(), None)
    assert lease is not None
    other = run_one(driver, 1, PROMPTS[1])
    leases.finish(lease, 8)
    for uid, prompt in enumerate(PROMPTS[2:4], 2):
        run_one(driver, uid, prompt)
    settle(driver)
    assert driver.tiers is not None
    assert driver.tiers.host.length(finished.key(), None) <= 8
    assert driver.scheduler.memory.cache.match(other.key()).length >= 36


def test_a_prefetch_is_there_when_its_prompt_comes() -> None:
    driver = tiered()
    for uid, prompt in enumerate(PROMPTS):
        last = run_one(driver, uid, prompt)
    first = make_request(9, PROMPTS[0], 1)
    memory = driver.scheduler.memory
    assert memory.tiers is not None
    memory.tiers.loads.prefetch(first.key(), None)
    settle(driver)
    assert memory.cache.match(first.key()).length == 40
    assert run_one(driver, 10, [*PROMPTS[0], 1]).cached_len == 40
    assert last.phase is Phase.DONE
    driver.now += 100
    driver.step()
    assert memory.cache.locked_pages == 0


def test_rates_follow_what_is_measured() -> None:
    rates = Rates(compute=1e-4, load=1e-5)
    assert rates.worth_loading(0, 4096, 4096) == 4096
    for _ in range(50):
        rates.note_load(4096, 4.0)
    assert not rates.pays
    assert rates.worth_loading(0, 4096, 4096) == 0
    for _ in range(50):
        rates.note_step(4096, 4096, 40.0)
    assert rates.worth_loading(0, 4096, 4096) == 4096


@pytest.mark.parametrize(
    ("cached", "in_host", "in_files", "read", "expected"),
    [
        (0, 1000, 4000, 1e-6, 4000),  # both pay
        (0, 1000, 4000, 1e-3, 1000),  # files are too slow, and host memory is not
        (0, 0, 4000, 1e-3, 0),
        (1000, 1000, 1000, 1e-6, 1000),  # nothing is left to load
        (0, 10, 10, 1e-6, 0),  # too little to pay for waiting
    ],
)
def test_what_is_worth_loading(cached: int, in_host: int, in_files: int, read: float, expected: int) -> None:
    rates = Rates(compute=2e-5, load=2e-6, read=read)
    assert rates.worth_loading(cached, in_host, in_files) == expected


def test_loads_under_way_count_against_another() -> None:
    rates = Rates(compute=2e-5, load=1e-5)
    assert rates.worth_loading(0, 1000, 1000) == 1000
    assert rates.worth_loading(0, 1000, 1000, ahead=100_000) == 0


def saved() -> Driver:
    """One that has run all prompts. From now on nothing is copied but what a step waits for."""
    driver = tiered(is_waited_for=True)
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    settle(driver)
    driver.mover._lateness = 1.0
    return driver


def test_a_prompt_begins_before_its_load_is_done_where_steps_wait_for_layers() -> None:
    driver = saved()
    again = run_one(driver, 10, PROMPTS[0])
    assert again.cached_len == 36
    assert num_loads(driver) == 1


def test_a_prompt_whose_load_would_hold_its_step_up_waits() -> None:
    driver = saved()
    assert driver.tiers is not None
    driver.tiers.rates.load.seconds = 0.5  # 18 s in all; the prompt's last four tokens take 4
    request = make_request(10, PROMPTS[0], 2)
    request.stop_ids = frozenset()
    driver.scheduler.add(request)
    for _ in range(14):
        driver.step()
        driver.now += 1.0
        assert request.phase is Phase.WAITING
    driver.now += 2.0
    driver.run()
    assert_right(request)
    assert request.cached_len == 36


def test_a_request_that_goes_on_behind_its_output_begins_early_too() -> None:
    driver = tiered(is_waited_for=True, num_pages=33)
    first = run_one(driver, 0, PROMPTS[0], 24)
    for uid in range(1, 6):
        run_one(driver, uid, PROMPTS[uid])
    settle(driver)
    driver.mover._lateness = 1.0
    request = make_request(7, PROMPTS[0], 24)
    request.stop_ids, request.output_ids = frozenset(), first.output_ids[:20]
    request.num_retractions = 1
    driver.scheduler.add(request)
    for _ in range(20):
        driver.step()
    assert request.phase is Phase.DONE
    assert_right(request)
    assert num_loads(driver) == 1


def test_a_copy_stays_until_the_device_has_it() -> None:
    """Its prompt is admitted, and ends, before the last layers are there."""
    driver = saved()
    assert driver.tiers is not None
    waits, driver.mover.wait = driver.mover.wait, lambda number: None  # type: ignore[method-assign]
    request = make_request(10, PROMPTS[0], 2)
    driver.scheduler.add(request)
    for _ in range(3):
        driver.step()
    driver.abort(request)
    driver.step()
    driver.check()
    assert driver.tiers.is_moving
    assert driver.tiers.host.tree.locked_pages >= 9
    waits(100)
    settle(driver)
    assert driver.tiers.host.tree.locked_pages == 0
