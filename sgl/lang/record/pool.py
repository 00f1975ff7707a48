"""Runs program bodies on few threads: another starts only when all wait for values, or one is busy for a while. Bodies
that only record share one thread; bodies that call other services overlap."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from sgl.lang.aio import io, outcome, when_blocking

T = TypeVar("T")
STUCK_S = 0.1  # without progress for this long, more threads start


def on_own_thread(work: Callable[..., T], *args: Any) -> Future[T]:
    """Run work on its own thread in the caller's context. The future cannot be cancelled."""
    job, future = _job(work, args)
    threading.Thread(target=job, name="sgl-body", daemon=True).start()
    return future


def _job(work: Callable[..., T], args: tuple[Any, ...]) -> tuple[Callable[[], None], Future[T]]:
    """A call that never raises, and the future of its result."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def job() -> None:
        try:
            future.set_result(context.run(outcome, work, *args))
        except BaseException as error:  # the future raises it
            future.set_exception(error)

    return job, future


class BodyPool:
    """A job queue with at most `max_threads` threads, of which one should be busy."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self.reset()

    def reset(self) -> None:
        """Start over without jobs and threads, as in a forked child."""
        self._jobs: deque[Callable[[], object]] = deque()  # none raises
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_busy = 0
        self._num_taken = 0
        self._is_watched = False

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run work on the pool in the caller's context. The future cannot be cancelled."""
        job, future = _job(work, args)
        self._jobs.append(job)
        self._start_if_idle()
        self._watch_if_waiting()
        return future

    def work(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Run jobs, this thread first. On return all have started; other threads may still run some."""
        self._jobs.extend(jobs)
        with self._lock:
            self._num_threads += 1
            self._num_busy += 1
        self._watch_if_waiting()
        self._work()

    def _start_if_idle(self) -> None:
        with self._lock:
            if not self._jobs or self._num_busy or self._num_threads >= self._max_threads:
                return
            self._count(1)
        self._start(1)

    def _count(self, num_threads: int) -> None:
        self._num_threads += num_threads
        self._num_busy += num_threads

    def _start(self, num_threads: int) -> None:
        for _ in range(num_threads):
            threading.Thread(target=self._work, name="sgl-body", daemon=True).start()

    def _work(self) -> None:
        with when_blocking(self._blocked):
            while True:
                with self._lock:  # atomic, so that no job is left behind
                    if not self._jobs:
                        self._count(-1)
                        return
                    job = self._jobs.popleft()
                    self._num_taken += 1
                job()

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        with self._lock:
            self._num_busy -= 1
        self._start_if_idle()
        try:
            yield
        finally:
            with self._lock:
                self._num_busy += 1

    def _watch_if_waiting(self) -> None:
        with self._lock:
            if not self._jobs or self._is_watched:
                return
            self._is_watched = True
        io.post(self._watch)

    def _watch(self) -> None:
        io.loop().call_later(STUCK_S, self._look, self._num_taken)

    def _look(self, num_taken: int) -> None:
        """On the io thread: double the threads if no job was taken since the last look."""
        with self._lock:
            self._is_watched = bool(self._jobs)
            is_stuck = self._num_taken == num_taken
            num_more = (
                min(self._num_threads, self._max_threads - self._num_threads, len(self._jobs)) if is_stuck else 0
            )
            self._count(num_more)
        self._start(num_more)
        if self._is_watched:
            self._watch()
