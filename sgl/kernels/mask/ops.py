"""Token masks on the device.

A mask is packed: bit i % 32 of int32 i // 32 is 1 if token i is allowed. `mask/layout.py` describes the tensors.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from sgl.kernels.mask.layout import GrammarTensors, Places, VocabularyTensors

_CHUNK = 1 << 22  # logits at a time on a CPU: bounds temporaries


def apply_token_mask_(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> torch.Tensor:
    """Set the logits of forbidden tokens to -inf, in place.

    logits: float32 [B, V], below infinity, rows contiguous. masks: int32 [R, ceil(V / 32)]. mask_rows: int32 [B],
    each row's mask; -1: none. On a GPU nothing waits for the device.
    """
    assert masks.shape[1] == -(-logits.shape[1] // 32), "one bit a token"
    if logits.is_cuda:
        from sgl.kernels.mask import triton as mask_triton

        mask_triton.apply_token_mask_(logits, masks, mask_rows)
        return logits
    chosen = mask_rows.ge(0).nonzero().squeeze(1)
    penalties = _byte_penalties()
    for start in range(0, len(chosen), step := max(1, _CHUNK // logits.shape[1])):
        part = chosen[start : start + step]
        packed = masks.index_select(0, mask_rows.index_select(0, part)).view(torch.uint8)
        added = penalties.index_select(0, packed.view(-1).to(torch.int32)).view(len(part), -1)[:, : logits.shape[1]]
        if len(part) == len(logits):
            logits.add_(added)
        else:
            logits.index_add_(0, part, added)
    return logits


def compute_masks_(
    masks: torch.Tensor, rows: torch.Tensor, places: Places, grammars: GrammarTensors, vocabulary: VocabularyTensors
) -> None:
    """Compute the token masks at places by walking the vocabulary from each, on a GPU, which nothing waits for.

    rows: int32 [N], distinct. masks: int32 [R, ceil(V / 32)]; row rows[i] gets the mask of place i.
    """
    from sgl.kernels.mask import triton as mask_triton

    mask_triton.compute_masks_(masks, rows, places, grammars, vocabulary)


@lru_cache(maxsize=1)
def _byte_penalties() -> torch.Tensor:
    """float32 [256, 8]: addends of eight logits by the byte of their bits; twice as fast as shifts."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits > 0, 0.0, -torch.inf)
