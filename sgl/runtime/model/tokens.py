"""The tokens of a step, as models take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl.runtime.model.gdn.states import StateStep
from sgl.runtime.model.image_features import ImageFeatures
from sgl.runtime.model.lora import LoraStep


@dataclass(frozen=True, slots=True)
class Tokens:
    """T tokens, on the device."""

    ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T] of their keys and values, or [2, T]: see `KVCache.slots_of`
    wanted: torch.Tensor | None = None  # int64 [N]: tokens whose hidden states are wanted; None: all
    images: ImageFeatures | None = None  # among them
    lora: LoraStep | None = None  # of those with adapters
    states: StateStep | None = None  # that they change, of a RecurrentModel
