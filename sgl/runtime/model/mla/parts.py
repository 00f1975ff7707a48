"""One rank's part of a decoder with latent attention: some layers, heads, columns of MLPs and experts, and tokens.

Every rank caches the latents of all tokens, from which all heads read.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sgl.errors import ConfigError
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.shard import Shard


def check_parts(config: LatentConfig, shard: Shard) -> None:
    """Raise ConfigError for a model that cannot be cut into so many parts."""
    size = shard.size
    shard.check_stages(config.path, config.num_layers)
    sizes = {"attention heads": config.num_heads}
    if config.num_dense:
        sizes["columns of its MLP (intermediate_size)"] = config.intermediate_size
    if config.num_dense < config.num_layers:
        sizes["columns of an expert (moe_intermediate_size)"] = config.expert_size
    uncut = [f"{its} {name}" for name, its in sizes.items() if its % size]
    if not uncut and not len(Shard(size - 1, size).vocabulary(config.vocab_size)):
        uncut = [f"a vocabulary of {config.vocab_size}"]
    if uncut:
        raise ConfigError(
            f"tp_size={size}: {config.path} has {uncut[0]}, which {size} ranks cannot share equally",
            option="tp_size",
        )


def local(config: LatentConfig, shard: Shard) -> LatentConfig:
    """The config of this part; hidden size, latents and vocabulary stay the model's."""
    layers = shard.layers(config)
    return replace(
        config,
        num_layers=len(layers),
        num_dense=min(max(config.num_dense - layers.start, 0), len(layers)),
        num_heads=config.num_heads // shard.size,
        intermediate_size=config.intermediate_size // shard.size,
        expert_size=config.expert_size // shard.size,
    )


def part(name: str, config: LatentConfig, shard: Shard) -> tuple[slice, ...]:
    """Where this part lies in a checkpoint's tensor, but for shared experts. config: the whole model's."""
    *_, module, kind = name.split(".")
    its = local(config, shard)
    heads = {
        "q_proj": its.query_dim,
        "q_b_proj": its.query_dim,
        "kv_b_proj": its.nope_dim + its.value_dim,
        "o_proj": its.value_dim,
    }
    size = its.expert_size if ".experts." in name else its.intermediate_size
    if module in ("embed_tokens", "lm_head"):
        tokens = shard.vocabulary(config.vocab_size)
        return (slice(tokens.start, tokens.stop),)
    if ".shared_experts." in name or kind == "bias":
        return ()
    if module in heads:
        rows = _nth(shard, its.num_heads * heads[module])
        return (slice(None), rows) if module == "o_proj" else (rows,)
    if module in ("gate_proj", "up_proj"):
        return (_nth(shard, size),)
    return (slice(None), _nth(shard, size)) if module == "down_proj" else ()


def of_shared(name: str, tensor: torch.Tensor, config: LatentConfig, shard: Shard) -> torch.Tensor:
    """This part of a shared experts' tensor, as experts of the others' size: [num_shared, columns, hidden], or of
    down_proj [hidden, num_shared, columns]. config: the whole model's."""
    columns = _nth(shard, config.expert_size // shard.size)
    if "down_proj" in name:
        return tensor.view(len(tensor), config.num_shared, -1)[:, :, columns]
    return tensor.view(config.num_shared, -1, tensor.shape[1])[:, columns]


def _nth(shard: Shard, width: int) -> slice:
    return slice(shard.rank * width, (shard.rank + 1) * width)
