"""Slots on the device for LoRA adapters: every adapter's matrices of a layer's product stacked, beside the weights.

A slot is one run of memory, so that an adapter comes in by one copy. Ranks below the slots' are padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.lora.ops import Shrunk, expand_, expand_silu_and_mul, shrink
from sgl.kernels.lora.rows import AdapterRows
from sgl.runtime.lora_options import LORA_TARGETS
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.rotary import rotary_order
from sgl.runtime.model.shard import Shard

_MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = {name: "mlp" if name in _MLP else "self_attn" for name in LORA_TARGETS}
"""The products that adapters may have matrices for, and the module that each is in."""
_PRODUCTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_LEAST_RANK = 16  # of a tensor core's tile
_ALIGNED = 64  # elements


class _Stacked(NamedTuple):
    """Of one product of one layer."""

    a: torch.Tensor  # [slots, parts * rank, in]
    b: torch.Tensor  # [slots, out, rank]
    parts: tuple[int, ...]  # out by module


@dataclass(frozen=True, slots=True)
class Pair:
    """A module's two matrices, of one rank's part of the model. B is scaled."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in host memory."""

    path: str
    flat: torch.Tensor  # [elements of a slot]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a product's matrices are in a slot."""

    modules: tuple[str, ...]
    parts: tuple[int, ...]
    depth: int
    first_a: int
    first_b: int


