"""What the engine asks of a kind of device, whoever makes it.

CPU and CUDA are here. Others register a subclass under the entry point group `sgl.platforms`, by the name that option
`device` has; `python -m sgl.platforms.check NAME` holds one to what engines need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionShape


class Platform(ABC):
    """A kind of device. Its tensors are torch's, on `device`; without kernels of its own it runs the torch references.
    Nothing here is called in a step."""

    name: ClassVar[str]
    """In option `device`, alone or before a colon and a number."""
    kind: ClassVar[str] = "devices"
    """What messages call them."""
    seen_by: ClassVar[str] = "torch"
    """Which library finds them, in messages."""
    is_gpu: ClassVar[bool] = False
    """Whether sgl's own GPU kernels and graphs run there."""
    is_shared: ClassVar[bool] = False
    """Whether all ranks compute on the one device, rather than each on its own."""
    runs_ahead: ClassVar[bool] = True
    """Whether step N+1 is launched before the results of step N are read, by default."""
    max_rows: ClassVar[int] = 128
    """Requests at once, by default."""
    page_size: ClassVar[int] = 16
    """Tokens of a KV page, by default."""
    memory_fraction: ClassVar[float] = 0.8
    """Of the memory, for weights and KV pages, by default."""

    def is_available(self) -> bool:
        """Whether this machine has one."""
        return bool(self.names())

    @abstractmethod
    def names(self) -> list[str]:
        """The devices that engines may take here, as people call them."""

    @abstractmethod
    def device(self, index: int | None) -> torch.device:
        """The device of that number, or the first."""

    def option(self, device: torch.device) -> str:
        """What option `device` says of one."""
        return self.name if device.index is None else f"{self.name}:{device.index}"

    def device_name(self, device: torch.device) -> str:
        """For people."""
        names = self.names()
        return names[min(device.index or 0, len(names) - 1)]

    @abstractmethod
    def total_memory(self, device: torch.device, sharing: int) -> tuple[int, str]:
        """Bytes for each of `sharing` processes of one engine or several, and what it is that has so many."""

    def memory_left(self, device: torch.device) -> int | None:
        """Bytes that KV pages may take beside `total_memory`, once weights are loaded; None: whatever is left of it."""
        return None

    def step_tokens(self, device: torch.device, num_multiplied: int) -> int:
        """Tokens of a step, by default. num_multiplied: weights that each is multiplied with."""
        return 2048

    def why_no_fp8(self, device: torch.device) -> str | None:
        """Why neither weights nor keys and values can be in eight bits there; None: they can."""
        return f"needs an NVIDIA GPU, and this is {self.option(device)}"

    def attention(self, shape: AttentionShape) -> AttentionBackend | None:
        """A backend of its own for models of that shape, which may have a latent_dim; None: one of sgl's. It is taken
        unless option attention_backend names another."""
        return None

    def lay_out(self, matrix: torch.Tensor) -> torch.Tensor:
        """A weight matrix [out, in] as the device likes it, equal in shape, dtype and contents. Called once for each
        that is loaded."""
        return matrix
