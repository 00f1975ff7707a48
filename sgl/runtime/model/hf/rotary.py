"""Rotary frequencies of transformers' modules that depend on the length of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_FIXED = "fixed"  # a type that transformers does not know: it computes nothing anew


@torch.inference_mode()
def fix_frequencies(module: Any, max_positions: int) -> None:
    """Make the frequencies of dynamic and LongRoPE types those of a sequence of max_positions, once for all.
    transformers takes the longest sequence of a step: results would depend on other requests, and cached keys would
    not fit. On the meta device nothing is computed."""
    for each in module.modules():
        _fix_magnitude(each, max_positions)
        types = getattr(each, "rope_type", None)
        by_layer = types if isinstance(types, dict) else {None: types}
        varying = [name for name, its in by_layer.items() if its is not None and _varies(its)]
        for layer_type in varying:
            buffer = next(each.buffers())
            if not buffer.is_meta:
                last = torch.tensor([[max_positions - 1]], device=buffer.device)
                each(buffer, last, *([] if layer_type is None else [layer_type]))
        if varying:
            fixed = {name: _FIXED if name in varying else its for name, its in by_layer.items()}
            each.rope_type = fixed if isinstance(types, dict) else _FIXED


def _fix_magnitude(module: Any, max_positions: int) -> None:
    """Phi-3.5-MoE has a factor for long contexts, and one for short ones, which its module reads off the device."""
    given = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    if "long_mscale" not in given or not hasattr(module, "rope_init_fn"):
        return
    is_long = max_positions > given["original_max_position_embeddings"]
    buffer = module.inv_freq
    if not buffer.is_meta:
        buffer.copy_(module.rope_init_fn(module.config, buffer.device, seq_len=max_positions)[0])
    module.attention_scaling = given["long_mscale" if is_long else "short_mscale"]
    module.rope_type = _FIXED
    module.__class__ = LlamaRotaryEmbedding  # which turns by its frequencies and scales by its factor


def _varies(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"
