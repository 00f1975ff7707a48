"""One launch that copies all layers of a list of pages between a KV cache and a buffer of whole pages.

Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # words of a program's turn
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy(cache: Tensor, pages: Tensor, buffer: Tensor, rows: Tensor | None = None, *, is_gather: bool) -> None:
    """Copy between cache [F, num_pages, n] and buffer [m, F, n], uint8, pages: int64 [m]; is_gather: to the buffer.
    rows: int64 [m], those of a longer buffer."""
    if not len(pages):
        return
    word = next(dtype for dtype in _WORDS if cache.shape[-1] % dtype.itemsize == 0)
    cache, buffer = cache.view(word), buffer.view(word)
    num_fragments, num_pages, size = cache.shape
    grid = (len(pages), num_fragments)
    _copy[grid](cache, pages, buffer, rows, num_pages, size, is_gather=is_gather, block=_BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["num_pages"])
def _copy(cache, pages, buffer, rows, num_pages, size, is_gather: tl.constexpr, block: tl.constexpr):
    at, fragment = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    page = tl.load(pages + at)
    row = at if rows is None else tl.load(rows + at)
    in_cache = cache + (fragment * num_pages + page) * size
    in_buffer = buffer + (row * tl.num_programs(1) + fragment) * size
    for start in range(0, size, block):
        words = start + tl.arange(0, block)
        inside = words < size
        if is_gather:
            tl.store(in_buffer + words, tl.load(in_cache + words, mask=inside), mask=inside)
        else:
            tl.store(in_cache + words, tl.load(in_buffer + words, mask=inside), mask=inside)
