"""The rotary table for a config's rope parameters; sgl/kernels/layers/rope.py rotates.

Formulas as in transformers' modeling_rope_utils: linear (position interpolation), dynamic NTK, llama3, YaRN (arXiv
2309.00071).
"""

from __future__ import annotations

import math

import torch

from sgl.runtime.model.config import RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cosines, then sines.

    Dynamic NTK depends on the sequence length. transformers uses the longest sequence of a forward pass, so results
    depend on batch and chunking. Here position p always uses length p + 1, which equals transformers up to the
    original context, and beyond it for tokens generated one by one.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
    angles = positions * _frequencies(rope, head_dim, positions)
    scale = _attention_factor(rope)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)


def _frequencies(rope: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Radians a token, [1, head_dim / 2], or [num_positions, head_dim / 2] if they vary."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32)[None] / head_dim
    if rope.type == "dynamic":
        original = rope.original_context_length
        stretch = rope.factor * (positions + 1).clamp(min=original) / original - (rope.factor - 1)
        return 1.0 / (rope.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents
    plain = 1.0 / rope.theta**exponents
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, plain)
    if rope.type == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Keep short waves, interpolate long ones, blend those between."""
    turns = rope.original_context_length * plain / (2 * math.pi)  # full turns over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    def dimension_of(turns: float) -> float:
        """The index that makes that many turns over the original context."""
        wave = rope.original_context_length / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0.0, 1.0)[None]
    return plain / rope.factor * interpolated + plain * (1 - interpolated)


def _attention_factor(rope: RopeConfig) -> float:
    """YaRN's scale of both queries and keys."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.factor, rope.mscale) / temperature(rope.factor, rope.mscale_all_dim)
    return temperature(rope.factor, 1.0)


def temperature(factor: float, mscale: float) -> float:
    """By how much attention scales for a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
