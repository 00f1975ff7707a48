"""New weights of transformers' modules, some of which are parts of our products."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from sgl.errors import WeightsError
from sgl.kernels.layers.linear import PackedMatrix
from sgl.runtime.model.hf.fuse import Logits, Part, Product
from sgl.runtime.model.hf.model import TransformersModel
from sgl.runtime.model.update.writer import Writer, plain
from sgl.runtime.model.weights import packed


class TransformersWriter(Writer):
    """A `Writer`, by the names that the module itself has for its tensors."""

    why_not_read: str | None = None

    def __init__(self, model: TransformersModel) -> None:
        self._module: Any = model.module
        self._first = {name: first for name, (first, _) in model.names.items()}
        self.shapes = {name: shape for name, (_, shape) in model.names.items()}
        self.aliases = {name: first for name, first in self._first.items() if name != first}
        self._opened: list[Product | Logits] = []

    def missing(self, names: Collection[str]) -> list[str]:
        have = {self._first[name] for name in names}
        return [name for name in dict.fromkeys(self._first.values()) if name not in have]

    def begin(self, names: Collection[str]) -> None:
        found = (self._place(alias)[0] for name in names for alias in self._aliases(name))
        for module in {id(its): its for its in found if isinstance(its, Product | Logits)}.values():
            if isinstance(module.matrix, PackedMatrix):
                module.matrix = plain(module.matrix)
                self._opened.append(module)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        for alias in self._aliases(name):
            self._view(alias).copy_(tensor)

    def finish(self) -> None:
        for product in self._opened:
            product.matrix = packed(product.matrix)
        self._opened = []
        modules = list(self._module.modules())
        for norm in modules:
            scales, weight = getattr(norm, "scales", None), getattr(norm, "weight", None)
            if scales is not None and weight is not None and scales.data_ptr() != weight.data_ptr():
                scales.copy_(1.0 + weight.float())
        for attention in modules:
            if (follow := getattr(attention, "sgl_follow", None)) is not None:
                follow()

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """See `Writer`; it is never cut."""
        whole = self._view(name)
        return (whole[first:last] if whole.dim() else whole).to(torch.float32, copy=True)

    def _aliases(self, name: str) -> list[str]:
        first = self._first[name]
        return [alias for alias, its in self._first.items() if its == first]

    def _place(self, name: str) -> tuple[Any, int | None]:
        """The module that holds a tensor, and which of a product's."""
        path, _, _ = name.rpartition(".")
        module = self._module.get_submodule(path)
        if isinstance(module, Part):
            return module.product, module.index
        return module, 0 if isinstance(module, Product) else None

    def _view(self, name: str) -> torch.Tensor:
        """Where a tensor lies."""
        module, index = self._place(name)
        kind = name.rpartition(".")[2]
        if isinstance(module, Logits) or index is None:
            its = getattr(module, {"weight": "matrix"}.get(kind, kind) if isinstance(module, Logits) else kind)
        else:
            whole = module.bias if kind == "bias" else module.matrix
            its = torch.split(whole, module.sizes)[index]
            if kind == "weight" and module.are_turned[index]:
                its = its.t()
        if not isinstance(its, torch.Tensor):
            raise WeightsError(f"{name} is held in a form that takes no new weights", tensor=name)
        return its.detach()
