"""Slots on the device for LoRA adapters: every adapter's matrices of a layer's product stacked, beside the weights.

A slot is one run of memory, so that an adapter comes in by one copy. Ranks below the slots' are padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sgl.kernels.layers.activation import gelu_and_mul, silu_and_mul
from sgl.kernels.layers.linear import Matrix, gated_overlapped, linear, linear_add
from sgl.kernels.lora.experts import ExpertAdapters
from sgl.kernels.lora.ops import Shrunk, expand_, expand_silu_and_mul, shrink
from sgl.kernels.lora.rows import AdapterRows
from sgl.runtime.lora_options import LORA_EXPERTS, LORA_FUSED

_LEAST_RANK = 16  # of a tensor core's tile
_ALIGNED = 64  # elements
EXPERT_PRODUCTS = "expert_gate_up", "expert_down"


Shape = tuple[int, int]


class Fused(NamedTuple):
    """A parameter with the matrices of all experts."""

    experts: list[tuple[str, ...]]
    """The modules of each: they have its rows one after the other,"""
    is_turned: bool = False
    """or in turn, each gate before its up."""


@dataclass(frozen=True, slots=True)
class Modules:
    """Of a whole model, by transformers' names."""

    shapes: Mapping[str, Shape]  # [out, in] of the products that adapters may change
    refused: Mapping[str, str]  # the reason by what the names of others contain; empty: they never run
    ends: Mapping[str, str]  # the same of embedding and head, by their names
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """The parameters of experts."""

    @property
    def names(self) -> list[str]:
        """The last parts of their names, each once."""
        return list(dict.fromkeys(name.rpartition(".")[2] for name in self.shapes))

    @property
    def parts(self) -> list[str]:
        """As `names`, for those that compute several products these."""
        return list(dict.fromkeys(part for module in self.shapes for part in parts_of(module)))

    def reason(self, module: str) -> str | None:
        """Why an adapter may not change a module; module: perhaps what follows its name, too."""
        return next((why for part, why in {**self.refused, **self.ends}.items() if part in f"{module}."), None)


def is_of_expert(module: str) -> bool:
    """Whether it is one of the experts of a mixture."""
    return ".experts." in module


def parts_of(module: str) -> tuple[str, ...]:
    """The products that a module computes, as `lora_target_modules` names them."""
    if is_of_expert(module):
        return (LORA_EXPERTS,)
    name = module.rpartition(".")[2]
    return LORA_FUSED.get(name, (name,))


class Source(NamedTuple):
    """What a part of a product has of a module's matrices."""

    module: str  # by transformers' name
    rows: torch.Tensor  # int64 [width]: of its B, in our order
    columns: slice = slice(None)  # of its A


class Product(NamedTuple):
    """Of a layer: the modules that it computes side by side, each with rows of its own."""

    sources: tuple[Source, ...]
    depth: int  # columns
    num_experts: int | None = None
    """Whose modules these are, an expert after the other."""


class _Stacked(NamedTuple):
    """Of one product of one layer."""

    a: torch.Tensor  # [slots, parts * rank, in], or [slots, experts, parts * rank, in]
    b: torch.Tensor  # [slots, out, rank], or [slots, experts, out, rank]
    parts: tuple[int, ...]  # out by module


class Pair(NamedTuple):
    """A module's two matrices. B is scaled."""

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

    sources: tuple[Source, ...]
    depth: int
    num_experts: int | None
    first_a: int
    first_b: int


