"""A long random run of the scheduler over device, host memory and files, with restarts.

    python -m benchmarks.tiers_soak [--operations 1000000] [--seed 0]

The mock model's tokens hash the KV that they read: a page that was copied to or from the wrong place, too early or
too late, is a wrong token; there are up to three ranks, whose copies end when they like. Beside admissions, aborts,
flushes and new weights there are leases that are taken, shared, expire and finish, prefetches, copies of everything,
reads of files that come too late, and engines that begin again with the files of the one before, some of which are
damaged. The ledgers of device and host pages are proved every 200 operations and at the end, when every page must be
free or evictable. A failure prints the seed that led there.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from pathlib import Path
from typing import Literal

from benchmarks.scheduler_soak import random_setting
from sgl.runtime.cache.files import Item, PageFiles
from sgl.runtime.cache.windows import pages_in_window
from sgl.runtime.scheduler.counters import TierCounters
from sgl.runtime.scheduler.leases import Lease
from sgl.runtime.scheduler.request import Phase, Request
from tests.mock_runner import Mixed
from tests.scheduler_driver import Driver, Setting, assert_right, random_request

CHECK_EVERY = 200
EPISODE = 10_000  # operations with one setting
_RESTARTS = 4  # of an episode
_LATER = 500.0  # seconds, after which whatever is still read is late


Beside = Literal["states", "windows"]
"""What a model has besides pages of all layers: recurrent states, or layers with windows, whose pages are apart."""


def tiered_setting(rng: random.Random, folder: Path, beside: Beside | None = None) -> Setting:
    """Host memory that is smaller or larger than the device's, copies that end sooner or later."""
    setting = random_setting(rng)
    setting.radix = True
    setting.host_pages = max(2, int(setting.num_pages * rng.choice([0.2, 1.0, 3.0])))
    setting.folder = folder if rng.random() < 0.6 else None
    setting.lateness = rng.choice([0.0, 0.5, 0.9])
    setting.is_waited_for = rng.random() < 0.5
    setting.most_saves = rng.choice([1, 4, 1 << 20])
    setting.seed = rng.getrandbits(31)
    setting.ranks = rng.choice([1, 2, 3])
    setting.window = rng.choice([None, None, None, 2 * setting.page_size + 3])
    setting.drafts = rng.random() < 0.3
    if beside is not None:
        setting.window = None
    if beside == "states":
        setting.checkpoints, setting.host_states = rng.choice([1, 3, 8, 40]), rng.choice([1, 4, 40])
        setting.drafts, setting.depth = False, 1
    if beside == "windows":
        setting.window, size = Mixed(rng.choice([2, 7, 2 * setting.page_size + 3])), setting.page_size
        each = pages_in_window(setting.window, size, setting.budget or setting.context)
        setting.num_window_pages = 1 + each + rng.choice([0, 4, 20, 60])
        setting.host_window_pages = max(2, int(setting.num_window_pages * rng.choice([0.3, 1.0, 4.0])))
    return setting


