"""The embeddings of tokens of which only some are here."""

from __future__ import annotations

import torch
from torch.nn import functional


def embedding_part(token_ids: torch.Tensor, embedding: torch.Tensor, first: int) -> torch.Tensor:
    """Rows of embedding [N, n], which has the tokens from `first` on, for token_ids, int64 [T]; zeros for others:
    [T, n]."""
    if embedding.is_cuda:
        from sgl.kernels.layers import fused_triton

        return fused_triton.embedding_part(token_ids, embedding, first)
    rows = token_ids - first
    is_own = (rows >= 0) & (rows < len(embedding))
    return functional.embedding(rows.clamp_(0, len(embedding) - 1), embedding).mul_(is_own[:, None])
