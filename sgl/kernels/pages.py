"""Whole pages of all layers, gathered into one buffer and scattered from it.

A KV cache is [F, num_pages, n bytes]: of each of F fragments (keys or values of a layer) all pages. A buffer is
[m, F, n bytes]: page after page, as host memory and files have them.
"""

from __future__ import annotations

import torch


def gather(cache: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy pages, int64 [m] on the device, of cache [F, num_pages, n] into buffer [m, F, n]; both uint8."""
    if cache.is_cuda:
        # imported only where a Triton kernel runs
        from sgl.kernels import pages_triton

        pages_triton.copy(cache, pages, buffer, is_gather=True)
    else:
        buffer.copy_(cache[:, pages].transpose(0, 1))


def scatter(cache: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy buffer [m, F, n] into pages, int64 [m] on the device and each at most once, of cache [F, num_pages, n]."""
    if cache.is_cuda:
        from sgl.kernels import pages_triton

        pages_triton.copy(cache, pages, buffer, is_gather=False)
    else:
        cache[:, pages] = buffer.transpose(0, 1)
