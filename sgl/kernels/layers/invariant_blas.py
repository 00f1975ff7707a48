"""Products whose sums have one order for any number of rows, by a library's kernels.

cuBLAS chooses a kernel by the shape of a call, never by the numbers. Calls of one number of rows, of which the last is
filled up, thus add in one order if that does not depend on where a row stands; calls of other numbers of rows may join
if their order is the same. Both are tried for each shape of a matrix before it is used, with sums that are nothing but
rounding errors: another order gives other bits in almost every number.
"""

from __future__ import annotations

import functools
import logging

import torch

ROWS = (64, 128, 256, 512, 1024)
"""Of a call. On an H100, 64 cost no more than one, and 1,024 no more a row than 8,192."""
_FIRST = 256  # rows of the calls that the others are compared with
_MOST_LOGITS = 512  # rows of a call for logits, whose matrices are large
_ROW_COST = 256  # rows that cost as much as a call's reading of the matrix, about
_SHIFT = 37  # rows, to other places in a call

logger = logging.getLogger(__name__)


@functools.cache
def call_sizes(
    size: int, width: int, dtype: torch.dtype, device: torch.device, *, for_logits: bool = False
) -> tuple[int, ...]:
    """Numbers of rows of calls that agree, for matrices [size, width]: ascending, none if not even one agrees with
    itself. It computes and waits: not for captured steps. for_logits: of products in float32, without a bias."""
    if dtype.itemsize != 2 or size % 8 or width % 8:
        return ()  # rows that are not aligned alike; float32 is for tests only
    num_rows = _MOST_LOGITS if for_logits else ROWS[-1]
    sizes = agreeing(*_cancelling(num_rows, size, width, dtype, device), for_logits=for_logits)
    how = f"cuBLAS in calls of {', '.join(map(str, sizes))} rows" if sizes else "Triton"
    logger.info("deterministic: products with matrices [%d, %d] by %s", size, width, how)
    return sizes


def agreeing(x: torch.Tensor, matrix: torch.Tensor, *, for_logits: bool = False) -> tuple[int, ...]:
    """Those of `ROWS` whose calls give x [rows, k] times the matrix [n, k] the same bits, with a bias and without."""
    sizes = tuple(rows for rows in ROWS if rows <= len(x))
    dtype = torch.float32 if for_logits else x.dtype
    for bias in (None,) if for_logits else (None, matrix.new_zeros(len(matrix))):
        expected = _in_calls(x, matrix, bias, _FIRST, dtype)
        moved = _in_calls(x.roll(_SHIFT, 0), matrix, bias, _FIRST, dtype)
        if not torch.equal(moved, expected.roll(_SHIFT, 0)):
            return ()
        sizes = tuple(rows for rows in sizes if torch.equal(_in_calls(x, matrix, bias, rows, dtype), expected))
    return sizes


def multiply(
    x: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    sizes: tuple[int, ...],
) -> torch.Tensor:
    """x [T, k] times the matrix [n, k], plus the bias [n], in calls of `sizes` rows: [T, n], in `out` if given."""
    x, calls, start = x.contiguous(), cover(len(x), sizes), 0
    to = x.new_empty(sum(calls), len(matrix)) if out is None else out
    for rows in calls:
        part, end = x[start : start + rows], start + rows
        if len(part) < rows:  # the last
            filled = x.new_empty(rows, x.shape[1])
            filled[: len(part)] = part
            part = filled
        if end <= len(to):
            _call(part, matrix, bias, to[start:end])
        else:
            to[start:] = _call(part, matrix, bias, to.new_empty(rows, len(matrix)))[: len(to) - start]
        start = end
    return to[: len(x)] if out is None else out


def cover(num_rows: int, sizes: tuple[int, ...]) -> list[int]:
    """Calls for so many rows, of which the last may be filled up: as many as possible of the largest, then what costs
    least."""
    calls = [sizes[-1]] * (num_rows // sizes[-1])
    return calls + list(_rest(num_rows % sizes[-1], sizes)[1])


@functools.lru_cache(4096)
def _rest(num_rows: int, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The cost in rows, and the calls."""
    if not num_rows:
        return 0, ()
    least = next(rows for rows in sizes if rows >= num_rows)
    found: tuple[int, tuple[int, ...]] = (least + _ROW_COST, (least,))
    for rows in sizes[: sizes.index(least)]:
        cost, calls = _rest(num_rows - rows, sizes)
        found = min(found, (cost + rows + _ROW_COST, (rows, *calls)))
    return found


def _call(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """All products are by this, so that what was tried is what is used."""
    if bias is not None:
        return torch.addmm(bias, x, matrix.t(), out=out)
    if out.dtype != x.dtype:
        return torch.mm(x, matrix.t(), out_dtype=out.dtype, out=out)
    return torch.mm(x, matrix.t(), out=out)


def _in_calls(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    out = x.new_empty(len(x), len(matrix), dtype=dtype)
    for start in range(0, len(x), rows):
        _call(x[start : start + rows], matrix, bias, out[start : start + rows])
    return out


def _cancelling(
    num_rows: int, size: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [num_rows, width] and a matrix [size, width] whose products are 0, were they not rounded."""
    random = torch.Generator(device).manual_seed(0)
    order = torch.randperm(width // 2, generator=random, device=device)
    x = torch.empty(num_rows, width // 2, dtype=dtype, device=device).normal_(generator=random)
    matrix = torch.empty(size, width // 2, dtype=dtype, device=device).normal_(generator=random)
    return torch.cat((x, x[:, order]), 1), torch.cat((matrix, -matrix[:, order]), 1)
