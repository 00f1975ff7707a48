"""What one call asks for holds up nobody else: the order of the waiting queue over calls, and every door to it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from benchmarks.waiting_queue import make_scheduler
from sgl.lang.ir import nodes as ir
from sgl.runtime.engine import Engine
from sgl.runtime.scheduler import waiting_queue
from sgl.runtime.scheduler.request import FinishReason, Phase, Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.waiting_queue import DEFAULT_PATIENCE, SHARE
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint
from tests.patience import wait_until
from tests.program_client import SECONDS, Client, gen
from tests.scheduler_driver import Driver, Setting, make_request

POLICIES = ["lpm", "fcfs", "priority", "dfs-weight"]


def order(scheduler: Scheduler) -> list[Request]:
    """All that could go on now, nobody being admitted."""
    with closing(scheduler.queue.candidates()) as candidates:
        return list(candidates)


# ── the queue ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_the_order_is_by_rank_and_then_by_policy(policy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is how many of the call waited already: two, and then twice as many each time."""
    monkeypatch.setattr(waiting_queue, "SHARE", 2)
    rng = random.Random(seed)
    driver = Driver(Setting(rows=2, policy=policy, num_pages=60, budget=16, overlap=False))
    scheduler = driver.scheduler
    ranks: dict[int, int] = {}
    live: list[Request] = []

    def by_definition() -> list[int]:
        waiting = sorted(scheduler.queue, key=lambda request: request.order)
        waiting = [request for request in waiting if scheduler.memory.computed_by(request) is None]
        if policy == "lpm":
            waiting.sort(key=lambda request: -scheduler.memory.current_match(request).length)
        waiting.sort(key=lambda request: ranks[request.uid])
        if policy == "priority":
            waiting.sort(key=lambda request: -request.priority)
        return [request.uid for request in waiting]

    for uid in range(300):
        match rng.randrange(6):
            case 0 | 1 | 2 if len(live) < 40:
                call = rng.choice([None, "few", "many", "many", "many"])
                number = sum(request.call == call and request.phase is Phase.WAITING for request in live)
                ranks[uid] = 0 if call is None or number < 2 else (number // 2).bit_length()
                prompt = [[5] * 8, [7] * 12, [9]][rng.randrange(3)] + [uid % 90]
                live.append(make_request(uid, prompt, 2, call=call, priority=rng.randrange(3)))
                scheduler.add(live[-1])
            case 3 if live:
                driver.abort(rng.choice(live))
            case _:
                driver.step()
        live = [request for request in live if request.phase is not Phase.DONE]
        assert [request.uid for request in order(scheduler)] == by_definition()
    driver.run()
    driver.check()
    assert not scheduler.queue._of_call


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_waits_for_others_about_twice_as_long_as_it_is(policy: str) -> None:
    """Whatever their order of arrival, and however heavy the subtree in which the large one waits."""
    sizes = {"huge": 20_000, "large": 2000, "middle": 300, "small": 20, "one": 1}
    scheduler = make_scheduler(policy)  # type: ignore[arg-type]
    for number, (call, size) in enumerate(sizes.items()):
        for each in range(size):
            prompt = np.array([number, *divmod(each, 100)], np.int32)
            scheduler.add(Request(number * 10**6 + each, prompt, make_request(0, [1], 1).params, 0, 1, call=call))
    before: Counter[Any] = Counter()
    for number, request in enumerate(order(scheduler)):
        mine = before[request.call]
        for call, seen in before.items():
            if call != request.call:
                assert seen <= 2 * max(mine, SHARE) + SHARE, (call, request.call, mine)
        before[request.call] += 1
        assert number < sum(sizes.values())
    assert before == sizes


@pytest.mark.costly
@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_whoever_else_keeps_coming(policy: str) -> None:
    """Requests of others come as fast as they go. Each is admitted after so many of them; a large call goes on too."""
    driver = Driver(Setting(rows=2, policy=policy, num_pages=60, budget=64, overlap=False, page_size=1))
    scheduler = driver.scheduler
    size = 3 * SHARE
    many = [make_request(uid, [3, uid % 90], 1, call="many") for uid in range(size)]
    for request in many:
        scheduler.add(request)
    waited, admitted, uid = dict[int, int](), 0, size
    others: list[Request] = []
    while any(request.phase is Phase.WAITING for request in many):
        while sum(request.phase is Phase.WAITING for request in others) < 8:
            others.append(make_request(uid, [5, 6, uid % 90], 1, priority=uid % 2))
            scheduler.add(others[-1])
            waited[uid], uid = admitted, uid + 1
        driver.step()
        for request in [request for request in others if request.phase is not Phase.WAITING]:
            others.remove(request)
            admitted += 1
            assert admitted - waited.pop(request.uid) <= 2 * DEFAULT_PATIENCE
        assert admitted <= size // SHARE * 2 * (DEFAULT_PATIENCE + SHARE), "some of many wait for ever"
        driver.check()


def test_a_large_call_costs_those_beside_it_a_share_and_no_more() -> None:
    """One request comes after another while a large call is worked off: each overtakes what is beyond the share."""
    driver = Driver(Setting(rows=4, policy="fcfs", num_pages=60, budget=64, overlap=False))
    many = [make_request(uid, [3, uid % 90], 1, call="many") for uid in range(2000)]
    for request in many:
        driver.scheduler.add(request)
    waits: list[int] = []
    for uid in range(2000, 2020):
        one = make_request(uid, [4, uid % 90], 1)
        driver.scheduler.add(one)
        ended = len(driver.done)
        while not one.is_done:
            driver.step()
        waits.append(len(driver.done) - ended)
    assert waits[0] <= SHARE + 8
    assert max(waits[1:]) <= 8


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_within_a_call_the_policy_keeps_its_cache_hits(policy: str) -> None:
    """More prefixes by turns than the cache has room for: those of one are admitted one after the other."""

    def cached(call: str | None) -> int:
        driver = Driver(Setting(rows=2, policy=policy, num_pages=40, budget=64, overlap=False))
        for uid in range(1000):
            stem = [uid % 10] * 40
            driver.scheduler.add(make_request(uid, [*stem, 50 + uid % 30, uid % 7], 1, call=call))
        driver.run(20_000)
        driver.check()
        return driver.scheduler.counters.cached_tokens

    alone, together = cached(None), cached("one call")
    assert together >= 0.8 * alone > 20_000


def test_a_retracted_request_keeps_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "SHARE", 1)
    driver = Driver(Setting(rows=4, policy="fcfs", num_pages=40, overlap=False))
    requests = [make_request(uid, [uid], 9, call="many") for uid in range(6)]
    for request in requests:
        driver.scheduler.add(request)
    driver.step()
    first = requests[0]
    assert first.phase is not Phase.WAITING
    driver.scheduler.retract(first)
    assert order(driver.scheduler)[0] is first
    driver.run()
    driver.check()


