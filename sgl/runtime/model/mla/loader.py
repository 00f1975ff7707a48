"""Loads a decoder with latent attention: safetensors or random weights."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal

import torch

from sgl.errors import ConfigError
from sgl.kernels.moe.experts import Experts
from sgl.runtime.model.config import DtypeName
from sgl.runtime.model.loader import LoadFormat, check_tensors, read_quantized, resolve_dtype, say_dequantized
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.mla.model import LatentDecoder
from sgl.runtime.model.mla.parts import check_parts, local, of_shared, part
from sgl.runtime.model.mla.weights import LatentWeights, allocate_weights, checkpoint_tensors
from sgl.runtime.model.quantized.checkpoint import QuantizedCheckpoint
from sgl.runtime.model.quantized.experts import pack_both
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import WHOLE, Shard
from sgl.runtime.model.weight_files import model_headers, opened, read
from sgl.runtime.model.weights import keeps_groups

_LM_HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def load_latent(
    config: LatentConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: Literal["auto"] | DtypeName = "auto",
    load_format: LoadFormat = "auto",
    max_positions: int | None = None,
    ranks: Ranks | None = None,
) -> LatentDecoder:
    """See `load_decoder`."""
    shard = WHOLE if ranks is None else ranks.shard
    check_parts(config, shard)
    device = torch.device(device)
    torch_dtype = resolve_dtype(config, dtype, device)
    if load_format == "gguf":
        raise ConfigError(f"load_format='gguf': {config.path} is safetensors", option="load_format")
    if load_format == "dummy":
        weights = _random_weights(config, torch_dtype, device, shard)
    else:
        weights = _load_weights(config, torch_dtype, device, shard)
    weights.pack()
    return LatentDecoder(config, weights, max_positions, ranks)


def num_latent_weights(config: LatentConfig) -> int:
    """Of the whole model."""
    return sum(math.prod(shape) for shape in tensor_shapes(config, tied=config.tie_word_embeddings).values())


def _random_weights(config: LatentConfig, dtype: torch.dtype, device: torch.device, shard: Shard) -> LatentWeights:
    """Initialised like transformers: normal matrices, no biases, norms of one. All parts are cut from the same."""
    tied, own = config.tie_word_embeddings, local(config, shard)
    weights = allocate_weights(own, dtype, device, tied=tied, shard=shard)
    targets = checkpoint_tensors(own, weights, shard.layers(config).start)
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in tensor_shapes(config, tied=tied).items():
        target = targets.get(name)
        if name.endswith(("norm.weight", "bias")):
            if target is not None:
                target.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        drawn = torch.empty(shape, dtype=dtype, device=device)  # also where others hold it
        drawn.normal_(0.0, config.initializer_range, generator=generator)
        if target is not None:
            _fill(name, target, drawn[part(name, config, shard)], config, shard)
    return weights


def _fill(name: str, target: torch.Tensor, value: torch.Tensor, config: LatentConfig, shard: Shard) -> None:
    """Copy `part` of a checkpoint's tensor to where it belongs. config: the whole model's."""
    if ".shared_experts." in name:
        value = of_shared(name, value, config, shard)
    if shard.rank and name.endswith("o_proj.bias"):
        target.zero_()  # it counts once
    else:
        target.copy_(value.view(target.shape) if value.dim() != target.dim() else value)


def fill_part(name: str, target: torch.Tensor, value: torch.Tensor, config: LatentConfig, shard: Shard) -> None:
    """Copy a rank's part of a checkpoint's tensor to where `checkpoint_tensors` says. config: the whole model's."""
    _fill(name, target, paired_by_halves(name, value[part(name, config, shard)], config), config, shard)


def is_used(name: str, config: LatentConfig) -> bool:
    """Not a tensor of the layers behind the last one, which predict several tokens at once."""
    layer = _LAYER.match(name)
    return layer is None or int(layer[1]) < config.num_layers


