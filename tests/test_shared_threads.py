"""Threads that read images: nobody's slow images keep all of them."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

import pytest

from sgl.runtime.requests.images import SharedThreads
from tests.patience import PATIENCE, wait_until


def test_one_caller_leaves_a_thread_to_others() -> None:
    threads = SharedThreads(3, "test")
    gate = threading.Event()
    slow = [threads.of("slow").submit(gate.wait, PATIENCE) for _ in range(100)]
    try:
        wait_until(lambda: sum(future.running() for future in slow) == 2)
        assert threads.of("other").submit(lambda: 7).result(PATIENCE) == 7
        assert sum(future.running() for future in slow) == 2
    finally:
        gate.set()
    assert all(future.result(PATIENCE) for future in slow)


def test_callers_take_turns() -> None:
    threads = SharedThreads(2, "test")
    gate, never, order = threading.Event(), threading.Event(), list[str]()
    held = threads.of("first").submit(never.wait, PATIENCE)  # two threads would note their turns in any order
    futures: list[Future[object]] = [threads.of("second").submit(gate.wait, PATIENCE)]
    futures += [threads.of(name).submit(order.append, name) for name in ("many",) * 50 + ("few",) * 5]
    gate.set()
    assert not wait(futures, PATIENCE).not_done
    never.set()
    assert held.result(PATIENCE)
    assert order == ["many", "few"] * 5 + ["many"] * 45


def test_errors_and_cancelled_work_free_their_thread() -> None:
    threads = SharedThreads(2, "test")
    gate = threading.Event()
    running = threads.of("one").submit(gate.wait, PATIENCE)
    cancelled = threads.of("one").submit(gate.wait, PATIENCE)
    assert cancelled.cancel()
    gate.set()
    assert running.result(PATIENCE)
    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            threads.of("one").submit(lambda: 1 // 0).result(PATIENCE)
    assert threads.of("one").submit(lambda: 3).result(PATIENCE) == 3
