"""How many threads a step takes, and the thread that an engine does its work in."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sgl.runtime.runner.threads import MANY_MULTIPLICATIONS, StepThreads
from sgl.runtime.thread import EngineThread


@pytest.fixture
def alone() -> Iterator[ThreadPoolExecutor]:
    """A thread whose number of torch's threads is its own: others of this process keep theirs."""
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as thread:
        yield thread
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("per_token", "num_tokens", "is_streamed", "wakes_fast", "expected"),
    [
        (1_000_000, 1, False, True, 1),
        (6_000_000, 1, False, True, 3),
        (6_000_000, 1, False, False, 1),
        (6_000_000, 32, False, True, 4),
        (6_000_000, 32, True, True, 3),
        (6_000_000, 32, True, False, 1),
        (MANY_MULTIPLICATIONS, 1, False, False, 4),
        (MANY_MULTIPLICATIONS, 1, True, False, 4),
    ],
)
def test_a_step_takes_as_many_threads_as_it_is_worth(
    alone: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    per_token: int,
    num_tokens: int,
    is_streamed: bool,
    wakes_fast: bool,
    expected: int,
) -> None:
    seconds = {1: 8e-6, 4: 3e-6 if wakes_fast else 40e-6}
    measured: list[int] = []

    def measure(self: StepThreads, num_threads: int) -> float:
        measured.append(num_threads)
        self._set(num_threads)
        return seconds[num_threads]

    monkeypatch.setattr(StepThreads, "_seconds", measure)

    def work() -> list[int]:
        torch.set_num_threads(4)
        threads = StepThreads(per_token)
        taken = []
        for _ in range(3):
            threads.choose(num_tokens, is_streamed=is_streamed)
            taken.append(torch.get_num_threads())
        return taken

    assert alone.submit(work).result() == [expected] * 3
    assert measured in ([], [1, 4]), "it is measured once a second at most"


def test_one_core_is_one_thread(alone: ThreadPoolExecutor) -> None:
    def work() -> int:
        torch.set_num_threads(1)
        threads = StepThreads(6_000_000)
        threads.choose(32, is_streamed=True)
        return torch.get_num_threads()

    assert alone.submit(work).result() == 1


def test_measuring_runs_parallel_regions(alone: ThreadPoolExecutor) -> None:
    def work() -> tuple[float, float, bool]:
        torch.set_num_threads(2)
        threads = StepThreads(6_000_000)
        return threads._seconds(1), threads._seconds(2), threads._workers_wake_fast() in (True, False)

    assert all(alone.submit(work).result())


def test_an_engine_thread_runs_one_thing_after_the_other_and_ends() -> None:
    thread = EngineThread()
    first = thread.start(threading.get_ident)
    failed = thread.start(lambda: 1 // 0)
    second = thread.start(threading.get_ident)
    assert first.result() == second.result() != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        failed.result()
    inside = thread.start(thread.join)  # would wait for itself
    inside.result(10)
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
        assert ends.wait(10)

    with pytest.raises(KeyboardInterrupt):
        thread.call(work)
    assert ends.is_set()
    assert not thread.is_alive


def test_a_dropped_engine_thread_ends() -> None:
    thread = EngineThread()
    runs = thread._thread
    del thread
    gc.collect()
    runs.join(10)
    assert not runs.is_alive()
