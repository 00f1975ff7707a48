"""How many threads a step takes, and the thread that an engine does its work in."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sgl.runtime.loop.thread import EngineThread
from sgl.runtime.runner import threads as threads_module
from sgl.runtime.runner.threads import MANY_MULTIPLICATIONS, StepThreads
from tests.patience import PATIENCE


@pytest.fixture
def alone() -> Iterator[ThreadPoolExecutor]:
    """A thread whose number of torch's threads is its own: others of this process keep theirs."""
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as thread:
        yield thread
    torch.set_num_threads(before)


class Clock:
    """Steps take what they would with so many threads, which run for a share of that time."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: dict[int, float], share: float = 1.0) -> None:
        self.seconds = seconds
        self.share = share
        self.now = self.ran = 0.0
        patch.setattr(threads_module.time, "perf_counter", lambda: self.now)
        patch.setattr(threads_module.time, "process_time", lambda: self.ran)

    def run(self, threads: StepThreads, num_tokens: int, num_steps: int, *, is_streamed: bool = False) -> list[int]:
        """How many threads each step took."""
        taken = []
        for _ in range(num_steps):
            threads.choose(num_tokens, is_streamed=is_streamed)
            taken.append(torch.get_num_threads())
            self.now += self.seconds[taken[-1]]
            self.ran += self.seconds[taken[-1]] * taken[-1] * self.share
            threads.done(worked=True)
        return taken


def begin(per_token: int, num_threads: int) -> StepThreads:
    torch.set_num_threads(num_threads)
    return StepThreads(per_token)


@pytest.mark.parametrize(
    ("per_token", "num_tokens", "is_streamed", "expected"),
    [
        (1_000_000, 1, False, 1),
        (6_000_000, 1, False, 3),
        (6_000_000, 32, False, 4),
        (6_000_000, 32, True, 3),
        (MANY_MULTIPLICATIONS, 1, False, 4),
        (MANY_MULTIPLICATIONS, 1, True, 4),
    ],
)
def test_a_step_takes_as_many_threads_as_it_has_work_for(
    alone: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    per_token: int,
    num_tokens: int,
    is_streamed: bool,
    expected: int,
) -> None:
    clock = Clock(monkeypatch, {1: 4.0, 3: 2.0, 4: 1.0})

    def work() -> list[int]:
        return clock.run(begin(per_token, 4), num_tokens, 20, is_streamed=is_streamed)

    taken = alone.submit(work).result()
    assert taken[8:] == [expected] * 12, "the other way was tried early"
    assert taken.count(expected) >= 18


def test_what_onednn_keeps_is_prepared_either_way(alone: ThreadPoolExecutor) -> None:
    def work() -> tuple[list[tuple[int, int]], int]:
        prepared: list[tuple[int, int]] = []
        begin(6_000_000, 4).prepare(lambda num_tokens: prepared.append((torch.get_num_threads(), num_tokens)))
        return prepared, torch.get_num_threads()

    assert alone.submit(work).result() == ([(1, 66), (3, 66), (4, 66)], 4)


@pytest.mark.parametrize("with_two", [0.5, 0.97, 3.0])
def test_small_steps_go_the_way_that_takes_less_time(
    alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, with_two: float
) -> None:
    clock = Clock(monkeypatch, {1: 1.0, 2: with_two})

    def work() -> tuple[list[int], list[int]]:
        threads = begin(6_000_000, 2)
        before = clock.run(threads, 32, 1000)
        clock.seconds = {1: 1.0, 2: 3.5 - with_two}  # the machine has changed
        return before[500:], clock.run(threads, 32, 1000)[500:]

    before, after = alone.submit(work).result()
    for taken, two in ((before, with_two), (after, 3.5 - with_two)):
        fraction = taken.count(2) / len(taken)
        assert fraction > 0.95 if two < 1 else fraction < 0.05
        assert 0 < fraction < 1, "the other way is tried now and then"


def test_sizes_are_told_apart(alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {1: 1.0, 2: 2.0})

    def work() -> tuple[int, int]:
        threads = begin(6_000_000, 2)
        small = clock.run(threads, 2, 500)[-1]
        clock.seconds = {1: 2.0, 2: 1.0}
        return small, clock.run(threads, 32, 500)[-1]

    assert alone.submit(work).result() == (1, 2)


def test_large_steps_take_one_thread_where_many_are_starved(
    alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process wants the processors, then none does."""
    clock = Clock(monkeypatch, {1: 0.2, 2: 0.1})

    def work() -> list[list[int]]:
        threads = begin(MANY_MULTIPLICATIONS, 2)
        taken = [clock.run(threads, 1, 1000)]
        clock.seconds, clock.share = {1: 0.2, 2: 2.0}, 0.5
        taken.append(clock.run(threads, 1, 1000))
        clock.seconds, clock.share = {1: 0.2, 2: 0.15}, 0.5
        taken.append(clock.run(threads, 1, 2000))
        clock.seconds, clock.share = {1: 0.2, 2: 0.1}, 1.0
        return [*taken, clock.run(threads, 1, 1000)]

    alone_at_first, crowded, shared, alone_again = alone.submit(work).result()
    assert alone_at_first == [2] * 1000, "nothing is tried where nothing is wrong"
    assert 1 in crowded[:20]
    assert crowded[20:].count(2) < 10
    assert shared[1500:].count(2) > 480, "starved, but no worse off"
    assert alone_again[500:] == [2] * 500


