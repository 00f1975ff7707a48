"""What a runner holds on its device, by the original's names for it, given back and taken again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, Protocol, get_args

import torch

from sgl.runtime.model.base import Model
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.occupation import Occupied

Part = Literal["kv_cache", "weights", "cuda_graph"]
PARTS: Final = get_args(Part)


class Graphs(Protocol):
    """CUDA graphs, which hold the addresses of keys, values and weights."""

    def capture(self) -> None:
        """Record them."""

    def drop(self) -> None:
        """Let go of them until the next `capture`."""


class Occupation:
    """Of one runner. On the thread that launches its steps, and with none under way."""

    def __init__(self, model: Model, kv: KVCache, graphs: Sequence[Graphs]) -> None:
        self._graphs, self.device = graphs, model.device
        is_gpu = model.device.type == "cuda"
        self._current: AbstractContextManager[Any] = torch.cuda.device(model.device) if is_gpu else nullcontext()
        self._kv = Occupied(kv.storages(), keeps=False)
        self._model = model
        self._weights: Occupied | None = None  # known when they are given back
        self.released: dict[Part, int] = {}  # bytes

    def parts(self) -> tuple[Part, ...]:
        """Those that can be given back here: on a CPU, weights are in the only memory that there is."""
        return ("kv_cache",) if self.device.type == "cpu" else PARTS

    @property
    def why_not(self) -> str | None:
        """What keeps anything from being given back."""
        return self._kv.why_not

    def release(self, parts: Collection[Part]) -> dict[Part, int]:
        """Give these back, weights into host memory, and the graphs in any case. Returns bytes by part."""
        before = set(self.released)
        with self._current:
            if "weights" in parts and "weights" not in before:  # first: host memory may be too small for them
                weights = Occupied(self._model.weights.tensors(), keeps=True)
                self.released["weights"] = weights.release()
                self._weights = weights
            if self._graphs and "cuda_graph" not in before:
                free = self._free_bytes()
                for graphs in self._graphs:
                    graphs.drop()
                self.released["cuda_graph"] = self._free_bytes() - free
            if "kv_cache" in parts and "kv_cache" not in before:
                self.released["kv_cache"] = self._kv.release()
            self._free_bytes()
        return {part: number for part, number in self.released.items() if part not in before}

    def restore(self, parts: Collection[Part]) -> None:
        """Take these again. Graphs are captured anew when the others are there."""
        self.take(parts)
        if self.released.keys() == {"cuda_graph"}:
            self.capture()

    def take(self, parts: Collection[Part]) -> None:
        """Take these again, but graphs."""
        with self._current:
            if "weights" in parts and self._weights is not None:
                self._weights.restore()
                self._weights = None
                del self.released["weights"]
            if "kv_cache" in parts and "kv_cache" in self.released:
                self._kv.restore()
                del self.released["kv_cache"]

    def capture(self) -> None:
        """Record the graphs anew, also those that were not dropped: all ranks do it at once."""
        with self._current:
            for graphs in self._graphs:
                if "cuda_graph" not in self.released:
                    graphs.drop()
                graphs.capture()
        self.released.pop("cuda_graph", None)

    def end(self) -> None:
        """Give all back for good, after the last step, without a wait for other ranks."""
        for graphs in self._graphs:
            graphs.drop()
        self._graphs = ()  # and the buffers that they read and write
        self._kv.release()
        if "weights" in self.parts() and self._weights is None:
            Occupied(self._model.weights.tensors(), keeps=False).release()
        if self.device.type == "cuda" and self._model.collectives is None:  # else it may wait for a dead rank
            with self._current:
                torch.cuda.empty_cache()  # torch keeps memory by stream, and another engine has its own

    def _free_bytes(self) -> int:
        """Of the device, once torch keeps none of what it does not use."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])
