"""How many threads a step on a CPU is worth: as many as have enough to do, where waking them pays, which is tried.

Waking OpenMP's workers takes a microsecond while they spin, and tens of them once they sleep, as they do at once where
a process has more of them than there are cores (another thread of it has run parallel regions too). Where other
processes want the cores, whoever waits for a worker waits until that has one again. On two cores of an EPYC a step of
32 rows of a model of 6 million weights takes 6.9 ms with two threads and 9.2 with one; with workers that sleep 10.4;
beside a process that keeps a core busy 26, and 11 with one; of two such engines each 400, since every barrier waits for
the scheduler's next tick, and 10 with one. So small steps are timed either way, now and then, and large ones when the
process did not get the processors' time that its threads asked for (benchmarks/cpu_neighbours.py).

Workers that spin take their cores from others. A process that streams what it is given, and whoever reads the stream,
want one of them: with 64 streams over HTTP a token of a small model takes a tenth longer if a step takes both cores.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

MANY_MULTIPLICATIONS = 400_000_000  # of a step to which more threads are a gain even if they sleep
_THREAD_MULTIPLICATIONS = 2_000_000  # of a small step that are worth a thread
_FEWEST, _RECENT = 3, 31  # small steps that the other way is held against, and the latest of more; one large one
_SOON, _LATE = 16, 64  # times what a trial took, before the next: twice as many each time it was for nothing
_GAIN = 0.95  # of the time, for which the way is changed
_STARVED = 0.7  # of the time of its threads that a process ran for
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 1.0  # to tell that from: the clock of a process goes by ticks of some ms
_DEAREST = 5.0  # seconds that one thread may need for a large step that it is tried with


class StepThreads:
    """Sets torch's intra-op threads for the calling thread, step by step.

    Threads whose first use of torch falls into a small step take its number; others keep theirs. Other busy threads of
    the process pass for its steps': beside them no large step seems starved.
    """

    def __init__(self, multiplications_per_token: int) -> None:
        self._per_token = multiplications_per_token
        self._all = torch.get_num_threads()
        self._trials: dict[tuple[int, bool, int], _Trial] = {}  # by threads, whether large, and size of small ones
        self._trial: _Trial | None = None  # of the step under way
        self._num_tokens = 0
        self._began = self._ran_before = 0.0

    def prepare(self, work: Callable[[int], None]) -> None:
        """Do work, which is given the tokens of the largest small step, with one thread, with all and with all but one.
        What oneDNN keeps for each would else come trial by trial, for many thousands of requests, and count as their
        time. Numbers between, of few tokens on many cores, come as they are met."""
        for num_threads in sorted({1, max(1, self._all - 1), self._all}):
            torch.set_num_threads(num_threads)
            work((MANY_MULTIPLICATIONS - 1) // self._per_token)

    def choose(self, num_tokens: int, *, is_streamed: bool) -> None:
        """As many as a step of num_tokens is worth, which begins; but for large ones, a streamed one leaves a core to
        others."""
        multiplications = num_tokens * self._per_token
        wanted, is_large = self._all, multiplications >= MANY_MULTIPLICATIONS
        if not is_large:
            wanted = max(1, min(self._all - is_streamed, multiplications // _THREAD_MULTIPLICATIONS))
        self._trial = None
        if wanted > 1:
            size = wanted, is_large, 0 if is_large else num_tokens.bit_length()
            if size not in self._trials:
                self._trials[size] = _Trial(wanted, is_large=is_large)
            self._trial = self._trials[size]
            wanted = wanted if self._trial.takes_many else 1
        torch.set_num_threads(wanted)
        self._num_tokens = num_tokens
        self._began, self._ran_before = time.perf_counter(), time.process_time()

    def done(self, *, worked: bool) -> None:
        """The step has ended; `worked`: it did not fail."""
        if self._trial is not None and worked:
            seconds, ran = time.perf_counter() - self._began, time.process_time() - self._ran_before
            self._trial.took(seconds, ran, self._num_tokens)
        torch.set_num_threads(self._all)


class _Trial:
    """Which of two ways, many threads or one, steps of a size take less time. The other way is tried now and then, but
    by large steps, to which it may be a loss of as many times as there are threads, only once they are starved."""

    def __init__(self, num_threads: int, *, is_large: bool) -> None:
        self._num_threads = num_threads
        self._is_large = is_large
        self._keeps_many = True
        self._tries_left = 0
        self._tried = 0.0  # seconds
        self._factor = _SOON
        self._wait = 0.0  # seconds of steps before the next trial
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds a token
        self._begin()

    def _begin(self) -> None:
        self._is_first = True
        self._num_steps = 0
        self._spent = self._ran = 0.0
        self._recent.clear()

    @property
    def takes_many(self) -> bool:
        """Of the next step."""
        return self._keeps_many ^ (self._tries_left > 0)

    def took(self, seconds: float, ran: float, num_tokens: int) -> None:
        """Note how long that step took, and how long all threads of the process ran for meanwhile."""
        if self._tries_left:
            self._tries_left -= 1
            self._tried += seconds
            if not self._tries_left:
                self._decide(seconds / num_tokens)
            return
        if self._is_first:  # workers wake, or go, and what was never used is loaded
            self._is_first = False
            return
        self._num_steps += 1
        self._spent += seconds
        self._ran += ran
        self._recent.append(seconds / num_tokens)
        if len(self._recent) < (1 if self._is_large else _FEWEST) or self._spent < self._wait:
            return
        if not self._keeps_many or not self._is_large or self._is_starved():
            self._tries_left, self._tried = 1 if self._is_large else 2, 0.0
        elif self._spent > _MOST_SECONDS:
            self._begin()

    def _decide(self, seconds: float) -> None:
        # Large steps may be of kinds that take turns; among small ones one may be late.
        usual = statistics.fmean(self._recent) if self._is_large else statistics.median(self._recent)
        is_better = seconds < _GAIN * usual
        self._keeps_many ^= is_better
        self._factor = _SOON if is_better else min(2 * self._factor, _LATE)
        self._wait = self._factor * self._tried
        self._begin()

    def _is_starved(self) -> bool:
        if self._spent < _LEAST_SECONDS or self._ran > _DEAREST * self._num_steps:
            return False
        return self._ran < _STARVED * self._num_threads * self._spent
