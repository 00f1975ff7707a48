"""Cached pages beyond the device's memory: what is copied there, and when it comes back.

    evicted, or a lease gives way ─▶ copied to host memory ─▶ written to a file             `Saves`
    a prompt, or a program's node, arrives ─▶ read from a file ─▶ loaded ─▶ in the tree     `Loads`

Nothing waits for a copy. The runner copies between steps, in the order of the moves that it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sgl.runtime.batch import Mover, PageMoves, joined
from sgl.runtime.cache.checkpoints import Checkpoints
from sgl.runtime.cache.files import PageFiles
from sgl.runtime.cache.host import HostCache
from sgl.runtime.cache.in_flight import InFlight
from sgl.runtime.cache.ledger import check
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.rates import Rates
from sgl.runtime.cache.window_pages import WindowPages
from sgl.runtime.scheduler.beside import Beside, StateCopies
from sgl.runtime.scheduler.counters import TierCounters
from sgl.runtime.scheduler.leases import Leases
from sgl.runtime.scheduler.loads import Loads
from sgl.runtime.scheduler.saves import Saves
from sgl.runtime.scheduler.window_copies import WindowCopies

_LOADING_POLL_SECONDS = 3e-4  # between looks, where nothing else can be done
_SAVING_POLL_SECONDS = 5e-3


NO_TIERS = dict.fromkeys(
    (
        *("host_total_tokens", "host_used_tokens", "host_saved_tokens", "host_loaded_tokens"),
        *("file_used_bytes", "file_written_tokens", "file_read_tokens", "num_loads", "num_declined_loads"),
        *("num_late_reads", "num_failed_writes", "host_total_states", "host_used_states", "host_saved_states"),
        *("host_loaded_states", "file_written_states", "file_read_states"),
    ),
    0,
)
"""`Tiers.state` without any."""


class Tiers:
    """Of one scheduler. Single-threaded. The rest is there once it is attached."""

    saves: Saves
    loads: Loads
    beside: Beside

    def __init__(
        self,
        host: HostCache,
        rates: Rates,
        *,
        files: PageFiles | None = None,
        most_saves: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """most_saves: pages that are copied to host memory between two steps, at most."""
        self.host = host
        self.rates = rates
        self.files = files
        self.counters = TierCounters()
        self._most_saves = most_saves
        self._clock = clock

    def attach(
        self,
        cache: RadixCache,
        in_flight: InFlight,
        leases: Leases,
        states: Checkpoints | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        """The device's side."""
        self.beside = Beside()
        if states is not None:
            self.beside = StateCopies(states, self.host, self.counters)
        elif windows is not None:
            self.beside = WindowCopies(windows, self.host)
        its = self.host, self.rates, self.files, self.counters, self.beside
        self.saves = Saves(cache, *its, self._most_saves)
        self.loads = Loads(cache, in_flight, leases, self.saves, *its, self._clock)
        cache.end_watcher = self.saves
        for beside in (states, windows):
            if beside is not None:
                beside.on_taken = self.saves.lose
        leases.demotes = self.saves

    @property
    def poll_seconds(self) -> float | None:
        """How soon `poll` wants to be called again; None: there is nothing under way."""
        if self.loads.is_moving:
            return _LOADING_POLL_SECONDS
        return _SAVING_POLL_SECONDS if self.saves.is_busy else None

    def poll(self) -> None:
        """Take up what has ended. Before a step is scheduled."""
        self.loads.poll()
        self.saves.poll()

    def launch(self, mover: Mover) -> None:
        """Have pages copied. After a step is scheduled and before it is launched."""
        saves, loads, beside = self.saves.take(), self.loads.take(), self.beside.take()
        if saves or loads or any(map(len, beside.values())):
            move = mover.move(PageMoves(joined(saves), joined(loads), **beside))
            self.saves.launched(move)
            self.loads.launched(move)

    def state(self) -> dict[str, int]:
        """For users: what the tiers hold, and what moved since the start."""
        counters, size, states = self.counters, self.host.page_size, self.host.states
        return {
            "host_total_tokens": (self.host.pool.num_pages - 1) * size,
            "host_used_tokens": self.host.num_used * size,
            "host_saved_tokens": counters.saved_pages * size,
            "host_loaded_tokens": counters.loaded_pages * size,
            "file_used_bytes": 0 if self.files is None else self.files.num_bytes,
            "file_written_tokens": counters.written_pages * size,
            "file_read_tokens": counters.read_pages * size,
            "num_loads": counters.num_loads,
            "num_declined_loads": counters.num_declined,
            "num_late_reads": counters.num_late,
            "num_failed_writes": 0 if self.files is None else self.files.num_failed,
            "host_total_states": 0 if states is None else states.num_slots,
            "host_used_states": 0 if states is None else states.num_slots - len(states.free),
            "host_saved_states": counters.saved_states,
            "host_loaded_states": counters.loaded_states,
            "file_written_states": counters.written_states,
            "file_read_states": counters.read_states,
        }

    def clear(self, evict: Callable[[], int]) -> int:
        """Forget all copies that nothing is under way of, with `evict`, which evicts device pages that need none."""
        self.loads.clear()
        self.saves.clear()
        self.host.tree.reset()
        if self.files is not None:
            self.files.clear()
        return self._without_saves(evict)

    def forget(self, adapter: int, evict: Callable[[], int]) -> int:
        """Forget an adapter's copies, with `evict`, which evicts its device pages."""
        self.host.tree.forget(adapter)
        return self._without_saves(evict)

    @property
    def is_moving(self) -> bool:
        """Whether pages are on their way between the device and what keeps copies, but files that are written."""
        return self.loads.is_moving or self.saves.is_copying

    def outdate(self, evict: Callable[[], int]) -> int:
        """Let nothing find any copy again, with `evict`, which does so with device pages. Only while not moving."""
        assert not self.is_moving, "what is under way would arrive later"
        self.loads.clear()
        self.saves.clear()
        self.host.tree.reset(detach=True)
        if self.files is not None:
            self.files.outdate()
        return self._without_saves(evict)

    def _without_saves(self, evict: Callable[[], int]) -> int:
        self.saves.is_paused = True
        try:
            return evict()
        finally:
            self.saves.is_paused = False

    def close(self) -> None:
        """Write what is to be written to files, and let go of them. After the last step. Idempotent."""
        if self.files is not None:
            self.files.close()

    def check(self) -> list[str]:
        """Breaches of ownership of host pages."""
        locked, reads = [*self.loads.locked_copies(), *self.saves.locked()], self.loads.reads.all()
        problems = check(self.host.pool, self.host.tree, [read.pages for read in reads], locked)
        held = [*(read.held for read in reads), *self.saves.held()]
        problems += self.beside.check([read.rows for read in reads], held)
        return [f"host memory: {problem}" for problem in problems]
