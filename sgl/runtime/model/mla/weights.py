"""The weights of a decoder with latent attention, and which of a checkpoint's tensors fill them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from sgl.kernels.layers.linear import Matrix, prepare
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.packed import PackedExperts
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.shard import WHOLE, Shard
from sgl.runtime.model.weights import DecoderWeights, matrix_tensors, packed

_MATRICES = ("qkv", "query_up", "output", "gate_up", "down")


@dataclass(slots=True)
class LatentLayer:
    """One layer. Matrices are [out, in]. Rotated numbers are paired by halves, as rope.py rotates them."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Matrix  # [queries' latent or all heads' queries, then kv_rank + rope_dim; hidden]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [q_rank]
    query_up: Matrix | None  # [num_heads * query_dim, q_rank]
    latent_norm: torch.Tensor  # [kv_rank]
    latent_up: torch.Tensor  # [num_heads, nope_dim + value_dim, kv_rank]: keys, then values
    output: Matrix  # [hidden, num_heads * value_dim]
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor  # [hidden]
    gate_up: Matrix | None  # [2 * intermediate, hidden], of a dense layer
    down: Matrix | None  # [hidden, intermediate]
    experts: Experts | None  # of any other


class LatentWeights(DecoderWeights[LatentLayer]):
    """All weights."""

    @property
    def num_multiplied(self) -> int:
        """Elements of the matrices that a token is multiplied with: of the experts, those that it takes."""
        total = next(matrix_tensors(self.lm_head)).numel()
        for layer in self.layers:
            matrices = [getattr(layer, name) for name in _MATRICES]
            total += layer.latent_up.numel()
            total += sum(next(matrix_tensors(matrix)).numel() for matrix in matrices if matrix is not None)
            if layer.experts is not None:
                total += layer.experts.num_multiplied
        return total

    def pack(self) -> None:
        """See `Weights.pack`."""
        for layer in self.layers:
            for name in _MATRICES:
                matrix = getattr(layer, name)
                setattr(layer, name, None if matrix is None else packed(matrix))
        self.pack_head()

    def prepare(self, most_rows: int) -> None:
        """See `linear.prepare`."""
        for layer in {layer.experts is None: layer for layer in self.layers}.values():
            for name in _MATRICES:
                matrix = getattr(layer, name)
                if matrix is not None:
                    prepare(matrix, getattr(layer, f"{name}_bias", None), most_rows)
        prepare(self.lm_head, None, most_rows)


