"""The model families that the decoder serves, by their differences.

To add one: a `Family` in `FAMILIES`. A difference that no field names gets one, read in config.py and applied in
decoder.py; other names of tensors go into weights.py. tests/test_models.py compares each family to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from sgl.runtime.media.config import Towers


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls the parts of its mixtures of experts in config.json and in checkpoints."""

    size: str
    """Of config.json: the intermediate size of an expert."""
    block: str = "mlp"
    """The module of router and experts in a layer."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    always_normalises: bool = False
    """Otherwise `norm_topk_prob` is read."""
    has_shared: bool = False
    """Whether an expert of `shared_expert_intermediate_size` computes all tokens."""


@dataclass(frozen=True, slots=True)
class Family:
    """The features of one `architectures` entry of config.json, and defaults of its config."""

    architecture: str
    attention_bias: Literal["none", "qkv", "qkv option", "configured"] = "none"
    """Biases of the attention projections; qkv option: unless `qkv_bias` is false; configured: all four if
    `attention_bias` is set."""
    has_mlp_bias_option: bool = False
    """Whether `mlp_bias` is read."""
    has_qk_norm: bool = False
    """Whether queries and keys are normalised for each head."""
    sliding_window: Literal["none", "all layers", "if used", "by layer", "every other"] = "none"
    """Which layers attend to only `sliding_window` tokens; if used: all if `use_sliding_window` is set; by layer, every
    other: then by `layer_types`, or those from `max_window_layers` on, or every other one before it."""
    experts: ExpertNames | None = None
    """Of families with mixtures of experts."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    vision: Towers | None = None
    """Whose vision tower it has. Rotary frequencies are then shared among time, height and width."""


LLAMA = Family(
    "LlamaForCausalLM",
    attention_bias="configured",
    has_mlp_bias_option=True,
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
)
MISTRAL = Family(
    "MistralForCausalLM",
    sliding_window="all layers",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    attention_bias="qkv",
    sliding_window="by layer",
    defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    attention_bias="configured",
    has_qk_norm=True,
    sliding_window="by layer",
    defaults={"max_position_embeddings": 32768, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
)
QWEN2_VL = replace(QWEN2, architecture="Qwen2VLForConditionalGeneration", vision="qwen2_vl")
QWEN2_5_VL = replace(QWEN2, architecture="Qwen2_5_VLForConditionalGeneration", vision="qwen2_5_vl")
QWEN3_VL = replace(QWEN3, architecture="Qwen3VLForConditionalGeneration", sliding_window="none", vision="qwen3_vl")

MIXTRAL = Family(
    "MixtralForCausalLM",
    sliding_window="all layers",
    experts=ExpertNames("intermediate_size", "block_sparse_moe", "w1", "w3", "w2", always_normalises=True),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    attention_bias="qkv option",
    sliding_window="every other",
    experts=ExpertNames("moe_intermediate_size", has_shared=True),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    attention_bias="configured",
    has_qk_norm=True,
    sliding_window="if used",
    experts=ExpertNames("moe_intermediate_size"),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
)

FAMILIES = {
    family.architecture: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN2_VL, QWEN2_5_VL, QWEN3_VL, MIXTRAL, QWEN2_MOE, QWEN3_MOE)
}
