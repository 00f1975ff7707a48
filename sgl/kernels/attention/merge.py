"""Merging attention over two disjoint sets of keys. The plain torch reference, and on a GPU a Triton twin."""

from __future__ import annotations

import torch


def merge_attention_(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, rows: torch.Tensor
) -> None:
    """Make out[rows], in place, what attention over its keys and those of `part` together would have given.

    out: [T, heads, head_dim]. lse: float32 [T, heads], base-2 logarithms of the sums of exponentials, left as they
    are. part, part_lse: the same for N tokens. rows: int64 [N], no two alike.
    """
    if out.is_cuda:
        from sgl.kernels.attention import merge_triton

        merge_triton.merge_attention_(out, lse, part, part_lse, rows)
        return
    weight = torch.sigmoid((part_lse - lse.index_select(0, rows)) * torch.log(torch.tensor(2.0)))
    before = out.index_select(0, rows).float()
    out.index_copy_(0, rows, torch.lerp(before, part.float(), weight.unsqueeze(-1)).to(out.dtype))