# ── every door ──────────────────────────────────────────────────────────────────────────────────────────────────

ROWS, MANY = 4, 500
GREEDY = {"max_new_tokens": 1, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = chat_checkpoint(tmp_path_factory.mktemp("model"))
    with Engine(str(folder), **OPTIONS, max_running_requests=ROWS) as engine:
        yield engine


@contextmanager
def held(engine: Engine) -> Iterator[threading.Event]:
    """No step is made until the event is set; what arrives is queued."""
    let_go, loop = threading.Event(), engine._loop
    step = loop.step

    def step_then() -> None:
        if let_go.wait(0.001):
            step()

    loop.step = step_then  # type: ignore[method-assign]
    try:
        yield let_go
    finally:
        let_go.set()
        loop.step = step  # type: ignore[method-assign]


def texts(prompt: str) -> dict[str, Any]:
    nodes = [
        {"st": 0, "op": "text", "text": prompt},
        {"st": 0, "op": "gen", "name": "x", "params": {"max_tokens": 1}},
    ]
    return {"nodes": nodes, "final": True}


def by_generate(engine: Engine, server: LiveServer) -> None:
    engine.generate(prompt=["a"] * MANY, sampling_params=GREEDY)


def by_samples(engine: Engine, server: LiveServer) -> None:
    engine.generate(prompt=["a"] * 10, sampling_params={**GREEDY, "n": MANY // 10})


def by_http(engine: Engine, server: LiveServer) -> None:
    server.post("/generate", {"text": ["a"] * MANY, "sampling_params": GREEDY}).raise_for_status()


def by_completions(engine: Engine, server: LiveServer) -> None:
    body = {"model": "default", "prompt": ["a"] * (MANY // 4), "n": 4, "max_tokens": 1}
    server.post("/v1/completions", body).raise_for_status()


def by_score(engine: Engine, server: LiveServer) -> None:
    engine.score("a", [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(MANY)])


def by_forks(engine: Engine, server: LiveServer) -> None:
    children = tuple(range(1, MANY + 1))
    branches = [node for child in children for node in ((child, ir.Text("b")), (child, gen(max_tokens=1)))]
    Client(engine).finish(ir.Text("a"), ir.Fork(children), *branches)


def by_rows(engine: Engine, server: LiveServer) -> None:
    body = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": texts("a"), "rows": [{}] * MANY}
    server.post("/v1/programs", body).raise_for_status()


DOORS = [by_generate, by_samples, by_http, by_completions, by_score, by_forks, by_rows]


@pytest.mark.costly
@pytest.mark.parametrize("many", DOORS, ids=lambda door: door.__name__.removeprefix("by_"))
def test_a_plain_request_passes_a_large_call_at_every_door(engine: Engine, server: LiveServer, many: Any) -> None:
    """It comes last, and most of the others are still to be done when it is."""
    scheduler, ended, plain = engine._scheduler, list[tuple[int, ...]](), (40, 41, 42, 43)
    finish = scheduler.finish

    def note(request: Request, reason: FinishReason) -> None:
        ended.append(tuple(request.prompt_ids.tolist()))
        finish(request, reason)

    def arguments() -> dict[str, Any]:
        return {"input_ids": list(plain), "sampling_params": GREEDY}

    scheduler.finish = note  # type: ignore[method-assign]
    try:
        with held(engine) as let_go:
            hog = threading.Thread(target=many, args=(engine, server))
            hog.start()
            wait_until(lambda: len(scheduler.queue) >= MANY)
            one = threading.Thread(target=engine.generate, kwargs=arguments())
            one.start()
            wait_until(lambda: len(scheduler.queue) > MANY)
            let_go.set()
            one.join(SECONDS)
            hog.join(SECONDS)
        assert not one.is_alive()
        assert not hog.is_alive()
    finally:
        scheduler.finish = finish  # type: ignore[method-assign]
    assert len(ended) > MANY
    assert ended.index(plain) <= SHARE + 6 * ROWS
