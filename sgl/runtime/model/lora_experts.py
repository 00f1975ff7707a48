"""Which modules a mixture's experts are to LoRA adapters, and where each is in the experts' products."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sgl.runtime.model.lora import EXPERT_PRODUCTS, Fused, Product, Shape, Source


class Mixture(NamedTuple):
    """The experts of a layer, by transformers' names."""

    whole: str  # what has the matrices of all in one
    single: str  # what has one module for each
    names: tuple[str, str, str]  # gate, up and down of such a module
    num_experts: int
    size: int  # of an expert
    hidden: int
    is_turned: bool = False  # see `Fused`

    def fused(self) -> dict[str, Fused]:
        """By parameter: gates and ups, and downs."""
        gate, up, down = self.names
        places = [f"{self.single}.{expert}" for expert in range(self.num_experts)]
        return {
            f"{self.whole}.gate_up_proj": Fused(
                [(f"{its}.{gate}", f"{its}.{up}") for its in places], self.is_turned
            ),
            f"{self.whole}.down_proj": Fused([(f"{its}.{down}",) for its in places]),
        }

    def shapes(self) -> dict[str, Shape]:
        """Of each expert's modules."""
        gate_up, down = self.fused().values()
        ups = {name: (self.size, self.hidden) for its in gate_up.experts for name in its}
        return ups | {name: (self.hidden, self.size) for its in down.experts for name in its}

    def products(self, cut: Callable[[str], tuple[slice, ...]]) -> dict[str, Product]:
        """By name. cut: where a rank's part of a weight is, for all experts the same."""
        found, shapes = {}, self.shapes()
        for product, its in zip(EXPERT_PRODUCTS, self.fused().values(), strict=True):
            first = its.experts[0][0]
            out, width = shapes[first]
            rows, columns = (*cut(f"{first}.weight"), slice(None), slice(None))[:2]
            ours = torch.arange(out)[rows]
            sources = tuple(Source(name, ours, columns) for each in its.experts for name in each)
            found[product] = Product(sources, len(range(width)[columns]), self.num_experts)
        return found
