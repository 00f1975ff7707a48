"""A step's tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl.runtime.model.lora import LoraStep
from sgl.runtime.model.seen import Seen


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of T tokens."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T], or [2, T]: see `KVCache.slots_of`
    last: torch.Tensor  # int64 [S]: tokens to sample after
    wanted: torch.Tensor | None  # int64 [N]: tokens whose hidden states are wanted; None: all
    seen: Seen | None = None
    lora: LoraStep | None = None  # of tokens with adapters

    @property
    def num_wanted(self) -> int:
        """Hidden states that are wanted."""
        return len(self.token_ids if self.wanted is None else self.wanted)

    @property
    def more(self) -> dict[str, Any]:
        """Arguments that only a model which sees has."""
        return {} if self.seen is None else {"seen": self.seen}
