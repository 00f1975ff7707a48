"""Copies between pinned memory and the device as a Triton kernel, which reads or writes the host's memory itself.

A few kilobytes take a kernel 2 to 3 µs; a copy engine takes as long, and the GPU another 5 to 10 to hand over to it
and back. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Like `target.copy_(source, non_blocking=True)` for contiguous tensors of as many integers: one on the device, the
    other there or pinned. What does not fit target's dtype is cut off."""
    _copy[(triton.cdiv(source.numel(), _BLOCK),)](source, target, source.numel(), block=_BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["size"])
def _copy(source, target, size, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    tl.store(target + at, tl.load(source + at, mask=inside, other=0).to(target.dtype.element_ty), mask=inside)
