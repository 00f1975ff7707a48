"""Reads the config.json of a decoder with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, and V3, arXiv
2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sgl.kernels.moe.experts import MOST_GROUPS
from sgl.runtime.model.checkpoint import checkpoint_folder
from sgl.runtime.model.config import (
    DtypeName,
    RopeConfig,
    read_context_length,
    read_dtype,
    read_rope,
    special_tokens,
)
from sgl.runtime.model.fields import Fields, read_config_json, read_json
from sgl.runtime.model.quantized.scheme import QuantScheme
from sgl.runtime.model.rotary import temperature

_V2, _V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
_DEFAULTS: dict[str, Mapping[str, Any]] = {  # transformers'
    _V2: {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 2048,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    _V3: {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}


def is_latent(path: str | Path) -> bool:
    """Whether a checkpoint's architecture is one of these. Raises ModelError."""
    return read_json(checkpoint_folder(path) / "config.json").get("architectures") in ([_V2], [_V3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token chooses its experts, and what they weigh."""

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"]  # of the router's logits
    has_bias: bool  # each expert's, added to its score for the choice alone
    num_groups: int  # of neighbouring experts; 1: any are chosen
    top_groups: int  # whose experts are chosen
    best_of_group: Literal[1, 2]  # of its experts, by whose scores' sum a group is chosen
    normalises: bool  # the chosen ones' weights to a sum of 1
    scale: float  # of all weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """What decoder and loader need to know of a checkpoint."""

    path: str  # the checkpoint's folder
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a layer without experts
    expert_size: int  # intermediate size of an expert
    num_layers: int
    num_dense: int  # first layers, without experts
    num_shared: int  # experts that every token takes
    routing: Routing
    num_heads: int
    q_rank: int | None  # of the queries' latent, if they have one
    kv_rank: int  # of the keys' and values' latent
    nope_dim: int  # numbers of a query that are not rotated
    rope_dim: int  # numbers of a query that are, and of a token's one rotated key
    value_dim: int  # of a head
    is_interleaved: bool  # whether rotated numbers are paired with their neighbours
    rms_norm_eps: float
    rope: RopeConfig
    scale: float  # of scores
    context_length: int  # tokens, scaling included
    attention_bias: bool
    tie_word_embeddings: bool
    initializer_range: float
    dtype: DtypeName  # of the checkpoint
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    checkpoint_format: str = "safetensors"
    scheme: QuantScheme | None = None  # of a quantised checkpoint

    @property
    def num_kv_heads(self) -> int:
        """All heads read the same latent."""
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers cached for a token: its latent and its rotated key."""
        return self.kv_rank + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Numbers of these that are the values, too."""
        return self.kv_rank

    @property
    def query_dim(self) -> int:
        """Of a head, before absorption."""
        return self.nope_dim + self.rope_dim

    @classmethod
    def from_pretrained(cls, path: str | Path) -> LatentConfig:
        """Read a checkpoint folder, a config.json, or a hub id (downloads the checkpoint). Raises UnsupportedModel for
        missing features, ModelError for a missing or inconsistent config."""
        folder = checkpoint_folder(path)
        data = read_config_json(folder)
        (architecture,) = data["architectures"]
        fields = Fields(str(folder), {**_DEFAULTS[architecture], **data}, architecture)
        _refuse_unsupported(fields)
        rope = read_rope(fields)
        q_rank = fields.data["q_lora_rank"] and fields.integer("q_lora_rank")
        nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
        if rope_dim % 2:
            raise fields.unsupported(f"an odd qk_rope_head_dim, {rope_dim}")
        bos, eos = special_tokens(folder, fields.data)
        quantized, scheme = fields.data.get("quantization_config"), None
        if quantized is not None:
            scheme = QuantScheme.of(quantized, str(folder), architecture)
        return cls(
            path=str(folder),
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            expert_size=fields.integer("moe_intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_dense=_count(fields, "first_k_dense_replace"),
            num_shared=_count(fields, "n_shared_experts"),
            routing=_routing(fields),
            num_heads=fields.integer("num_attention_heads"),
            q_rank=q_rank,
            kv_rank=fields.integer("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=fields.integer("v_head_dim"),
            is_interleaved=architecture == _V2 or fields.flag("rope_interleave"),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            rope=rope,
            scale=(nope_dim + rope_dim) ** -0.5 * _stretched(rope),
            context_length=read_context_length(fields, rope),
            attention_bias=fields.flag("attention_bias"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            initializer_range=fields.number("initializer_range", default=0.02),
            dtype=read_dtype(fields),
            bos_token_id=bos,
            eos_token_ids=eos,
            scheme=scheme,
            checkpoint_format="safetensors" if scheme is None else scheme.checkpoint_format,
        )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.data.get("hidden_act") not in (None, "silu"):
        raise fields.unsupported(f"activation {fields.data['hidden_act']!r}")
    if fields.flag("mlp_bias"):
        raise fields.unsupported("a bias in the MLP (mlp_bias)")
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", default=heads) != heads:
        raise fields.unsupported("latent attention with fewer key-value heads than heads")


def _count(fields: Fields, key: str) -> int:
    return fields.integer(key) if fields.data.get(key) else 0


def _routing(fields: Fields) -> Routing:
    is_v3 = fields.architecture == _V3
    num_experts = fields.integer("n_routed_experts")
    groups = top_groups = 1
    method = fields.data.get("topk_method") or "greedy"
    if not is_v3 and method not in ("greedy", "group_limited_greedy"):
        raise fields.unsupported(f"a choice of experts by topk_method {method!r}")
    if is_v3 or method == "group_limited_greedy":
        groups, top_groups = fields.integer("n_group"), fields.integer("topk_group")
    top_k = fields.integer("num_experts_per_tok")
    if groups > MOST_GROUPS:
        raise fields.unsupported(f"a choice among more than {MOST_GROUPS} groups of experts (n_group {groups})")
    if num_experts % groups or top_groups > groups or top_k > num_experts // groups * top_groups:
        raise fields.error(
            f"num_experts_per_tok {top_k} of n_routed_experts {num_experts} in the best topk_group {top_groups} of "
            f"n_group {groups} cannot be chosen"
        )
    return Routing(
        num_experts=num_experts,
        top_k=top_k,
        scores="sigmoid" if is_v3 else "softmax",
        has_bias=is_v3,
        num_groups=groups,
        top_groups=top_groups,
        best_of_group=2 if is_v3 and num_experts > groups else 1,
        # DeepSeek-V2 normalises nothing in transformers, whatever its config says.
        normalises=is_v3 and fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor", default=1.0),
    )


def _stretched(rope: RopeConfig) -> float:
    """What scaled ropes multiply scores with, beside what they do to cosines and sines."""
    if rope.type == "default" or not rope.mscale_all_dim:
        return 1.0
    return temperature(rope.factor, rope.mscale_all_dim) ** 2
