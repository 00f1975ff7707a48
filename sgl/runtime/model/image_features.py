"""What a step's layers need to know of images in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sgl.runtime.media.item import MediaRun


@dataclass(slots=True)
class ImageFeatures:
    """Of a step of T tokens."""

    places: torch.Tensor  # int64 [3, T]: positions in time, height and width
    runs: list[tuple[slice, torch.Tensor]]
    """Consecutive tokens with their embeddings, [1 + deep, n, hidden]: the first in place of the token's own, the
    others added behind the first layers."""

    def embed(self, residual: torch.Tensor) -> None:
        """Put embeddings in place of those of placeholders, [T, hidden]."""
        for tokens, features in self.runs:
            residual[tokens] = features[0]

    def of(self, wanted: torch.Tensor) -> ImageFeatures:
        """Of wanted tokens alone, int64 [N]."""
        num_tokens, picked = self.places.shape[1], []
        for tokens, features in self.runs:
            if len(features) > 1:
                whole = features.new_zeros(len(features), num_tokens, features.shape[2])
                whole[:, tokens] = features
                picked.append((slice(None), whole.index_select(1, wanted)))
        return ImageFeatures(self.places.index_select(1, wanted), picked)

    def add(self, index: int, residual: torch.Tensor) -> None:
        """Add what belongs behind a layer."""
        for tokens, features in self.runs:
            if index + 1 < len(features):
                residual[tokens] += features[index + 1]


class VisionEncoder(Protocol):
    """A model's vision tower: embeds images."""

    @property
    def num_runs(self) -> int:
        """Images that were embedded, since the start."""

    @property
    def num_bytes(self) -> int:
        """Of weights, and of embeddings that it may keep."""

    @property
    def num_weights(self) -> int:
        """All of it."""

    def encode(self, places: torch.Tensor, runs: list[MediaRun]) -> ImageFeatures:
        """For a step with these images. places: int64 [3, T]."""
        ...
