"""Keys and values of all cached tokens by layer, in pages. The page pool tracks ownership."""

from __future__ import annotations

import math

import numpy as np
import torch

from sgl.runtime.model.config import ModelConfig


class KVCache:
    """`keys[layer]` and `values[layer]`: [num_pages, page_size, num_kv_heads, head_dim]. Initially zero: attention
    may read unwritten slots and multiply them by zero."""

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim)
        if device.type == "cpu":  # NumPy's zeros take memory only where used
            zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
            storage = torch.from_numpy(zeros).view(dtype).view(shape)
        else:
            storage = torch.zeros(shape, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.page_size = page_size
        self.keys = list(storage[:, 0].unbind())
        self.values = list(storage[:, 1].unbind())

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """Over all layers, keys and values."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
