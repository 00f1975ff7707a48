"""Around attention over latents (multi-head latent attention, arXiv 2405.04434): what is cached for a token, and the
products that move queries into the latents' space and what they attend to out of it (weight absorption).

The plain torch reference; a GPU runs Triton kernels beside cuBLAS's products, and alone for a single token.
"""

from __future__ import annotations

import torch

from sgl.kernels.layers.norm import rms_norm
from sgl.kernels.layers.rope import apply_rotary


def enter(
    query: torch.Tensor,
    latents: torch.Tensor,
    up: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Store the latents of T tokens in the cache, normalised, with their rotated keys, in place. Returns the tokens'
    queries as they multiply with what is cached, [T, num_heads, rank + rope_dim].

    query: [T, num_heads, nope_dim + rope_dim], rows contiguous. latents: [T, rank + rope_dim], rows contiguous. up:
    [num_heads, nope_dim + value_dim, rank], from latents to keys and values. norm: [rank]. rotary: from
    `rope.rotary_rows`, of rope_dim. cache: [num_pages, page_size, 1, rank + rope_dim]. slots: int64 [T],
    page * page_size + offset.
    """
    num_tokens, num_heads, width = query.shape
    rank, rope_dim = up.shape[2], latents.shape[1] - up.shape[2]
    nope_dim = width - rope_dim
    out = query.new_empty(num_tokens, num_heads, rank + rope_dim)
    if query.is_cuda:
        from sgl.kernels.latent import products_triton

        products_triton.enter(query, latents, up, norm, eps, rotary, cache, slots, out)
        if num_tokens == 1:
            return out
    else:
        key = apply_rotary(latents[:, None, rank:], *rotary)[:, 0]
        rows = torch.cat((rms_norm(latents[:, :rank], norm, eps), key), -1)
        cache.flatten(0, 2).index_copy_(0, slots, rows)
        out[..., rank:] = apply_rotary(query[..., nope_dim:], *rotary)
    torch.bmm(query[..., :nope_dim].transpose(0, 1), up[:, :nope_dim], out=out[..., :rank].transpose(0, 1))
    return out


def expand(attended: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """The values [T, num_heads * value_dim] of attended latents [T, num_heads, rank]; up as for `enter`."""
    num_tokens, num_heads, _ = attended.shape
    out = attended.new_empty(num_tokens, num_heads, up.shape[1] - nope_dim)
    torch.bmm(attended.transpose(0, 1), up[:, nope_dim:].transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)
