"""The LoRA adapters of one rank: in host memory by number, and those of a step on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl.kernels.lora.rows import AdapterRows, block_of, tiled
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import Batch, Int32Array, Int64Array
from sgl.runtime.model.adapter import read_adapter
from sgl.runtime.model.lora import Adapter, LoraSlots, LoraStep


class Adapters:
    """Loaded adapters, and the slots that steps use them in."""

    def __init__(self, slots: LoraSlots, uploader: Uploader) -> None:
        self._slots = slots
        self._uploader = uploader
        self._loaded: dict[int, Adapter] = {}

    def read(self, path: str) -> Adapter:
        """An adapter's folder. Raises AdapterError. Safe from any thread."""
        return read_adapter(path, self._slots)

    def add(self, number: int, adapter: Adapter) -> None:
        """Keep an adapter for later steps."""
        self._loaded[number] = adapter

    def drop(self, number: int) -> None:
        """Free an adapter that no step needs any more."""
        del self._loaded[number]

    def write(self, writes: Sequence[tuple[int, int]]) -> None:
        """Copy adapters into slots; see `Batch.adapter_writes`."""
        for slot, number in writes:
            self._slots.place(slot, self._loaded[number])

    def step(self, batch: Batch, wanted: Int64Array | None) -> LoraStep:
        """A batch with adapters. wanted: the tokens that the last layer goes on with; None: all."""
        assert batch.adapters is not None, "some row has one"
        of_tokens = np.repeat(batch.adapters, batch.q_lens)
        rows = self._rows(of_tokens)
        return LoraStep(self._slots, rows, None if wanted is None else self._rows(of_tokens[wanted]))

    def _rows(self, slots: Int32Array) -> AdapterRows:
        block = block_of(len(slots))
        order, tiles = tiled(slots, None if self._slots.is_on_cpu else block)
        on_device = self._uploader.upload(order, tiles, slots)
        return AdapterRows(on_device[0], on_device[1], block, on_device[2])
