"""The waiting queue: the order of each policy against a plain sort, and what its operations cost as many wait."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import closing
from types import FrameType
from typing import Any

import numpy as np
import pytest

from benchmarks.waiting_queue import make_requests, make_scheduler, step
from sgl.runtime.scheduler.admission import ReleaseSimulation
from sgl.runtime.scheduler.request import FinishReason, Phase, Request
from sgl.runtime.scheduler.scheduler import Scheduler
from tests.scheduler_driver import Driver, Setting, assert_right, make_request, random_request

POLICIES = ["lpm", "fcfs", "priority", "dfs-weight", "program"]
ABORT = FinishReason("abort")


def order(scheduler: Scheduler) -> list[Request]:
    """All that could go on now, nobody being admitted."""
    with closing(scheduler.queue.candidates()) as candidates:
        return list(candidates)


def by_sorting(scheduler: Scheduler, policy: str) -> list[Request]:
    """The same, from the definitions."""
    memory = scheduler.memory
    waiting = sorted(scheduler.queue, key=lambda request: request.order)
    waiting = [request for request in waiting if memory.computed_by(request) is None]
    if policy == "priority":
        waiting.sort(key=lambda request: -request.priority)
    if policy == "lpm":
        waiting.sort(key=lambda request: -memory.current_match(request).length)
    return waiting


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_the_order_is_that_of_a_plain_sort_whatever_happened_before(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(Setting(rows=2, policy=policy, num_pages=60, budget=16, overlap=False))
    live: list[Request] = []
    for uid in range(300):
        match rng.randrange(6):
            case 0 | 1 if len(live) < 20:
                live.append(random_request(uid, rng.getrandbits(31), 96))
                driver.scheduler.add(live[-1])
            case 2 if live:
                driver.abort(rng.choice(live))
            case 3:
                driver.scheduler.memory.cache.evict(rng.randrange(8))
            case _:
                driver.step()
        live = [request for request in live if request.phase is not Phase.DONE]
        assert [r.uid for r in order(driver.scheduler)] == [r.uid for r in by_sorting(driver.scheduler, policy)]
    driver.run()
    driver.check()


@pytest.mark.parametrize("seed", range(4))
def test_depth_first_enters_the_subtree_with_most_waiting(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(Setting(rows=1, policy="dfs-weight", num_pages=200, page_size=1, context=96, overlap=False))
    stems = [[branch * 20 + k for k in range(6)] for branch in range(4)]
    for uid, stem in enumerate(stems):
        driver.scheduler.add(make_request(uid, [*stem, 96], 1))
    driver.run()
    waiting = [make_request(uid, [*rng.choice(stems), 90, uid], 1) for uid in range(4, 24)]
    for request in waiting:
        driver.scheduler.add(request)
    for request in rng.sample(waiting, 5):
        driver.abort(request)
    left = [tuple(request.prompt_ids[:6].tolist()) for request in order(driver.scheduler)]
    assert len(left) == 15
    runs = [stem for i, stem in enumerate(left) if i == 0 or left[i - 1] != stem]
    assert len(runs) == len(set(left)), "a subtree is used up before the next is entered"
    weights = [left.count(stem) for stem in runs]
    assert weights == sorted(weights, reverse=True)


def test_a_subtree_that_one_enters_as_the_last_leaves_it_stays() -> None:
    """In one round a held request leaves a node while another, whose prefix was evicted, comes to the node above."""
    setting = Setting(page_size=1, num_pages=97, rows=3, budget=1, overlap=False, policy="dfs-weight")
    driver = Driver(setting)
    requests = [random_request(uid, seed, setting.context) for uid, seed in enumerate([0, 0, 3884, 28398902])]
    requests[2].waits_for_grammar = True
    for request in requests:
        driver.scheduler.add(request)
    while driver.step():
        driver.check()
    assert [request.uid for request in requests if not request.is_done] == [2]
    driver.scheduler.grammar_is_ready(requests[2])
    driver.run()
    driver.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_those_that_wait_for_one_prefix_are_set_aside_as_one_and_all_come_back(policy: str) -> None:
    """Half share a prefix that the first of them computes chunk by chunk; then the rest go on, each with a hit."""
    driver = Driver(Setting(rows=2, policy=policy, num_pages=200, budget=8, overlap=False))
    stem = list(range(32))
    requests = [make_request(uid, [*stem, uid], 2) for uid in range(40)]
    requests += [make_request(uid, [uid, 3, uid], 2) for uid in range(40, 60)]
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    driver.check()
    for request in requests:
        assert_right(request)
    assert sum(request.cached_len for request in requests[:40]) >= 38 * 32


def work(function: Callable[[], object]) -> int:
    """How many instructions of Python's a function executes."""
    number = 0

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal number
        frame.f_trace_opcodes = True
        number += event == "opcode"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        function()
    finally:
        sys.settrace(before)
    return number


