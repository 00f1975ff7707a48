"""The part of a model that looks at images: transformers' vision tower, and what it last gave.

A step that has an image's tokens takes their embeddings from here, and in some models what is added behind its first
layers, too.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from sgl.kernels.collectives import Collectives
from sgl.runtime.media.config import MediaConfig
from sgl.runtime.media.item import MediaItem, MediaRun
from sgl.runtime.model.config import DtypeName, ModelConfig
from sgl.runtime.model.hf import weights
from sgl.runtime.model.hf.config import empty_module
from sgl.runtime.model.image_features import ImageFeatures
from sgl.runtime.model.loader import OF_TOWERS, LoadFormat, resolve_dtype


class VisionTower:
    """Embeds images. Keeps the latest embeddings, of at most `max_bytes`."""

    def __init__(self, module: Any, config: MediaConfig, max_bytes: int) -> None:
        self.num_runs = 0
        """Images that were embedded."""
        self._module = module
        self._config = config
        self._max_bytes = max_bytes
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # by the item's digest
        self._num_bytes = 0
        parameter = next(module.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype

    @property
    def num_bytes(self) -> int:
        """Of weights and of kept embeddings."""
        return sum(int(its.nbytes) for its in self._module.parameters()) + self._max_bytes

    @property
    def num_weights(self) -> int:
        """Of the tower."""
        return sum(int(its.numel()) for its in self._module.parameters())

    def encode(self, places: torch.Tensor, runs: list[MediaRun]) -> ImageFeatures:
        """For a step. places: int64 [3, T]."""
        found = {id(run.item): self._features_of(run.item) for run in runs}  # held, whatever is dropped meanwhile
        return ImageFeatures(
            places,
            [
                (slice(run.start, run.start + run.count), found[id(run.item)][:, run.first : run.first + run.count])
                for run in runs
            ],
        )

    def _features_of(self, item: MediaItem) -> torch.Tensor:
        """[1 + deep, tokens, hidden]"""
        features = self._features.get(item.digest)
        if features is None:
            self._features[item.digest] = features = self._embedded(item)
            self._num_bytes += features.nbytes
        self._features.move_to_end(item.digest)
        while self._num_bytes > self._max_bytes and len(self._features) > 1:
            _, old = self._features.popitem(last=False)
            self._num_bytes -= old.nbytes
        return features

    @torch.inference_mode()
    def _embedded(self, item: MediaItem) -> torch.Tensor:
        self.num_runs += 1
        grid = torch.tensor([item.grid], device=self._device)
        out = self._module(self.patches(item).to(self._dtype), grid_thw=grid)
        deep = getattr(out, "deepstack_features", None) or ()
        return torch.stack((out.pooler_output, *deep))

    def patches(self, item: MediaItem) -> torch.Tensor:
        """float32 [patches, 3 * frames * side * side] of a patch, in the order of tokens."""
        config = self._config
        how = config.image if item.kind == "image" else config.video
        size, merge, depth = config.patch_size, config.merge_size, config.temporal_patch_size
        moments, height, width = item.grid
        frames = torch.from_numpy(item.frames).to(self._device)
        if missing := moments * depth - len(frames):
            frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
        mean, std = (torch.tensor(its, device=self._device) for its in (how.mean, how.std))
        pixels = (frames.float() * how.scale - mean) / std  # [frames, height, width, 3]
        shape = moments, depth, height // merge, merge, size, width // merge, merge, size, 3
        return pixels.view(shape).permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(moments * height * width, -1)


class SharedTower:
    """The vision tower of the first of several ranks, which sends the others what it gives."""

    def __init__(
        self, tower: VisionTower | None, config: ModelConfig, ranks: Collectives, like: torch.Tensor
    ) -> None:
        """tower: only the first rank has it. like: a tensor with the embeddings' dtype and device."""
        assert config.media is not None, "it has a tower"
        self._tower, self._ranks, self._like = tower, ranks, like
        self._depth, self._width = 1 + config.media.num_deep, config.hidden_size

    @property
    def num_runs(self) -> int:
        """See `VisionEncoder`; of the first rank."""
        return 0 if self._tower is None else self._tower.num_runs

    @property
    def num_bytes(self) -> int:
        """See `VisionEncoder`; of the first rank."""
        return 0 if self._tower is None else self._tower.num_bytes

    @property
    def num_weights(self) -> int:
        """See `VisionEncoder`; of the first rank."""
        return 0 if self._tower is None else self._tower.num_weights

    def encode(self, places: torch.Tensor, runs: list[MediaRun]) -> ImageFeatures:
        """See `VisionEncoder`, with all ranks."""
        given = None if self._tower is None else self._tower.encode(places, runs).runs
        found = []
        for number, run in enumerate(runs):
            tokens = slice(run.start, run.start + run.count)
            features = self._like.new_empty(self._depth, run.count, self._width)
            if given is not None:
                features.copy_(given[number][1])
            found.append((tokens, self._ranks.broadcast_(features)))
        return ImageFeatures(places, found)


def load_tower(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: Literal["auto"] | DtypeName,
    load_format: LoadFormat,
    max_bytes: int,
) -> VisionTower:
    """The tower of a checkpoint, with its weights or random ones; arguments as for `load_decoder`. Raises ModelError
    and WeightsError."""
    assert config.media is not None, "it has one"
    torch_dtype = resolve_dtype(config, dtype, device)
    its = transformers.AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=False)
    module = empty_module(its, config.architecture, "sdpa", torch_dtype).model.visual
    if load_format == "dummy":
        weights.fill(module, torch_dtype, device)
    else:
        weights.load(module, Path(config.path), torch_dtype, device, config.scheme, OF_TOWERS)
    return VisionTower(module, config.media, max_bytes)
