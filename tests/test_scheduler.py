"""The scheduler against the mock model: invariants 1 and 4–7 and 10 of the design, under random interleavings."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sgl.errors import QueueFull
from sgl.runtime.cache.windows import pages_in_window
from sgl.runtime.scheduler import admission
from sgl.runtime.scheduler.admission import OutputLengths
from sgl.runtime.scheduler.leases import Lease
from sgl.runtime.scheduler.request import Phase, Request
from sgl.runtime.scheduler.step import Limits
from tests.mock_runner import Mixed, expected_output
from tests.scheduler_driver import Driver, Setting, assert_right, make_request, random_request

settings_strategy = st.builds(
    Setting,
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_pages=st.just(0),
    rows=st.integers(1, 8),
    budget=st.sampled_from([1, 3, 7, 16, 64, None]),
    overlap=st.booleans(),
    radix=st.sampled_from([True, True, True, False]),
    policy=st.sampled_from(["lpm", "fcfs", "priority", "dfs-weight", "program"]),
    conservativeness=st.sampled_from([1.0, 0.01]),
    drafts=st.booleans(),
    depth=st.sampled_from([1, 1, 2, 3, 5]),
)
windowed_strategy = st.builds(
    replace,
    settings_strategy,
    window=st.sampled_from([2, 3, 7, 16, 40]),
    policy=st.sampled_from(["lpm", "dfs-weight", "program"]),
)
mixed_strategy = st.builds(
    lambda setting, window_room: replace(setting, window=Mixed(setting.window), num_window_pages=window_room),
    windowed_strategy,
    st.integers(0, 12),
)
recurrent_strategy = st.builds(
    replace, settings_strategy, checkpoints=st.sampled_from([0, 1, 2, 5, 40]), depth=st.just(1)
)

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2**31)),
        st.tuples(st.just("hold"), st.integers(0, 2**31)),
        st.tuples(st.just("let go"), st.integers(0, 100)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 100)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("lease"), st.integers(0, 100)),
    ),
    max_size=40,
)


@given(settings_strategy, st.sampled_from([0.0, 0.1, 0.5, 3.0]), actions)
@example(Setting(page_size=1, rows=2, budget=1, overlap=False, radix=False), 0.0, [("hold", 5215871), ("add", 470)])
@settings(max_examples=150)
def test_any_interleaving_keeps_every_page_owned_and_every_token_right(
    setting: Setting, room: float, plan: list[tuple[str, int]]
) -> None:
    run_plan(setting, room, plan)


@given(recurrent_strategy, st.sampled_from([0.0, 0.1, 0.5, 3.0]), actions)
@settings(max_examples=150)
def test_any_interleaving_keeps_every_state_owned_and_right(
    setting: Setting, room: float, plan: list[tuple[str, int]]
) -> None:
    driver = run_plan(setting, room, plan)
    states = driver.scheduler.memory.states
    assert states is not None
    assert len(states.checkpoints.free) == states.checkpoints.num_slots


@given(windowed_strategy, st.sampled_from([0.0, 0.1, 0.5, 3.0]), actions)
@settings(max_examples=150)
def test_any_interleaving_with_a_window_keeps_every_page_owned_and_every_token_right(
    setting: Setting, room: float, plan: list[tuple[str, int]]
) -> None:
    """In a pool that need not hold a whole context."""
    run_plan(setting, room, plan)


@given(mixed_strategy, st.sampled_from([0.0, 0.1, 0.5, 3.0]), actions)
@settings(max_examples=100)
def test_any_interleaving_with_windowed_pages_beside_full_ones_is_right(
    setting: Setting, room: float, plan: list[tuple[str, int]]
) -> None:
    driver = run_plan(setting, room, plan)
    assert driver.window_pool is not None
    assert driver.window_pool.num_free == setting.num_window_pages - 1


def run_plan(setting: Setting, room: float, plan: list[tuple[str, int]]) -> Driver:
    least = -(-setting.context // setting.page_size) + 1
    if setting.window is not None:
        windowed = min(least, pages_in_window(setting.window, setting.page_size, 1) + 1)
        if isinstance(setting.window, Mixed):
            setting.num_window_pages += windowed
        else:
            least = windowed
    setting.num_pages = least + int(room * least)
    driver = Driver(setting)
    requests: list[Request] = []
    leases: list[Lease] = []
    for action, value in plan:
        if action in ("add", "hold"):
            requests.append(random_request(len(requests), value, setting.context))
            requests[-1].waits_for_grammar = action == "hold"
            driver.scheduler.add(requests[-1])
        elif action == "let go" and requests:
            driver.scheduler.grammar_is_ready(requests[value % len(requests)])
        elif action == "step":
            for _ in range(value):
                driver.step()
                driver.check()
        elif action == "abort" and requests:
            victim = requests[value % len(requests)]
            if victim.phase is not Phase.DONE:
                driver.abort(victim)
                emitted = len(victim.output_ids)
                driver.check()
                driver.step()
                assert len(victim.output_ids) == emitted, "a token came after the abort"
                driver.check()
        elif action == "flush":
            driver.scheduler.memory.cache.reset()
            driver.check()
        elif action == "lease" and requests:
            chosen = requests[value % len(requests)]
            lease = driver.scheduler.memory.leases.take(chosen.key(), chosen.namespace)
            leases += [] if lease is None else [lease]
            driver.check()
    while driver.step():
        assert not any(request.waits_for_grammar and request.output_ids for request in requests)
    driver.check()
    for request in requests:
        assert request.waits_for_grammar or request.phase is Phase.DONE
        driver.scheduler.grammar_is_ready(request)
    driver.run()
    driver.check()
    for request in requests:
        assert request.phase is Phase.DONE
        if request.finish_reason is not None and request.finish_reason.type != "abort":
            assert_right(request, recurrent=setting.checkpoints is not None, window=setting.window)
    for lease in leases:
        driver.scheduler.memory.leases.release(lease)
    assert driver.scheduler.memory.cache.locked_pages == 0
    driver.scheduler.memory.cache.reset()
    assert driver.pool.num_free == setting.num_pages - 1
    return driver


def run_all(setting: Setting, requests: list[Request]) -> Driver:
    driver = Driver(setting)
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    for request in requests:
        assert_right(request, recurrent=setting.checkpoints is not None, window=setting.window)
    return driver


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_change_no_token_and_those_that_stand_save_steps(overlap: bool) -> None:
    steps = []
    for drafts in (False, True):
        requests = [make_request(uid, [uid, 5, uid + 9], 24) for uid in range(1, 9)]
        driver = run_all(Setting(drafts=drafts, overlap=overlap, num_pages=200), requests)
        driver.check()
        steps.append(driver.scheduler.counters.steps)
        counters = driver.scheduler.counters
        assert bool(counters.verified_tokens) == drafts
        assert counters.verified_tokens <= counters.drafted_tokens
    assert overlap or steps[1] < steps[0]  # with run-ahead a row sits out the step that it saves


@pytest.mark.parametrize(("budget", "most_drafts"), [(1, 0), (7, 0), (12, 0), (15, 7), (64, 56), (None, 56)])
def test_drafts_hold_up_no_other_output(budget: int | None, most_drafts: int) -> None:
    """Each has a token in every step, and drafts get what is left."""
    driver = Driver(Setting(budget=budget, overlap=False, num_pages=400))
    requests = [make_request(uid, [uid, 5, uid + 9], 40) for uid in range(1, 9)]
    for request in requests:
        driver.scheduler.add(request)
    while not all(request.output_ids for request in requests):
        assert driver.step()
    for _ in range(4):
        going_on = [request for request in requests if not request.is_done]
        before = [len(request.output_ids) for request in going_on]
        for request in going_on:
            if request.max_new_tokens - len(request.output_ids) > 8 and driver.scheduler.may_draft(request):
                driver.scheduler.draft(request, [96] * 7)
        drafted = driver.scheduler.counters.drafted_tokens
        assert driver.step()
        assert all(len(request.output_ids) > number for request, number in zip(going_on, before, strict=True))
        assert driver.scheduler.counters.drafted_tokens - drafted <= most_drafts
    driver.run()
    for request in requests:
        assert_right(request)


def with_outputs(number: int, budget: int, rows: int = 8) -> tuple[Driver, list[Request]]:
    """So many requests run, each with a token at least and 60 to come, as no stop token ends them."""
    driver = Driver(Setting(budget=budget, overlap=False, num_pages=400, rows=rows, radix=False))
    outputs = [make_request(uid, [uid, 5, uid + 9], 60) for uid in range(1, number + 1)]
    for request in outputs:
        request.stop_ids = frozenset()
        driver.scheduler.add(request)
    while not all(request.output_ids for request in outputs):
        assert driver.step()
    return driver, outputs


def test_steps_are_no_longer_than_they_may_be() -> None:
    """Where one token is left, an output and a prompt do not both have it."""
    driver, outputs = with_outputs(4, budget=5)
    late = make_request(9, list(range(10)), 2)
    driver.scheduler.add(late)
    for _ in range(10):
        driver.scheduler.draft(outputs[0], [96])
        assert driver.scheduler.shares.draft_room() == 0
        assert driver.step()
    assert len(late.output_ids) == 1


def test_a_retracted_request_computes_its_prompt_again_as_one() -> None:
    """It leaves room for drafts, and has what is left before other prompts."""
    driver, outputs = with_outputs(3, budget=24)
    resumed = make_request(9, list(range(60)), 9)
    driver.scheduler.add(resumed)
    while not resumed.output_ids:
        assert driver.step()
    driver.scheduler.retract(resumed)
    driver.scheduler.add(make_request(10, list(range(50)), 9))
    kv_len, rooms, numbers = driver.scheduler.memory.rows.kv_len, [], []
    while resumed.phase is not Phase.DECODE:
        rooms.append(driver.scheduler.shares.draft_room())
        before = int(kv_len[resumed.row]) if resumed.phase is Phase.PREFILL else 0
        assert driver.step()
        numbers.append(int(kv_len[resumed.row]) - before)
    assert rooms == [10] * 3
    assert numbers[:2] == [21, 21]
    driver.run()
    for request in [*outputs, resumed]:
        assert_right(request)


def test_a_prompt_that_waits_for_its_grammar_keeps_no_room() -> None:
    driver, _ = with_outputs(3, budget=24, rows=4)
    held = make_request(9, [1, 2, 3], 5, waits_for_grammar=True)
    driver.scheduler.add(held)
    while held.phase is Phase.WAITING or driver.scheduler.memory.rows.kv_len[held.row] < 2:
        assert driver.step()
    assert driver.scheduler.shares.draft_room() == 21


@pytest.mark.parametrize("has_row", [True, False])
def test_drafts_and_certain_texts_leave_half_of_what_is_left_to_prompts(has_row: bool) -> None:
    driver, outputs = with_outputs(4, budget=24, rows=4 + has_row)
    late = make_request(9, list(range(50)), 2)
    assert driver.scheduler.shares.draft_room() == 20
    driver.scheduler.add(late)
    rooms, numbers = [], []
    while not late.output_ids and len(numbers) < 5:
        rooms.append(driver.scheduler.shares.draft_room())
        for request in outputs:
            driver.scheduler.draft(request, [96] * 7)
        before = int(driver.scheduler.memory.rows.kv_len[late.row]) if late.phase is not Phase.WAITING else 0
        assert driver.step()
        numbers.append(int(driver.scheduler.memory.rows.kv_len[late.row]) - before if has_row else 0)
    assert set(rooms) == {10 if has_row else 20}
    assert numbers == ([13, 13, 13, 11] if has_row else [0] * 5), "beside one draft of seven"
    driver.run()
    for request in [*outputs, late]:
        assert_right(request)


def test_followers_wait_for_a_prefix_that_is_being_computed_and_then_hit_it() -> None:
    stem = list(range(32))
    requests = [make_request(i, [*stem, i], 2) for i in range(6)]
    driver = Driver(Setting(budget=64, overlap=False))
    driver.runner.keep_batches = True
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    computed = sum(int(batch.q_lens.sum()) for batch in driver.runner.batches)
    assert [r.cached_len for r in requests] == [0] + [32] * 5
    assert computed <= 33 + 5 * 1 + 6 * 2


def test_a_prompt_that_is_held_is_computed_but_for_its_last_token_and_keeps_nobody_waiting() -> None:
    stem = list(range(32))
    held, other = make_request(0, [*stem, 40, 41], 2), make_request(1, [*stem, 40, 42], 2)
    held.waits_for_grammar = True
    driver = Driver(Setting(budget=64, overlap=False))
    driver.runner.keep_batches = True
    driver.scheduler.add(held)
    driver.scheduler.add(other)
    while driver.step():
        pass
    assert driver.runner.batches[0].q_lens.tolist() == [33]
    assert other.phase is Phase.DONE
    assert other.cached_len == 32
    assert not held.output_ids
    driver.scheduler.grammar_is_ready(held)
    driver.run()
    assert driver.runner.batches[-2].q_lens.tolist() == [1]
    for request in (held, other):
        assert_right(request)


def test_a_retracted_request_resumes_as_a_prefix_hit_with_the_same_tokens() -> None:
    setting = Setting(page_size=2, num_pages=50, rows=4, context=96, budget=None)
    requests = [make_request(i, [i * 5 + k for k in range(8)], 80) for i in range(4)]
    for request in requests:
        request.stop_ids = frozenset()
    driver = Driver(setting)
    driver.scheduler._lengths._known_ratio = 0.05  # expects short outputs, so it admits too many
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    assert driver.scheduler.counters.retractions > 0
    for request in requests:
        assert request.output_ids == expected_output(request.prompt_ids.tolist(), 80, request.seed, frozenset())


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority", "dfs-weight", "program"])
def test_a_steady_stream_of_better_matches_starves_nobody(policy: str) -> None:
    driver = Driver(Setting(rows=2, policy=policy, budget=64))
    driver.scheduler.queue._patience = 10
    stem = list(range(20, 44))
    driver.scheduler.add(make_request(0, [*stem, 1], 2, priority=5))
    driver.run()
    lonely = make_request(1, [90, 91, 92, 93, 94], 2, priority=0)
    uid = 2
    queue: deque[Request] = deque()
    for _ in range(400):
        while len(queue) < 6:
            queue.append(make_request(uid, [*stem, uid % 90], 2, priority=5))
            driver.scheduler.add(queue[-1])
            uid += 1
        if uid == 8:
            driver.scheduler.add(lonely)
        driver.step()
        queue = deque(r for r in queue if r.phase is not Phase.DONE)
        if lonely.phase is Phase.DONE:
            break
    assert lonely.phase is Phase.DONE
    assert uid < 60


def test_longest_prefix_is_admitted_first() -> None:
    driver = Driver(Setting(rows=1, policy="lpm", overlap=False))
    driver.scheduler.add(make_request(0, list(range(30)), 1))
    driver.run()
    short = make_request(1, [*range(8), 77, 78], 1)
    none = make_request(2, [60, 61, 62], 1)
    long = make_request(3, [*range(24), 77], 1)
    for request in (none, short, long):
        driver.scheduler.add(request)
    driver.run()
    assert list(driver.done) == [0, 3, 1, 2]


def test_depth_first_enters_the_heavier_subtree_first() -> None:
    driver = Driver(Setting(rows=1, policy="dfs-weight", overlap=False))
    left, right = list(range(12)), list(range(50, 62))
    for uid, prompt in enumerate((left, right)):
        driver.scheduler.add(make_request(uid, [*prompt, 99 - uid], 1))
    driver.run()
    for uid, prompt in ((2, left), (3, right), (4, right)):
        driver.scheduler.add(make_request(uid, [*prompt, 80 + uid], 1))
    driver.run()
    assert list(driver.done)[2:] == [3, 4, 2]


def test_higher_priority_is_admitted_first() -> None:
    driver = Driver(Setting(rows=1, policy="priority", overlap=False))
    for uid, priority in enumerate((0, 2, 1)):
        driver.scheduler.add(make_request(uid, [uid + 10], 1, priority=priority))
    driver.run()
    assert list(driver.done) == [1, 2, 0]


def test_a_small_request_may_pass_a_large_one_that_does_not_fit_yet() -> None:
    driver = Driver(
        Setting(rows=8, num_pages=26, page_size=4, context=96, budget=None, policy="fcfs", overlap=False)
    )
    running = make_request(0, list(range(40)), 20)
    running.stop_ids = frozenset()
    driver.scheduler.add(running)
    driver.step()
    large = make_request(1, list(range(50, 96)), 40)
    small = make_request(2, [9], 2)
    for request in (large, small):
        request.stop_ids = frozenset()
        driver.scheduler.add(request)
    driver.run()
    assert list(driver.done).index(2) < list(driver.done).index(1)


def test_a_full_queue_refuses_and_keeps_the_others() -> None:
    driver = Driver(Setting(rows=1))
    driver.scheduler.limits = Limits(1, 96, 16, max_queued_requests=2)
    first = [make_request(i, [i + 1], 3) for i in range(2)]
    for request in first:
        driver.scheduler.add(request)
    with pytest.raises(QueueFull, match="2 requests"):
        driver.scheduler.add(make_request(9, [1], 3))
    driver.run()
    for request in first:
        assert_right(request)


def test_requests_that_are_late_are_named_once_and_the_rest_go_on() -> None:
    driver = Driver(Setting(rows=1, overlap=False))
    running = make_request(0, [5], 30, deadline=10.0)
    waiting = make_request(1, [6], 3, queue_deadline=5.0)
    patient = make_request(2, [7], 3, deadline=100.0)
    for request in (running, waiting, patient):
        request.stop_ids = frozenset()
        driver.scheduler.add(request)
    driver.step()
    assert driver.scheduler.expire() == []
    driver.now = 6.0
    assert driver.scheduler.expire() == [waiting]
    driver.abort(waiting)
    driver.now = 11.0
    assert driver.scheduler.expire() == [running]
    driver.abort(running)
    driver.run()
    assert len(patient.output_ids) == 3
    driver.check()


def test_lengths_that_are_expected_follow_the_latest_and_are_worked_out_when_asked_for() -> None:
    """Not for each request: many end in one step."""
    lengths = OutputLengths()
    assert lengths.remaining(0, 1000, exact=False) == 700
    for length in range(7):
        lengths.finished(length, 1000)
    assert lengths.remaining(0, 1000, exact=False) == 700  # too few to learn from
    expected = np.quantile(np.arange(372, 500), 0.9)
    with mock.patch.object(admission, "_quantile", wraps=admission._quantile) as quantile:
        for length in range(500):
            lengths.finished(length, 1000)
        assert not quantile.called
        for _ in range(3):
            assert lengths.remaining(0, 1000, exact=False) == pytest.approx(expected, abs=1)
            assert lengths.remaining(100, 1000, exact=True) == 900
        quantile.assert_called_once()
    for number in range(8, 40):
        ratios = np.random.default_rng(number).random(number).tolist()
        assert admission._quantile(ratios) == np.quantile(ratios, 0.9)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 64, None])
def test_tokens_do_not_depend_on_how_they_are_computed(overlap: bool, budget: int | None) -> None:
    requests = [random_request(uid, seed, 96) for uid, seed in enumerate(range(40))]
    run_all(Setting(overlap=overlap, budget=budget, num_pages=40, page_size=4), requests)
