"""Admission: simulates how running requests grow and release pages. Growth is rounded up by at most a page for each
request; `OutputLengths` estimates output lengths."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from operator import sub

import numpy as np

from sgl.runtime.cache.windows import first_seen_page
from sgl.runtime.scheduler.memory import RowMemory
from sgl.runtime.scheduler.request import Phase, Request

_WINDOW = 128
_QUANTILE = 0.9
_FIRST_GUESS = 0.7
_ENOUGH = 8  # ratios


class OutputLengths:
    """Expects the 0.9 quantile of recent ratios output / max_new_tokens."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._conservativeness = conservativeness
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._known_ratio: float | None = _FIRST_GUESS  # None: to be computed
        self._penalty = 1.0

    def finished(self, output_len: int, max_new_tokens: int) -> None:
        """Learn from a request that was not aborted."""
        self._ratios.append(output_len / max(max_new_tokens, 1))
        self._penalty = max(1.0, self._penalty * 0.99)
        if len(self._ratios) >= _ENOUGH:
            self._known_ratio = None  # computed on demand: many may end in one step

    def retracted(self) -> None:
        """Expect more for a while: a guess was too low."""
        self._penalty = min(self._penalty * 1.25, 1.0 / max(self._ratio, 0.01))

    def remaining(self, output_len: int, max_new_tokens: int, *, exact: bool) -> int:
        """Expected further tokens after output_len; exact: it will use all of max_new_tokens."""
        left = max_new_tokens - output_len
        if exact:
            return left
        return min(left, math.ceil(left * min(1.0, self._ratio * self._penalty * self._conservativeness)))

    @property
    def _ratio(self) -> float:
        if self._known_ratio is None:
            self._known_ratio = _quantile(self._ratios)
        return self._known_ratio


def _quantile(ratios: Iterable[float]) -> float:
    """What np.quantile finds, which takes 0.2 ms."""
    ratios = sorted(ratios)
    at, part = divmod(_QUANTILE * (len(ratios) - 1), 1)
    below, above = ratios[int(at)], ratios[math.ceil(at + part)]
    return above - (above - below) * (1 - part) if part >= 0.5 else below + (above - below) * part


