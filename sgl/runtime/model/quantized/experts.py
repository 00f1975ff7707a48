"""Experts' matrices as they are stored, packed for kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from sgl.kernels.layers.grouped import UNIT
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.packed import PackedExperts
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.quantized.checkpoint import QuantizedCheckpoint
from sgl.runtime.model.quantized.pack import grouped
from sgl.runtime.model.shard import DOWN, GATE_UP, Shard
from sgl.runtime.model.weights import Weights

Part = tuple[slice, ...]


class HasName(Protocol):
    """A checkpoint's tensor, or some rows of one."""

    @property
    def name(self) -> str:
        """In the file."""

    def part(self, part: Part) -> Part:
        """Where a part of it lies in the file's tensor."""


def quantized_experts(
    config: ModelConfig, entries: Mapping[str, HasName], quantized: QuantizedCheckpoint, shard: Shard
) -> dict[tuple[int, str], list[list[str]]]:
    """A part's matrices of experts that are all quantised, by layer there and name in `Experts`: each expert's tensors'
    names, or the one name of all."""
    names = FAMILIES[config.architecture].experts
    if names is None or config.experts is None:
        return {}
    found = {}
    for layer, index in enumerate(shard.layers(config)):
        one_by_one = f"model.layers.{index}.{names.block}.experts"
        for field, fused, modules in (
            ("gate_up", GATE_UP, (names.gate, names.up)),
            ("down", DOWN, (names.down,)),
        ):
            each = [
                [f"{one_by_one}.{expert}.{module}.weight" for module in modules]
                for expert in range(config.experts.num_experts)
            ]
            for choice in (each, [[f"model.layers.{index}.mlp.{fused}"]]):
                if all(
                    name in entries and entries[name].name in quantized.shapes for its in choice for name in its
                ):
                    found[layer, f"experts.{field}"] = choice
    return found


def pack_experts(
    weights: Weights,
    found: Mapping[tuple[int, str], list[list[str]]],
    config: ModelConfig,
    entries: Mapping[str, HasName],
    quantized: QuantizedCheckpoint,
    shard: Shard,
    device: torch.device,
) -> None:
    """Read what `quantized_experts` found into the weights: packed, or memory for what no kernel reads."""
    for (layer, name), modules in found.items():
        experts, is_down = weights.layers[layer].experts, name == "experts.down"
        assert experts is not None, "the config says so"
        fused = modules[0][0]
        if fused.endswith((GATE_UP, DOWN)):
            packed = _of_blocks(quantized, fused, shard.part(fused, config))
        else:
            packed = packed_experts(
                quantized,
                [
                    [(entries[its].name, entries[its].part(shard.part(its, config))) for its in each]
                    for each in modules
                ],
            )
        meta = experts.down if is_down else experts.gate_up
        matrices = (
            torch.empty_like(meta, device=device) if isinstance(meta, torch.Tensor) and packed is None else packed
        )
        assert matrices is not None, "it is read once"
        weights.layers[layer].experts = (
            replace(experts, down=matrices) if is_down else replace(experts, gate_up=matrices)
        )


def whole_experts(
    mlps: Mapping[int, str], num_experts: int, quantized: QuantizedCheckpoint
) -> dict[int, tuple[list[list[tuple[str, Part]]], ...]]:
    """Layers, of these with the names of their MLPs, whose experts are all quantised: the tensors of gates and ups, and
    of downs, of each."""
    found = {}
    for index, mlp in mlps.items():
        experts: tuple[list[list[tuple[str, Part]]], ...] = tuple(
            [[(f"{mlp}.experts.{its}.{module}.weight", ()) for module in modules] for its in range(num_experts)]
            for modules in (("gate_proj", "up_proj"), ("down_proj",))
        )
        if all(name in quantized.shapes for each in experts for modules in each for name, _ in modules):
            found[index] = experts
    return found


def pack_both(
    experts: Experts,
    gate_up: Sequence[Sequence[tuple[str, Part]]],
    down: Sequence[Sequence[tuple[str, Part]]],
    quantized: QuantizedCheckpoint,
    device: torch.device,
) -> Experts:
    """With both matrices packed, see `packed_experts`, or memory for both."""
    both = packed_experts(quantized, gate_up), packed_experts(quantized, down)
    if both[0] is not None and both[1] is not None:
        return replace(experts, gate_up=both[0], down=both[1])
    empty = [torch.empty_like(its, device=device) for its in experts.unpacked]
    return replace(experts, gate_up=empty[0], down=empty[1])


def packed_experts(
    quantized: QuantizedCheckpoint, experts: Sequence[Sequence[tuple[str, Part]]]
) -> PackedExperts | None:
    """A matrix of each expert, of the rows of its tensors, or parts of these. None: see `grouped` and
    `PackedExperts.of`."""
    found = []
    for tensors in experts:
        matrix = grouped([quantized.codes(name, part) for name, part in tensors])
        if matrix is None:
            return None
        found.append(matrix)
    return PackedExperts.of(found)


def _of_blocks(quantized: QuantizedCheckpoint, name: str, part: Part) -> PackedExperts | None:
    """Of a part of the experts [experts, k, n] of a layer in MXFP4."""
    blocks, exponents = quantized.blocks(name)
    _, columns, rows = (*part, slice(None), slice(None))[:3]
    first, after, _ = columns.indices(blocks.shape[2] * UNIT)
    if blocks.dim() != 4 or first % UNIT or after % UNIT:
        return None
    units = slice(first // UNIT, after // UNIT)
    blocks, exponents = blocks[:, rows, units], exponents[:, rows, units]
    if name.endswith(GATE_UP):  # each gate is before its up
        order = torch.arange(blocks.shape[1], device=blocks.device).view(-1, 2).t().flatten()
        blocks, exponents = blocks[:, order], exponents[:, order]
    return PackedExperts.of_e2m1(blocks, exponents)
