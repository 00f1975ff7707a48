"""How many threads a step on a CPU is worth: as many as have enough to do, but no more than get processors.

Where other processes want the cores, whoever waits for an OpenMP worker waits until that has a core again. On two cores
of an EPYC a step of 32 rows of a model of 6 million weights takes 6.9 ms with two threads and 9.2 with one; beside a
process that keeps a core busy 26, and 11 with one; of two such engines each 400, since every barrier waits for the
scheduler's next tick, and 10 with one. So a process whose threads ran for much less time than its steps took leaves it
at as many as did run, for a while (benchmarks/cpu_neighbours.py). Workers that sleep, as they do where a process has
more of them than there are cores, look the same, and are worth as little.

Workers that spin take their cores from others. A process that streams what it is given, and whoever reads the stream,
want one of them: with 64 streams over HTTP a token of a small model takes a tenth longer if a step takes both cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

MANY_MULTIPLICATIONS = 400_000_000  # of a step that leaves no core to those who read a stream
_THREAD_MULTIPLICATIONS = 2_000_000  # of a small step that are worth a thread
_STARVED = 0.7  # of the time of its threads that a process ran for
_LEAST_SECONDS = 0.1  # of steps, to tell that from: the clock of a process goes by ticks of some ms
_REST = 20  # times what starved steps took, before more threads are tried again


class StepThreads:
    """Sets torch's intra-op threads for the calling thread, step by step.

    Threads whose first use of torch falls into a small step take its number; others keep theirs. Other busy threads of
    the process pass for its steps': beside them no step seems starved.
    """

    def __init__(self, multiplications_per_token: int) -> None:
        self._per_token = multiplications_per_token
        self._all = self._most = torch.get_num_threads()
        self._rests_until = 0.0
        self._began = self._ran_before = 0.0
        self._forget()

    def _forget(self) -> None:
        self._spent = self._wanted = self._ran = 0.0  # seconds: of steps, of their threads, of those that did run

    def prepare(self, work: Callable[[int], None]) -> None:
        """Do work, which is given the tokens of the largest small step, with one thread, with all and with all but one.
        What oneDNN keeps for each would else come with some request, and count as its time. Numbers between, of few
        tokens on many cores, come as they are met."""
        for num_threads in sorted({1, max(1, self._all - 1), self._all}):
            torch.set_num_threads(num_threads)
            work((MANY_MULTIPLICATIONS - 1) // self._per_token)

    def choose(self, num_tokens: int, *, is_streamed: bool) -> None:
        """As many as a step of num_tokens is worth, which begins; but for large ones, a streamed one leaves a core to
        others."""
        multiplications = num_tokens * self._per_token
        wanted = self._all
        if multiplications < MANY_MULTIPLICATIONS:
            wanted = max(1, min(self._all - is_streamed, multiplications // _THREAD_MULTIPLICATIONS))
        self._began, self._ran_before = time.perf_counter(), time.process_time()
        if self._began >= self._rests_until:
            self._most = self._all
        self._num_threads = min(wanted, self._most)
        torch.set_num_threads(self._num_threads)

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
