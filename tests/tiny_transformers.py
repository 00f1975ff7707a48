"""Tiny random checkpoints of transformers' decoders, in a fraction of a second each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.utils import logging

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 16}
WINDOW = {"sliding_window": 20}
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96}
ROTARY = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
GRANITE = {"attention_multiplier": 0.2, "logits_scaling": 3.0, "embedding_multiplier": 2.0}
PER_LAYER = {"vocab_size_per_layer_input": 384, "hidden_size_per_layer_input": 8}
SCALED_QUERIES = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LLAMA4 = {
    **HEADS,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 0],
    "attention_chunk_size": 128,
    "floor_scale": 128,
}
EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {**HEADS, **WINDOW, **MOE, "num_dense_layers": 1, "global_attn_every_n_layers": 2},
    "AXK1ForCausalLM": {**LATENT, **SHARED},
    "ApertusForCausalLM": {},
    "Apertus1p5TextForCausalLM": {},
    "ArceeForCausalLM": HEADS,
    "AriaTextForCausalLM": {**HEADS, "moe_num_experts": 4, "moe_topk": 2},
    "BeamForCausalLM": {**HEADS, **WINDOW, **MOE, "n_group": 2, "topk_group": 1},
    "BioGptForCausalLM": {},
    "BitNetForCausalLM": {},
    "CTRLLMHeadModel": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "dff": 96},
    "Cohere2ForCausalLM": {**WINDOW, "sliding_window_pattern": 2, "logit_scale": 0.7},
    "Cohere2MoeForCausalLM": {**HEADS, **WINDOW, **MOE, "num_shared_experts": 1, "sliding_window_pattern": 2},
    "CodeGenForCausalLM": ROTARY,
    "CohereForCausalLM": {"logit_scale": 0.7, "use_qk_norm": True},
    "CwmForCausalLM": {**HEADS, **WINDOW},
    "DeepseekV2ForCausalLM": {**LATENT, **SHARED},
    "DeepseekV3ForCausalLM": {**LATENT, **SHARED},
    "Dots1ForCausalLM": {**SHARED, **HEADS},
    "Ernie4_5ForCausalLM": HEADS,
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "Exaone4ForCausalLM": {**HEADS, **WINDOW, "sliding_window_pattern": 2},
    "ExaoneMoeForCausalLM": {
        **WINDOW,
        **MOE,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "sliding_window_pattern": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "FlexOlmoForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "FlintForCausalLM": {**HEADS, **WINDOW, **MOE, "shared_expert_intermediate_size": 32},
    "FuyuForCausalLM": {},
    "GPT2LMHeadModel": GPT,
    "GPTBigCodeForCausalLM": GPT,
    "GPTJForCausalLM": ROTARY,
    "GPTNeoXForCausalLM": {},
    "Gemma2ForCausalLM": {**HEADS, **WINDOW, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0},
    "Gemma3ForCausalLM": {**HEADS, **WINDOW, "query_pre_attn_scalar": 40, "sliding_window_pattern": 2},
    "Gemma3ForConditionalGeneration": {
        "text_config": {**HEADS, **WINDOW},
        "vision_config": EYES,
        "mm_tokens_per_image": 4,
        "image_token_index": 383,
        "boi_token_index": 382,
        "eoi_token_index": 381,
    },
    "Gemma3nForCausalLM": {
        **HEADS,
        **WINDOW,
        **PER_LAYER,
        "num_kv_shared_layers": 1,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0, 0.0],
    },
    "Gemma4ForCausalLM": {**HEADS, **WINDOW, **PER_LAYER, "global_head_dim": 32, "num_global_key_value_heads": 1},
    "Gemma4UnifiedForCausalLM": {**HEADS, **WINDOW},
    "GemmaForCausalLM": HEADS,
    "Glm4ForCausalLM": HEADS,
    "Glm4MoeForCausalLM": {**SHARED, **HEADS},
    "Glm4MoeLiteForCausalLM": {**LATENT, **SHARED},
    "Glm4vForConditionalGeneration": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8},
        "image_token_id": 383,
        "video_token_id": 382,
    },
    "GlmForCausalLM": HEADS,
    "GptOssForCausalLM": {
        **HEADS,
        **WINDOW,
        **EXPERTS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": {**GRANITE, **EXPERTS},
    "GraniteMoeHybridForCausalLM": {**GRANITE, **EXPERTS, "layer_types": ["attention"] * 3, "mamba_n_heads": 8},
    "GraniteMoeSWAForCausalLM": {**GRANITE, **EXPERTS, **WINDOW, "shared_intermediate_size": 32},
    "GraniteMoeSharedForCausalLM": {**GRANITE, **EXPERTS, "shared_intermediate_size": 32},
    "GraniteSWAForCausalLM": {**GRANITE, **WINDOW},
    "HYV3ForCausalLM": {**HEADS, **MOE, "num_shared_experts": 1},
    "HeliumForCausalLM": HEADS,
    "HunYuanDenseV1ForCausalLM": HEADS,
    "HunYuanMoEV1ForCausalLM": {**HEADS, "num_experts": 4, "moe_topk": 2},
    "HyperCLOVAXForCausalLM": HEADS,
    "Jais2ForCausalLM": {},
    "Kolibri1ForCausalLM": {**HEADS, **WINDOW, **MOE, "shared_expert_intermediate_size": 32},
    "LagunaForCausalLM": {**HEADS, **WINDOW, **MOE, "shared_expert_intermediate_size": 32},
    "LlamaForCausalLM": {"mlp_bias": True, "attention_bias": True},
    "LlavaForConditionalGeneration": {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", **EYES},
        "image_token_index": 383,
    },
    "LlavaOnevisionForConditionalGeneration": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {"model_type": "siglip_vision_model", **EYES},
        "image_token_index": 383,
    },
    "MellumForCausalLM": {**HEADS, **WINDOW, **MOE},
    "MiMoV2FlashForCausalLM": {**WINDOW, **MOE, "head_dim": 24, "v_head_dim": 16, "n_group": 1, "topk_group": 1},
    "MiniCPM3ForCausalLM": LATENT,
    "MiniMaxM2ForCausalLM": {**EXPERTS, **HEADS},
    "MinistralForCausalLM": {**HEADS, **WINDOW},
    "Ministral3ForCausalLM": {**HEADS, "rope_parameters": SCALED_QUERIES},
    "Mistral3ForConditionalGeneration": {
        "text_config": {"model_type": "mistral", **HEADS},
        "vision_config": {"model_type": "pixtral", **EYES},
        "image_token_index": 383,
    },
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": {
        "text_config": LLAMA4,
        "vision_config": {**EYES, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    },
    "MixtralForCausalLM": EXPERTS,
    "ModernBertDecoderForCausalLM": WINDOW,
    "NanoChatForCausalLM": {},
    "NemotronForCausalLM": HEADS,
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": WINDOW,
    "OlmoForCausalLM": {"clip_qkv": 2.0},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "PersimmonForCausalLM": {},
    "Phi3ForCausalLM": {**WINDOW, "num_key_value_heads": 1},
    "PhiForCausalLM": {},
    "PhimoeForCausalLM": EXPERTS,
    "Qwen2MoeForCausalLM": {**MOE, "shared_expert_intermediate_size": 32},
    "Qwen3MoeForCausalLM": {**MOE, **HEADS},
    "Qwen3VLForConditionalGeneration": {
        "text_config": {
            **HEADS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 8,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "image_token_id": 383,
        "video_token_id": 382,
        "vision_start_token_id": 381,
        "vision_end_token_id": 380,
    },
    "SeedOssForCausalLM": HEADS,
    "SmolLM3ForCausalLM": {"tie_word_embeddings": True},
    "SolarOpenForCausalLM": {**HEADS, **SHARED},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": WINDOW,
    "VaultGemmaForCausalLM": {**HEADS, **WINDOW},
    "YoutuForCausalLM": LATENT,
}
"""transformers' class names, and what their configs need beside SIZES."""
NEWER = [
    "AXK1",
    "Apertus1p5Text",
    "AriaText",
    "Beam",
    "CTRL",
    "CodeGen",
    "Cohere2Moe",
    "ExaoneMoe",
    "Flint",
    "Fuyu",
    "GPTJ",
    "Gemma4Unified",
    "Glm4MoeLite",
    "Glm4v",
    "GraniteMoeHybrid",
    "GraniteMoeSWA",
    "GraniteMoeShared",
    "GraniteSWA",
    "HYV3",
    "HunYuanMoEV1",
    "Kolibri1",
    "Laguna",
    "Llava",
    "LlavaOnevision",
    "Mellum",
    "MiMoV2Flash",
    "Ministral",
    "ModernBertDecoder",
    "SolarOpen",
]
SINCE = {name: "5.24" for name in ARCHITECTURES if re.sub("(LMHeadModel|For.*)$", "", name) in NEWER}
"""A transformers that serves them, where the oldest one that sgl takes may not: it lacks them, or has attention that
cannot be replaced."""


def tiny_transformer(path: Path, architecture: str, config_class: Any = None, **overrides: Any) -> Path:
    """Write a checkpoint of float32 numbers to path, and return it. No norm is one and no bias zero. Skips the test
    where this transformers is too old for it. config_class: where it is not the architecture's own."""
    if Version(transformers.__version__) < Version(SINCE.get(architecture, "0")):
        pytest.skip(f"{architecture} needs transformers {SINCE[architecture]}")
    model_class = getattr(transformers, architecture)
    fields = {**SIZES, "tie_word_embeddings": False, **overrides}
    if "text_config" in overrides:
        fields = {**overrides, "text_config": {**SIZES, **overrides["text_config"]}}
    config = (config_class or model_class.config_class)(**fields)
    model = model_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + (1.0 if "norm" in name or "ln" in name else 0.0))
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * (4.0 if "embed" in name else 1.5))
    logging.disable_progress_bar()
    model.save_pretrained(path)
    return path
