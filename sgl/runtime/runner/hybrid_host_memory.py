"""Host memory for what a prefix has beside pages of all layers: recurrent states, or windowed pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl.runtime.batch import PageMoves, PendingMoves
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.runner.host_pages import HostPages
from sgl.runtime.runner.shared_rows import SharedRows
from sgl.runtime.runner.states import RowStates


@dataclass(slots=True, eq=False)
class JoinedMoves(PendingMoves):
    """Copies of pages, and of recurrent states or windowed pages beside them."""

    pages: PendingMoves
    others: list[PendingMoves]
    number: int

    @property
    def load_seconds(self) -> float:
        """See `batch.PendingMoves`; of pages."""
        return self.pages.load_seconds

    def is_loaded(self) -> bool:
        return self.pages.is_loaded() and all(its.is_loaded() for its in self.others)

    def is_saved(self) -> bool:
        return self.pages.is_saved() and all(its.is_saved() for its in self.others)

    def comes_by_layer(self) -> bool:
        """See `batch.PendingMoves`."""
        return self.pages.comes_by_layer() and all(its.is_loaded() for its in self.others)


class HybridHostMemory:
    """Of one runner; often there is nothing."""

    def __init__(
        self,
        states: RowStates | None,
        kv: KVCache,
        num_windowed: int,
        device: torch.device,
        shared: SharedRows | None = None,
    ) -> None:
        """num_windowed: pages for copies. shared: see `HostPages`; of these. Raises ConfigError if there is not so
        much memory."""
        self._states = states
        self._windowed: HostPages | None = None
        if num_windowed and kv.windowed is not None:
            self._windowed = HostPages(kv.fragments(windowed=True), num_windowed + 1, device, shared)
            self._num_seen = -(-kv.windowed.window // kv.page_size)

    def wait(self, number: int) -> None:
        """See `HostPages.wait`."""
        if self._states is not None:
            self._states.wait(number)
        if self._windowed is not None:
            self._windowed.wait(number)

    def move(self, moves: PageMoves, pages: PendingMoves) -> PendingMoves:
        """The rest of these moves, of which `pages` are under way."""
        others = [] if self._states is None else self._states.move(moves)
        if self._windowed is not None:
            others.append(self._windowed.move(PageMoves(moves.window_saves, moves.window_loads)))
        return JoinedMoves(pages, others, pages.number) if others else pages

    def hosts(self) -> tuple[list[HostPages], list[HostPages]]:
        """Host memory of states, in parts, and of windowed pages."""
        states = [] if self._states is None else self._states.host
        return states, [] if self._windowed is None else [self._windowed]

    def load_seconds(self) -> float:
        """Seconds that a state, or the windowed pages that a token sees, take to load. Before there are any."""
        seconds = 0.0 if self._states is None else self._states.load_seconds()
        return seconds if self._windowed is None else seconds + self._windowed.page_seconds() * self._num_seen
