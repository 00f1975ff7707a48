"""Recurrent states by request row and checkpoint: what a batch copies, and whose states its tokens change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgl.kernels.gdn.rows import Rows
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import EMPTY_STATE, Batch, Int64Array, PageMoves, PendingMoves
from sgl.runtime.model.base import RecurrentModel
from sgl.runtime.model.gdn.states import StateStep
from sgl.runtime.runner.host_pages import HostPages
from sgl.runtime.runner.shared_rows import SharedRows

_MEASURED_STATES = 4


class RowStates:
    """The states of a model: first one for each of `num_rows` rows, one that padding rows share, then checkpoints."""

    def __init__(
        self,
        model: RecurrentModel,
        num_rows: int,
        num_checkpoints: int,
        num_host: int = 0,
        shared: list[SharedRows] | None = None,
    ) -> None:
        """num_host: states of host memory, for copies of checkpoints. shared: see `HostPages`; of each part. Raises
        ConfigError."""
        self._first = num_rows + 1
        self._cache = model.new_states(self._first + num_checkpoints)
        self._uploader = Uploader(model.device)
        self.host: list[HostPages] = []
        """Of each part of a state."""
        if num_host:
            parts = self._cache.fragments()
            rows: Sequence[SharedRows | None] = shared or [None] * len(parts)
            self.host = [
                HostPages(part, num_host + 1, model.device, its) for part, its in zip(parts, rows, strict=True)
            ]

    def warm_up(self) -> None:
        """Compile what copies states."""
        nothing, padding = np.full(1, -1, np.int64), np.full(1, self._first - 1, np.int64)
        self._copy(nothing, padding)

    def load(self, batch: Batch) -> None:
        """The copies before a step."""
        loads = batch.state_loads
        if loads is not None and len(loads):
            sources = np.where(loads[:, 0] == EMPTY_STATE, -1, loads[:, 0] + self._first)
            self._copy(sources.astype(np.int64), loads[:, 1].astype(np.int64))

    def save(self, batch: Batch) -> None:
        """The copies after a step."""
        saves = batch.state_saves
        if saves is not None and len(saves):
            self._copy(saves[:, 0].astype(np.int64), saves[:, 1].astype(np.int64) + self._first)

    def move(self, moves: PageMoves) -> list[PendingMoves]:
        """Copy checkpoints between the device and host memory; see `batch.Mover`."""
        offsets = np.array([self._first, 0], np.int32)
        its = PageMoves(moves.state_saves + offsets, moves.state_loads + offsets[::-1])
        return [host.move(its) for host in self.host]

    def wait(self, number: int) -> None:
        """See `HostPages.wait`."""
        for host in self.host:
            host.wait(number)

    def load_seconds(self) -> float:
        """Seconds that loading a state takes. Before there are any."""
        return sum(host.page_seconds(_MEASURED_STATES) for host in self.host)

    def step(self, batch: Batch) -> StateStep:
        """The states that the batch's tokens change."""
        num_single = Rows.count_single(batch.q_lens)
        slots, starts, chunks, firsts = self._uploader.upload(*Rows.arrays(batch.rows, batch.q_lens))
        lens = tuple(batch.q_lens[num_single:].tolist())
        return StateStep(self._cache, Rows(slots, num_single, starts, chunks, firsts, lens))

    def decodes(self, rows: torch.Tensor) -> StateStep:
        """Those that one token of each of these rows changes, int64 [B] on the device."""
        return StateStep(self._cache, Rows.of_decodes(rows))

    def _copy(self, sources: Int64Array, targets: Int64Array) -> None:
        self._cache.copy(*self._uploader.upload(sources, targets))
