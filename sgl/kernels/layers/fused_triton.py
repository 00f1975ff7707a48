"""Fused Triton kernels for the element-wise work between matrix products.

Twins of embedding.py, norm.py, activation.py, rope.py, qkv.py and linear.py: float32 inside, rounded where the
references round. On Hopper and later, each kernel starts while the previous one drains and waits for its results
(programmatic dependent launch). Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels import limits

_ACTIVATION_BLOCK = 1024
_HEADS = 16  # of one token, in a program of rotate_and_store
_MANY_ROWS = 1024  # of a norm: more are bound by bandwidth, fewer by latency


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, is_invariant: bool = False) -> torch.Tensor:
    """`norm.rms_norm` for contiguous rows and weight [n]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(x, x, weight, out, eps, has_residual=False, is_invariant=is_invariant)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    before: torch.Tensor | None = None,
    *,
    is_invariant: bool = False,
) -> torch.Tensor:
    """`norm.add_rms_norm` for contiguous x and residual."""
    out = residual if weight is None else torch.empty_like(residual)
    _norm(x, residual, weight, out, eps, has_residual=True, before=before, is_invariant=is_invariant)
    return out


def norm_parts_(x: torch.Tensor, weight: torch.Tensor, sizes: tuple[int, int], eps: float) -> None:
    """`norm.norm_parts_` for contiguous x."""
    block = triton.next_power_of_2(max(sizes))
    num_warps = min(16, max(1, block // 128))
    options = overlap(x.device)
    _norm_parts[(len(x), 2)](x, weight, x.shape[1], *sizes, eps, block=block, num_warps=num_warps, **options)


def cap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`activation.cap_` for contiguous x."""
    grid = (triton.cdiv(x.numel(), _ACTIVATION_BLOCK),)
    _cap[grid](x, x.numel(), cap, block=_ACTIVATION_BLOCK, num_warps=4, **overlap(x.device))
    return x


def silu_and_mul(
    gate_up: torch.Tensor, added: torch.Tensor | None = None, *, is_gelu: bool = False
) -> torch.Tensor:
    """`activation.silu_and_mul`, or `gelu_and_mul`, for contiguous inputs."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    grid = (out.numel() // width, triton.cdiv(width, _ACTIVATION_BLOCK))
    options = overlap(out.device)
    _silu_and_mul[grid](
        gate_up,
        added,
        out,
        width,
        has_added=added is not None,
        is_gelu=is_gelu,
        block=_ACTIVATION_BLOCK,
        num_warps=4,
        **options,
    )
    return out


def embedding_part(token_ids: torch.Tensor, embedding: torch.Tensor, first: int) -> torch.Tensor:
    """`embedding.embedding_part`."""
    num_rows, width = embedding.shape
    out = embedding.new_empty(len(token_ids), width)
    grid = len(token_ids), triton.cdiv(width, _ACTIVATION_BLOCK)
    _embedding_part[grid](
        token_ids,
        embedding,
        out,
        first,
        num_rows,
        width,
        block=_ACTIVATION_BLOCK,
        num_warps=4,
        **overlap(out.device),
    )
    return out


def rotary_rows(
    table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope.rotary_rows`."""
    head_dim = table.shape[1]
    cos, sin = torch.empty(2, len(positions), 1, head_dim, dtype=dtype, device=table.device)
    half = head_dim // 2
    block = triton.next_power_of_2(half)
    _rotary_rows[(len(positions),)](
        table, positions, cos, sin, half, block=block, num_warps=1, **overlap(cos.device)
    )
    return cos, sin


def rotate_and_store(
    qkv: torch.Tensor,
    num_heads: int,
    rotary: tuple[torch.Tensor, torch.Tensor],
    norm: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`qkv.rotate_and_store` for contiguous tokens of qkv and out, and contiguous pages."""
    *parts, num_tokens, num_all, head_dim = qkv.shape
    cos, sin = rotary
    query = (cos if parts else qkv).new_empty(num_tokens, num_heads, head_dim) if out is None else out
    half = head_dim // 2
    _rotate_and_store[(num_tokens, triton.cdiv(num_all, _HEADS))](
        qkv,
        cos,
        sin,
        norm,
        query,
        key_cache,
        value_cache,
        slots,
        qkv.stride(-3),
        qkv.stride(0),
        key_cache.stride(1),
        value_cache.stride(1),
        eps,
        num_heads,
        key_cache.shape[2],
        half,
        num_parts=math.prod(parts),
        has_norm=norm is not None,
        narrows=key_cache.dtype.itemsize == 1,
        block_heads=_HEADS,
        block_half=triton.next_power_of_2(half),
        num_warps=4,
        **overlap(qkv.device),
    )
    return query


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear.quantize_rows` for contiguous x."""
    num_rows, width = x.shape
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    num_warps = min(16, max(1, block // 256))
    _quantize_rows[(num_rows,)](x, values, scales, width, block=block, num_warps=num_warps, **overlap(x.device))
    return values, scales


def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options: whether a kernel may start while the previous one runs."""
    return {"overlaps": True, "launch_pdl": True} if limits.of(device).overlaps else {"overlaps": False}


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    *,
    has_residual: bool,
    before: torch.Tensor | None = None,
    is_invariant: bool,
) -> None:
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    num_rows = out.numel() // width
    num_warps = min(4 if num_rows > _MANY_ROWS or is_invariant else 16, max(1, block // 128))
    _rms_norm[(num_rows,)](
        x,
        residual,
        before,
        weight,
        out,
        x.stride(-2) if x.dim() > 1 else width,
        out.numel(),
        width,
        eps,
        num_parts=x.numel() // out.numel(),
        has_residual=has_residual,
        has_before=before is not None,
        has_weight=weight is not None,
        block=block,
        num_warps=num_warps,
        **overlap(x.device),
    )


@triton.jit
def _rms_norm(
    x,
    residual,
    before,
    weight,
    out,
    x_stride,
    part_stride,
    width,
    eps,
    num_parts: tl.constexpr,
    has_residual: tl.constexpr,
    has_before: tl.constexpr,
    has_weight: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    if has_weight:
        scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if num_parts > 1:
        values = values.to(tl.float32)
    for part in tl.static_range(1, num_parts):
        values += tl.load(x + part * part_stride + row * x_stride + columns, mask=inside, other=0.0)
    if has_before:
        factors = tl.load(before + columns, mask=inside, other=0.0)
        values = _normed(values.to(tl.float32), factors, width, eps).to(out.dtype.element_ty)
    if has_residual:
        summed = tl.load(residual + row * width + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + summed.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(residual + row * width + columns, values, mask=inside)
    if has_weight:
        wide = values.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
        normed = (wide * scale).to(weight.dtype.element_ty).to(tl.float32)
        tl.store(out + row * width + columns, (normed * scales).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normed(wide, factors, width, eps):
    """float32, of a row of so many numbers with zeros behind, rounded to the factors' dtype before they scale it."""
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    return (wide * scale).to(factors.dtype).to(tl.float32) * factors.to(tl.float32)


@triton.jit
def _norm_parts(x, weight, stride, first, second, eps, block: tl.constexpr, overlaps: tl.constexpr):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.program_id(1) * first
    width = tl.where(start > 0, second, first)
    columns = tl.arange(0, block)
    inside = columns < width
    at = x + tl.program_id(0).to(tl.int64) * stride + start + columns
    wide = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + start + columns, mask=inside, other=0.0)
    tl.store(at, _normed(wide, factors, width, eps).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _cap(x, size, cap, block: tl.constexpr, overlaps: tl.constexpr):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    values = tl.load(x + at, mask=at < size, other=0.0)
    tl.store(x + at, cap - 2.0 * cap / (1.0 + tl.exp(2.0 / cap * values)), mask=at < size)


@triton.jit
def _embedding_part(token_ids, embedding, out, first, num_rows, width, block: tl.constexpr, overlaps: tl.constexpr):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    row = tl.load(token_ids + token) - first
    is_own = tl.broadcast_to((row >= 0) & (row < num_rows), columns.shape)
    tl.store(
        out + token * width + columns,
        tl.load(embedding + row * width + columns, mask=inside & is_own, other=0.0),
        mask=inside,
    )


@triton.jit
def activated(gate, is_gelu: tl.constexpr):
    """silu, or gelu by tanh, of float32."""
    turned = gate
    if is_gelu:
        turned = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-turned))


@triton.jit
def _silu_and_mul(
    gate_up,
    added,
    out,
    width,
    has_added: tl.constexpr,
    is_gelu: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    at = row * 2 * width + columns
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    if has_added:
        gate += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(added + at + width, mask=inside, other=0.0).to(tl.float32)
        gate, up = gate.to(out.dtype.element_ty).to(tl.float32), up.to(out.dtype.element_ty).to(tl.float32)
    gated = activated(gate, is_gelu).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + columns, (gated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_rows(x, values, scales, width, block: tl.constexpr, overlaps: tl.constexpr):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    wide = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0) / 448.0, 1e-12)
    rounded = tl.minimum(tl.maximum(wide / scale, -448.0), 448.0).to(values.dtype.element_ty)
    tl.store(values + row * width + columns, rounded, mask=columns < width)
    tl.store(scales + row, scale)


@triton.jit
def _rotary_rows(table, positions, cos, sin, half, block: tl.constexpr, overlaps: tl.constexpr):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, block)
    inside = dims < half
    at = table + tl.load(positions + token).to(tl.int64) * 2 * half + dims
    cosine = tl.load(at, mask=inside, other=0.0).to(cos.dtype.element_ty)
    sine = tl.load(at + half, mask=inside, other=0.0)
    to = token * 2 * half + dims
    tl.store(cos + to, cosine, mask=inside)
    tl.store(cos + to + half, cosine, mask=inside)
    tl.store(sin + to, (-sine).to(sin.dtype.element_ty), mask=inside)
    tl.store(sin + to + half, sine.to(sin.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    norm,
    query,
    key_cache,
    value_cache,
    slots,
    qkv_stride,
    part_stride,
    key_stride,
    value_stride,
    eps,
    num_heads,
    num_kv_heads,
    half,
    num_parts: tl.constexpr,
    has_norm: tl.constexpr,
    narrows: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    dtype = query.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    dims = tl.arange(0, block_half)[None, :]
    num_rotated = num_heads + num_kv_heads
    inside = (heads < num_rotated + num_kv_heads) & (dims < half)
    is_rotated = heads < num_rotated
    at = qkv + token * qkv_stride + heads * 2 * half + dims
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, num_parts):
        low += tl.load(at + part * part_stride, mask=inside, other=0.0)
        high += tl.load(at + part * part_stride + half, mask=inside, other=0.0)
    if num_parts > 1:
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    of_token = token * 2 * half + dims
    cosine = tl.load(cos + of_token, mask=dims < half, other=0.0).to(tl.float32)
    sine = tl.load(sin + of_token + half, mask=dims < half, other=0.0).to(tl.float32)
    slot = tl.load(slots + token).to(tl.int64)
    x, y = low, high
    if has_norm:
        scale = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 1) / (2 * half) + eps)
        weights = norm + heads * 2 * half + dims
        is_normed = inside & is_rotated
        low_weight = tl.load(weights, mask=is_normed, other=0.0).to(tl.float32)
        high_weight = tl.load(weights + half, mask=is_normed, other=0.0).to(tl.float32)
        narrow = norm.dtype.element_ty
        x = ((low * scale[:, None]).to(narrow).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        y = ((high * scale[:, None]).to(narrow).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    low = tl.where(is_rotated, x * cosine - y * sine, low).to(dtype)
    high = tl.where(is_rotated, y * cosine + x * sine, high).to(dtype)
    is_query = inside & (heads < num_heads)
    to = query + (token * num_heads + heads) * 2 * half + dims
    tl.store(to, low, mask=is_query)
    tl.store(to + half, high, mask=is_query)
    if narrows:  # to e4m3, whose largest number is 448
        low = tl.minimum(tl.maximum(low.to(tl.float32), -448.0), 448.0).to(key_cache.dtype.element_ty)
        high = tl.minimum(tl.maximum(high.to(tl.float32), -448.0), 448.0).to(key_cache.dtype.element_ty)
    is_key = inside & (heads >= num_heads) & is_rotated
    to = key_cache + slot * key_stride + (heads - num_heads) * 2 * half + dims
    tl.store(to, low, mask=is_key)
    tl.store(to + half, high, mask=is_key)
    is_value = inside & (heads >= num_rotated)
    to = value_cache + slot * value_stride + (heads - num_rotated) * 2 * half + dims
    tl.store(to, low, mask=is_value)
    tl.store(to + half, high, mask=is_value)
