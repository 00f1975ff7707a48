"""How many threads a step on a CPU is worth: each has to have enough to do for waking it to pay.

Waking OpenMP's workers takes a microsecond while they spin, and tens of them once they sleep, as they do at once where
a process has more of them than there are cores (another thread of it has run parallel regions too), or where other
processes want the cores. So it is measured from time to time. On two cores of an EPYC, with two threads instead of
one: of a model of 6 million weights a step of 32 rows takes 6.9 instead of 9.2 ms, and one of a single row 2.1 instead
of 2.5; with workers that sleep, 10.4 and 3.5 ms. From 400 million multiplications on more threads gain even then.

Workers that spin take their cores from others. A process that streams what it is given, and whoever reads the stream,
want one of them: with 64 streams over HTTP a token of a small model takes a tenth longer if a step takes both cores.
"""

from __future__ import annotations

import time

import torch

MANY_MULTIPLICATIONS = 400_000_000
_THREAD_MULTIPLICATIONS = 2_000_000  # of a small step that are worth a thread
_SLOW_SECONDS = 10e-6  # that a parallel region takes longer than its share of the work
_MEASURED_FOR = 1.0  # seconds
_REGIONS = 8
_GRAIN = 1 << 15  # numbers that torch gives to one thread


class StepThreads:
    """Sets torch's intra-op threads for the calling thread, step by step.

    Threads that others start while a small step runs inherit its number; those that exist are not touched.
    """

    def __init__(self, multiplications_per_token: int) -> None:
        self._per_token = multiplications_per_token
        self._all = torch.get_num_threads()
        self._now = 0
        self._numbers = torch.zeros(self._all * _GRAIN)
        self._wakes_fast, self._measured = False, -_MEASURED_FOR

    def choose(self, num_tokens: int, *, is_streamed: bool) -> None:
        """As many as a step of num_tokens is worth; but for large ones, a streamed one leaves a core to others."""
        multiplications = num_tokens * self._per_token
        wanted = self._all
        if multiplications < MANY_MULTIPLICATIONS:
            wanted = max(1, min(self._all - is_streamed, multiplications // _THREAD_MULTIPLICATIONS))
            if wanted > 1 and not self._workers_wake_fast():
                wanted = 1
        self._set(wanted)

    def _workers_wake_fast(self) -> bool:
        now = time.monotonic()
        if now - self._measured >= _MEASURED_FOR:
            alone, together = self._seconds(1), self._seconds(self._all)
            self._wakes_fast = together - alone / self._all < _SLOW_SECONDS
            self._measured = now
        return self._wakes_fast

    def _seconds(self, num_threads: int) -> float:
        """Of a parallel region, or of the same work in one thread."""
        self._set(num_threads)
        self._numbers.add_(1.0)  # the first one wakes workers that nothing has kept awake
        start = time.perf_counter()
        for _ in range(_REGIONS):
            self._numbers.add_(1.0)
        return (time.perf_counter() - start) / _REGIONS

    def _set(self, num_threads: int) -> None:
        if num_threads != self._now:
            torch.set_num_threads(num_threads)
            self._now = num_threads
