"""Chooses the number of threads for a step on a CPU: as many as have work, but no more than get cores.

When other processes take the cores, every OpenMP barrier waits for a core. A step of 32 rows of a model of 6
million weights on two cores of an EPYC takes 6.9 ms with two threads and 9.2 with one; beside a busy process 26 and
11; with two such engines 400 and 10. So if a process's threads ran for much less time than its steps took, it is
limited for a while to the number that ran (benchmarks/cpu_neighbours.py). Sleeping, oversubscribed workers look the
same and are as useless.

Spinning workers also take cores from streaming and its clients: with 64 HTTP streams, a token of a small model
takes a tenth longer if steps use both cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

MANY_MULTIPLICATIONS = 400_000_000  # a larger step leaves no core to readers of streams
_THREAD_MULTIPLICATIONS = 2_000_000  # of a small step, for each thread
_STARVED = 0.7  # share of its threads' time that a process ran
_LEAST_SECONDS = 0.1  # of steps to measure; a process's clock has ticks of some ms
_REST = 20  # times the starved steps' duration, until more threads are tried


class StepThreads:
    """Sets torch's intra-op threads for the calling thread at each step.

    Threads that first use torch during a small step adopt its number. Other busy threads of the process count as
    the step's and hide starvation.
    """

    def __init__(self, multiplications_per_token: int, *, is_fixed: bool = False) -> None:
        """is_fixed: always all, since torch rounds some sums by their number."""
        self._is_fixed = is_fixed
        self._per_token = multiplications_per_token
        self._all = self._most = torch.get_num_threads()
        self._rests_until = 0.0
        self._began = self._ran_before = 0.0
        self._forget()

    def _forget(self) -> None:
        self._spent = self._wanted = self._ran = 0.0  # seconds: of steps, of their threads, of those that ran

    def prepare(self, work: Callable[[int], None]) -> None:
        """Run `work`, given the tokens of the largest small step, with one thread, all, and all but one, so that
        oneDNN's allocations are not charged to a request."""
        for num_threads in sorted({1, max(1, self._all - 1), self._all}):
            torch.set_num_threads(num_threads)
            work((MANY_MULTIPLICATIONS - 1) // self._per_token)

    def choose(self, num_tokens: int, *, is_streamed: bool) -> None:
        """Set the threads for a step that begins. A streamed one leaves a core to others, unless it is large."""
        multiplications = num_tokens * self._per_token
        wanted = self._all
        if multiplications < MANY_MULTIPLICATIONS and not self._is_fixed:
            wanted = max(1, min(self._all - is_streamed, multiplications // _THREAD_MULTIPLICATIONS))
        self._began, self._ran_before = time.perf_counter(), time.process_time()
        if self._began >= self._rests_until:
            self._most = self._all
        self._num_threads = wanted if self._is_fixed else min(wanted, self._most)
        torch.set_num_threads(self._num_threads)

    @contextmanager
    def phase(self, *, is_last: bool) -> Iterator[None]:
        """A part of a step. Torch's threads are released after the last one or a failure."""
        worked = False
        try:
            yield
            worked = True
        finally:
            if is_last or not worked:
                self.done(worked=worked)

    def done(self, *, worked: bool) -> None:
        """The step has ended; `worked`: it did not fail."""
        now = time.perf_counter()
        if worked and self._num_threads > 1:
            self._spent += now - self._began
            self._wanted += self._num_threads * (now - self._began)
            self._ran += time.process_time() - self._ran_before
            if self._spent >= _LEAST_SECONDS:
                if self._ran < _STARVED * self._wanted:
                    self._most = max(1, round(self._ran / self._spent))
                    self._rests_until = now + _REST * self._spent
                self._forget()
        torch.set_num_threads(self._all)
