"""What waiting requests cost the engine's thread: µs a request for each policy and number of them, and the ratios.

    python -m benchmarks.waiting_queue [--sizes 1000 10000 100000] [--policies lpm fcfs priority dfs-weight]

Half of the prompts share a beginning of 64 tokens, the others nothing. Columns: `add` to the queue; `pick`, a round in
which all rows are taken but one and the next request is chosen, in µs a round and beside it nothing; `drain`, the whole
way through admission, one step and the end; `cancel`, in random order; `expire`, where all are late at once. The bar:
10 µs a request for each of add, cancel and expire, and a pick that does not grow with what waits.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from contextlib import closing
from typing import get_args

import numpy as np

from sgl.runtime.batch import StepResult
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.config import SchedulePolicy
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.request import FinishReason, Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Limits

ROWS, PAGE, SHARED, OWN = 128, 16, 64, 32  # tokens
PICKS = 200
PARAMS = SamplingParams(max_new_tokens=1)


def make_scheduler(policy: SchedulePolicy, clock: Callable[[], float] = time.monotonic) -> Scheduler:
    """With room for all rows and much of the cache."""
    limits = Limits(ROWS, 256, 1 << 20, schedule_policy=policy)
    return Scheduler(limits, PagePool(1 << 13, PAGE), clock=clock)


def make_requests(number: int, **fields: object) -> list[Request]:
    """Every second one begins like the others of its kind."""
    rng = np.random.default_rng(0)
    own = rng.integers(1000, 30_000, (number, SHARED + OWN), dtype=np.int32)
    own[::2, :SHARED] = np.arange(SHARED)
    return [
        Request(uid, ids, PARAMS, seed=0, max_new_tokens=1, priority=uid % 7, **fields)  # type: ignore[arg-type]
        for uid, ids in enumerate(own)
    ]


def step(scheduler: Scheduler) -> int:
    """Launch what is scheduled, let each row have its token, and end those that have; returns how many ended."""
    batch = scheduler.schedule()
    if batch is None:
        return 0
    scheduler.after_launch(batch)
    tokens = np.zeros(len(batch.requests), np.int32)
    ended = 0
    for group in scheduler.handle(batch, StepResult(tokens, {})):
        for request in group:
            scheduler.finish(request, FinishReason("length"))
            ended += 1
    return ended


def measure(policy: SchedulePolicy, number: int) -> dict[str, float]:
    """µs a request, and for `pick` a round."""
    results: dict[str, float] = {}

    def timed(name: str, count: int, work: Callable[[], object]) -> None:
        gc.collect()
        began = time.thread_time()
        work()
        results[name] = 1e6 * (time.thread_time() - began) / count

    scheduler = make_scheduler(policy)
    requests = make_requests(number)
    for first in requests[:2]:  # so that something is cached
        scheduler.add(first)
        step(scheduler)
    requests = make_requests(number)
    timed("add", number, lambda: [scheduler.add(request) for request in requests])

    def pick() -> None:
        for _ in range(PICKS):
            with closing(scheduler.queue.candidates()) as candidates:
                assert next(candidates) is not None

    timed("pick", PICKS, pick)
    random.Random(0).shuffle(requests)
    late = FinishReason("abort")
    timed("cancel", number, lambda: [scheduler.finish(request, late) for request in requests])
    assert not scheduler.has_work

    for request in (requests := make_requests(number)):
        scheduler.add(request)

    def drain() -> None:
        while scheduler.has_work:
            step(scheduler)

    timed("drain", number, drain)
    assert scheduler.memory.check() == []

    now = 0.0
    scheduler = make_scheduler(policy, lambda: now)
    for request in make_requests(number, queue_deadline=1.0):
        scheduler.add(request)
    now = 2.0

    def expire() -> None:
        while expired := scheduler.expire():
            for request in expired:
                scheduler.finish(request, late)

    timed("expire", number, expire)
    assert not scheduler.has_work
    return results


def main() -> None:
    """Print a line for each policy and size, and how much the largest costs more than the smallest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--policies", nargs="+", default=get_args(SchedulePolicy), choices=get_args(SchedulePolicy))
    args = parser.parse_args()
    for policy in args.policies:
        rows = [measure(policy, size) for size in args.sizes]
        print(f"{policy:<12}" + "".join(f"{name:>9}" for name in rows[0]) + "   µs")
        for size, row in zip(args.sizes, rows, strict=True):
            print(f"{size:>10}  " + "".join(f"{value:9.2f}" for value in row.values()))
        ratios = [last / first for first, last in zip(rows[0].values(), rows[-1].values(), strict=True)]
        print(f"{'ratio':>10}  " + "".join(f"{ratio:9.2f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