class ReleaseSimulation:
    """Counts free pages at each moment at which a running request ends. beside: the same of another pool, from which
    each request takes pages, too."""

    def __init__(self, available_pages: int, page_size: int, beside: ReleaseSimulation | None = None) -> None:
        self.beside = beside
        self._available = available_pages
        self._page_size = page_size
        self._remaining: list[int] = []
        self._slack: list[int] = []
        self._grows: list[bool] = []
        self._released: list[int] = []
        self._needed: list[int] = []
        self._most_grown = 0  # pages, if none are released before all have ended

    def add(
        self, remaining: int, known_len: int, held_pages: int, released_pages: int, most_pages: int | None = None
    ) -> None:
        """Add a request that computes known_len tokens at once, then `remaining` more one by one. At its end it
        releases released_pages of its held_pages, and all that it grew. One that would grow beyond most_pages, which
        it never holds together, takes these at once."""
        grows = most_pages is None or known_len + remaining <= most_pages * self._page_size
        needed = max(0, -(-known_len // self._page_size) - held_pages)
        if not grows and most_pages is not None:
            needed = max(0, most_pages - held_pages)
        self._available -= needed
        self._needed.append(needed)
        self._remaining.append(remaining)
        slack = (held_pages + needed) * self._page_size - known_len if grows else 0
        self._slack.append(slack)
        self._grows.append(grows)
        self._most_grown += self._growth(remaining, slack) if grows else 0
        self._released.append(released_pages + needed)

    def is_feasible(self) -> bool:
        """Whether free pages suffice at every moment."""
        if self._available < 0 or not (self.beside is None or self.beside.is_feasible()):
            return False
        if self._available >= self._most_grown:  # usual; the rest takes 50 µs
            return True
        remaining = np.array(self._remaining, np.int64)
        order = np.argsort(remaining, kind="stable")
        remaining = remaining[order]
        slack, released = np.array(self._slack)[order], np.array(self._released)[order]
        alive = np.cumsum(np.array(self._grows)[order][::-1])[::-1]
        slack_alive = np.cumsum(slack[::-1])[::-1]
        # Each request grew by ceil((t - slack) / page_size) pages, rounded up by less than one:
        grown = (alive * (remaining + self._page_size - 1) - slack_alive) // self._page_size
        freed = np.cumsum(released) - released
        return bool((self._available + freed - grown >= 0).all())

    def shrink(self, pages: int, beside: int = 0) -> None:
        """Count `pages` fewer as available, and so many of the pool beside."""
        self._available -= pages
        if self.beside is not None:
            self.beside.shrink(beside)

    def drop_last(self) -> None:
        """Undo the latest `add`."""
        if self.beside is not None:
            self.beside.drop_last()
        remaining, slack = self._remaining.pop(), self._slack.pop()
        self._most_grown -= self._growth(remaining, slack) if self._grows.pop() else 0
        self._available += self._needed.pop()
        self._released.pop()

    def _growth(self, remaining: int, slack: int) -> int:
        """Pages for tokens beyond `slack`."""
        return max(0, -(-(remaining - slack) // self._page_size))


class Admission:
    """What running requests and those about to run will need. step_tokens: as in `Limits`."""

    def __init__(self, memory: RowMemory, lengths: OutputLengths, step_tokens: int | None) -> None:
        self._memory = memory
        self._lengths = lengths
        self._step_tokens = step_tokens

    def simulation(self, reserved: Iterable[Request] = ()) -> ReleaseSimulation:
        """Of the running requests, and waiting ones that room is reserved for."""
        memory, beside = self._memory, None
        if memory.windows is not None:
            beside = ReleaseSimulation(memory.windows.pages.available, memory.page_size)
        simulation = ReleaseSimulation(memory.available_pages, memory.page_size, beside)
        for request in memory.running.values():
            if request.phase is not Phase.DRAINING:
                self._add_running(simulation, request)
        for request in reserved:
            self._add_waiting(simulation, request, memory.current_match(request).length)
        return simulation

    def fits(
        self,
        simulation: ReleaseSimulation,
        request: Request,
        partners: Sequence[tuple[Request, int]],
        matched_len: int,
        skipped: int,
    ) -> bool:
        """Whether there is room for a request that finds matched_len of its tokens, of which it does not read the
        first ones, `skipped`, and for its partners (each with the tokens that it will find). Counts them if so, or if
        nothing runs or is loaded; drops leases if that helps."""
        self._add_waiting(simulation, request, matched_len, skipped)
        for partner, found in partners:
            self._add_waiting(simulation, partner, found)
        lent = (matched_len - skipped) // self._memory.page_size
        if simulation.is_feasible() or (self._memory.is_busy and drop_leases(self._memory, simulation, lent)):
            return True
        if self._memory.is_busy:
            for _ in range(len(partners) + 1):
                simulation.drop_last()
        return False

    def _add_running(self, simulation: ReleaseSimulation, request: Request) -> None:
        memory, row, windows = self._memory, request.row, self._memory.windows
        kv_len, num_pages = int(memory.rows.kv_len[row]), int(memory.rows.num_pages[row])
        known = max(request.target_len, kv_len)
        remaining = self._remaining(request)

        def add(pool: ReleaseSimulation, given: int, most: int | None) -> None:
            held, lent = num_pages - given, max(request.shared_pages - given, 0)
            pool.add(remaining, known - given * memory.page_size, held, held - lent, most)

        add(simulation, int(memory.rows.given_back[row]), memory.most_pages(request, self._step_tokens))
        if simulation.beside is not None and windows is not None:
            most = windows.most_pages(known - kv_len, self._step_tokens)
            add(simulation.beside, int(windows.given_back[row]), most)

    def _add_waiting(
        self, simulation: ReleaseSimulation, request: Request, matched_len: int, skipped: int = 0
    ) -> None:
        memory, windows, page_size = self._memory, self._memory.windows, self._memory.page_size
        lent, remaining = (matched_len - skipped) // page_size, self._remaining(request)
        most = memory.most_pages(request, self._step_tokens)
        simulation.add(remaining, request.num_known - skipped, lent, 0, most)
        if simulation.beside is not None and windows is not None:
            first = first_seen_page(windows.window, page_size, matched_len)
            most = windows.most_pages(request.num_known - matched_len, self._step_tokens)
            lent = matched_len // page_size - first
            simulation.beside.add(remaining, request.num_known - first * page_size, lent, 0, most)

    def _remaining(self, request: Request) -> int:
        return self._lengths.remaining(
            len(request.output_ids), request.max_new_tokens, exact=request.params.ignore_eos
        )


def drop_leases(memory: RowMemory, simulation: ReleaseSimulation, lent: int) -> bool:
    """Drop the oldest leases until the simulation is feasible; none if all would not suffice. lent: pages locked for
    the request that comes last."""
    leases = memory.leases
    if not len(leases):
        return False
    # With shared pages, either count may miss some.
    in_use = lent + sum(request.tree_len for request in memory.running.values()) // memory.page_size
    room = max(leases.num_pages, memory.cache.locked_pages - in_use)
    window_room = sum(map(len, leases.window_pages()))
    simulation.shrink(-room, -window_room)
    would_do = simulation.is_feasible()
    simulation.shrink(room, window_room)
    while would_do and not simulation.is_feasible():
        before = memory.available_by_pool()
        if not leases.drop_oldest():
            return False
        simulation.shrink(*map(sub, before, memory.available_by_pool()))
    return would_do
