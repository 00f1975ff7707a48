"""Keys and values of all cached tokens by layer, in pages. The page pool tracks ownership."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


class KVLayout(Protocol):
    """What a token's keys and values take."""

    @property
    def num_layers(self) -> int:
        """Layers with keys and values of their own."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of each layer."""

    @property
    def head_dim(self) -> int:
        """Numbers of a head's key, and of its value."""

    @property
    def latent_dim(self) -> int:
        """The first numbers of a key that are its value, too: both are cached once. 0: values are apart."""


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """Layers with a window, whose pages are of a pool of their own."""

    layers: Sequence[bool]  # [num_layers] which they are
    window: int  # their widest
    num_pages: int  # of their pool, including its dummy page


class Arrivals(Protocol):
    """Pages on their way into the cache that a step may use."""

    def wait(self, num_fragments: int) -> None:
        """Let what the device does next wait until the first so many fragments of all these pages are there."""


class KVCache:
    """`keys[layer]` and `values[layer]`: [num_pages, page_size, num_kv_heads, head_dim]; values with a latent_dim are
    so many first numbers of the keys. Initially zero: attention may read unwritten slots and multiply them by zero.
    Windowed layers have `windowed.num_pages` pages."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windowed: WindowedLayers | None = None,
    ) -> None:
        is_windowed = [False] * layout.num_layers if windowed is None else list(windowed.layers)
        self._storages: dict[bool, torch.Tensor] = {}  # by whether it is that of windowed layers
        for each in set(is_windowed):
            pages = windowed.num_pages if each and windowed is not None else num_pages
            self._storages[each] = self._storage(layout, is_windowed.count(each), pages, page_size, dtype, device)
        self.num_pages = num_pages
        self.page_size = page_size
        self.windowed = windowed
        layers = {each: iter(storage.unbind()) for each, storage in self._storages.items()}
        parts = [next(layers[each]) for each in is_windowed]
        self.keys = [part[0] for part in parts]
        self.values = [part[0, ..., : layout.latent_dim] if layout.latent_dim else part[1] for part in parts]
        num_parts, num_full = len(parts[0]) if parts else 0, 0
        self._num_before: list[int] = []  # fragments of layers without windows up to each layer
        for each in is_windowed:
            num_full += not each
            self._num_before.append(num_parts * num_full)
        self._arrivals: Arrivals | None = None

    @staticmethod
    def _storage(
        layout: KVLayout, num_layers: int, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        parts = 1 if layout.latent_dim else 2
        shape = (num_layers, parts, num_pages, page_size, layout.num_kv_heads, layout.head_dim)
        if device.type == "cpu":  # NumPy's zeros take memory only where used
            zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
            return torch.from_numpy(zeros).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    @contextmanager
    def arriving(self, arrivals: Arrivals | None) -> Iterator[None]:
        """A forward pass that uses pages which are still on their way, and calls `reach` before it uses a layer's.
        Whatever comes later finds all of them there."""
        self._arrivals = arrivals
        try:
            yield
        finally:
            self._arrivals = None
            if arrivals is not None:
                arrivals.wait(self._num_before[-1])

    def reach(self, layer: int) -> None:
        """That layer's keys and values are used from now on."""
        if self._arrivals is not None:
            self._arrivals.wait(self._num_before[layer])

    def storages(self) -> list[torch.Tensor]:
        """What all keys and values are parts of."""
        return [*self._storages.values()]

    def slots_of(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """A layer's slots [T] of a step's: of those [T] of all layers, or [2, T] of full and windowed pages."""
        return slots if self.windowed is None else slots[int(self.windowed.layers[layer])]

    def fragments(self, *, windowed: bool = False) -> torch.Tensor:
        """One storage as uint8 [F, pages, bytes]: F fragments, keys or values of a layer, of every page. windowed: that
        of windowed layers."""
        storage = self._storages[windowed]
        layers, parts, pages = storage.shape[:3]
        return storage.view(torch.uint8).view(layers * parts, pages, -1)

    @staticmethod
    def bytes_per_token(layout: KVLayout, dtype: torch.dtype) -> int:
        """Over all layers, keys and values."""
        return layout.num_layers * KVCache.layer_bytes(layout, dtype)

    @staticmethod
    def layer_bytes(layout: KVLayout, dtype: torch.dtype) -> int:
        """Of a token in a layer."""
        return (1 if layout.latent_dim else 2) * layout.num_kv_heads * layout.head_dim * dtype.itemsize
