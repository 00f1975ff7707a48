"""Split-K products, and gated ones, of 2 to 128 tokens in Triton, as kernels that overlap with the previous one.

So few tokens are bound by reading the matrix. Its tile is a product's first operand, whose rows fill a tensor core's
64, and the tokens are its second one, of 16 columns at least: as the first one they would be padded to 64. Imported
only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import activated, overlap
from sgl.kernels.layers.parts_triton import Tiles

# By most tokens; the fastest of 12 to 130 for each matrix of Llama-3.1-8B and Llama-3.2-1B on an H200, or nearly
_PARTS = tuple(Tiles(tokens, 64, 128, 4, stages) for tokens, stages in ((16, 6), (32, 5), (64, 5), (128, 4)))
_GATED = (*(Tiles(tokens, 64, 128, 4, 4) for tokens in (16, 32, 64)), Tiles(128, 128, 64, 8, 4))


class _Split(NamedTuple):
    """How columns are cut where that leaves few multiprocessors idle."""

    parts: int
    programs: int  # of a multiprocessor, at most
    least: float  # share of all that may run at once; more than so many do
    most_tokens: int


_SPLITS = _Split(4, 1, 0.7, 128), _Split(2, 1, 0.7, 128), _Split(2, 2, 0.7, 64), _Split(2, 2, 0.5, 16)
_LEAST_GATED = 0.8  # of gated products, which are not split
"""Where fewer programs run, cuBLAS was up to a third faster on an H200, and `parts_triton` a tenth: in 28 matrices of
models of 0.6 to 70 billion weights."""
_SHARED_STAGES = 3  # of two programs of a multiprocessor
_BESIDE = 512  # bytes of shared memory that compilers take beside a stage
_LEAST_STAGES = 3  # with fewer, where shared memory is small, too little is loaded ahead


def linear_parts(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, num_processors: int
) -> torch.Tensor | None:
    """`parts_triton.linear_parts` where one of `_SPLITS` fits the matrix; None: other kernels fit better."""
    num_tokens, width = x.shape
    size, tiles = len(matrix), _tiles(_PARTS, num_tokens)
    if tiles is None or size % tiles.rows:
        return None
    for split in _SPLITS:
        share = size // tiles.rows * split.parts / (split.programs * num_processors)
        fits = num_tokens <= split.most_tokens and split.least < share <= 1
        if fits and width % (tiles.columns * split.parts) == 0:
            most = tiles.stages if split.programs == 1 else _SHARED_STAGES
            stages = _stages(x, most, split.programs * (tiles.tokens + tiles.rows) * tiles.columns)
            if stages is not None:
                out = torch.empty(split.parts, num_tokens, size, dtype=torch.float32, device=x.device)
                _launch(x, matrix, bias, out, tiles._replace(stages=stages))
                return out
    return None


def gated(x: torch.Tensor, matrix: torch.Tensor, num_processors: int, *, is_gelu: bool) -> torch.Tensor | None:
    """silu(gate), or gelu by tanh, * up of a matrix [2n, k], gates first, times x [T, k]: [T, n], rounded once; None:
    other kernels fit better."""
    num_tokens, width = x.shape
    size, tiles = len(matrix) // 2, _tiles(_GATED, num_tokens)
    if tiles is None or size % tiles.rows or width % tiles.columns:
        return None
    num_programs = size // tiles.rows
    stages = _stages(x, tiles.stages, (tiles.tokens + 2 * tiles.rows) * tiles.columns)
    if stages is None or num_programs < _LEAST_GATED * num_processors * -(-num_programs // num_processors):
        return None
    out = x.new_empty(num_tokens, size)
    _launch(x, matrix, None, out, tiles._replace(stages=stages), is_gated=True, is_gelu=is_gelu)
    return out


def _tiles(of: Sequence[Tiles], num_tokens: int) -> Tiles | None:
    """That hold so many tokens; None: none do, or it is one, which needs none."""
    return next((tiles for tiles in of if 2 <= num_tokens <= tiles.tokens), None)


def _stages(x: torch.Tensor, most: int, size: int) -> int | None:
    """That shared memory holds, of `size` elements each; None: too few."""
    stages = limits.of(x.device).stages(most, size * x.element_size() + _BESIDE)
    return stages if stages >= _LEAST_STAGES else None


def _launch(
    x: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> None:
    """With out [parts, T, n], or [T, n] of one part."""
    num_tokens, width = x.shape
    size = out.shape[-1]
    num_parts = out.numel() // (num_tokens * size)
    _few[(size // tiles.rows, num_parts)](
        x,
        matrix,
        bias,
        out,
        num_tokens,
        size,
        width=width,
        chunk=width // num_parts,
        has_bias=bias is not None,
        is_gated=is_gated,
        is_gelu=is_gelu,
        rows=tiles.rows,
        block=tiles.columns,
        block_tokens=tiles.tokens,
        stages=tiles.stages,
        num_warps=tiles.warps,
        **overlap(x.device),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _few(
    x,
    matrix,
    bias,
    out,
    num_tokens,
    size,
    width: tl.constexpr,
    chunk: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    block_tokens: tl.constexpr,
    stages: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(1)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    token = tl.arange(0, block_tokens)
    columns = part * chunk + tl.arange(0, block)
    is_token = (token < num_tokens)[None, :]
    at = matrix + row.to(tl.int64)[:, None] * width + columns[None, :]
    up_at = at + tl.cast(size, tl.int64) * width
    at_x = x + token.to(tl.int64)[None, :] * width + columns[:, None]
    sums = tl.zeros([rows, block_tokens], tl.float32)
    ups = tl.zeros([rows, block_tokens], tl.float32)
    for start in tl.range(0, chunk, block, num_stages=stages):
        weights = tl.load(at + start)
        inputs = tl.load(at_x + start, mask=is_token, other=0.0)
        sums = tl.dot(weights, inputs, sums)
        if is_gated:
            ups = tl.dot(tl.load(up_at + start), inputs, ups)
    if has_bias:
        sums += tl.where(part == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
    if is_gated:
        sums = activated(sums, is_gelu) * ups
    to = out + (part * num_tokens + token).to(tl.int64)[None, :] * size + row[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_token)
