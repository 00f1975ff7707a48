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
    assert taken == [expected] * 20


def test_what_onednn_keeps_is_prepared_either_way(alone: ThreadPoolExecutor) -> None:
    def work() -> tuple[list[tuple[int, int]], int]:
        prepared: list[tuple[int, int]] = []
        begin(6_000_000, 4).prepare(lambda num_tokens: prepared.append((torch.get_num_threads(), num_tokens)))
        return prepared, torch.get_num_threads()

    assert alone.submit(work).result() == ([(1, 66), (3, 66), (4, 66)], 4)


@pytest.mark.parametrize("per_token", [6_000_000, MANY_MULTIPLICATIONS])
def test_starved_steps_take_as_many_threads_as_run(
    alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, per_token: int
) -> None:
    """Other processes want the processors for a while."""
    clock = Clock(monkeypatch, {1: 0.016, 2: 0.008, 3: 0.007, 4: 0.004})

    def work() -> list[list[int]]:
        threads = begin(per_token, 4)
        taken = [clock.run(threads, 32, 1000)]
        clock.seconds, clock.share = {1: 0.02, 2: 0.02, 4: 0.1}, 0.5
        taken.append(clock.run(threads, 32, 500))
        clock.seconds, clock.share = {1: 0.016, 2: 0.008, 4: 0.004}, 1.0
        return [*taken, clock.run(threads, 32, 1000)]

    alone_at_first, crowded, alone_again = alone.submit(work).result()
    assert alone_at_first == [4] * 1000
    assert [crowded.count(each) > 0 for each in (4, 3, 2, 1)] == [True, False, True, True]
    assert crowded.index(2) <= 4, "after some tenths of a second"
    assert 0 < crowded[10:].count(4) < 25, "tried now and then"
    assert alone_again[-500:] == [4] * 500


def test_threads_that_run_nearly_all_the_time_are_not_starved(
    alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, {16: 0.01}, share=0.75)
    assert alone.submit(lambda: clock.run(begin(6_000_000, 16), 32, 500)).result() == [16] * 500


def test_a_step_that_fails_tells_nothing(alone: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {1: 3.0, 2: 0.01})

    def work() -> list[int]:
        threads = begin(6_000_000, 2)
        for _ in range(30):
            threads.choose(32, is_streamed=False)
            clock.now += 1.0  # and nothing ran
            threads.done(worked=False)
        return clock.run(threads, 32, 10)

    assert alone.submit(work).result() == [2] * 10


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


@pytest.mark.slow
def test_a_dropped_engine_thread_ends() -> None:
    thread = EngineThread()
    runs = thread._thread
    del thread
    gc.collect()
    runs.join(PATIENCE)
    assert not runs.is_alive()
