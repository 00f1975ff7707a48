"""Split-K products, and gated ones, of 2 to 16 tokens in Triton, as kernels that overlap with the previous one.

So few tokens are bound by reading the matrix. Its tile is a product's first operand, whose rows fill a tensor core's
64, and the tokens are its second one, of 16 columns at least: as the first one they would be padded to 64. Imported
only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import activated, overlap

# The fastest of 34 to 77 configurations for each matrix of Llama-3.1-8B and Llama-3.2-1B on an H200, or nearly
_TOKENS = 16  # the least that tensor cores take, and the most here
_BLOCK = 128  # columns at a time
_ROWS = 64
_PARTS = ((4, 1, 6), (2, 1, 6), (2, 2, 3))  # of the columns, by most programs a multiprocessor; and their stages
_GATED_STAGES = 4
_LEAST_PROGRAMS = 100  # fewer leave too much of a GPU idle


def linear_parts(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, num_processors: int
) -> torch.Tensor | None:
    """`parts_triton.linear_parts` by one program for two multiprocessors to two for each; None: other kernels fit
    better."""
    num_tokens, width = x.shape
    size = len(matrix)
    if not 2 <= num_tokens <= _TOKENS or size % _ROWS:
        return None
    for parts, most, stages in _PARTS:
        num_programs = size // _ROWS * parts
        fills = num_processors < 2 * num_programs <= 2 * most * num_processors
        if fills and width % (_BLOCK * parts) == 0:
            out = torch.empty(parts, num_tokens, size, dtype=torch.float32, device=x.device)
            _launch(x, matrix, bias, out, _ROWS, stages)
            return out
    return None


def gated(x: torch.Tensor, matrix: torch.Tensor, *, is_gelu: bool) -> torch.Tensor | None:
    """silu(gate), or gelu by tanh, * up of a matrix [2n, k], gates first, times x [T, k]: [T, n], rounded once; None:
    other kernels fit better."""
    num_tokens, width = x.shape
    size = len(matrix) // 2
    rows = next((its for its in (_ROWS, _ROWS // 2) if size % its == 0 and size // its >= _LEAST_PROGRAMS), None)
    if rows is None or not 2 <= num_tokens <= _TOKENS or width % _BLOCK:
        return None
    out = x.new_empty(num_tokens, size)
    _launch(x, matrix, None, out, rows, _GATED_STAGES, is_gated=True, is_gelu=is_gelu)
    return out


def _launch(
    x: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    stages: int,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> None:
    """With out [parts, T, n], or [T, n] of one part."""
    num_tokens, width = x.shape
    size = out.shape[-1]
    num_parts = out.numel() // (num_tokens * size)
    num_bytes = (_TOKENS + (2 * rows if is_gated else rows)) * _BLOCK * x.element_size()
    _few[(size // rows, num_parts)](
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
        rows=rows,
        block=_BLOCK,
        block_tokens=_TOKENS,
        stages=limits.of(x.device).stages(stages, num_bytes),
        num_warps=4,
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