class LoraSlots:
    """`num_slots` slots for one rank's part of the model."""

    def __init__(
        self,
        known: Modules,
        layers: Sequence[Mapping[str, Product]],
        *,
        num_slots: int,
        rank: int,
        targets: Collection[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """known: of the whole model. layers: their products by name. rank: an adapter's at most. targets: of
        `Modules.parts`, which adapters may change."""
        layers = wanted(layers, targets)
        self.known, self.most_rank, self.targets = known, rank, frozenset(targets)
        self.num_slots, self.dtype = num_slots, dtype
        self.rank = padded_rank(rank, device)
        self._places, self._size = _places(layers, self.rank)
        self._buffer = torch.zeros(num_slots, self._size, dtype=dtype, device=device)
        self._layers = [
            {
                name: _by_expert(self._stacked(self._buffer, place), place.num_experts)
                for name, place in places.items()
            }
            for places in self._places
        ]

    @property
    def modules(self) -> set[str]:
        """Whose matrices have a place."""
        every = (place for places in self._places for place in places.values())
        return {source.module for place in every for source in place.sources}

    @property
    def is_on_cpu(self) -> bool:
        """Whether products are torch's."""
        return self._buffer.device.type == "cpu"

    def packed(self, path: str, pairs: Mapping[str, Pair]) -> Adapter:
        """An adapter's matrices by module, as a slot holds them."""
        flat = torch.zeros(self._size, dtype=self._buffer.dtype, pin_memory=self._buffer.is_cuda)
        for places in self._places:
            for place in places.values():
                self._fill(flat, place, pairs)
        return Adapter(path, flat)

    def place(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter into a slot, in stream order."""
        self._buffer[slot].copy_(adapter.flat, non_blocking=True)

    def product(self, layer: int, name: str) -> _Stacked | None:
        """The stacked matrices of a layer's product (a field of LayerWeights); None: no adapter has any."""
        return self._layers[layer].get(name)

    def of_experts(self, layer: int, rows: AdapterRows) -> ExpertAdapters | None:
        """What adapters add to a layer's experts; None: nothing."""
        gate_up, down = (self.product(layer, name) for name in EXPERT_PRODUCTS)
        if gate_up is None or down is None:
            return None
        return ExpertAdapters(rows, gate_up[:2], down[:2])

    def _fill(self, flat: torch.Tensor, place: _Place, pairs: Mapping[str, Pair]) -> None:
        a, b, parts = self._stacked(flat.unsqueeze(0), place)
        start = 0
        for number, (source, width) in enumerate(zip(place.sources, parts, strict=True)):
            pair = pairs.get(source.module)
            if pair is not None:
                own = pair.a.shape[0]
                a[0, number * self.rank : number * self.rank + own] = pair.a[:, source.columns]
                b[0, start : start + width, :own] = pair.b[source.rows]
            start += width

    def _stacked(self, buffer: torch.Tensor, place: _Place) -> _Stacked:
        parts = tuple(len(source.rows) for source in place.sources)
        rank, out = self.rank, sum(parts)
        a = buffer[:, place.first_a : place.first_a + len(parts) * rank * place.depth]
        b = buffer[:, place.first_b : place.first_b + out * rank]
        return _Stacked(a.view(len(buffer), len(parts) * rank, place.depth), b.view(len(buffer), out, rank), parts)


class LoraStep:
    """A step in which some tokens have adapters: what its layers add to their products."""

    def __init__(
        self,
        slots: LoraSlots,
        rows: AdapterRows,
        wanted: AdapterRows | None = None,
        aside: torch.cuda.Stream | None = None,
    ) -> None:
        """rows: of all tokens. wanted: of those that the last layer goes on with, None: all. aside: a stream beside
        products, on which adapters' are computed; None: around them."""
        self._slots, self._rows, self._wanted, self._aside = slots, rows, wanted, aside

    def for_wanted(self) -> LoraStep:
        """The same, of the tokens that the last layer goes on with."""
        return self if self._wanted is None else LoraStep(self._slots, self._wanted, aside=self._aside)

    def begin(self, layer: int, name: str, x: torch.Tensor, *, is_half: bool = False) -> torch.Tensor | None:
        """What `expand_` needs, before a product with x [T, in] is launched. is_half: what `add_` needs."""
        stacked = self._slots.product(layer, name)
        if stacked is None:
            return None
        if self._aside is None:
            return shrink(x, stacked.a, self._rows, len(stacked.parts))
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            shrunk = shrink(x, stacked.a, self._rows, len(stacked.parts))
            if is_half:
                return shrunk
            out = x.new_zeros(len(x), sum(stacked.parts))
            expand_(shrunk, stacked.b, out, self._rows, stacked.parts)
            return out

    def expand_(self, layer: int, name: str, begun: torch.Tensor | None, out: torch.Tensor) -> None:
        """Add what has begun to out [T, out], behind the product."""
        stacked = self._slots.product(layer, name)
        if stacked is None or begun is None:
            return
        if self._aside is None:
            expand_(begun, stacked.b, out, self._rows, stacked.parts)
        else:
            self._join()
            out.add_(begun)

    def add_(
        self, layer: int, name: str, shrunk: Shrunk | None, rest: torch.Tensor | None, residual: torch.Tensor
    ) -> None:
        """Add what has begun behind `linear_add`: to what it left, `rest`, unless that is parts to sum, or to the
        residual."""
        stacked = self._slots.product(layer, name)
        if stacked is None or shrunk is None:
            return
        if self._aside is not None and rest is not None and rest.dim() > 2:
            with torch.cuda.stream(self._aside):  # such a product leaves the residual alone
                expand_(shrunk, stacked.b, residual, self._rows, stacked.parts)
            self._join()
        else:
            self._join()
            out = rest if rest is not None and rest.dim() == 2 else residual
            expand_(shrunk, stacked.b, out, self._rows, stacked.parts)

    def gated(
        self, layer: int, begun: torch.Tensor, gate_up: torch.Tensor, gate: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`expand_` to gate_up [T, 2n], then `gate` of activation.py: [T, n]."""
        stacked = self._slots.product(layer, "gate_up")
        assert stacked is not None, "it has begun"
        if gate is not silu_and_mul:
            self.expand_(layer, "gate_up", begun, gate_up)
            return gate(gate_up)
        if self._aside is None:
            return expand_silu_and_mul(begun, stacked.b, gate_up, self._rows)
        self._join()
        return silu_and_mul(gate_up, begun)

    def of_experts(self, layer: int) -> ExpertAdapters | None:
        """What is added to a layer's experts."""
        return self._slots.of_experts(layer, self._rows)

    def _join(self) -> None:
        if self._aside is not None:
            torch.cuda.current_stream().wait_stream(self._aside)


def adapted(
    x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, index: int, name: str, lora: LoraStep | None
) -> torch.Tensor:
    """`linear` of a layer's product, with what adapters add."""
    begun = None if lora is None else lora.begin(index, name, x)
    out = linear(x, matrix, bias)
    if lora is not None:
        lora.expand_(index, name, begun, out)
    return out


def added(
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    index: int,
    name: str,
    lora: LoraStep | None,
    *,
    captured: bool,
) -> torch.Tensor | None:
    """`linear_add` of a layer's product, with what adapters add."""
    shrunk = None if lora is None else lora.begin(index, name, x, is_half=True)
    rest = linear_add(x, matrix, bias, residual, captured=captured)
    if lora is not None:
        lora.add_(index, name, shrunk, rest, residual)
    return rest


def gated(
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    gate: Callable[[torch.Tensor], torch.Tensor],
    index: int,
    lora: LoraStep | None,
    *,
    captured: bool = False,
) -> torch.Tensor:
    """`gate` of activation.py of a layer's gates and ups. captured: for a CUDA graph."""
    if captured and lora is None:
        product = gated_overlapped(x, matrix, bias, is_gelu=gate is gelu_and_mul)
        if product is not None:
            return product
    begun = None if lora is None else lora.begin(index, "gate_up", x)
    gate_up = linear(x, matrix, bias)
    return gate(gate_up) if lora is None or begun is None else lora.gated(index, begun, gate_up, gate)


def fed(x: torch.Tensor, gate_up: Matrix, down: Matrix, index: int, lora: LoraStep | None) -> torch.Tensor:
    """A layer's whole SwiGLU MLP."""
    return adapted(gated(x, gate_up, None, silu_and_mul, index, lora), down, None, index, "down", lora)


def wanted(layers: Sequence[Mapping[str, Product]], targets: Collection[str]) -> list[dict[str, Product]]:
    """The products that have a target."""
    return [
        {
            name: product
            for name, product in products.items()
            if any({*parts_of(source.module)} & {*targets} for source in product.sources)
        }
        for products in layers
    ]


def slot_size(
    layers: Sequence[Mapping[str, Product]], rank: int, targets: Collection[str], device: torch.device
) -> int:
    """Elements of each of `LoraSlots`, whose arguments these are."""
    return _places(wanted(layers, targets), padded_rank(rank, device))[1]


def padded_rank(rank: int, device: torch.device) -> int:
    """The rank that slots have: as it is on a CPU, a power of two for kernels."""
    return rank if device.type == "cpu" else max(_LEAST_RANK, 1 << (rank - 1).bit_length())


def _by_expert(its: _Stacked, num_experts: int | None) -> _Stacked:
    if num_experts is None:
        return its
    a, b = (torch.unflatten(matrices, 1, (num_experts, -1)) for matrices in its[:2])
    return _Stacked(a, b, its.parts[: len(its.parts) // num_experts])


def _places(layers: Sequence[Mapping[str, Product]], rank: int) -> tuple[list[dict[str, _Place]], int]:
    """By layer and product, and the elements of a slot."""
    size, found = 0, []
    for products in layers:
        places = {}
        for name, (sources, depth, num_experts) in products.items():
            first_b = size + math.ceil(len(sources) * rank * depth / _ALIGNED) * _ALIGNED
            places[name] = _Place(sources, depth, num_experts, size, first_b)
            size = first_b + math.ceil(sum(len(its.rows) for its in sources) * rank / _ALIGNED) * _ALIGNED
        found.append(places)
    return found, size
