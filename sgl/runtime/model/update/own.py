"""What the writers of our own models share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic

import torch

from sgl.errors import WeightsError
from sgl.kernels.layers.invariant import InvariantMatrix
from sgl.kernels.layers.linear import PackedMatrix
from sgl.runtime.model.loader import LM_HEAD
from sgl.runtime.model.part import W
from sgl.runtime.model.update.writer import Writer, plain


class OwnWriter(Writer, Generic[W]):
    """A `Writer`'s names and its head, which may be the embedding. Its tensors are not read back."""

    why_not_read: str | None

    def __init__(self, weights: W, embedding: str, *forms: Mapping[str, tuple[int, ...]]) -> None:
        """embedding: its name. forms: the tensors of whole checkpoints, which may have any of these forms."""
        self._weights, self._forms = weights, forms
        self.shapes = {name: shape for form in forms for name, shape in form.items()}
        self.aliases = {LM_HEAD: embedding} if weights.is_tied else {}
        self.shapes |= {alias: self.shapes[name] for alias, name in self.aliases.items()}

    def missing(self, names: Collection[str]) -> list[str]:
        have = {self.aliases.get(name, name) for name in names}
        return min(([name for name in form if name not in have] for form in self._forms), key=len)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        raise WeightsError(f"{name}: {self.why_not_read}", tensor=name)

    def _unpack_head(self) -> None:
        weights = self._weights
        if self.aliases:
            weights.lm_head = weights.embedding
        elif isinstance(weights.lm_head, PackedMatrix):
            weights.lm_head = plain(weights.lm_head)
        elif isinstance(weights.lm_head, InvariantMatrix):
            weights.lm_head = weights.lm_head.plain()
