"""New weights of hybrids of gated delta nets and attention."""

from __future__ import annotations

from collections.abc import Collection

import torch

from sgl.errors import WeightsError
from sgl.kernels.layers.linear import PackedMatrix
from sgl.runtime.model.gdn.model import Hybrid
from sgl.runtime.model.gdn.parts import cut
from sgl.runtime.model.gdn.weights import IGNORED, Slot, slots, tensor_shapes
from sgl.runtime.model.loader import LM_HEAD
from sgl.runtime.model.update.writer import is_follower, plain, unpack


class HybridWriter:
    """A `Writer`."""

    why_not_read: str | None = "weights of gated delta nets are not read back"

    def __init__(self, model: Hybrid) -> None:
        self._model, self._weights, self._config = model, model.weights, model.whole_config
        self._tied = model.weights.is_tied
        self._embedding = f"{self._config.prefix}embed_tokens.weight"
        self._each, self._fused = (
            tensor_shapes(self._config, tied=self._tied, fused=fused) for fused in (False, True)
        )
        self.shapes = {**self._each, **self._fused}
        if self._tied:
            self.shapes[LM_HEAD] = self.shapes[self._embedding]
        self.aliases = {LM_HEAD: self._embedding} if self._tied else {}
        self._slots: dict[str, Slot] = {}

    def name(self, given: str) -> str:
        """See `Writer`."""
        return given

    def ignores(self, name: str) -> bool:
        """See `Writer`."""
        return is_follower(name) or name.startswith(IGNORED)

    def missing(self, names: Collection[str]) -> list[str]:
        """See `Writer`."""
        have = {*names, self._embedding} if self._tied and LM_HEAD in names else names
        return min(([name for name in its if name not in have] for its in (self._each, self._fused)), key=len)

    def begin(self, names: Collection[str]) -> None:
        """See `Writer`."""
        weights, layers = self._weights, self._model.shard.layers_of(len(self._config.attends))
        unpack(weights.parts())
        if self._tied:
            weights.lm_head = weights.embedding
        elif isinstance(weights.lm_head, PackedMatrix):
            weights.lm_head = plain(weights.lm_head)
        self._slots = {
            name: slot
            for fused in (False, True)
            for name, slot in slots(self._model.config, weights, fused=fused, first=layers.start).items()
        }

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """See `Writer`."""
        if self._tied and name == LM_HEAD:
            name = self._embedding
        if name in self._slots:  # else another stage's
            part = cut(name, tensor, self._config, self._model.shard)
            self._slots[name].put(part.to(self._weights.embedding.device))

    def finish(self) -> None:
        """See `Writer`."""
        self._slots = {}
        self._weights.pack()

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """See `Writer`."""
        raise WeightsError(f"{name}: {self.why_not_read}", tensor=name)
