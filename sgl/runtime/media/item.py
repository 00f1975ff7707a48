"""One image or video, resized for a model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

MediaKind = Literal["image", "video"]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class MediaItem:
    """Pixels whose sides are multiples of a token's, and what makes them the same as others'."""

    kind: MediaKind
    frames: npt.NDArray[np.uint8]  # [frames, height, width, 3]
    grid: tuple[int, int, int]  # moments, and patches of height and width
    merge_size: int
    fps: float | None = None  # frames a second of a video, if known
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        about = f"{self.kind} {self.grid} {self.fps} {self.frames.shape}".encode()
        object.__setattr__(self, "digest", hashlib.sha256(about + self.frames.tobytes()).digest())

    @property
    def num_tokens(self) -> int:
        """Of the language model."""
        moments, height, width = self.token_grid
        return moments * height * width

    @property
    def token_grid(self) -> tuple[int, int, int]:
        """Moments, and tokens of height and width."""
        moments, height, width = self.grid
        return moments, height // self.merge_size, width // self.merge_size


@dataclass(frozen=True, slots=True)
class MediaRun:
    """Consecutive tokens of a step, or of a prompt, that stand for part of an item."""

    start: int  # the first of them
    item: MediaItem
    first: int  # which of the item's tokens that is
    count: int
