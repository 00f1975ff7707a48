"""Copies between pinned memory and the device with a Triton kernel that accesses host memory itself.

A few kilobytes take a kernel 2 to 3 µs. A copy engine takes as long, plus 5 to 10 µs for switching to it and back.
Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels.launch_triton import Launcher
from sgl.kernels.layers.fused_triton import overlap

_BLOCK = 1024


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source, non_blocking=True)` for contiguous integer tensors, one on the device, the other there or
    pinned, which may be longer. Values that do not fit target's dtype are truncated."""
    device, size = target.device if target.is_cuda else source.device, min(target.numel(), source.numel())
    options = overlap(device)
    arguments = source, target, size, not source.is_cuda, _BLOCK, options.pop("overlaps")
    _launch((triton.cdiv(size, _BLOCK), 1, 1), *arguments, any_values=(2,), num_warps=4, **options)


@triton.jit(do_not_specialize=["size"])
def _copy(source, target, size, is_host: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    # Host data is ready before the previous kernel ends. Later kernels may read this copy's result early, so they
    # must not start before it ends.
    if overlaps and not is_host:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(source + at, mask=inside, other=0, cache_modifier=".cv")
    if overlaps and is_host:
        gdc_wait()
    tl.store(target + at, values.to(target.dtype.element_ty), mask=inside)


_launch = Launcher(_copy)
