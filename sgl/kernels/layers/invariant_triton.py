"""Products whose sums have one order for any number of rows, in Triton: twin of `InvariantMatrix` on a CPU.

One tile and one cut of the columns serve all: they follow from the matrix. Where few rows would leave processors idle,
programs share the parts of a sum, and a second kernel adds them in the order in which one program does. Imported only
where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits
from sgl.kernels.layers.fused_triton import overlap

_ROWS, _COLUMNS, _DEPTH = 128, 128, 64  # of the inputs, of the result, and numbers multiplied at a time
_WARPS, _STAGES = 8, 4
_SMALL_ROWS, _SMALL_COLUMNS, _SMALL_DEPTH = 16, 32, 32  # in float32, which only tests are
_PROGRAMS = 256  # that keep any GPU busy
_LEAST_STEPS = 4  # of a part
_MOST_PARTS = 8
_GROUP = 8  # tiles of rows that read a matrix's rows from the L2 cache, one after another
_SUM_BLOCK = 1024


def multiply(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """x [T, k] times the matrix [n, k], plus the bias [n], into contiguous out [T, n], rounded once."""
    x = x.contiguous()
    (num_rows, width), size = x.shape, len(matrix)
    if not num_rows or not size:
        return out
    is_small = x.dtype.itemsize == 4
    rows, columns, depth = (_SMALL_ROWS, _SMALL_COLUMNS, _SMALL_DEPTH) if is_small else (_ROWS, _COLUMNS, _DEPTH)
    parts = num_parts(size, width, columns, depth)
    part_width = triton.cdiv(triton.cdiv(width, depth), parts) * depth
    row_tiles, column_tiles = triton.cdiv(num_rows, rows), triton.cdiv(size, columns)
    shares = parts > 1 and row_tiles * column_tiles < _PROGRAMS // 2
    to = torch.empty(parts, num_rows, size, dtype=torch.float32, device=x.device) if shares else out
    options = overlap(x.device)
    num_bytes = (rows + columns) * depth * x.element_size()
    _multiply[(row_tiles * column_tiles, parts if shares else 1)](
        x,
        matrix,
        bias,
        to,
        num_rows,
        size,
        row_tiles,
        column_tiles,
        has_bias=bias is not None and not shares,
        width=width,
        part_width=part_width,
        parts=1 if shares else parts,
        block_rows=rows,
        block_columns=columns,
        block_depth=depth,
        group=_GROUP,
        num_warps=4 if is_small else _WARPS,
        num_stages=limits.of(x.device).stages(_STAGES, num_bytes),
        **options,
    )
    if shares:
        grid = num_rows, triton.cdiv(size, _SUM_BLOCK)
        _sum[grid](
            to,
            bias,
            out,
            num_rows,
            size,
            has_bias=bias is not None,
            parts=parts,
            block=_SUM_BLOCK,
            num_warps=4,
            **options,
        )
    return out


def num_parts(size: int, width: int, columns: int = _COLUMNS, depth: int = _DEPTH) -> int:
    """Into how many parts a sum over `width` columns of a matrix of `size` rows is cut: so many that a single tile of
    inputs keeps a GPU busy, if they are long enough."""
    wanted = _PROGRAMS // triton.cdiv(size, columns)
    parts = max(1, min(wanted, _MOST_PARTS, triton.cdiv(width, depth) // _LEAST_STEPS))
    steps = triton.cdiv(triton.cdiv(width, depth), parts)
    return int(triton.cdiv(triton.cdiv(width, depth), steps))  # none is empty


@triton.jit(do_not_specialize=["num_rows", "row_tiles"])
def _multiply(
    x,
    matrix,
    bias,
    out,
    num_rows,
    size,
    row_tiles,
    column_tiles,
    has_bias: tl.constexpr,
    width: tl.constexpr,
    part_width: tl.constexpr,
    parts: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    group: tl.constexpr,
    overlaps: tl.constexpr,
):
    """A tile of the sum of `parts` parts, from part number program_id(1) on, which is also where it goes."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    tile, first_part = tl.program_id(0), tl.program_id(1)
    in_group = group * column_tiles
    first_tile = tile // in_group * group
    group_size = tl.minimum(row_tiles - first_tile, group)
    row_tile = first_tile + tile % in_group % group_size
    column_tile = tile % in_group // group_size
    rows = row_tile * block_rows + tl.arange(0, block_rows)
    columns = column_tile * block_columns + tl.arange(0, block_columns)
    depth = tl.arange(0, block_depth)
    at_x = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * width + depth[None, :]
    at = matrix + tl.minimum(columns, size - 1).to(tl.int64)[None, :] * width + depth[:, None]
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for part in tl.static_range(parts):
        begin = (first_part + part) * part_width
        sums = tl.zeros([block_rows, block_columns], tl.float32)
        for start in range(begin, tl.minimum(begin + part_width, width), block_depth):
            if width % block_depth == 0:
                inputs = tl.load(at_x + start)
                weights = tl.load(at + start)
            else:
                inputs = tl.load(at_x + start, mask=(depth + start < width)[None, :], other=0.0)
                weights = tl.load(at + start, mask=(depth + start < width)[:, None], other=0.0)
            sums = tl.dot(inputs, weights, sums, input_precision="ieee")
        total = sums if part == 0 else total + sums
    if has_bias:
        total += tl.load(bias + columns, mask=columns < size, other=0.0).to(tl.float32)[None, :]
    to = out + (first_part.to(tl.int64) * num_rows + rows[:, None]) * size + columns[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (columns < size)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _sum(
    given,
    bias,
    out,
    num_rows,
    size,
    has_bias: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Add the parts of a row, as `_multiply` would."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    total = tl.load(given + row * size + columns, mask=inside, other=0.0)
    for part in tl.static_range(1, parts):
        at = given + (tl.cast(part, tl.int64) * num_rows + row) * size + columns
        total += tl.load(at, mask=inside, other=0.0)
    if has_bias:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, total.to(out.dtype.element_ty), mask=inside)
