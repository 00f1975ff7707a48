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

import math
import statistics
import time
from collections import deque

import torch

MANY_MULTIPLICATIONS = 400_000_000  # of a step to which more threads are a gain even if they sleep
_THREAD_MULTIPLICATIONS = 2_000_000  # of a small step that are worth a thread
_PERIOD = 64  # steps of a size, the first two of which go the other way
_KEPT = 3  # timings either way, of which the median counts
_GAIN = 0.95  # of the time, for which the way is changed
_SHORT_CALM, _LONG_CALM = 4, 64  # large steps of a size between two doubts: twice as many each time they were idle
_STARVED = 0.7  # of the time of its threads, that a step ran for


class StepThreads:
    """Sets torch's intra-op threads for the calling thread, step by step.

    Threads whose first use of torch falls into a small step take its number; others keep theirs.
    """

    def __init__(self, multiplications_per_token: int) -> None:
        self._per_token = multiplications_per_token
        self._all = torch.get_num_threads()
        self._trials: dict[tuple[int, int], _Trial | _Doubt] = {}  # by threads and size
        self._trial: _Trial | _Doubt | None = None  # of the step under way
        self._num_tokens = 0
        self._began = self._ran_before = 0.0

    def choose(self, num_tokens: int, *, is_streamed: bool) -> None:
        """As many as a step of num_tokens is worth, which begins; but for large ones, a streamed one leaves a core to
        others."""
        multiplications = num_tokens * self._per_token
        wanted, is_large = self._all, multiplications >= MANY_MULTIPLICATIONS
        if not is_large:
            wanted = max(1, min(self._all - is_streamed, multiplications // _THREAD_MULTIPLICATIONS))
        self._trial = None
        if wanted > 1:
            size = wanted, num_tokens.bit_length()
            self._trial = self._trials.get(size) or (_Doubt() if is_large else _Trial())
            self._trials[size] = self._trial
            wanted = wanted if self._trial.next_takes_many() else 1
        torch.set_num_threads(wanted)
        self._num_tokens = num_tokens
        self._began, self._ran_before = time.perf_counter(), time.process_time()

    def done(self) -> None:
        """The step has ended."""
        if self._trial is not None:
            seconds, ran = time.perf_counter() - self._began, time.process_time() - self._ran_before
            self._trial.took(seconds / self._num_tokens, ran / (seconds * torch.get_num_threads()))
        torch.set_num_threads(self._all)


class _Trial:
    """Which of two ways, many threads or one, steps of a size take less time."""

    def __init__(self) -> None:
        self._takes_many = True
        self._number = _PERIOD - 4  # of the step in its period
        self._seconds: dict[bool, deque[float]] = {way: deque(maxlen=_KEPT) for way in (True, False)}

    def next_takes_many(self) -> bool:
        """Of the next step."""
        self._number = (self._number + 1) % _PERIOD
        return self._takes_many ^ (self._number < 2)

    def took(self, seconds: float, share: float) -> None:
        """Note the time a token of that step: of the last of a period, and of the second that goes the other way, when
        workers have woken, or gone. The first period is short: it may be that nothing runs well."""
        if self._number == _PERIOD - 1:
            self._seconds[self._takes_many].append(seconds)
        elif self._number == 1:
            self._seconds[not self._takes_many].append(seconds)
            ours, others = (self._seconds[way] for way in (self._takes_many, not self._takes_many))
            if ours and statistics.median(others) < _GAIN * statistics.median(ours):
                self._takes_many = not self._takes_many


class _Doubt:
    """The same for large steps, which lose more by going the other way: they do so once a step with many threads was
    starved of processors, and where one thread is kept, now and then."""

    def __init__(self) -> None:
        self._takes_many = True
        self._tries_other = False
        self._calm = 0  # steps before the next doubt
        self._next_calm = _SHORT_CALM
        self._last = {True: math.inf, False: math.inf}  # by way

    def next_takes_many(self) -> bool:
        """Of the next step."""
        return self._takes_many ^ self._tries_other

    def took(self, seconds: float, share: float) -> None:
        """Note the time a token of that step, and for which share of its threads' time the process ran."""
        self._last[self.next_takes_many()] = seconds
        if self._tries_other:
            is_better = self._last[not self._takes_many] < self._last[self._takes_many]
            self._takes_many ^= is_better
            self._next_calm = _SHORT_CALM if is_better else min(2 * self._next_calm, _LONG_CALM)
            self._tries_other, self._calm = False, self._next_calm
        elif self._calm:
            self._calm -= 1
        else:
            self._tries_other = not self._takes_many or share < _STARVED
