"""How many threads a step on a CPU is worth: waking them costs more than a small step takes.

Measured on two cores of an EPYC: a decode step of a model of 6 million weights takes 2.0 ms with one thread and 4.4
with two at one row, 7.1 and 10.4 at 32 rows: once two threads have run parallel regions, a process has more OpenMP
workers than there are cores, and they sleep between regions. With 260 to 530 million multiplications both take as
long, with two billion two threads take 0.7 of the time.
"""

from __future__ import annotations

import torch

PARALLEL_MULTIPLICATIONS = 400_000_000


class StepThreads:
    """Sets torch's intra-op threads for the calling thread, step by step.

    Threads that others start while a small step runs inherit its single one; those that exist are not touched.
    """

    def __init__(self, multiplications_per_token: int) -> None:
        self._per_token = multiplications_per_token
        self._all = torch.get_num_threads()
        self._now = 0

    def choose(self, num_tokens: int) -> None:
        """One thread for a small step of num_tokens, all of torch's for others."""
        wanted = self._all if num_tokens * self._per_token >= PARALLEL_MULTIPLICATIONS else 1
        if wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted
