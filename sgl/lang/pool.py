"""Runs program bodies on as few threads as will do: another one starts only when all others wait for a value.

Bodies that only record therefore all run on one thread. It knows jobs, not programs; `sgl.lang.batch` and `arun` of
`def` programs call it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

from sgl.lang.aio import when_blocking


class BodyPool:
    """A queue of jobs and at most `max_threads` threads, of which at most one is meant to be busy."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._jobs: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_busy = 0

    def submit(self, job: Callable[[], object]) -> None:
        """Run the job on a thread of the pool. It must not raise."""
        self._jobs.append(job)
        self._start_if_idle()

    def work(self, jobs: list[Callable[[], object]]) -> None:
        """Run jobs with the calling thread as the first of the pool. On return all have been started, and those
        that other threads took may still be running."""
        self._jobs.extend(jobs)
        with self._lock:
            self._num_threads += 1
            self._num_busy += 1
        self._work()

    def _start_if_idle(self) -> None:
        with self._lock:
            if not self._jobs or self._num_busy or self._num_threads >= self._max_threads:
                return
            self._num_threads += 1
            self._num_busy += 1
        threading.Thread(target=self._work, name="sgl-body", daemon=True).start()

    def _work(self) -> None:
        with when_blocking(self._blocked):
            while True:
                with self._lock:  # leaving and finding no job are one step, so that no job is left behind
                    if not self._jobs:
                        self._num_threads -= 1
                        self._num_busy -= 1
                        return
                    job = self._jobs.popleft()
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