def allocate_weights(
    config: LatentConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tied: bool,
    shard: Shard = WHOLE,
    without: Container[int] = (),
) -> LatentWeights:
    """Uninitialised weights. config: of a part of the model. tied: the head is the embedding. without: layers whose
    experts get no memory."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def bias(size: int) -> torch.Tensor | None:
        return torch.zeros(size, dtype=dtype, device=device) if config.attention_bias else None

    def experts(index: int) -> Experts:
        routing, hidden, size = config.routing, config.hidden_size, config.expert_size
        num_all = routing.num_experts + config.num_shared
        place = torch.device("meta") if index in without else device
        return Experts(
            router=tensor(routing.num_experts, hidden),
            gate_up=torch.empty(num_all, 2 * size, hidden, dtype=dtype, device=place),
            down=torch.empty(num_all, hidden, size, dtype=dtype, device=place),
            top_k=routing.top_k,
            normalises=routing.normalises,
            scores=routing.scores,
            scale=routing.scale,
            bias=tensor(routing.num_experts).float() if routing.has_bias else None,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            best_of_group=routing.best_of_group,
            num_shared=config.num_shared,
        )

    hidden, intermediate, rank = config.hidden_size, config.intermediate_size, config.q_rank
    q_size = config.num_heads * config.query_dim
    qkv_size = (q_size if rank is None else rank) + config.head_dim
    num_tokens = len(shard.vocabulary(config.vocab_size))
    embedding = tensor(num_tokens, hidden)
    layers = [
        LatentLayer(
            input_norm=tensor(hidden),
            qkv=tensor(qkv_size, hidden),
            qkv_bias=bias(qkv_size),
            query_norm=None if rank is None else tensor(rank),
            query_up=None if rank is None else tensor(q_size, rank),
            latent_norm=tensor(config.kv_rank),
            latent_up=tensor(config.num_heads, config.nope_dim + config.value_dim, config.kv_rank),
            output=tensor(hidden, config.num_heads * config.value_dim),
            output_bias=bias(hidden),
            post_attention_norm=tensor(hidden),
            gate_up=tensor(2 * intermediate, hidden) if index < config.num_dense else None,
            down=tensor(hidden, intermediate) if index < config.num_dense else None,
            experts=None if index < config.num_dense else experts(index),
        )
        for index in range(config.num_layers)
    ]
    lm_head = embedding if tied else tensor(num_tokens, hidden)
    return LatentWeights(embedding, layers, tensor(hidden if shard.is_last else 0), lm_head)


def checkpoint_tensors(config: LatentConfig, weights: LatentWeights, first: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face checkpoint as the view of the weights that it fills: where that has three
    dimensions, of as many numbers in the same order; not of packed experts. Only before `LatentWeights.pack`.
    first: the number of the part's first layer."""
    tensors: dict[str, Matrix | None] = {"model.embed_tokens.weight": weights.embedding}
    for index, layer in enumerate(weights.layers, first):
        parts: dict[str, Matrix | None] = {
            "input_layernorm.weight": layer.input_norm,
            "self_attn.q_a_layernorm.weight": layer.query_norm,
            "self_attn.q_b_proj.weight": layer.query_up,
            "self_attn.kv_a_layernorm.weight": layer.latent_norm,
            "self_attn.kv_b_proj.weight": layer.latent_up,
            "self_attn.o_proj.weight": layer.output,
            "self_attn.o_proj.bias": layer.output_bias,
            "post_attention_layernorm.weight": layer.post_attention_norm,
            "mlp.down_proj.weight": layer.down,
        }
        for kind, qkv in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if isinstance(qkv, torch.Tensor):
                query, latent = torch.split(qkv, [len(qkv) - config.head_dim, config.head_dim])
                parts[f"self_attn.kv_a_proj_with_mqa.{kind}"] = latent
                if config.q_rank is not None:
                    parts[f"self_attn.q_a_proj.{kind}"] = query
                elif kind == "weight":  # queries without a latent have no bias
                    parts["self_attn.q_proj.weight"] = query
        if isinstance(layer.gate_up, torch.Tensor):
            parts["mlp.gate_proj.weight"], parts["mlp.up_proj.weight"] = layer.gate_up.chunk(2)
        if layer.experts is not None:
            parts |= _expert_tensors(config, layer.experts)
        tensors |= {f"model.layers.{index}.{name}": part for name, part in parts.items()}
    tensors["model.norm.weight"] = weights.norm if len(weights.norm) else None
    if weights.lm_head is not weights.embedding:
        tensors["lm_head.weight"] = weights.lm_head
    return {name: its for name, its in tensors.items() if isinstance(its, torch.Tensor)}


def _expert_tensors(config: LatentConfig, experts: Experts) -> dict[str, Matrix | None]:
    num_experts = config.routing.num_experts
    parts: dict[str, Matrix | None] = {
        "mlp.gate.weight": experts.router,
        "mlp.gate.e_score_correction_bias": experts.bias,
    }
    if isinstance(experts.gate_up, PackedExperts):
        return parts
    gate_up, down = experts.unpacked
    gates, ups = gate_up.chunk(2, 1)
    for expert in range(num_experts):
        parts[f"mlp.experts.{expert}.gate_proj.weight"] = gates[expert]
        parts[f"mlp.experts.{expert}.up_proj.weight"] = ups[expert]
        parts[f"mlp.experts.{expert}.down_proj.weight"] = down[expert]
    if config.num_shared:  # in a checkpoint one wide MLP, whose columns we cut among experts
        parts["mlp.shared_experts.gate_proj.weight"] = gates[num_experts:]
        parts["mlp.shared_experts.up_proj.weight"] = ups[num_experts:]
        parts["mlp.shared_experts.down_proj.weight"] = down[num_experts:].transpose(0, 1)
    return parts
