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

BEFORE = MappingProxyType(
    {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
)
"""Norms before attention and feed-forward,"""
AFTER = MappingProxyType({"output_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"})
"""or behind them,"""
GEMMAS = MappingProxyType(
    {"input_norm": "input_layernorm", "post_attention_norm": "pre_feedforward_layernorm", **AFTER}
)
"""or both."""
GLMS = MappingProxyType({**BEFORE, "output_norm": "post_self_attn_layernorm", "down_norm": "post_mlp_layernorm"})


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
    may_be_transposed: bool = False
    """Whether some checkpoints hold a layer's experts as [experts, in, out]."""
    has_shared: bool = False
    """Whether an expert of `shared_expert_intermediate_size` computes all tokens."""
    router: str = "gate"
    is_turned: bool = False
    """Whether a checkpoint has the experts of a layer as one tensor, transposed, with each gate before its up, with
    biases; then gates are clamped."""


@dataclass(frozen=True, slots=True)
class Family:
    """The features of one `architectures` entry of config.json, and defaults of its config."""

    architecture: str
    attention_bias: Literal["none", "qkv", "qkv option", "qkv configured", "configured"] = "none"
    """Biases of the attention projections; qkv option: unless `qkv_bias` is false; configured: if `attention_bias` is
    set, those of qkv, or all four."""
    has_mlp_bias_option: bool = False
    """Whether `mlp_bias` is read."""
    has_qk_norm: bool = False
    """Whether queries and keys are normalised for each head."""
    has_wide_qk_norm: bool = False
    """Whether all of a token's queries are normalised together, and all keys."""
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    """A layer's norms by their fields in `LayerWeights`, and their names in checkpoints."""
    norms_add_one: bool = False
    """Whether norms scale by their weights plus one, in float32."""
    activation: Literal["silu", "gelu"] = "silu"
    """Of the feed-forward's gate; gelu: by tanh."""
    has_sinks: bool = False
    """Whether attention has sinks."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    has_query_scalar: bool = False
    """Whether the scale of attention follows from `query_pre_attn_scalar`."""
    has_score_cap: bool = False
    """Whether `attn_logit_softcapping` is read."""
    has_partial_rope: bool = False
    """Whether `partial_rotary_factor` is read: a part of each head is rotated."""
    has_interleaved_rope: bool = False
    """Whether rotation pairs neighbouring numbers of a head, not those half of the rotated part apart."""
    has_local_rope: bool = False
    """Whether layers with a window have a rope of their own."""
    sliding_window: Literal["none", "all layers", "if used", "by layer", "every other", "by pattern"] = "none"
    """Which layers attend to only `sliding_window` tokens; if used: all if `use_sliding_window` is set; by layer, every
    other: then by `layer_types`, or those from `max_window_layers` on, or every other one before it; by pattern: by
    `layer_types`, or all but each `sliding_window_pattern`th."""
    fused_modules: tuple[str, ...] = ()
    """Modules of transformers' that compute several products at once."""
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

GEMMA2 = Family(
    "Gemma2ForCausalLM",
    attention_bias="configured",
    norms=GEMMAS,
    norms_add_one=True,
    activation="gelu",
    scales_embedding=True,
    has_query_scalar=True,
    has_score_cap=True,
    sliding_window="by pattern",
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
)
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    has_qk_norm=True,
    has_score_cap=False,
    has_local_rope=True,
    defaults={
        **GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)
GEMMA3_SEEING = replace(  # images are not taken
    GEMMA3,
    architecture="Gemma3ForConditionalGeneration",
    defaults={**GEMMA3.defaults, "num_attention_heads": 8, "vocab_size": 262208},
)
PHI3 = Family(
    "Phi3ForCausalLM",
    has_partial_rope=True,
    fused_modules=("qkv_proj", "gate_up_proj"),
    sliding_window="all layers",
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
)
OLMO2 = Family(
    "Olmo2ForCausalLM",
    attention_bias="configured",
    has_wide_qk_norm=True,
    norms=AFTER,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
)
GLM = Family(
    "GlmForCausalLM",
    attention_bias="qkv configured",
    has_partial_rope=True,
    has_interleaved_rope=True,
    fused_modules=("gate_up_proj",),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
)
GLM4 = replace(GLM, architecture="Glm4ForCausalLM", norms=GLMS)

GPT_OSS = Family(
    "GptOssForCausalLM",
    attention_bias="configured",
    has_sinks=True,
    sliding_window="by pattern",
    experts=ExpertNames("intermediate_size", router="router", always_normalises=True, is_turned=True),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    architecture="Qwen3VLMoeForConditionalGeneration",
    sliding_window="none",
    vision="qwen3_vl",
    experts=ExpertNames("moe_intermediate_size", always_normalises=True, may_be_transposed=True),
)

FAMILIES = {
    family.architecture: family
    for family in (
        *(
            LLAMA,
            MISTRAL,
            QWEN2,
            QWEN3,
            QWEN2_VL,
            QWEN2_5_VL,
            QWEN3_VL,
            QWEN3_VL_MOE,
            MIXTRAL,
            QWEN2_MOE,
            QWEN3_MOE,
        ),
        *(GEMMA2, GEMMA3, GEMMA3_SEEING, PHI3, OLMO2, GLM, GLM4, GPT_OSS),
    )
}
RENAMED = frozenset({"exaone", "internlm3", "iquestcoder", "sarvam_mla", "sarvam_moe"})
"""Model types published under classes of their own, which transformers serves by those of other families."""
BODIES = {f"{name}Model": f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
"""Classes without a head, of models that embed texts."""