def test_a_trial_costs_little_whatever_it_costs(alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads that look starved, and are worth their number."""
    clock = Clock(monkeypatch, {1: 16.0, 16: 1.0}, share=0.6)

    def work(per_token: int) -> float:
        began = clock.now
        clock.run(begin(per_token, 16), 1, 2000)
        return clock.now - began

    assert alone.submit(work, MANY_MULTIPLICATIONS).result() == 2000, "too dear to be tried at all"
    clock.seconds = {1: 0.16, 16: 0.01}
    for per_token in (MANY_MULTIPLICATIONS, MANY_MULTIPLICATIONS // 4):
        assert 20 < alone.submit(work, per_token).result() < 20 * 1.1


def test_no_way_gets_stuck_where_two_kinds_of_steps_take_turns(
    alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, {1: 0.2, 2: 2.0}, share=0.5)

    def work() -> list[int]:
        threads = begin(MANY_MULTIPLICATIONS, 2)
        assert clock.run(threads, 1, 30)[-1] == 1
        clock.share = 1.0
        taken = []
        for _ in range(1000):
            for kind in (1.0, 2.5):
                clock.seconds = {1: 0.2 * kind, 2: 0.1 * kind}
                taken += clock.run(threads, 1, 1)
        return taken

    assert alone.submit(work).result()[1000:] == [2] * 1000


def test_small_steps_are_told_from_large_ones_of_the_same_size(
    alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, {1: 1.0, 2: 0.5})

    def work() -> tuple[int, int]:
        threads = begin(6_000_000, 2)
        small, large = [], []
        for _ in range(500):
            small += clock.run(threads, 64, 1)
            large += clock.run(threads, 120, 1)
        return small.count(1), large.count(1)

    small, large = alone.submit(work).result()
    assert small > 0
    assert large == 0


def test_a_step_that_fails_tells_nothing(alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {1: 3.0, 2: 1.0})

    def work() -> list[int]:
        threads = begin(6_000_000, 2)
        while clock.run(threads, 32, 1) == [2]:
            pass
        for _ in range(3):  # in the midst of a trial, and at once
            threads.choose(32, is_streamed=False)
            threads.done(worked=False)
        return clock.run(threads, 32, 10)

    assert alone.submit(work).result()[1:] == [2] * 9


def test_one_core_is_one_thread(alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> list[int]:
        return Clock(monkeypatch, {1: 1.0}).run(begin(6_000_000, 1), 32, 3, is_streamed=True)

    assert alone.submit(work).result() == [1] * 3


def test_an_engine_thread_runs_one_thing_after_the_other_and_ends() -> None:
    thread = EngineThread()
    first = thread.start(threading.get_ident)
    failed = thread.start(lambda: 1 // 0)
    second = thread.start(threading.get_ident)
    assert first.result() == second.result() != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        failed.result()
    inside = thread.start(thread.join)  # would wait for itself
    inside.result(PATIENCE)
    thread.close()
    thread.close()
    thread.join()
    assert not thread.is_alive


def test_an_engine_thread_ends_with_a_call_that_fails_or_is_interrupted() -> None:
    thread = EngineThread()
    assert thread.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    assert not thread.is_alive

    thread = EngineThread()
    ends = threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    if threading.get_ident() != main:
        pytest.skip("only a main thread is interrupted")

    def work() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        threading.Timer(0.2, ends.set).start()
        assert ends.wait(PATIENCE)

    with pytest.raises(KeyboardInterrupt):
        thread.call(work)
    assert ends.is_set()
    assert not thread.is_alive


def test_an_engine_thread_takes_the_threads_of_its_maker(alone: ThreadPoolExecutor) -> None:
    def work() -> int:
        torch.set_num_threads(3)
        thread = EngineThread()
        torch.set_num_threads(1)  # of the process, too
        return thread.call(torch.get_num_threads)

    assert alone.submit(work).result() == 3


def test_steps_leave_the_threads_as_they_were(alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> list[int]:
        threads = begin(1_000_000, 4)
        taken = Clock(monkeypatch, {1: 1.0}).run(threads, 1, 1)
        return [*taken, torch.get_num_threads()]

    assert alone.submit(work).result() == [1, 4]


def test_a_dropped_engine_thread_ends() -> None:
    thread = EngineThread()
    runs = thread._thread
    del thread
    gc.collect()
    runs.join(PATIENCE)
    assert not runs.is_alive()
