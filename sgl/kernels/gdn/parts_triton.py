"""Triton twins of what ops.py has beside the delta rule: convolutions, gates and copies of states.

Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl.kernels.gdn.rows import CHUNK, Rows

_CHANNELS = 128  # of a convolution's program
_TOKENS = 32
_ELEMENTS = 1024
_COPIED = 4096
_HEADS = 8


def convolve(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`ops.convolve`, with channels side by side."""
    width, channels = weight.shape
    out = x.new_empty(len(x), channels)
    blocks = triton.cdiv(channels, _CHANNELS)
    sizes = {"width": width, "block_channels": _CHANNELS}
    if rows.num_single:
        _convolve_single[(rows.num_single, blocks)](
            x, weight, states, rows.slots, out, x.stride(0), channels, **sizes
        )
    if rows.lens:
        grid = len(rows.chunks) * (CHUNK // _TOKENS), blocks
        _convolve[grid](
            x,
            weight,
            states,
            rows.slots,
            rows.starts,
            rows.chunks,
            out,
            x.stride(0),
            channels,
            chunk=CHUNK,
            block_tokens=_TOKENS,
            **sizes,
            num_warps=8,
        )
        _keep_inputs[(len(rows.lens), blocks)](
            x, states, rows.slots, rows.starts, x.stride(0), channels, rows.num_single, **sizes
        )
    return out


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`ops.gated_norm` for contiguous x."""
    num_tokens, heads, width = x.shape
    out = x.new_empty(num_tokens, heads * width)
    _gated_norm[(num_tokens, triton.cdiv(heads, _HEADS))](
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        heads,
        width,
        eps,
        block_heads=_HEADS,
        block=triton.next_power_of_2(width),
    )
    return out


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`ops.sigmoid_gated`."""
    num_tokens, width = x.shape
    out = x.new_empty(num_tokens, width)
    _sigmoid_gated[(num_tokens, triton.cdiv(width, _ELEMENTS))](
        x, gate, out, x.stride(0), gate.stride(0), width, block=_ELEMENTS
    )
    return out


def copy_states(states: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """`ops.copy_states`."""
    num_layers, num_slots = states.shape[:2]
    size = states[0, 0].numel()
    _copy_states[(triton.cdiv(size, _COPIED), num_layers, len(sources))](
        states, sources, targets, num_slots, size, block=_COPIED
    )


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _convolve_single(
    x,
    weight,
    states,
    slots,
    out,
    x_stride,
    channels,
    width: tl.constexpr,
    block_channels: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    inside = channel < channels
    state = states + tl.load(slots + token) * (width - 1) * channels + channel
    new = tl.load(x + token * x_stride + channel, mask=inside, other=0.0)
    sums = new.to(tl.float32) * tl.load(weight + (width - 1) * channels + channel, mask=inside, other=0.0)
    for at in tl.static_range(width - 1):
        old = tl.load(state + at * channels, mask=inside, other=0.0)
        sums += old.to(tl.float32) * tl.load(weight + at * channels + channel, mask=inside, other=0.0)
        if at > 0:
            tl.store(state + (at - 1) * channels, old, mask=inside)
    if width > 1:
        tl.store(state + (width - 2) * channels, new, mask=inside)
    tl.store(out + token * channels + channel, _silu(sums).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _convolve(
    x,
    weight,
    states,
    slots,
    starts,
    chunks,
    out,
    x_stride,
    channels,
    chunk: tl.constexpr,
    block_tokens: tl.constexpr,
    width: tl.constexpr,
    block_channels: tl.constexpr,
):
    number = tl.program_id(0) // (chunk // block_tokens)
    row = tl.load(chunks + 2 * number)
    first = tl.load(chunks + 2 * number + 1) + tl.program_id(0) % (chunk // block_tokens) * block_tokens
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    channel = (tl.program_id(1) * block_channels + tl.arange(0, block_channels))[None, :]
    is_channel = channel < channels
    token = (first + tl.arange(0, block_tokens))[:, None]
    state = states + tl.load(slots + row) * (width - 1) * channels
    sums = tl.zeros([block_tokens, block_channels], tl.float32)
    for at in tl.static_range(width):
        before = token - (width - 1) + at
        is_input = (before >= start) & (before < end) & is_channel
        inputs = tl.load(x + before.to(tl.int64) * x_stride + channel, mask=is_input, other=0.0).to(tl.float32)
        if at < width - 1:
            is_kept = (before < start) & is_channel
            place = width - 1 + before - start
            inputs += tl.load(state + place * channels + channel, mask=is_kept, other=0.0).to(tl.float32)
        inputs *= tl.load(weight + at * channels + channel, mask=is_channel, other=0.0).to(tl.float32)
        sums += inputs
    to = out + token.to(tl.int64) * channels + channel
    tl.store(to, _silu(sums).to(out.dtype.element_ty), mask=(token < end) & is_channel)


@triton.jit(do_not_specialize=["num_single"])
def _keep_inputs(
    x,
    states,
    slots,
    starts,
    x_stride,
    channels,
    num_single,
    width: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Into the states, the last inputs of rows with several tokens."""
    row = num_single + tl.program_id(0)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    inside = channel < channels
    state = states + tl.load(slots + row) * (width - 1) * channels + channel
    for at in tl.static_range(width - 1):  # ascending: what is still to be read lies behind
        token = end - (width - 1) + at
        new = tl.load(x + token.to(tl.int64) * x_stride + channel, mask=inside & (token >= start), other=0.0)
        old = tl.load(state + (width - 1 + token - start) * channels, mask=inside & (token < start), other=0.0)
        tl.store(state + at * channels, new + old, mask=inside)


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    out,
    gate_stride,
    heads,
    width,
    eps,
    block_heads: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    columns = tl.arange(0, block)[None, :]
    inside = (head < heads) & (columns < width)
    place = head * width + columns
    rows = tl.load(x + token * heads * width + place, mask=inside, other=0.0).to(tl.float32)
    rows *= tl.rsqrt(tl.sum(rows * rows, 1) / width + eps)[:, None]
    rows = rows.to(out.dtype.element_ty).to(tl.float32)
    rows *= tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    rows *= _silu(tl.load(gate + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + token * heads * width + place, rows.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid_gated(x, gate, out, x_stride, gate_stride, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    values = tl.load(x + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-opened))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * width + columns, (values * opened).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _copy_states(states, sources, targets, num_slots, size, block: tl.constexpr):
    pair, layer = tl.program_id(2), tl.program_id(1).to(tl.int64)
    source, target = tl.load(sources + pair), tl.load(targets + pair)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    copied = tl.load(states + (layer * num_slots + source) * size + at, mask=inside & (source >= 0), other=0.0)
    tl.store(states + (layer * num_slots + target) * size + at, copied, mask=inside)
