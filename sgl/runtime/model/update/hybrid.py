"""New weights of hybrids of gated delta nets and attention."""

from __future__ import annotations

from collections.abc import Collection

import torch

from sgl.runtime.model.gdn.model import Hybrid
from sgl.runtime.model.gdn.parts import cut
from sgl.runtime.model.gdn.weights import IGNORED, HybridWeights, Slot, slots, tensor_shapes
from sgl.runtime.model.update.own import OwnWriter
from sgl.runtime.model.update.writer import unpack


class HybridWriter(OwnWriter[HybridWeights]):
    """A `Writer`."""

    why_not_read: str | None = "weights of gated delta nets are not read back"

    def __init__(self, model: Hybrid) -> None:
        self._model, self._config = model, model.whole_config
        forms = (tensor_shapes(self._config, tied=model.weights.is_tied, fused=fused) for fused in (False, True))
        super().__init__(model.weights, f"{self._config.prefix}embed_tokens.weight", *forms)
        self._slots: dict[str, Slot] = {}

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith(IGNORED)

    def begin(self, names: Collection[str]) -> None:
        weights, layers = self._weights, self._model.shard.layers_of(len(self._config.attends))
        unpack(weights.parts())
        self._unpack_head()
        self._slots = {
            name: slot
            for fused in (False, True)
            for name, slot in slots(self._model.config, weights, fused=fused, first=layers.start).items()
        }

    def put(self, name: str, tensor: torch.Tensor) -> None:
        name = self.aliases.get(name, name)
        if name in self._slots:  # else another stage's
            part = cut(name, tensor, self._config, self._model.shard)
            self._slots[name].put(part.to(self._weights.embedding.device))

    def finish(self) -> None:
        self._slots = {}
        self._weights.pack()
