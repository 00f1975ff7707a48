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
class Family:
    """The features of one `architectures` entry of config.json, and defaults of its config."""

    architecture: str
    attention_bias: Literal["none", "qkv", "configured"] = "none"
    """Biases of the attention projections; configured: all four if `attention_bias` is set."""
    has_mlp_bias_option: bool = False
    """Whether `mlp_bias` is read."""
    has_qk_norm: bool = False
    """Whether queries and keys are normalised for each head."""
    sliding_window: Literal["none", "all layers", "by layer"] = "none"
    """Which layers attend to only `sliding_window` tokens; by layer: by `layer_types`, or from `max_window_layers`
    on, if `use_sliding_window` is set."""
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

FAMILIES = {
    family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN2_VL, QWEN2_5_VL, QWEN3_VL)
}
