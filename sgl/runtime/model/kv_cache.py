"""Keys and values of all cached tokens by layer, in pages. The page pool tracks ownership."""

from __future__ import annotations

import math
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


class KVCache:
    """`keys[layer]` and `values[layer]`: [num_pages, page_size, num_kv_heads, head_dim]; values with a latent_dim are
    so many first numbers of the keys. Initially zero: attention may read unwritten slots and multiply them by zero."""

    def __init__(
        self, layout: KVLayout, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        parts = 1 if layout.latent_dim else 2
        shape = (layout.num_layers, parts, num_pages, page_size, layout.num_kv_heads, layout.head_dim)
        if device.type == "cpu":  # NumPy's zeros take memory only where used
            zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
            storage = torch.from_numpy(zeros).view(dtype).view(shape)
        else:
            storage = torch.zeros(shape, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.page_size = page_size
        self.keys = list(storage[:, 0].unbind())
        self.values = list((storage[:, 0, ..., : layout.latent_dim] if parts == 1 else storage[:, 1]).unbind())

    @staticmethod
    def bytes_per_token(layout: KVLayout, dtype: torch.dtype) -> int:
        """Over all layers, keys and values."""
        return (
            (1 if layout.latent_dim else 2)
            * layout.num_layers
            * layout.num_kv_heads
            * layout.head_dim
            * dtype.itemsize
        )
