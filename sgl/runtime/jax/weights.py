"""A decoder's weights as JAX arrays, cut among devices. Torch only reads the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch

from sgl.runtime.jax.mesh import Devices
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.rotary import rotary_table
from sgl.runtime.model.weights import LayerWeights, Weights

Arrays = dict[str, Any]
"""By name, in nested dicts and lists."""
_WHOLE = ("input_norm", "output_bias", "output_norm", "post_attention_norm", "down_bias", "down_norm")


@dataclass(frozen=True, slots=True)
class JaxWeights:
    """`arrays` as `decoder.Decoder` reads them."""

    arrays: Arrays
    num_multiplied: int

    def tensors(self) -> Iterator[Any]:
        """What the first device holds."""
        for array in jax.tree.leaves(self.arrays):
            yield array.addressable_data(0)


@dataclass(frozen=True, slots=True)
class Heads:
    """How heads are grouped for several devices: keys and values of a head that several of them need are copied."""

    num_kv: int
    group: int  # query heads of each
    copies: int

    @staticmethod
    def of(config: ModelConfig, num_devices: int) -> Heads:
        """One number divides the other: `Shard.check`."""
        num_kv = max(config.num_kv_heads, num_devices)
        return Heads(num_kv, config.num_heads // num_kv, num_kv // config.num_kv_heads)


def placed(weights: Weights, config: ModelConfig, devices: Devices, max_positions: int) -> JaxWeights:
    """The weights on the devices; those of torch are let go of layer by layer."""
    num_multiplied, layers = weights.num_multiplied, []
    for index, layer in enumerate(weights.layers):
        layers.append(_layer(layer, config, devices))
        weights.layers[index] = None  # type: ignore[call-overload]  # nobody reads it again
    ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
    tables = [rotary_table(rope, config.head_dim, max_positions, torch.device("cpu")) for rope in ropes]
    of_tokens = 0 if config.vocab_size % devices.size == 0 else None
    arrays: Arrays = {
        "embedding": devices.put(_host(weights.embedding), of_tokens),
        "norm": devices.put(_host(weights.norm)),
        "layers": layers,
        "rotary": [devices.put(_host(table)) for table in tables],
    }
    if weights.lm_head is not weights.embedding:
        arrays["lm_head"] = devices.put(_host(weights.lm_head), of_tokens)
    return JaxWeights(arrays, num_multiplied)


def _layer(layer: LayerWeights, config: ModelConfig, devices: Devices) -> Arrays:
    heads, dim, hidden = Heads.of(config, devices.size), config.head_dim, config.hidden_size
    sizes = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]

    def of_heads(fused: Any) -> torch.Tensor:
        """[n, ...] of query, key and value heads to [num_kv, group + 2, head_dim, ...]."""
        query, key, value = torch.split(fused, sizes)
        query = query.view(heads.num_kv, heads.group, dim, *fused.shape[1:])
        others = [
            its.view(config.num_kv_heads, 1, dim, *fused.shape[1:]).repeat_interleave(heads.copies, 0)
            for its in (key, value)
        ]
        return torch.cat([query, *others], 1)

    def norm_of(weight: torch.Tensor | None, group: int) -> torch.Tensor | None:
        if weight is None or not config.wide_qk_norm:
            return weight
        if group:
            return weight.view(heads.num_kv, heads.group, dim)
        return weight.view(config.num_kv_heads, 1, dim).repeat_interleave(heads.copies, 0)

    assert isinstance(layer.output, torch.Tensor), "matrices are not packed"
    wide = 0 if config.wide_qk_norm else None
    parts: dict[str, tuple[Any, int | None]] = {name: (getattr(layer, name), None) for name in _WHOLE}
    parts |= {
        "qkv": (of_heads(layer.qkv), 0),
        "qkv_bias": (None if layer.qkv_bias is None else of_heads(layer.qkv_bias), 0),
        "q_norm": (norm_of(layer.q_norm, heads.group), wide),
        "k_norm": (norm_of(layer.k_norm, 0), wide),
        "output": (layer.output.view(hidden, heads.num_kv, heads.group, dim), 1),
        "sinks": (None if layer.sinks is None else layer.sinks.view(heads.num_kv, heads.group), 0),
    }
    for name, its in (("gate_up", layer.gate_up), ("gate_up_bias", layer.gate_up_bias)):
        if its is not None:
            assert isinstance(its, torch.Tensor), "matrices are not packed"
            parts[name] = its.view(2, -1, *its.shape[1:]), 1
    parts["down"] = layer.down, 1
    if layer.experts is not None:
        experts = layer.experts
        gate_up, down = experts.unpacked
        gate, up = gate_up.transpose(1, 2).chunk(2, dim=2)
        parts |= {"router": (experts.router, None), "router_bias": (experts.router_bias, None)}
        parts |= {"gate": (gate, 2), "up": (up, 2), "expert_down": (down.transpose(1, 2), 1)}
        if experts.gate_up_bias is not None:
            gate, up = experts.gate_up_bias.chunk(2, dim=1)
            parts |= {"gate_bias": (gate, 1), "up_bias": (up, 1), "expert_down_bias": (experts.down_bias, None)}
    return {name: devices.put(_host(its), axis) for name, (its, axis) in parts.items() if its is not None}


def _host(tensor: Any) -> npt.NDArray[Any]:
    """A CPU tensor as NumPy's; bfloat16 has the type of JAX."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.uint16).numpy().view(jnp.bfloat16))
    return np.asarray(tensor.numpy())