class LoraSlots:
    """`num_slots` slots for one rank's part of the model."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        *,
        num_slots: int,
        rank: int,
        targets: Collection[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """config: the whole model's. rank: an adapter's at most. targets: of `TARGETS`, which adapters may have."""
        self.config, self.shard = config, shard
        self.most_rank, self.targets = rank, frozenset(targets)
        self._order = rotary_order(config)  # in which the decoder computes queries and keys
        self.num_slots = num_slots
        self.rank = padded_rank(rank, device)
        self._places, self._size = _places(shard.local(config), self.rank, self.targets)
        self._buffer = torch.zeros(num_slots, self._size, dtype=dtype, device=device)
        self._layers = [
            {name: self._stacked(self._buffer, place) for name, place in places.items()} for places in self._places
        ]

    @staticmethod
    def num_bytes(
        config: ModelConfig,
        shard: Shard,
        *,
        num_slots: int,
        rank: int,
        targets: Collection[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> int:
        """That they take; arguments as of the class."""
        return num_slots * dtype.itemsize * _places(shard.local(config), padded_rank(rank, device), targets)[1]

    @property
    def is_on_cpu(self) -> bool:
        """Whether products are torch's."""
        return self._buffer.device.type == "cpu"

    def packed(self, path: str, pairs: Mapping[str, Pair]) -> Adapter:
        """An adapter's matrices by module, as a slot holds them."""
        flat = torch.zeros(self._size, dtype=self._buffer.dtype, pin_memory=self._buffer.is_cuda)
        first = self.shard.layers(self.config).start
        for layer, places in enumerate(self._places, first):
            for place in places.values():
                self._fill(flat, place, layer, pairs)
        return Adapter(path, flat)

    def place(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter into a slot, in stream order."""
        self._buffer[slot].copy_(adapter.flat, non_blocking=True)

    def product(self, layer: int, name: str) -> _Stacked | None:
        """The stacked matrices of a layer's product (a field of LayerWeights); None: no adapter has any."""
        return self._layers[layer].get(name)

    def _fill(self, flat: torch.Tensor, place: _Place, layer: int, pairs: Mapping[str, Pair]) -> None:
        a, b, _ = self._stacked(flat.unsqueeze(0), place)
        start = 0
        for number, (name, width) in enumerate(zip(place.modules, place.parts, strict=True)):
            pair = pairs.get(f"model.layers.{layer}.{TARGETS[name]}.{name}")
            if pair is not None:
                own = pair.a.shape[0]
                a[0, number * self.rank : number * self.rank + own] = pair.a
                its = pair.b
                if name in ("q_proj", "k_proj") and self._order is not None:
                    its = its.view(-1, self.config.head_dim, own)[:, self._order].flatten(0, 1)
                b[0, start : start + width, :own] = its
            start += width

    def _stacked(self, buffer: torch.Tensor, place: _Place) -> _Stacked:
        rank, out = self.rank, sum(place.parts)
        a = buffer[:, place.first_a : place.first_a + len(place.parts) * rank * place.depth]
        b = buffer[:, place.first_b : place.first_b + out * rank]
        shape = len(buffer), len(place.parts) * rank, place.depth
        return _Stacked(a.view(shape), b.view(len(buffer), out, rank), place.parts)


class LoraStep:
    """A step in which some tokens have adapters: what its layers add to their products."""

    def __init__(
        self,
        slots: LoraSlots,
        rows: AdapterRows,
        wanted: AdapterRows | None = None,
        aside: torch.cuda.Stream | None = None,
    ) -> None:
        """rows: of all tokens. wanted: of those that the last layer goes on with, None: all. aside: where `shrink` runs
        beside the product; None: before it."""
        self._slots, self._rows, self._wanted, self._aside = slots, rows, wanted, aside

    def for_wanted(self) -> LoraStep:
        """The same, of the tokens that the last layer goes on with."""
        return self if self._wanted is None else LoraStep(self._slots, self._wanted, aside=self._aside)

    def shrink(self, layer: int, name: str, x: torch.Tensor) -> Shrunk | None:
        """The first half of what is added to a product with x [T, in], before it is launched."""
        stacked = self._slots.product(layer, name)
        if stacked is None:
            return None
        if self._aside is None:
            return shrink(x, stacked.a, self._rows, len(stacked.parts))
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            return shrink(x, stacked.a, self._rows, len(stacked.parts))

    def expand_(self, layer: int, name: str, shrunk: Shrunk | None, out: torch.Tensor) -> None:
        """The second half, added to out [T, out], behind the product."""
        stacked = self._slots.product(layer, name)
        if stacked is not None and shrunk is not None:
            self._join()
            expand_(shrunk, stacked.b, out, self._rows, stacked.parts)

    def gated(
        self, layer: int, shrunk: Shrunk, gate_up: torch.Tensor, gate: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`expand_` to gate_up [T, 2n], then `gate` of activation.py: [T, n]."""
        stacked = self._slots.product(layer, "gate_up")
        assert stacked is not None, "it was shrunk"
        self._join()
        if gate is not silu_and_mul:
            expand_(shrunk, stacked.b, gate_up, self._rows, stacked.parts)
            return gate(gate_up)
        return expand_silu_and_mul(shrunk, stacked.b, gate_up, self._rows)

    def _join(self) -> None:
        if self._aside is not None:
            torch.cuda.current_stream().wait_stream(self._aside)


def padded_rank(rank: int, device: torch.device) -> int:
    """The rank that slots have: as it is on a CPU, a power of two for kernels."""
    return rank if device.type == "cpu" else max(_LEAST_RANK, 1 << (rank - 1).bit_length())


def _places(config: ModelConfig, rank: int, targets: Collection[str]) -> tuple[list[dict[str, _Place]], int]:
    """By layer and product, and the elements of a slot. config: of this part."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    shapes = {
        "qkv": ((heads, kv_heads, kv_heads), hidden),
        "output": ((hidden,), heads),
        "gate_up": ((intermediate, intermediate), hidden),
        "down": ((hidden,), intermediate),
    }
    size, layers = 0, []
    for layer in range(config.num_layers):
        places = {}
        for name, modules in _PRODUCTS.items():
            is_mixture = config.has_experts(layer) and TARGETS[modules[0]] == "mlp"
            if set(modules) & set(targets) and not is_mixture:
                parts, depth = shapes[name]
                first_b = size + math.ceil(len(parts) * rank * depth / _ALIGNED) * _ALIGNED
                places[name] = _Place(modules, parts, depth, size, first_b)
                size = first_b + math.ceil(sum(parts) * rank / _ALIGNED) * _ALIGNED
        layers.append(places)
    return layers, size