def costs(policy: str, number: int) -> dict[str, int]:
    """Instructions of a fixed number of operations, while `number` requests wait."""
    scheduler = make_scheduler(policy)  # type: ignore[arg-type]
    requests = make_requests(number + 100, deadline=1e9)
    for request in requests[:number]:
        scheduler.add(request)
    measured = {"add": work(lambda: [scheduler.add(request) for request in requests[number:]])}
    measured["step"] = work(lambda: [step(scheduler) for _ in range(3)])
    waiting = [request for request in requests if request.phase is Phase.WAITING]
    some = random.Random(0).sample(waiting, 100)
    measured["cancel"] = work(lambda: [scheduler.finish(request, ABORT) for request in some])
    measured["expire"] = work(scheduler.expire)
    measured["look for work"] = work(lambda: (scheduler.has_work, scheduler.waits_for_grammar))
    assert scheduler.memory.check() == []
    return measured


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
def test_no_operation_costs_more_because_more_wait(policy: str) -> None:
    few, many = costs(policy, 500), costs(policy, 4000)
    for name in few:
        assert many[name] < 2 * few[name] + 200, (name, few, many)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_step_looks_at_all_that_wait_for_one_prefix(policy: str) -> None:
    """One computes it in chunks, everybody else shares it: each chunk makes all of their matches longer."""

    def cost(number: int) -> int:
        driver = Driver(Setting(rows=4, policy=policy, num_pages=100, budget=4, overlap=False))
        stem = list(range(48))
        for uid in range(number):
            driver.scheduler.add(make_request(uid, [*stem, uid % 90, uid // 90], 2))
        return max(work(lambda: one_step(driver)) for _ in range(12))

    def one_step(driver: Driver) -> None:
        batch = driver.scheduler.schedule()
        assert batch is not None
        pending = driver.runner.launch(batch.batch)
        driver.scheduler.after_launch(batch)
        driver.handle(batch, pending)

    assert cost(4000) < 3 * cost(500)


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_are_held_cost_no_step_anything(policy: str) -> None:
    def cost(number: int) -> int:
        driver = Driver(Setting(rows=2, policy=policy, num_pages=100, budget=16, overlap=False))
        driver.scheduler.add(make_request(0, [5, 6], 60))
        driver.step()
        for uid in range(1, number):
            request = make_request(uid, [5], 2)  # of one token: nothing of it may be computed
            request.waits_for_grammar = True
            driver.scheduler.add(request)
        for _ in range(3):
            driver.scheduler.schedule()  # each is looked at once
            driver.scheduler._in_flight.clear()
        return work(driver.scheduler.schedule)

    assert cost(3000) < 2 * cost(300)


def test_timers_of_requests_that_ended_are_forgotten() -> None:
    scheduler = make_scheduler("fcfs")
    for request in make_requests(3000, deadline=1e12):
        scheduler.add(request)
        scheduler.finish(request, ABORT)
    assert len(scheduler._deadlines) < 1000
    assert len(scheduler.queue._arrivals) < 1000


def test_places_of_requests_that_ended_are_forgotten_while_others_wait() -> None:
    scheduler = make_scheduler("dfs-weight")
    first, *others = make_requests(3000)
    scheduler.add(first)
    for request in others:
        scheduler.add(request)
        scheduler.finish(request, ABORT)
    [subtrees] = [its._subtrees for its in scheduler.queue._orders]
    assert subtrees is not None
    assert sum(len(place.groups) for place in subtrees._places.values()) < 500
    assert order(scheduler) == [first]


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_end_while_another_computes_their_prefix_are_forgotten(policy: str) -> None:
    driver = Driver(Setting(rows=2, policy=policy, num_pages=200, budget=4, overlap=False))
    stem = list(range(48))
    driver.scheduler.add(make_request(0, stem, 2))
    driver.step()
    for uid in range(1, 300):
        request = make_request(uid, [*stem, uid % 90], 2)
        driver.scheduler.add(request)
        assert order(driver.scheduler) == []
        driver.scheduler.finish(request, ABORT)
    [its] = driver.scheduler.queue._orders
    assert sum(map(len, its._blocked.values())) == 0
    driver.run()


def test_the_quick_answer_of_the_simulation_is_the_slow_one() -> None:
    rng = np.random.default_rng(3)
    quick = 0
    for _ in range(300):
        simulation, slow = (ReleaseSimulation(int(available), 4) for available in [rng.integers(0, 60)] * 2)
        for remaining, known, held in rng.integers(0, 30, (rng.integers(1, 8), 3)).tolist():
            for each in (simulation, slow):
                each.add(remaining, known, held, held)
        if rng.random() < 0.3:
            simulation.drop_last()
            slow.drop_last()
        slow._most_grown = 1 << 60
        if not slow._remaining:
            continue
        quick += simulation._available >= simulation._most_grown
        assert simulation.is_feasible() == slow.is_feasible()
    assert quick > 20
