"""Around attention over latents (multi-head latent attention, arXiv 2405.04434): what is cached for a token, and the
products that move queries into the latents' space and what they attend to out of it (weight absorption).

The plain torch reference; a GPU runs Triton kernels where tokens are few.
"""

from __future__ import annotations

import torch

from sgl.kernels.layers.norm import rms_norm
from sgl.kernels.layers.rope import apply_rotary


def store_latents(
    latents: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Normalise the latents of T tokens, rotate their keys, and store both in the cache, in place.

    latents: [T, rank + rope_dim]. norm: [rank]. rotary: from `rope.rotary_rows`, of rope_dim. cache:
    [num_pages, page_size, 1, rank + rope_dim]. slots: int64 [T], page * page_size + offset.
    """
    rank = len(norm)
    normed = rms_norm(latents[:, :rank], norm, eps)
    key = apply_rotary(latents[:, None, rank:], *rotary)[:, 0]
    cache.flatten(0, 2).index_copy_(0, slots, torch.cat((normed, key), -1))


def absorb(
    query: torch.Tensor, up: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], nope_dim: int
) -> torch.Tensor:
    """Queries that multiply with what is cached, [T, num_heads, rank + rope_dim].

    query: [T, num_heads, nope_dim + rope_dim]. up: [num_heads, nope_dim + value_dim, rank], from latents to keys and
    values.
    """
    num_tokens, num_heads, width = query.shape
    rank = up.shape[2]
    out = query.new_empty(num_tokens, num_heads, rank + width - nope_dim)
    torch.bmm(query[..., :nope_dim].transpose(0, 1), up[:, :nope_dim], out=out[..., :rank].transpose(0, 1))
    out[..., rank:] = apply_rotary(query[..., nope_dim:], *rotary)
    return out


def expand(attended: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """The values [T, num_heads * value_dim] of attended latents [T, num_heads, rank]; up as for `absorb`."""
    num_tokens, num_heads, _ = attended.shape
    out = attended.new_empty(num_tokens, num_heads, up.shape[1] - nope_dim)
    torch.bmm(attended.transpose(0, 1), up[:, nope_dim:].transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)
