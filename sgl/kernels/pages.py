"""Whole pages of all layers, gathered into one buffer and scattered from it.

A KV cache is [F, num_pages, n bytes]: of each of F fragments (keys or values of a layer) all pages. A buffer is
[m, F, n bytes]: page after page, as host memory and files have them. With rows, int64 [m] on the device, the pages
lie in these rows of a longer buffer.
"""

from __future__ import annotations

from torch import Tensor


def gather(cache: Tensor, pages: Tensor, buffer: Tensor, rows: Tensor | None = None) -> None:
    """Copy pages, int64 [m] on the device, of cache [F, num_pages, n] into buffer [m, F, n]; both uint8."""
    if cache.is_cuda:
        # imported only where a Triton kernel runs
        from sgl.kernels import pages_triton

        pages_triton.copy(cache, pages, buffer, rows, is_gather=True)
    else:
        buffer[slice(None) if rows is None else rows] = cache[:, pages].transpose(0, 1)


def scatter(cache: Tensor, pages: Tensor, buffer: Tensor, rows: Tensor | None = None) -> None:
    """Copy buffer [m, F, n] into pages, int64 [m] on the device and each at most once, of cache [F, num_pages, n]."""
    if cache.is_cuda:
        from sgl.kernels import pages_triton

        pages_triton.copy(cache, pages, buffer, rows, is_gather=False)
    else:
        cache[:, pages] = (buffer if rows is None else buffer[rows]).transpose(0, 1)
