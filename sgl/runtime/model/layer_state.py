"""Tokens between two layers of the decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl.runtime.model.image_features import ImageFeatures
from sgl.runtime.model.lora import LoraStep


@dataclass(slots=True)
class LayerState:
    """T tokens on their way through the layers."""

    residual: torch.Tensor  # [T, hidden]
    rotary: tuple[torch.Tensor, torch.Tensor]  # of their positions
    slots: torch.Tensor  # int64 [T], or [2, T]: see `KVCache.slots_of`
    local_rotary: tuple[torch.Tensor, torch.Tensor] | None = None  # of layers with a window, if another
    rest: torch.Tensor | None = None  # not yet added to the residual,
    rest_norm: torch.Tensor | None = None  # before which it is normalised
    overlaps: bool = False  # attention may start while the previous kernel runs
    images: ImageFeatures | None = None  # among the tokens
    lora: LoraStep | None = None  # of tokens with adapters
