"""Threads that read images: nobody's slow images keep all of them."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from itertools import pairwise

import pytest

from sgl.runtime.requests.images import SharedThreads

LIMIT = 20.0


def test_one_caller_leaves_a_thread_to_others() -> None:
    threads = SharedThreads(3, "test")
    gate = threading.Event()
    slow = [threads.of("slow").submit(gate.wait, LIMIT) for _ in range(100)]
    try:
        assert threads.of("other").submit(lambda: 7).result(LIMIT) == 7
        assert sum(future.running() for future in slow) == 2
    finally:
        gate.set()
    assert all(future.result(LIMIT) for future in slow)


def test_callers_take_turns() -> None:
    threads = SharedThreads(2, "test")
    gate, order = threading.Event(), list[str]()
    futures: list[Future[object]] = [threads.of("first").submit(gate.wait, LIMIT)]
    futures += [threads.of("second").submit(gate.wait, LIMIT)]
    futures += [threads.of(name).submit(order.append, name) for name in ("many",) * 50 + ("few",) * 5]
    gate.set()
    assert not wait(futures, LIMIT).not_done
    last = max(place for place, name in enumerate(order) if name == "few")
    assert last <= 12, order  # beside as many of the other's, give or take what two threads reorder
    assert any(one != other for one, other in pairwise(order[:4]))


def test_errors_and_cancelled_work_free_their_thread() -> None:
    threads = SharedThreads(2, "test")
    gate = threading.Event()
    running = threads.of("one").submit(gate.wait, LIMIT)
    cancelled = threads.of("one").submit(gate.wait, LIMIT)
    assert cancelled.cancel()
    gate.set()
    assert running.result(LIMIT)
    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            threads.of("one").submit(lambda: 1 // 0).result(LIMIT)
    assert threads.of("one").submit(lambda: 3).result(LIMIT) == 3
