"""Products of a few tokens with a matrix of few rows, cut along the sums as well: else most of a GPU would be idle.

A program multiplies a part of the columns. What the parts add up to is left to the norm that follows, which reads
every number anyway. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels.fused_triton import overlap

_TOKENS, _ROWS, _COLUMNS = 64, 64, 128  # of a program's tile
_MOST_PARTS = 4
_WARPS, _STAGES = 4, 4


def linear_parts(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, num_processors: int
) -> torch.Tensor | None:
    """float32 [parts, T, n], with as many programs as there are multiprocessors, at most; None: one part would do."""
    num_tokens, width = x.shape
    size = len(matrix)
    token_tiles = triton.cdiv(num_tokens, _TOKENS)
    rows = _ROWS
    if token_tiles * triton.cdiv(size, rows) * _MOST_PARTS <= num_processors // 2:
        rows //= 2
    num_parts = min(_MOST_PARTS, num_processors // (token_tiles * triton.cdiv(size, rows)))
    if num_parts < 2:
        return None
    chunk = triton.cdiv(triton.cdiv(width, num_parts), _COLUMNS) * _COLUMNS
    num_parts = triton.cdiv(width, chunk)
    out = torch.empty(num_parts, num_tokens, size, dtype=torch.float32, device=x.device)
    _linear_parts[(triton.cdiv(size, rows), token_tiles, num_parts)](
        x,
        matrix,
        bias,
        out,
        num_tokens,
        size,
        width=width,
        chunk=chunk,
        has_bias=bias is not None,
        block_tokens=_TOKENS,
        block_rows=rows,
        block_columns=_COLUMNS,
        num_warps=_WARPS,
        num_stages=_STAGES,
        **overlap(x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_parts(
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
    tl.store(to, sums, mask=is_token & is_row[None, :])
