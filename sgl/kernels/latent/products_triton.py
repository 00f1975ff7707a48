"""What products.py does, in Triton: for steps of many tokens all but the products, and for a single token these, too.

A single token's products are bound by reading their matrices, which depend on no earlier kernel: they are loaded while
the previous one runs. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels.layers.fused_triton import overlap

_COLUMNS = 64  # of a latent, which a program computes of one head's query
_ROWS = 16  # of a head's values, which a program computes,
_PARTS = 16  # of programs, which it reads at a time


def enter(
    query: torch.Tensor,
    latents: torch.Tensor,
    up: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`products.enter` into `out`, of whose first numbers it computes only a single token's."""
    num_tokens, num_heads, width = query.shape
    rank = up.shape[2]
    nope_dim = width + rank - out.shape[2]
    absorbs = num_tokens == 1
    tiles = triton.cdiv(rank, _COLUMNS) if absorbs else 1
    cos, sin = rotary
    _enter[(num_tokens, 1 + (num_heads * tiles if absorbs else 1))](
        query,
        latents,
        up,
        norm,
        cos,
        sin,
        cache,
        slots,
        out,
        eps,
        query.stride(0),
        latents.stride(0),
        up.stride(0),
        cache.stride(1),
        num_heads,
        absorbs=absorbs,
        block_heads=1 if absorbs else triton.next_power_of_2(num_heads),
        tiles=tiles,
        rank=rank,
        nope_dim=nope_dim,
        half=(width - nope_dim) // 2,
        block_rank=triton.next_power_of_2(rank),
        block_nope=triton.next_power_of_2(nope_dim),
        block_half=triton.next_power_of_2((width - nope_dim) // 2),
        columns=_COLUMNS,
        num_warps=4,
        **overlap(query.device),
    )


def expand_parts(parts: torch.Tensor, programs: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """`products.expand` of one row that programs left in parts, [1, num_heads * value_dim] in up's dtype. See
    `attention.LatentDecodes.attend`."""
    num_heads, size, rank = up.shape
    size -= nope_dim
    out = up.new_empty(1, num_heads * size)
    _expand_parts[(num_heads, triton.cdiv(size, _ROWS))](
        parts,
        parts[2 * len(programs) * num_heads * rank :],
        programs,
        up,
        out,
        len(programs),
        num_heads,
        size,
        up.stride(0),
        nope_dim=nope_dim,
        rank=rank,
        block_rank=triton.next_power_of_2(rank),
        rows=_ROWS,
        block_parts=_PARTS,
        num_warps=4,
        **overlap(up.device),
    )
    return out


@triton.jit
def _enter(
    query,
    latents,
    up,
    norm,
    cos,
    sin,
    cache,
    slots,
    out,
    eps,
    query_stride,
    latents_stride,
    up_stride,
    slot_stride,
    num_heads,
    absorbs: tl.constexpr,
    block_heads: tl.constexpr,
    tiles: tl.constexpr,
    rank: tl.constexpr,
    nope_dim: tl.constexpr,
    half: tl.constexpr,
    block_rank: tl.constexpr,
    block_nope: tl.constexpr,
    block_half: tl.constexpr,
    columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    """The first program of a token stores its latent, others move queries."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cosines, sines = cos + token * 2 * half, sin + token * 2 * half + half
    if part == 0:
        _store(
            latents + token * latents_stride,
            norm,
            cosines,
            sines,
            cache,
            slots + token,
            eps,
            slot_stride,
            rank,
            half,
            block_rank,
            block_half,
            overlaps,
        )
    else:
        _move(
            query + token * query_stride,
            up,
            cosines,
            sines,
            out + token * num_heads * (rank + 2 * half),
            (part - 1) // tiles,
            (part - 1) % tiles,
            up_stride,
            num_heads,
            absorbs,
            block_heads,
            rank,
            nope_dim,
            half,
            block_nope,
            block_half,
            columns,
            overlaps,
        )


@triton.jit
def _store(
    latent,
    norm,
    cosines,
    sines,
    cache,
    slot,
    eps,
    slot_stride,
    rank: tl.constexpr,
    half: tl.constexpr,
    block_rank: tl.constexpr,
    block_half: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Normalise a token's latent, rotate its key, and store both."""
    dtype = cache.dtype.element_ty
    dims, rotated = tl.arange(0, block_rank), tl.arange(0, block_half)
    inside, is_rotated = dims < rank, rotated < half
    weights = tl.load(norm + dims, mask=inside, other=0.0).to(tl.float32)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(latent + dims, mask=inside, other=0.0).to(tl.float32)
    low = tl.load(latent + rank + rotated, mask=is_rotated, other=0.0).to(tl.float32)
    high = tl.load(latent + rank + half + rotated, mask=is_rotated, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + rotated, mask=is_rotated, other=0.0).to(tl.float32)
    sine = tl.load(sines + rotated, mask=is_rotated, other=0.0).to(tl.float32)
    to = cache + tl.load(slot).to(tl.int64) * slot_stride
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / rank + eps)
    normed = (values * scale).to(dtype).to(tl.float32) * weights
    tl.store(to + dims, normed.to(dtype), mask=inside)
    tl.store(to + rank + rotated, (low * cosine - high * sine).to(dtype), mask=is_rotated)
    tl.store(to + rank + half + rotated, (high * cosine + low * sine).to(dtype), mask=is_rotated)


@triton.jit
def _move(
    query,
    up,
    cosines,
    sines,
    out,
    first,
    tile,
    up_stride,
    num_heads,
    absorbs: tl.constexpr,
    block_heads: tl.constexpr,
    rank: tl.constexpr,
    nope_dim: tl.constexpr,
    half: tl.constexpr,
    block_nope: tl.constexpr,
    block_half: tl.constexpr,
    columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Rotate a token's queries of heads from `first` on, and absorb into one's: the tile-th columns of its product."""
    dtype = out.dtype.element_ty
    dims, rotated = tl.arange(0, block_nope), tl.arange(0, block_half)
    column = tile * columns + tl.arange(0, columns)
    if absorbs:
        matrix = up + first.to(tl.int64) * up_stride + dims[:, None] * rank + column[None, :]
        is_read = (dims < nope_dim)[:, None] & (column < rank)[None, :]
        weights = tl.load(matrix, mask=is_read, other=0.0)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    if absorbs:
        at = query + first * (nope_dim + 2 * half)
        plain = tl.load(at + dims, mask=dims < nope_dim, other=0.0).to(tl.float32)
        sums = tl.sum(weights.to(tl.float32) * plain[:, None], 0)
        tl.store(out + first * (rank + 2 * half) + column, sums.to(dtype), mask=column < rank)
    if tile == 0:
        heads = first + tl.arange(0, block_heads)[:, None]
        inside = (heads < num_heads) & (rotated < half)[None, :]
        at_low = query + heads * (nope_dim + 2 * half) + nope_dim + rotated[None, :]
        low = tl.load(at_low, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(at_low + half, mask=inside, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + rotated, mask=rotated < half, other=0.0).to(tl.float32)[None, :]
        sine = tl.load(sines + rotated, mask=rotated < half, other=0.0).to(tl.float32)[None, :]
        to = out + heads * (rank + 2 * half) + rank + rotated[None, :]
        tl.store(to, (low * cosine - high * sine).to(dtype), mask=inside)
        tl.store(to + half, (high * cosine + low * sine).to(dtype), mask=inside)


@triton.jit
def _expand_parts(
    parts,
    part_lse,
    programs,
    up,
    out,
    num_programs,
    num_heads,
    size,
    up_stride,
    nope_dim: tl.constexpr,
    rank: tl.constexpr,
    block_rank: tl.constexpr,
    rows: tl.constexpr,
    block_parts: tl.constexpr,
    overlaps: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    dims = tl.arange(0, block_rank)
    inside = dims < rank
    at = up + head.to(tl.int64) * up_stride + (nope_dim + row)[:, None] * rank + dims[None, :]
    weights = tl.load(at, mask=(row < size)[:, None] & inside[None, :], other=0.0)
    first_program, num_parts = tl.load(programs + 4), tl.load(programs + 5)
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()
    most = float("-inf")
    total = 0.0
    attended = tl.zeros([block_rank], tl.float32)
    for start in range(0, num_parts, block_parts):
        part = start + tl.arange(0, block_parts)
        # the first program's is a row's beginning, which stands behind all rows' ends
        at_part = (first_program + part + tl.where(part == 0, num_programs, 0)) * num_heads + head
        lse = tl.load(part_lse + at_part, mask=part < num_parts, other=float("-inf"), cache_modifier=".cg")
        is_read = (part < num_parts)[:, None] & inside[None, :]
        at_value = parts + at_part[:, None] * rank + dims[None, :]
        value = tl.load(at_value, mask=is_read, other=0.0, cache_modifier=".cg")
        now = tl.maximum(most, tl.max(lse, 0))
        fade = tl.exp2(most - now)
        share = tl.exp2(lse - now)
        attended = attended * fade + tl.sum(value * share[:, None], 0)
        total = total * fade + tl.sum(share, 0)
        most = now
    dtype = out.dtype.element_ty
    attended = (attended / total).to(dtype).to(tl.float32)
    values = tl.sum(weights.to(tl.float32) * attended[None, :], 1)
    tl.store(out + head * size + row, values.to(dtype), mask=row < size)
