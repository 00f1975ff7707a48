"""A platform of another package: torch's CPU device under the name "mirror". With this folder installed,

    pip install ./examples/platform
    python -m sgl.platforms.check mirror
    sgl serve --device mirror

A device's owner begins here: `device` names the torch device of the vendor's package, and the two hooks at the end
choose attention kernels and a layout of weights.
"""

from __future__ import annotations

import os

import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionShape
from sgl.kernels.attention.torch import TorchAttention
from sgl.platforms import Platform


class LatentMirror(TorchAttention):
    """Its own kernel for latent attention (DeepSeek), here in plain torch."""


class Mirror(Platform):
    """One device, which all ranks share."""

    name = "mirror"
    is_shared = True
    runs_ahead = False
    page_size = 8
    memory_fraction = 0.2

    def names(self) -> list[str]:
        return ["a mirror of the CPU"]

    def device(self, index: int | None) -> torch.device:
        return torch.device("cpu")

    def total_memory(self, device: torch.device, sharing: int) -> tuple[int, str]:
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return num_bytes // sharing, "the machine's memory"

    def attention(self, shape: AttentionShape) -> AttentionBackend | None:
        """Where keys are latents, its own; otherwise what sgl has for the device."""
        return LatentMirror(shape) if shape.latent_dim else None

    def lay_out(self, matrix: torch.Tensor) -> torch.Tensor:
        """Column by column, as this device would rather read it."""
        return matrix.t().contiguous().t()