class Episode:
    """Random operations under one setting; `total` counts pages of all its engines."""

    def __init__(self, rng: random.Random, folder: Path, beside: Beside | None = None) -> None:
        self.rng = rng
        self.setting = tiered_setting(rng, folder, beside)
        self.total = TierCounters()
        self.finished = 0
        self._uid = 0
        self._is_slow = rng.random() < 0.5

    def run(self, operations: int) -> None:
        """Engines one after the other, each with what the one before left in files."""
        for _ in range(_RESTARTS if self.setting.folder is not None else 1):
            self._engine(operations // _RESTARTS)
            self._damage()

    def _engine(self, operations: int) -> None:
        rng, setting = self.rng, self.setting
        driver = Driver(setting)
        tiers, memory = driver.tiers, driver.scheduler.memory
        assert tiers is not None
        if driver.files is not None and self._is_slow:
            slow_down(driver.files)
        live: list[Request] = []
        known: list[Request] = []
        leases: list[Lease] = []
        try:
            for operation in range(operations):
                kind = rng.random()
                if kind < 0.12 and len(live) < 24:
                    live.append(random_request(self._uid, rng.getrandbits(31), setting.context))
                    known = [*known[-31:], live[-1]]
                    driver.scheduler.add(live[-1])
                    self._uid += 1
                elif kind < 0.14 and live:
                    driver.abort(rng.choice(live))
                elif kind < 0.141:
                    memory.flush()
                elif kind < 0.1415:  # new weights, which are the same ones here
                    driver.copies.settle()
                    memory.outdate()
                elif kind < 0.18 and known:
                    self._lease(driver, rng.choice(known), leases)
                elif kind < 0.181:
                    tiers.saves.save_all_later()
                elif kind < 0.183 or (kind < 0.4 and self._is_slow and tiers.loads.is_busy):
                    driver.now += _LATER
                else:
                    driver.step()
                driver.now += 0.01
                if operation % CHECK_EVERY == 0:
                    driver.check()
                for request in live:
                    if request.finish_reason is not None and request.finish_reason.type != "abort":
                        assert_right(request, recurrent=setting.checkpoints is not None, window=setting.window)
                live = [request for request in live if request.phase is not Phase.DONE]
            for lease in leases:
                memory.leases.release(lease)
            driver.run()
            self._drain(driver)
        finally:
            if driver.files is not None:
                driver.files.close()
        self.finished += driver.scheduler.counters.finished
        for name in TierCounters.__slots__:
            setattr(self.total, name, getattr(self.total, name) + getattr(tiers.counters, name))

    def _lease(self, driver: Driver, request: Request, leases: list[Lease]) -> None:
        memory, rng = driver.scheduler.memory, self.rng
        key = request.key()
        kind = rng.randrange(6)
        if kind == 0:
            assert memory.tiers is not None
            memory.tiers.loads.prefetch(key, request.namespace)
        elif kind < 3:
            lease = memory.leases.take(key, request.namespace)
            leases += [] if lease is None else [lease]
        elif leases:
            lease = leases.pop(rng.randrange(len(leases)))
            if kind == 3:
                memory.leases.expire(lease)
            if kind == 4:
                memory.leases.finish(lease, rng.randrange(40))
            else:
                memory.leases.release(lease)

    def _drain(self, driver: Driver) -> None:
        tiers, memory = driver.tiers, driver.scheduler.memory
        assert tiers is not None
        for _ in range(100_000):
            if tiers.poll_seconds is None and not any(len(read.pages) for read in tiers.loads.reads.all()):
                break
            driver.step()
            if not any(not save.move.executed for save in tiers.saves._saving if save.move is not None):
                time.sleep(1e-4)  # for the thread that writes
        driver.now += 100.0  # what was loaded for nobody is held that long
        driver.step()
        driver.check()
        assert memory.cache.locked_pages == 0, f"pages stay locked under {self.setting}"
        assert tiers.host.tree.locked_pages == 0, f"host pages stay locked under {self.setting}"
        if self.setting.folder is None or self.rng.random() < 0.2:
            memory.flush()
            assert driver.pool.num_free == self.setting.num_pages - 1, f"pages are lost under {self.setting}"
            assert tiers.host.num_used == 0, f"host pages are lost under {self.setting}"
            for windows in (memory.windows, tiers.host.windows):
                free = 0 if windows is None else windows.pool.num_pages - 1 - windows.pool.num_free
                assert not free, f"windowed pages are lost under {self.setting}"

    def _damage(self) -> None:
        """A byte of a file, or its end."""
        if self.setting.folder is None:
            return
        files = [path for path in self.setting.folder.rglob("*.pages") if path.stat().st_size]
        if files and self.rng.random() < 0.5:
            path = self.rng.choice(files)
            data = bytearray(path.read_bytes())
            if self.rng.random() < 0.5:
                data[self.rng.randrange(len(data))] ^= 1 + self.rng.randrange(255)
            else:
                del data[self.rng.randrange(len(data)) :]
            path.write_bytes(data)


def slow_down(files: PageFiles) -> None:
    """Some of its reads take longer than a step."""
    read, number = files._read, itertools.count()

    def slow(item: Item) -> bool:
        if not next(number) % 3:
            time.sleep(3e-3)
        return read(item)

    files._read = slow  # type: ignore[method-assign]


def main() -> None:
    """Run episodes until the operations are used up, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    done = number = 0
    while done < args.operations:
        size = min(EPISODE, args.operations - done)
        seed = args.seed * 1_000_003 + number
        with tempfile.TemporaryDirectory() as folder:
            beside: Beside | None = {2: "states", 3: "windows"}.get(number % 4)  # type: ignore[assignment]
            episode = Episode(random.Random(seed), Path(folder), beside)
            try:
                episode.run(size)
            except BaseException:
                print(f"failed in the episode with random.Random({seed}): {episode.setting}")
                raise
        done, number = done + size, number + 1
        print(f"{done:>9} operations clean: {episode.finished} requests finished, {episode.total}", flush=True)
    print(f"clean after {done} operations in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
