"""A long random run of the scheduler: admissions, chunks, decodes, aborts, retractions, flushes, timeouts.

    python -m benchmarks.scheduler_soak [--operations 1000000] [--seed 0]

Every finished request's tokens are compared with the mock model's; the page ledger is proved every 500 operations
and at the end, when every page must be free or evictable. A failure prints the setting and the seed that led there.
"""

from __future__ import annotations

import argparse
import random
import time

from sgl.runtime.scheduler.request import Phase, Request
from tests.scheduler_driver import Driver, Setting, assert_right, random_request

CHECK_EVERY = 500
EPISODE = 20_000  # operations with one setting


def random_setting(rng: random.Random) -> Setting:
    """A page size, pool, budget and policy; the pool holds one request of full length, or a few."""
    page_size = rng.choice([1, 2, 4, 16])
    least = -(-96 // page_size) + 1
    return Setting(
        page_size=page_size,
        num_pages=least + int(rng.choice([0.0, 0.2, 1.0, 4.0]) * least),
        rows=rng.choice([1, 3, 8]),
        budget=rng.choice([1, 3, 7, 16, 64, None]),
        overlap=rng.random() < 0.6,
        radix=rng.random() < 0.9,
        policy=rng.choice(["lpm", "fcfs", "priority", "dfs-weight"]),
        conservativeness=rng.choice([1.0, 0.01]),
    )


def episode(rng: random.Random, operations: int) -> tuple[int, int]:
    """Random operations under one setting, then a drain. Returns requests finished and retractions."""
    setting = random_setting(rng)
    driver = Driver(setting)
    live: list[Request] = []
    uid = 0
    for operation in range(operations):
        kind = rng.random()
        if kind < 0.12 and len(live) < 24:
            live.append(random_request(uid, rng.getrandbits(31), setting.context))
            driver.scheduler.add(live[-1])
            uid += 1
        elif kind < 0.14 and live:
            driver.abort(rng.choice(live))
        elif kind < 0.141:
            driver.scheduler.memory.cache.reset()
        else:
            driver.step()
        if operation % CHECK_EVERY == 0:
            driver.check()
        for request in live:
            finish = request.finish_reason
            if finish is not None and finish.type != "abort":
                assert_right(request)
        live = [request for request in live if request.phase is not Phase.DONE]
    driver.run()
    driver.check()
    assert driver.scheduler.memory.cache.locked_pages == 0, f"pages stay locked under {setting}"
    driver.scheduler.memory.cache.reset()
    assert driver.pool.num_free == setting.num_pages - 1, f"pages are lost under {setting}"
    return driver.scheduler.counters.finished, driver.scheduler.counters.retractions


def main() -> None:
    """Run episodes until the operations are used up, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    done = finished = retractions = 0
    number = 0
    while done < args.operations:
        size = min(EPISODE, args.operations - done)
        seed = args.seed * 1_000_003 + number
        try:
            more_finished, more_retractions = episode(random.Random(seed), size)
        except BaseException:
            print(f"failed in the episode with random.Random({seed})")
            raise
        done, number = done + size, number + 1
        finished, retractions = finished + more_finished, retractions + more_retractions
        print(f"{done:>9} operations clean: {finished} requests finished, {retractions} retractions", flush=True)
    print(f"clean after {done} operations in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
