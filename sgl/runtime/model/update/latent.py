"""New weights of decoders with latent attention."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from sgl.errors import WeightsError
from sgl.kernels.layers.linear import PackedMatrix
from sgl.runtime.model.loader import LM_HEAD
from sgl.runtime.model.mla.loader import fill_part, is_used, tensor_shapes
from sgl.runtime.model.mla.model import LatentDecoder
from sgl.runtime.model.mla.weights import checkpoint_tensors
from sgl.runtime.model.update.writer import is_follower, plain, unpack

_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class LatentWriter:
    """A `Writer`."""

    why_not_read: str | None = "weights of latent attention are not read back"

    def __init__(self, model: LatentDecoder) -> None:
        self._model, self._weights = model, model.weights
        self._tied = model.weights.is_tied
        self._own = tensor_shapes(model.whole_config, tied=self._tied)
        self.shapes = dict(self._own)
        if self._tied:
            self.shapes[LM_HEAD] = self.shapes[_EMBEDDING]
        self.aliases = {LM_HEAD: _EMBEDDING} if self._tied else {}
        self._targets: dict[str, torch.Tensor] = {}

    def name(self, given: str) -> str:
        """See `Writer`."""
        return given

    def ignores(self, name: str) -> bool:
        """See `Writer`."""
        return is_follower(name) or not is_used(name, self._model.whole_config)

    def missing(self, names: Collection[str]) -> list[str]:
        """See `Writer`."""
        have = {*names, _EMBEDDING} if self._tied and LM_HEAD in names else names
        return [name for name in self._own if name not in have]

    def begin(self, names: Collection[str]) -> None:
        """See `Writer`."""
        weights, layers = self._weights, self._model.shard.layers(self._model.whole_config)
        touched = {int(found[1]) for name in names if (found := _LAYER.match(name)) is not None}
        unpack(layer for index, layer in zip(layers, weights.layers, strict=True) if index in touched)
        if self._tied:
            weights.lm_head = weights.embedding
        elif isinstance(weights.lm_head, PackedMatrix):
            weights.lm_head = plain(weights.lm_head)
        self._targets = checkpoint_tensors(self._model.config, weights, layers.start)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """See `Writer`."""
        target = self._targets.get(_EMBEDDING if self._tied and name == LM_HEAD else name)
        if target is not None:  # else another stage's
            fill_part(name, target, tensor, self._model.whole_config, self._model.shard)

    def finish(self) -> None:
        """See `Writer`."""
        self._targets = {}
        self._weights.pack()

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """See `Writer`."""
        raise WeightsError(f"{name}: {self.why_not_read}", tensor=name)
