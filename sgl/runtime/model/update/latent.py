"""New weights of decoders with latent attention."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from sgl.runtime.model.mla.loader import fill_part, is_used, tensor_shapes
from sgl.runtime.model.mla.model import LatentDecoder
from sgl.runtime.model.mla.weights import LatentWeights, checkpoint_tensors
from sgl.runtime.model.update.own import OwnWriter
from sgl.runtime.model.update.writer import unpack

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class LatentWriter(OwnWriter[LatentWeights]):
    """A `Writer`."""

    why_not_read: str | None = "weights of latent attention are not read back"

    def __init__(self, model: LatentDecoder) -> None:
        form = tensor_shapes(model.whole_config, tied=model.weights.is_tied)
        super().__init__(model.weights, "model.embed_tokens.weight", form)
        self._model = model
        self._targets: dict[str, torch.Tensor] = {}

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or not is_used(name, self._model.whole_config)

    def begin(self, names: Collection[str]) -> None:
        weights, layers = self._weights, self._model.shard.layers(self._model.whole_config)
        touched = {int(found[1]) for name in names if (found := _LAYER.match(name)) is not None}
        unpack(layer for index, layer in zip(layers, weights.layers, strict=True) if index in touched)
        self._unpack_head()
        self._targets = checkpoint_tensors(self._model.config, weights, layers.start)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        target = self._targets.get(self.aliases.get(name, name))
        if target is not None:  # else another stage's
            fill_part(name, target, tensor, self._model.whole_config, self._model.shard)

    def finish(self) -> None:
        self._targets = {}
        self._weights.pack()
