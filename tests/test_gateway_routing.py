"""Which worker gets a request: the index of beginnings against a plain model, each policy, and the simulation."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import routing
from sgl.errors import ConfigError, EngineDead
from sgl.runtime.gateway.config import GatewayConfig
from sgl.runtime.gateway.fleet import Fleet
from sgl.runtime.gateway.index import GUESS_SECONDS, PrefixIndex
from sgl.runtime.gateway.policy import AFFINITY, Demand, RoutingPolicy
from sgl.runtime.gateway.reports import Load

WORKERS = ("a", "b", "c")
chains = st.lists(st.integers(0, 5), min_size=1, max_size=5).map(
    lambda ids: [hash(tuple(ids[: i + 1])) for i in range(len(ids))]
)
acts = st.lists(
    st.tuples(
        st.sampled_from(["sent", "stored", "removed", "cleared", "forget", "late"]),
        st.sampled_from(WORKERS),
        chains,
    )
)


@given(acts, chains)
@settings(max_examples=200, deadline=None)
def test_the_index_finds_what_events_and_sent_requests_say(
    done: list[tuple[str, str, list[int]]], asked: list[int]
) -> None:
    now = 0.0
    index = PrefixIndex(lambda: now)
    stored: dict[str, set[int]] = {}
    guessed: dict[str, dict[int, float]] = {worker: {} for worker in WORKERS}
    for act, worker, blocks in done:
        if act == "late":
            now += GUESS_SECONDS * 0.6
            continue
        if act in ("cleared", "forget"):
            getattr(index, act)(worker)
            guessed[worker].clear()
            if act == "forget":
                stored.pop(worker, None)
            elif worker in stored:
                stored[worker].clear()
            continue
        getattr(index, act)(worker, blocks)
        if act == "sent":
            guessed[worker].update(dict.fromkeys(blocks, now))
        elif act == "stored":
            stored.setdefault(worker, set()).update(blocks)
        else:
            stored.setdefault(worker, set()).difference_update(blocks)
            for block in blocks:
                guessed[worker].pop(block, None)
    expected = {}
    for worker in WORKERS:
        lives = GUESS_SECONDS if worker in stored else float("inf")
        has = stored.get(worker, set()) | {b for b, when in guessed[worker].items() if now - when <= lives}
        number = next((i for i, block in enumerate(asked) if block not in has), len(asked))
        if number:
            expected[worker] = number
    assert index.found(asked) == expected


def test_a_worker_without_events_is_thought_to_keep_what_it_got_last() -> None:
    index = PrefixIndex(lambda: 0.0)
    index.set_room("a", 3)
    index.sent("a", [1, 2])
    index.sent("a", [3, 4])
    assert index.found([1, 2]) == {}
    assert index.found([3, 4]) == {"a": 2}


def fleet_of(number: int, policy: str = "cache_aware") -> Fleet:
    fleet = Fleet(policy, rng=random.Random(0), clock=lambda: 0.0)  # type: ignore[arg-type]
    for i in range(number):
        fleet.add(f"worker {i}")
    return fleet


def chain(name: int, length: int) -> list[int]:
    return [name * 1000 + i for i in range(length)]


@pytest.mark.parametrize("policy", get_args(RoutingPolicy))
def test_every_policy_chooses_among_those_that_take_requests(policy: str) -> None:
    fleet = fleet_of(4, policy)
    workers = list(fleet.workers)
    workers[1].is_draining = True
    chosen = {fleet.route(Demand(chain(i, 3), 16, 48, 10)).worker.id for i in range(100)}
    assert chosen == {"worker 0", "worker 2", "worker 3"}
    assert fleet.route(Demand(), among=workers[3:]).worker.id == "worker 3"
    with pytest.raises(EngineDead, match="no worker takes requests"):
        fleet.route(Demand(), among=workers[1:2])


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'cache_aware', 'round_robin'"):
        GatewayConfig.from_options({"routing_policy": "fastest"})


def test_each_kind_of_workers_has_turns_of_its_own() -> None:
    """A prompt that a prefill worker computes takes a turn of both kinds."""
    fleet = fleet_of(4, "round_robin")
    prefill, decode = list(fleet.workers)[:2], list(fleet.workers)[2:]
    for _ in range(10):
        fleet.route(Demand(), among=decode)
        fleet.route(Demand(), among=prefill)
    assert [worker.placed for worker in fleet.workers] == [5] * 4


def test_requests_for_one_worker_turn_no_others_to_it() -> None:
    """Such as every second one, that goes on from a stored response."""
    fleet = fleet_of(2, "round_robin")
    first, other = fleet.workers
    for _ in range(10):
        fleet.route(Demand())
        fleet.route(Demand(), among=[first])
    assert other.placed == 9


def test_requests_with_one_beginning_meet_until_that_worker_has_too_much_to_do() -> None:
    fleet = fleet_of(4)
    first = fleet.route(Demand(chain(1, 60), 16, 1000, 10))
    first.end()
    chosen = [fleet.route(Demand(chain(1, 60), 16, 1000, 50)).worker.id for _ in range(200)]
    assert chosen[0] == first.worker.id
    assert len(set(chosen)) > 2, "and spread when they are many"


def test_an_empty_worker_gets_no_more_than_its_share_for_being_empty() -> None:
    fleet = fleet_of(3)
    tickets = [fleet.route(Demand(chain(i, 8), 16, 128, 16)) for i in range(30)]
    fleet.add("new")
    tickets += [fleet.route(Demand(chain(100 + i, 8), 16, 128, 16)) for i in range(60)]
    works = [worker.work for worker in fleet.workers]
    assert max(works) <= 1.25 * sum(works) / len(works)
    for ticket in tickets:
        ticket.first_byte()
        ticket.end()
        ticket.end()
    assert all(worker.work == 0 == worker.in_flight for worker in fleet.workers)


def test_a_session_stays_and_gives_way_under_pressure() -> None:
    fleet = fleet_of(2)
    home = fleet.route(Demand((), 1, 100, 10, "s")).worker
    other = next(worker for worker in fleet.workers if worker is not home)
    home.work, other.work = 1.2 * 1000, 1000
    assert fleet.route(Demand((), 1, 100, 10, "s")).worker is home
    home.work = 10 * AFFINITY * 1000
    assert fleet.route(Demand((), 1, 100, 10, "s")).worker is other
    home.work = other.work
    other.kv_usage = 1.0
    assert fleet.route(Demand((), 1, 100, 10)).worker is home, "a worker without room is avoided"


def test_workers_share_by_their_measured_speed() -> None:
    arrivals = [routing.Arrival(i * 0.1, [i], 1000, 50) for i in range(4000)]
    simulation = routing.Simulation("cache_aware", [1.0, 1.0, 0.5], 100, "exact")
    simulation.run(arrivals, 1200 / routing.RATE / 2.5 / 0.97 / 0.1)
    slow, fast = simulation.done["worker 2"] * 0.5, simulation.done["worker 0"]
    assert 0.3 < slow / fast < 0.6


@pytest.mark.costly
@pytest.mark.parametrize("events", ["exact", "late", "none"])
def test_traffic_with_shared_beginnings_is_balanced_and_finds_what_an_oracle_finds(events: str) -> None:
    rng = random.Random(0)
    arrivals = []
    for i in range(6000):  # 64 prefixes of 8 blocks, and 30 % that share nothing
        prefix = rng.randrange(64)
        shared = [] if rng.random() < 0.3 else [prefix * 100 + block for block in range(8)]
        blocks = [*shared, *((1 << 32) + i * 10 + block for block in range(2 + 8 * (not shared)))]
        arrivals.append(routing.Arrival(i * 0.1, blocks, routing.BLOCK * len(blocks), 100))
    ours, best = routing.measure("cache_aware", arrivals, [1.0] * 4, 2000, 0.7, events)
    assert ours.hit_rate >= 0.95 * best
    assert ours.balance <= 1.25
    other, _ = routing.measure("round_robin", arrivals, [1.0] * 4, 2000, 0.7, events)
    assert ours.mean < other.mean


def test_what_a_worker_says_of_its_pages_and_of_others_requests_keeps_requests_away() -> None:
    """In virtual time: others hold one worker's pages, or fill its queue, during every other minute."""

    def pressed(worker: str, now: float) -> Load:
        is_pressed = worker == "worker 0" and int(now / 60) % 2 == 0
        return Load(20, 20, 1.0) if is_pressed else Load()

    arrivals = [routing.Arrival(i * 0.05, [i % 40, 1000 + i], 1000, 50) for i in range(6000)]
    stretch = 1200 / routing.RATE / 3 / 0.85 / 0.05
    waits, shares = [], []
    for is_told in (False, True):
        simulation = routing.Simulation("cache_aware", [1.0] * 3, 100, "exact", pressed=pressed, is_told=is_told)
        waits.append(simulation.run(arrivals, stretch).mean)
        shares.append(simulation.done["worker 0"] / sum(simulation.done.values()))
    assert waits[1] < 0.5 * waits[0]
    assert shares[1] < shares[0]


@pytest.mark.parametrize("policy", ["cache_aware", "power_of_two", "prefix_hash"])
def test_requests_that_others_sent_count_from_the_second_look_on(policy: str) -> None:
    fleet = fleet_of(2, policy)
    one, two = fleet.workers
    for ticket in [fleet.route(Demand((), 1, 100, 10)) for _ in range(50)]:
        ticket.end()
    fleet.report(one, Load(300, 100))
    assert {worker.others for worker in fleet.workers} == {0}, "they may have come in between"
    fleet.report(one, Load(300, 0))
    assert [worker.others for worker in fleet.workers] == [300, 0]
    tickets = [fleet.route(Demand((), 1, 100, 10, f"s{i}")) for i in range(50)]
    assert {ticket.worker.id for ticket in tickets} == {"worker 1"}
    fleet.report(two, Load(50))
    fleet.report(two, Load(50))
    assert two.others == 0, "its own"
    fleet.report(one, Load())
    assert not any(worker.others for worker in fleet.workers)
