"""CUDA graphs of what comes behind a replayed forward pass of few rows: their tokens are drawn, noted and copied to the
host, as one launch.

Where nothing but its logits, temperature and seed decides what a row samples. Three launches and what goes with them
took a host a quarter of a millisecond, and a step of a small model's single row takes an H200 less than one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from sgl.runtime.batch import Int32Array
from sgl.runtime.runner.capture import CAPTURE_MODE

_MAX_ROWS = 64  # larger steps take so long that the host's share of them is hidden
_NUM_SLOTS = 2  # as many steps are under way at most

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Slot(NamedTuple):
    number: int
    landing: torch.Tensor  # int32 [_MAX_ROWS], pinned
    array: Int32Array  # the same
    event: torch.cuda.Event


class DrawGraphs:
    """draw: float32 [B, vocab] logits, int64 [B] request rows and positions to int64 [B] tokens."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._free: list[_Slot] = []
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by rows and slot
        for number in range(_NUM_SLOTS):
            landing = torch.empty(_MAX_ROWS, dtype=torch.int32, pin_memory=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it so
            self._free.append(_Slot(number, landing, landing.numpy(), event))

    def capture(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        """For steps of B rows, whose logits, rows and positions will lie where these are; of too many, nothing."""
        if len(rows) > _MAX_ROWS:
            return
        for slot in self._free:
            self._launch(slot, logits, rows, positions)  # compiles and loads what a capture may not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=CAPTURE_MODE):
                self._launch(slot, logits, rows, positions)
            self._graphs[len(rows), slot.number] = graph

    def run(self, bucket: int, num_rows: int) -> Callable[[], list[npt.NDArray[Any]]] | None:
        """Draw for a step of `bucket` rows. Returns what waits for the first num_rows tokens, to be called once; None,
        and nothing done, where there is no graph to replay. Never waits for the device."""
        if bucket > _MAX_ROWS or not self._free:
            return None
        slot = self._free.pop()
        self._graphs[bucket, slot.number].replay()
        slot.event.record()

        def land() -> list[npt.NDArray[Any]]:
            slot.event.synchronize()
            tokens = slot.array[:num_rows].copy()
            self._free.append(slot)
            return [tokens]

        return land

    def _launch(self, slot: _Slot, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        # Triton is imported where a kernel of it runs.
        from sgl.kernels import staging_triton

        staging_triton.copy_(slot.landing[: len(rows)], self._draw(logits, rows, positions))
