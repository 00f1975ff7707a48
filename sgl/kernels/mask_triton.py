"""The Triton kernels behind `mask.py`, which says what each promises.

Imported only where a GPU or Triton's interpreter runs them: Triton is not installed elsewhere. An argument of a
kernel that is a tensor outside is a pointer inside, which no type says.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_APPLY_BLOCK = 4096


def apply_token_mask_(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> None:
    """See `mask.apply_token_mask_`."""
    num_rows, vocab_size = logits.shape
    grid = (triton.cdiv(vocab_size, _APPLY_BLOCK), num_rows)
    _apply[grid](logits, masks, mask_rows, vocab_size, logits.stride(0), masks.stride(0), block=_APPLY_BLOCK)


@triton.jit
def _apply(logits, masks, mask_rows, vocab_size, logits_stride, masks_stride, block: tl.constexpr):
    row = tl.program_id(1)
    mask_row = tl.load(mask_rows + row)
    if mask_row >= 0:
        tokens = tl.program_id(0) * block + tl.arange(0, block)
        is_token = tokens < vocab_size
        words = tl.load(masks + mask_row.to(tl.int64) * masks_stride + (tokens >> 5), mask=is_token, other=0)
        is_dropped = is_token & (((words >> (tokens & 31)) & 1) == 0)
        at = logits + row.to(tl.int64) * logits_stride + tokens
        tl.store(at, tl.full([block], float("-inf"), tl.float32), mask=is_dropped)
