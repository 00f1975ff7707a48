"""The largest of all ranks' 64-bit keys by a sum of 16-bit floats: each byte is a number that they hold exactly, in a
place of its rank's own, beside zeros of the others. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels.layers.fused_triton import overlap

_WIDTH = 512  # of a row of places
_BLOCK = 1024
_ROWS = 128


def spread(keys: torch.Tensor, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """keys, int64 [S], of a rank, for a sum over all: dtype [n, 512]."""
    num_places = 8 * size * len(keys)
    places = torch.empty(triton.cdiv(num_places, _WIDTH), _WIDTH, dtype=dtype, device=keys.device)
    grid = (triton.cdiv(places.numel(), _BLOCK),)
    _spread[grid](keys, places, len(keys), rank, places.numel(), block=_BLOCK, **overlap(keys.device))
    return places


def largest(places: torch.Tensor, size: int, out: torch.Tensor) -> None:
    """The largest key of all ranks from the sum of what they spread, into out, int64 [S]."""
    grid = (triton.cdiv(len(out), _ROWS),)
    _largest[grid](places, out, len(out), size=size, block=_ROWS, **overlap(out.device))


@triton.jit
def _spread(keys, places, num_keys, rank, num_places, block: tl.constexpr, overlaps: tl.constexpr):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * block + tl.arange(0, block)
    number = place // 8
    is_own = (number // num_keys == rank) & (place < num_places)
    key = tl.load(keys + number % num_keys, mask=is_own, other=0)
    byte = (key >> ((place % 8) * 8).to(tl.int64)) & 255
    tl.store(places + place, byte.to(tl.float32).to(places.dtype.element_ty), mask=place < num_places)


@triton.jit
def _largest(places, out, num_keys, size: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < num_keys
    best = tl.full([block], -(2**63), tl.int64)
    for rank in tl.static_range(size):
        key = tl.zeros([block], tl.int64)
        for byte in tl.static_range(8):
            value = tl.load(places + (rank * num_keys + row) * 8 + byte, mask=inside, other=0.0)
            key |= value.to(tl.float32).to(tl.int64) << (8 * byte)
        best = tl.maximum(best, key)
    tl.store(out + row, best, mask=inside)
