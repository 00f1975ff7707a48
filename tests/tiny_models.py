"""Random checkpoints of every family, tiny enough to be written and loaded in a fraction of a second."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AddedToken,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2-moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "glm": (GlmConfig, GlmForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM),
}
TINY: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 40, "sliding_window": 24}
FAMILY_TINY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen2-moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3-moe": {**EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3": {**_GEMMA, "sliding_window_pattern": 2, "num_hidden_layers": 4},
    "phi3": {"pad_token_id": 0},
    "glm": {"head_dim": 16, "pad_token_id": 0},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "gpt-oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}


def tiny_checkpoint(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    with_tokenizer: bool = False,
    max_shard_size: str = "1GB",
    fused_experts: bool = False,
    **overrides: Any,
) -> Path:
    """Write config.json, generation_config.json and float32 safetensors (and a tokenizer) to path, and return it.

    overrides: fields of config.json. No norm is one and no bias zero, so that a forgotten one shows.
    """
    config_class, model_class = CLASSES[family]
    config = config_class(**{**TINY, **FAMILY_TINY.get(family, {}), **overrides})
    model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + (1.0 if "norm" in name else 0.0))
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * (8.0 if "embed" in name else 1.5))
    model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=not fused_experts)
    if with_tokenizer:
        byte_tokenizer(config.vocab_size).save_pretrained(path)
    return path


WRITTEN_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n"""
    "</tool_call>{% endfor %}"
)
CALLING_TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + WRITTEN_CALLS + "\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def calling_checkpoint(path: Path) -> Path:
    """A tiny random model that writes calls as Qwen's do: in tags, the first of which is a token of its own."""
    tiny_checkpoint(path, vocab_size=400, max_position_embeddings=2048)
    tokenizer = byte_tokenizer(384)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.chat_template = CALLING_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; a change to ... removes the field."""
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly that many tokens: <unk>, <s>, </s>, the 256 bytes, and pairs of letters."""
    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_pairs = vocab_size - len(special) - len(alphabet)
    letters = "etaoinshrdlu"
    pairs = [(left, right) for left in ["Ġ", *letters] for right in letters][:num_pairs]
    if num_pairs < 0 or len(pairs) < num_pairs:
        raise ValueError(f"no byte tokenizer of {vocab_size} tokens")
    tokens = [*special, *alphabet, *(left + right for left, right in pairs)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )


def noisy_copy(source: Path, path: Path, share: float = 0.015) -> Path:
    """Write the checkpoint with noise of this share of each tensor's standard deviation to path, and return it: most
    of what follows a text is the same."""
    shutil.copytree(source, path)
    generator = torch.Generator().manual_seed(1)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor += torch.randn(tensor.shape, generator=generator) * tensor.std() * share
        save_file(tensors, file, metadata={"format": "pt"})
    return path
