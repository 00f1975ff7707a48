"""A step's tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl.runtime.model.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs(Tokens):
    """The tokens, and which are sampled after."""

    last: torch.Tensor  # int64 [S]

    @property
    def num_wanted(self) -> int:
        """Hidden states that are wanted."""
        return len(self.ids if self.wanted is None else self.wanted)