def tensor_shapes(config: LatentConfig, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a checkpoint, whole."""
    weights = allocate_weights(config, torch.float32, torch.device("meta"), tied=tied)
    return {name: _shape(name, target) for name, target in checkpoint_tensors(config, weights).items()}


def _shape(name: str, target: torch.Tensor) -> tuple[int, ...]:
    if target.dim() < 3:
        return tuple(target.shape)
    return tuple((target.flatten(1) if "down_proj" in name else target.flatten(0, 1)).shape)


def _load_weights(config: LatentConfig, dtype: torch.dtype, device: torch.device, shard: Shard) -> LatentWeights:
    folder = Path(config.path)
    used = {name: entry for name, entry in model_headers(folder).items() if is_used(name, config)}
    entries, quantized = read_quantized(used, config.scheme, device)
    tied = config.tie_word_embeddings and _LM_HEAD not in entries
    check_tensors(entries, tensor_shapes(config, tied=tied), folder)
    own = local(config, shard)
    layers = shard.layers(config)
    found = _quantized_layers(config, quantized) if keeps_groups(device) else {}
    without = {index - layers.start: its for index, its in found.items() if index in layers}
    weights = allocate_weights(own, dtype, device, tied=tied, shard=shard, without=without)
    for index, experts in without.items():
        weights.layers[index].experts = _packed(
            weights.layers[index].experts, experts, config, quantized, shard, device
        )
    targets = checkpoint_tensors(own, weights, layers.start)
    for file in sorted({entry.file for entry in entries.values()}):
        with opened(file) as tensors:
            for name, target in targets.items():
                if entries[name].file == file:
                    its = part(name, config, shard)
                    if name in quantized.shapes:
                        value = quantized.dequantized(name)[its]
                    else:
                        value = read(tensors, entries[name].name, file, its)
                    _fill(name, target, paired_by_halves(name, value, config), config, shard)
    num_packed = sum(layer.experts is not None and layer.experts.is_packed for layer in weights.layers)
    say_dequantized(
        quantized, config.scheme, dtype, but=f", but the experts of {num_packed} layers" * (num_packed > 0)
    )
    if config.tie_word_embeddings and not tied and torch.equal(targets[_LM_HEAD], weights.embedding):
        weights.lm_head = weights.embedding
    return weights


_Modules = list[tuple[str, slice | None]]
"""Tensors of an expert, and which of the columns of all shared ones are its own."""


def _quantized_layers(
    config: LatentConfig, quantized: QuantizedCheckpoint
) -> dict[int, tuple[list[_Modules], ...]]:
    """Layers whose experts are all quantised: gates and ups, and downs, of each."""
    found = {}
    for index in range(config.num_dense, config.num_layers):
        mlp, size = f"model.layers.{index}.mlp", config.expert_size
        places: list[tuple[str, slice | None]] = [
            (f"{mlp}.experts.{expert}", None) for expert in range(config.routing.num_experts)
        ]
        places += [
            (f"{mlp}.shared_experts", slice(its * size, (its + 1) * size)) for its in range(config.num_shared)
        ]
        kinds = ("gate_proj", "up_proj"), ("down_proj",)
        experts = tuple(
            [[(f"{place}.{module}.weight", its) for module in modules] for place, its in places]
            for modules in kinds
        )
        if all(name in quantized.shapes for each in experts for modules in each for name, _ in modules):
            found[index] = experts
    return found


def _packed(
    meta: Experts | None,
    experts: tuple[list[_Modules], ...],
    config: LatentConfig,
    quantized: QuantizedCheckpoint,
    shard: Shard,
    device: torch.device,
) -> Experts:
    assert meta is not None, "the layer is none of the dense ones"
    width = config.expert_size // shard.size

    def cut(name: str, its: slice | None) -> tuple[slice, ...]:
        first = (0 if its is None else its.start) + shard.rank * width
        columns = slice(first, first + width)
        return (slice(None), columns) if "down_proj" in name else (columns,)

    gate_up, down = ([[(name, cut(name, its)) for name, its in modules] for modules in each] for each in experts)
    return pack_both(meta, gate_up, down, quantized, device)


def paired_by_halves(name: str, tensor: torch.Tensor, config: LatentConfig) -> torch.Tensor:
    """A projection's rows in the order in which we rotate what they compute. Products of queries and keys, reordered
    alike, stay the same."""
    module = name.split(".")[-2]
    width = {
        "q_proj": config.query_dim,
        "q_b_proj": config.query_dim,
        "kv_a_proj_with_mqa": config.head_dim,
    }.get(module)
    if width is None or not config.is_interleaved:
        return tensor
    heads = tensor.view(-1, width, *tensor.shape[1:])
    kept, rotated = torch.split(heads, [width - config.rope_dim, config.rope_dim], 1)
    return torch.cat((kept, rotated[:, 0::2], rotated[:, 1::2]), 1).flatten(0, 1)
