"""The recurrent states of a hybrid on its device, by slot. Who owns which slot, others know."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sgl.kernels.gdn.ops import copy_states
from sgl.kernels.gdn.rows import Rows


class StateCache:
    """`of_rule[layer]`: float32 [slots, v_heads, k_dim, v_dim]; `of_convolution[layer]`: [slots, width - 1, channels].
    Initially empty."""

    def __init__(
        self,
        rule_shape: tuple[int, ...],
        convolution_shape: tuple[int, ...],
        num_layers: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._all = (
            _zeros((num_layers, num_slots, *rule_shape), torch.float32, device),
            _zeros((num_layers, num_slots, *convolution_shape), dtype, device),
        )
        self.of_rule, self.of_convolution = (list(each.unbind()) for each in self._all)

    def fragments(self) -> list[torch.Tensor]:
        """All of it as uint8 [layers, slots, bytes]: that of the rule, and of the convolution."""
        return [each.view(*each.shape[:2], -1).view(torch.uint8) for each in self._all]

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `copy_states`."""
        for states in self._all:
            if len(states):  # a stage may have no such layer
                copy_states(states, sources, targets)


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states that a step's tokens change."""

    cache: StateCache
    rows: Rows


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)  # take memory only where used
    return torch.from_numpy(zeros).view(dtype).view(shape)
