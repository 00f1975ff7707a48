"""One rank's part of a hybrid: some layers, and of these some heads of attention and of delta nets, columns of MLPs and
experts, and tokens.

A part is a smaller model of the same kind: what it reads of a checkpoint is a checkpoint of its own config. Its states
are those of its layers and heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sgl.errors import ConfigError
from sgl.runtime.model.gdn.config import HybridConfig
from sgl.runtime.model.shard import Shard

Cuts = tuple[int, list[slice]]
"""Along which dimension a tensor is cut, and what of it is joined."""


def check_parts(config: HybridConfig, shard: Shard) -> None:
    """Raise ConfigError for a model that cannot be cut into so many parts."""
    size, experts = shard.size, config.experts
    shard.check_stages(config.path, len(config.attends))
    sizes = {
        "attention heads": config.num_heads,
        "key heads in its delta nets": config.key_heads,
        "columns of its MLP (intermediate_size)": config.intermediate_size,
    }
    if experts is not None:
        sizes["columns of an expert (moe_intermediate_size)"] = experts.intermediate_size
        sizes["columns of its shared expert"] = experts.shared_size
    uncut = [f"{its} {name}" for name, its in sizes.items() if its % size]
    if config.num_kv_heads % size and size % config.num_kv_heads:
        uncut.append(f"{config.num_kv_heads} key-value heads")
    if not len(Shard(size - 1, size).vocabulary(config.vocab_size)):
        uncut.append(f"a vocabulary of {config.vocab_size}")
    if uncut:
        raise ConfigError(
            f"tp_size={size}: {config.path} has {uncut[0]}, which {size} ranks cannot share equally",
            option="tp_size",
        )


def local(config: HybridConfig, shard: Shard) -> HybridConfig:
    """The config of this part; hidden size and vocabulary stay the model's."""
    size, experts, layers = shard.size, config.experts, shard.layers_of(len(config.attends))
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=experts.intermediate_size // size,
            shared_size=experts.shared_size // size,
        )
    return replace(
        config,
        attends=config.attends[layers.start : layers.stop],
        is_sparse=config.is_sparse[layers.start : layers.stop],
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        key_heads=config.key_heads // size,
        value_heads=config.value_heads // size,
        intermediate_size=config.intermediate_size // size,
        experts=experts,
    )


def cuts(name: str, config: HybridConfig, shard: Shard) -> Cuts:
    """Where this part lies in a checkpoint's tensor. config: the whole model's."""
    its = local(config, shard)
    *_, module, kind = name.split(".")
    rank, values = shard.rank, its.value_heads * its.value_dim
    rows = {  # of one dimension's parts, one after the other for each head
        "q_proj": 2 * its.num_heads * its.head_dim,
        "in_proj_z": values,
        "in_proj_b": its.value_heads,
        "in_proj_a": its.value_heads,
        "in_proj_qkvz": its.conv_channels + values,  # by key head
        "in_proj_ba": 2 * its.value_heads,
    }
    if module in ("embed_tokens", "lm_head"):
        tokens = shard.vocabulary(config.vocab_size)
        return 0, [slice(tokens.start, tokens.stop)]
    if module in rows:
        return 0, [_nth(rank, rows[module])]
    if module in ("k_proj", "v_proj"):
        first = rank * config.num_kv_heads // shard.size
        return 0, [slice(first * its.head_dim, (first + its.num_kv_heads) * its.head_dim)]
    if module in ("in_proj_qkv", "conv1d"):
        keys, of_all = its.key_heads * its.key_dim, config.key_heads * config.key_dim
        return 0, [
            slice(before + rank * width, before + (rank + 1) * width)
            for before, width in ((0, keys), (of_all, keys), (2 * of_all, values))
        ]
    if kind in ("A_log", "dt_bias"):
        return 0, [_nth(rank, its.value_heads)]
    if module == "o_proj" and kind == "weight":
        return 1, [_nth(rank, its.num_heads * its.head_dim)]
    if module == "out_proj":
        return 1, [_nth(rank, values)]
    return _of_mlp(name, its, shard)


def cut(name: str, tensor: torch.Tensor, config: HybridConfig, shard: Shard) -> torch.Tensor:
    """This part of a checkpoint's tensor; biases of what is summed up count once. config: the whole model's."""
    if shard.rank and name.endswith("o_proj.bias"):
        return torch.zeros_like(tensor)
    dim, parts = cuts(name, config, shard)
    its = [tensor[(slice(None),) * dim + (part,)] for part in parts]
    return its[0] if len(its) == 1 else torch.cat(its, dim)


def matrix_part(name: str, config: HybridConfig, shard: Shard) -> tuple[slice, ...]:
    """`cuts` of an expert's matrix, as an index."""
    dim, [its] = cuts(name, config, shard)
    return (*(slice(None),) * dim, its)


def _of_mlp(name: str, its: HybridConfig, shard: Shard) -> Cuts:
    *_, module, kind = name.split(".")
    size = its.intermediate_size
    if its.experts is not None and ".experts." in name:
        size = its.experts.intermediate_size
    elif its.experts is not None and ".shared_expert." in name:
        size = its.experts.shared_size
    columns = _nth(shard.rank, size)
    if kind == "gate_up_proj":  # of all experts in one
        return 1, [columns, _nth(shard.rank + shard.size, size)]
    if kind == "down_proj":
        return 2, [columns]
    if module in ("gate_proj", "up_proj"):
        return 0, [columns]
    return (1, [columns]) if module == "down_proj" else (0, [slice(None)])


def _nth(rank: int, width: int) -> slice:
    return slice(rank * width, (rank + 1) * width)
