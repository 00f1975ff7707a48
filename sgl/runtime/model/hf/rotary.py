"""Rotary frequencies of transformers' modules that depend on the length of a sequence."""

from __future__ import annotations

from typing import Any

import torch

_FIXED = "fixed"  # a type that transformers does not know: it computes nothing anew


@torch.inference_mode()
def fix_frequencies(module: Any, max_positions: int) -> None:
    """Make the frequencies of dynamic and LongRoPE types those of a sequence of max_positions, once for all.
    transformers takes the longest sequence of a step: results would depend on other requests, and cached keys would
    not fit. On the meta device nothing is computed."""
    for each in module.modules():
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


def _varies(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"
