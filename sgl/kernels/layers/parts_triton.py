"""Split-K and whole products of few tokens with a matrix of few rows, as kernels that overlap with the previous
one.

Where whole sums would leave most of the GPU idle, programs take parts of the columns; the next norm adds the parts.
Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import overlap


class Tiles(NamedTuple):
    """A program's tile sizes and launch options."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


_PARTS = Tiles(64, 64, 128, 4, 4)
_MOST_PARTS = 4
# Whole sums, by most tokens; the fastest of 13 for Qwen3-0.6B's qkv matrix on an H200. For sums of 2,048 or more,
# cuBLAS is as fast at 64 tokens, and faster for more.
_WIDEST_WHOLE = 1024
_WHOLE = {64: Tiles(64, 32, 128, 4, 5), 128: Tiles(64, 64, 128, 4, 4), 256: Tiles(128, 64, 64, 8, 5)}


def linear_parts(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, num_processors: int
) -> torch.Tensor | None:
    """float32 [parts, T, n] by at most one program for each multiprocessor; None: one part would do."""
    num_tokens, width = x.shape
    tiles, size = _PARTS, len(matrix)
    if _count(tiles, num_tokens, size) * _MOST_PARTS <= num_processors // 2:
        tiles = tiles._replace(rows=tiles.rows // 2)
    num_parts = min(_MOST_PARTS, num_processors // _count(tiles, num_tokens, size))
    if num_parts < 2:
        return None
    chunk = triton.cdiv(triton.cdiv(width, num_parts), tiles.columns) * tiles.columns
    num_parts = triton.cdiv(width, chunk)
    out = torch.empty(num_parts, num_tokens, size, dtype=torch.float32, device=x.device)
    _launch(x, matrix, bias, out, tiles, chunk)
    return out


def linear_whole(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, num_processors: int
) -> torch.Tensor | None:
    """[T, n] in x's dtype. None if sums are long, or if programs exceed the multiprocessors or fill at most half of
    them: other products are faster then."""
    num_tokens, width = x.shape
    tiles = next((tiles for most, tiles in _WHOLE.items() if num_tokens <= most), None)
    if (
        tiles is None
        or width > _WIDEST_WHOLE
        or not num_processors < 2 * _count(tiles, num_tokens, len(matrix)) <= 2 * num_processors
    ):
        return None
    out = x.new_empty(num_tokens, len(matrix))
    _launch(x, matrix, bias, out, tiles, triton.cdiv(width, tiles.columns) * tiles.columns)
    return out


def _count(tiles: Tiles, num_tokens: int, size: int) -> int:
    token_tiles: int = triton.cdiv(num_tokens, tiles.tokens)
    return token_tiles * int(triton.cdiv(size, tiles.rows))


def _launch(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tiles: Tiles, chunk: int
) -> None:
    num_tokens, width = x.shape
    size = len(matrix)
    num_bytes = (tiles.tokens + tiles.rows) * tiles.columns * x.element_size()
    grid = triton.cdiv(size, tiles.rows), triton.cdiv(num_tokens, tiles.tokens), triton.cdiv(width, chunk)
    _linear[grid](
        x,
        matrix,
        bias,
        out,
        num_tokens,
        size,
        width=width,
        chunk=chunk,
        has_bias=bias is not None,
        block_tokens=tiles.tokens,
        block_rows=tiles.rows,
        block_columns=tiles.columns,
        num_warps=tiles.warps,
        num_stages=limits.of(x.device).stages(tiles.stages, num_bytes),
        **overlap(x.device),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _linear(
    x,
    matrix,
    bias,
    out,
    num_tokens,
    size,
    width: tl.constexpr,
    chunk: tl.constexpr,
    has_bias: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(2)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    tokens = tl.program_id(1) * block_tokens + tl.arange(0, block_tokens)
    columns = part * chunk + tl.arange(0, block_columns)
    is_token = (tokens < num_tokens)[:, None]
    is_row = rows < size
    row = tl.minimum(rows, size - 1)
    at = matrix + row.to(tl.int64)[:, None] * width + columns[None, :]
    at_x = x + tokens.to(tl.int64)[:, None] * width + columns[None, :]
    sums = tl.zeros([block_tokens, block_rows], tl.float32)
    for start in range(0, chunk, block_columns):
        if width % chunk == 0:
            inputs = tl.load(at_x + start, mask=is_token, other=0.0)
            weights = tl.load(at + start)
        else:
            inside = (columns + start < width)[None, :]
            inputs = tl.load(at_x + start, mask=is_token & inside, other=0.0)
            weights = tl.load(at + start, mask=inside, other=0.0)
        sums = tl.dot(inputs, tl.trans(weights), sums)
    if has_bias:
        sums += tl.where(part == 0, tl.load(bias + row).to(tl.float32), 0.0)[None, :]
    to = out + (part * num_tokens + tokens).to(tl.int64)[:, None] * size + rows[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_token & is_row[None, :])
