"""Copies between pinned memory and the device as a Triton kernel, which reads or writes the host's memory itself.

A few kilobytes take a kernel 2 to 3 µs; a copy engine takes as long, and the GPU another 5 to 10 to hand over to it
and back. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels.layers.fused_triton import overlap

_BLOCK = 1024


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Like `target.copy_(source, non_blocking=True)` for contiguous tensors of as many integers: one on the device, the
    other there or pinned. What does not fit target's dtype is cut off."""
    device = target.device if target.is_cuda else source.device
    grid = (triton.cdiv(source.numel(), _BLOCK),)
    is_host = not source.is_cuda
    _copy[grid](source, target, source.numel(), is_host=is_host, block=_BLOCK, num_warps=4, **overlap(device))


@triton.jit(do_not_specialize=["size"])
def _copy(source, target, size, is_host: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    # What the host wrote is there before the kernel ahead has ended. Kernels behind may read early what it planned, so
    # that none of them is set up before this one ends.
    if overlaps and not is_host:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(source + at, mask=inside, other=0, cache_modifier=".cv")
    if overlaps and is_host:
        gdc_wait()
    tl.store(target + at, values.to(target.dtype.element_ty), mask=inside)
