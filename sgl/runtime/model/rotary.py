"""The rotary table for a config's rope parameters; sgl/kernels/layers/rope.py rotates.

Formulas as in transformers' modeling_rope_utils: linear (position interpolation), dynamic NTK, llama3, YaRN (arXiv
2309.00071), LongRoPE.

Kernels rotate whole heads, whose numbers are paired by halves. Where a family pairs neighbours, or rotates a part, its
queries and keys are computed in another order (`rotary_order`), which changes none of their products; the others turn
by nothing.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from sgl.runtime.model.config import ModelConfig, RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cosines, then sines.

    Dynamic NTK depends on the sequence length. transformers uses the longest sequence of a forward pass, so results
    depend on batch and chunking. Here position p always uses length p + 1, which equals transformers up to the
    original context, and beyond it for tokens generated one by one. LongRoPE's frequencies are those of
    num_positions, likewise.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
    rotary_dim = rope.rotary_dim(head_dim)
    angles = positions * _frequencies(rope, rotary_dim, positions)
    scale, num_still = _attention_factor(rope), (head_dim - rotary_dim) // 2
    cos, sin = angles.cos() * scale, angles.sin() * scale
    if num_still:
        cos, sin = functional.pad(cos, (0, num_still), value=1.0), functional.pad(sin, (0, num_still))
    return torch.cat((cos, sin), dim=-1).to(device)


def rotary_order(config: ModelConfig) -> list[int] | None:
    """The order of a head's numbers in which each is rotated with the one half a head on; None: as they are."""
    head_dim, size = config.head_dim, config.rope.rotary_dim(config.head_dim)
    rotated, still = list(range(size)), list(range(size, head_dim))
    half, middle = size // 2, len(still) // 2
    first, second = (rotated[::2], rotated[1::2]) if config.interleaved_rope else (rotated[:half], rotated[half:])
    order = [*first, *still[:middle], *second, *still[middle:]]
    return None if order == list(range(head_dim)) else order


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
    if rope.type == "longrope":
        is_long = len(positions) > rope.original_context_length
        return plain / torch.tensor(rope.long_factors if is_long else rope.short_factors)
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
    """YaRN's and LongRoPE's scale of both queries and keys."""
    if rope.type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "longrope":
        return math.sqrt(1 + math.log(max(rope.factor, 1.0)) / math.log(rope.original_context_length))
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.factor, rope.mscale) / temperature(rope.factor, rope.mscale_all_dim)
    return temperature(rope.factor, 1.0)


def temperature(factor: float, mscale: float) -> float:
    """By how much attention scales for a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
