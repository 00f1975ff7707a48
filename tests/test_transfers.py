"""Prefill apart from decode, with the mock model: no page is lost, none is wrong, and whoever may die."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl.errors import InvalidRequest, QueueFull
from sgl.runtime.scheduler.request import Phase, Request
from sgl.runtime.transfer.params import TransferParams
from tests.mock_transfers import LEASE_SECONDS, SECRET, MockReader, decode_driver, layout_of, prefill_driver
from tests.scheduler_driver import Driver, Setting, assert_right, make_request

PROMPT = [(13 * k + 5) % 97 for k in range(40)]
SETTING = Setting(num_pages=40, context=80, budget=None, overlap=False, buffer_pages=24, lateness=0.0)


class Pair:
    """One engine for prompts and one for outputs."""

    def __init__(self, setting: Setting = SETTING, seed: int = 0) -> None:
        self.prefill = prefill_driver(setting)
        self.reader = MockReader({"p": self.prefill}, random.Random(seed))
        self.decode = decode_driver(setting, self.reader)
        self._uid = 0

    def offer(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        request = self.request(prompt, 0, offers_transfer=True, **fields)
        self.prefill.scheduler.add(request)
        self.prefill.run()
        assert request.offered is not None
        return request.offered

    def request(self, prompt: list[int], max_new: int, **fields: Any) -> Request:
        self._uid += 1
        request = make_request(self._uid, prompt, max_new, **fields)
        request.stop_ids = frozenset()
        return request

    def pull(self, params: dict[str, Any], prompt: list[int], **fields: Any) -> Request:
        request = self.request(prompt, 3, transfer=TransferParams.read(params, SECRET), **fields)
        self.decode.scheduler.add(request)
        return request

    def run(self) -> None:
        """Until nothing is under way."""
        for _ in range(2000):
            self.step()
            scheduler = self.decode.scheduler
            if not (scheduler.has_work or scheduler.memory.is_bringing or self.reader.running):
                return
        raise AssertionError("something does not end")

    def step(self) -> None:
        self.reader.go_on()
        for driver in (self.prefill, self.decode):
            driver.step()
            driver.check()

    @property
    def imports(self) -> Any:
        return self.decode.scheduler.memory.transfers.imports  # type: ignore[union-attr]

    @property
    def exports(self) -> Any:
        return self.prefill.scheduler.memory.transfers.exports  # type: ignore[union-attr]


def assert_all_is_back(driver: Driver) -> None:
    driver.check()
    memory = driver.scheduler.memory
    assert memory.cache.locked_pages == 0
    assert memory.pool.num_free + memory.cache.evictable_pages == memory.pool.num_pages - 1
    assert memory.transfers is not None
    assert memory.transfers.state()["transfer_used_tokens"] == 0


def test_a_prompt_that_another_engine_computed_is_pulled() -> None:
    pair = Pair()
    request = pair.pull(pair.offer(PROMPT), PROMPT)
    pair.run()
    assert_right(request)
    assert request.cached_len == 36  # the last token is computed here, with its page
    assert pair.imports.counts.pages == 9
    pair.prefill.step()
    assert_all_is_back(pair.prefill)
    assert_all_is_back(pair.decode)


def test_what_is_cached_is_not_pulled() -> None:
    pair = Pair()
    first = pair.request(PROMPT[:20], 1)
    pair.decode.scheduler.add(first)
    pair.run()
    request = pair.pull(pair.offer(PROMPT), PROMPT)
    pair.run()
    assert_right(request)
    assert pair.imports.counts.pages == 4
    again = pair.pull(pair.offer(PROMPT), PROMPT)
    pair.run()
    assert_right(again)
    assert pair.imports.counts.num_pulls == 1
    pair.prefill.step()
    assert_all_is_back(pair.prefill)  # it was told that nobody needs them


def test_several_samples_wait_for_one_pull() -> None:
    pair = Pair()
    params = pair.offer(PROMPT)
    requests = [pair.pull(params, PROMPT) for _ in range(3)]
    pair.run()
    for request in requests:
        assert_right(request)
        assert request.cached_len == 36
    assert pair.imports.counts.num_pulls == 1


def test_others_run_while_a_prompt_is_pulled() -> None:
    pair = Pair()
    held = pair.pull(pair.offer(PROMPT), PROMPT)
    other = pair.request([7] * 9, 5)
    pair.decode.scheduler.add(other)
    for _ in range(10):
        pair.decode.step()
    assert other.phase is Phase.DONE
    assert held.phase is Phase.WAITING
    pair.run()
    assert_right(held)


def test_a_prefill_engine_that_dies_leaves_the_prompt_to_the_decode_engine() -> None:
    pair = Pair(seed=3)
    request = pair.pull(pair.offer(PROMPT), PROMPT)
    for _ in range(4):
        pair.step()
    del pair.reader.engines["p"]
    pair.run()
    assert_right(request)
    assert_all_is_back(pair.decode)


@pytest.mark.parametrize("seed", range(6))
def test_pages_of_a_cut_read_are_nobodys_until_it_is_quiet(seed: int) -> None:
    pair = Pair(seed=seed)
    gone = pair.pull(pair.offer(PROMPT), PROMPT)
    for _ in range(3):
        pair.step()
    pair.decode.abort(gone)
    pair.decode.step()
    pair.decode.check()
    used = pair.decode.scheduler.memory.transfers.state()["transfer_used_tokens"]  # type: ignore[union-attr]
    assert used == 36  # quarantined
    request = pair.pull(pair.offer([1, *PROMPT]), [1, *PROMPT])
    pair.run()
    assert_right(request)
    assert_all_is_back(pair.decode)


def test_a_lease_that_nobody_takes_ends_by_time() -> None:
    pair = Pair()
    params = pair.offer(PROMPT)
    pair.prefill.step()
    assert not pair.prefill.scheduler.memory.cache.locked_pages  # the device's pages are free at once
    pair.prefill.now += LEASE_SECONDS + 1
    pair.prefill.step()
    assert_all_is_back(pair.prefill)
    request = pair.pull(params, PROMPT)
    pair.run()
    assert_right(request)
    assert request.cached_len == 0
    assert pair.imports.counts.num_failed == 1


def test_what_one_buffer_holds_is_bounded_and_told() -> None:
    pair = Pair()
    for turn in range(2):
        pair.offer([turn, *PROMPT])
    request = pair.request([9, *PROMPT], 0, offers_transfer=True)
    pair.prefill.scheduler.add(request)
    pair.prefill.run()
    assert request.offered is None
    with pytest.raises(QueueFull, match="disaggregation_buffer_mb"):
        pair.exports.offer(request)
    pair.prefill.now += LEASE_SECONDS + 1
    assert pair.offer([9, *PROMPT])["num_pages"] == 10


def test_a_prompt_longer_than_the_buffer_is_pulled_as_far_as_it_goes() -> None:
    pair = Pair()
    params = pair.offer(PROMPT)
    small = Setting(num_pages=40, context=80, budget=None, overlap=False, buffer_pages=4, lateness=0.0)
    pair.decode = decode_driver(small, pair.reader)
    request = pair.pull(params, PROMPT)
    pair.run()
    assert_right(request)
    assert request.cached_len == 16


def test_a_cached_prefix_does_not_give_way_to_what_is_pulled_behind_it() -> None:
    pair = Pair()
    params = pair.offer(PROMPT)
    pair.decode = decode_driver(replace(SETTING, num_pages=25), pair.reader)
    pair.decode.scheduler.add(pair.request(PROMPT[:20], 1))
    pair.run()
    pair.decode.scheduler.add(pair.request([7] * 65, 12))
    pair.decode.step()
    memory = pair.decode.scheduler.memory
    assert (memory.pool.num_free, memory.cache.evictable_pages) == (2, 5)
    request = pair.pull(params, PROMPT)
    pair.run()
    assert_right(request)
    assert_all_is_back(pair.decode)


def test_scored_prompts_are_computed_and_end_the_lease() -> None:
    pair = Pair()
    request = pair.pull(pair.offer(PROMPT), PROMPT, logprob_start=0)
    pair.run()
    assert_right(request)
    pair.prefill.step()
    assert_all_is_back(pair.prefill)


def test_params_of_others_are_refused_by_name() -> None:
    pair = Pair()
    given = pair.offer(PROMPT)
    params, layout = TransferParams.read(given, SECRET), layout_of(SETTING)
    key = pair.request(PROMPT, 1).key()
    params.check(layout, None, key)
    params.check(replace(layout, tp_size=2, pp_size=3), None, key)  # of ranks that hold other heads and layers
    with pytest.raises(InvalidRequest, match="another prompt"):
        params.check(layout, None, key[::-1])
    with pytest.raises(InvalidRequest, match="another prompt"):
        params.check(layout, "salt", key)
    with pytest.raises(InvalidRequest, match="40 tokens"):
        params.check(layout, None, key[:80])
    for field, value in (("page_size", 8), ("dtype", "float16"), ("model", "other")):
        with pytest.raises(InvalidRequest, match=field if field != "model" else "another model"):
            params.check(replace(layout, **{field: value}), None, key)
    wrong: list[Any] = [
        None,
        [],
        "x",
        {},
        {**given, "host": "10.0.0.1"},
        {**given, "port": 22},
        {**given, "port": "22"},
        {**given, "port": True},
        {**given, "num_pages": -1},
        {**given, "num_pages": 1 << 80},
        {**given, "host": "x" * 10_000},
        {**given, "signature": "ä"},
        {**given, "signature": None},
        {**given, "more": 1},
        {name: value for name, value in given.items() if name != "lease"},
    ]
    for each in wrong:
        with pytest.raises(InvalidRequest, match="kv_transfer_params"):
            TransferParams.read(each, SECRET)
    with pytest.raises(InvalidRequest, match="signed"):
        TransferParams.read(given, b"another secret")


class Machine(RuleBasedStateMachine):
    """Two prefill engines and a decode engine under everything that may happen to them."""

    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)
        self.setting = Setting(
            num_pages=24, context=64, budget=16, buffer_pages=14, lateness=0.5, rows=4, window=self.window
        )
        self.reader = MockReader({}, self.rng)
        self.lost: list[Driver] = []
        for name in "pq":
            self.reader.engines[name] = prefill_driver(self.setting, name)
        self.decode = decode_driver(self.setting, self.reader)
        self.uid = 0
        self.params: list[tuple[dict[str, Any], list[int], str | None]] = []
        self.offering: list[tuple[Request, list[int]]] = []
        self.live: list[Request] = []
        self.all: list[Request] = []

    def make(self, prompt: list[int], max_new: int, **fields: Any) -> Request:
        self.uid += 1
        return make_request(self.uid, prompt, max_new, **fields)

    @rule(name=st.sampled_from("pq"), stem=st.integers(0, 2), length=st.integers(1, 44), salted=st.booleans())
    def prefill(self, name: str, stem: int, length: int, salted: bool) -> None:
        prompt = [stem, *PROMPT, *PROMPT][:length]
        request = self.make(prompt, 0, offers_transfer=True, namespace="salt" if salted else None)
        self.reader.engines[name].scheduler.add(request)
        self.offering.append((request, prompt))

    @rule(data=st.data(), tail=st.integers(0, 3), max_new=st.integers(1, 8), score=st.booleans())
    def pull(self, data: st.DataObject, tail: int, max_new: int, score: bool) -> None:
        if not self.params:
            return
        given, prompt, namespace = data.draw(st.sampled_from(self.params))
        params = TransferParams.read(given, SECRET)
        prompt = prompt + [5] * tail
        request = self.make(prompt, max_new, transfer=params, namespace=namespace)
        params.check(layout_of(self.setting), namespace, request.key())
        if score:
            request.logprob_start = len(prompt) // 2
        self.decode.scheduler.add(request)
        self.live.append(request)
        self.all.append(request)

    @rule(stem=st.integers(0, 2), length=st.integers(1, 44))
    def plain(self, stem: int, length: int) -> None:
        request = self.make([stem, *PROMPT, *PROMPT][:length], 4)
        self.decode.scheduler.add(request)
        self.live.append(request)
        self.all.append(request)

    @rule(number=st.integers(1, 8))
    def steps(self, number: int) -> None:
        for _ in range(number):
            self.reader.go_on()
            for driver in (*self.reader.engines.values(), self.decode):
                driver.step()
        self.take()

    @rule(number=st.integers(1, 8))
    def reads_alone(self, number: int) -> None:
        for _ in range(number):
            self.reader.go_on()

    @rule(number=st.integers(1, 4))
    def decode_alone(self, number: int) -> None:
        for _ in range(number):
            self.decode.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [request for request in self.live if request.phase is not Phase.DONE]
        if live:
            self.decode.abort(data.draw(st.sampled_from(live)))

    @rule(seconds=st.sampled_from([0.5, 2.0, LEASE_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        for driver in (*self.reader.engines.values(), self.decode):
            driver.now += seconds

    @rule(name=st.sampled_from("pq"))
    def kill_prefill(self, name: str) -> None:
        old = self.reader.engines[name]
        self.lost.append(old)
        self.reader.engines[name] = prefill_driver(self.setting, name)
        self.reader.engines[name].now = old.now

    @rule()
    def kill_decode(self) -> None:
        """Its reads break, and the leases that it did not end stay until their time."""
        for each in list(self.reader.running):
            self.reader._end(each, is_last=False) if not each.ended else None
        self.reader.running.clear()
        now, self.live = self.decode.now, []
        self.all = [request for request in self.all if request.phase is Phase.DONE]
        self.decode = decode_driver(self.setting, self.reader)
        self.decode.now = now

    @rule()
    def flush(self) -> None:
        self.decode.scheduler.memory.flush()

    def take(self) -> None:
        for request, prompt in self.offering:
            if request.offered is not None:
                self.params = [*self.params[-5:], (request.offered, prompt, request.namespace)]  # type: ignore[list-item]
        self.offering = [each for each in self.offering if each[0].phase is not Phase.DONE]

    @invariant()
    def nothing_is_lost(self) -> None:
        self.decode.check()
        for driver in self.reader.engines.values():
            driver.check()

    def teardown(self) -> None:
        for _ in range(3000):
            self.reader.go_on()
            drivers = [*self.reader.engines.values(), self.decode]
            happened = [driver.step() for driver in drivers]
            if not any(happened) and not self.reader.running:
                break
        for driver in drivers:
            driver.now += 60.0
            for _ in range(200):
                driver.step()
            assert not driver.scheduler.has_work, "a request does not end"
            assert_all_is_back(driver)
        for request in self.all:
            assert request.phase is Phase.DONE
            if request.finish_reason is not None and request.finish_reason.type != "abort":
                assert_right(request, window=self.window)


class WindowedMachine(Machine):
    """Of a model that gives up what is behind its window: a prompt's first pages may be gone before it is offered."""

    window = 9


Machine.TestCase.settings = WindowedMachine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMachine = Machine.TestCase
TestWindowedMachine = WindowedMachine.TestCase


def test_a_prompt_longer_than_the_window_is_pulled_whole() -> None:
    pair = Pair(replace(SETTING, window=9))
    prompt = [*PROMPT, *PROMPT][:40]
    params = pair.offer(prompt)
    assert params["num_tokens"] == 40
    request = pair.pull(params, prompt)
    pair.run()
    assert_right(request, window=9)
    assert request.cached_len == 36
    for driver in (pair.prefill, pair.decode):
        assert_all_is_back(driver)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Machine, WindowedMachine])
def test_many_kills_lose_nothing(machine: type[Machine]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
