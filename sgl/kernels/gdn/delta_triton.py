"""The delta rule of ops.py in Triton.

A prompt's chunks of 64 tokens are prepared side by side, each with its triangular system solved; then each head's
state passes over them. Products take their inputs in the weights' dtype and sum in float32, in which states stay. The
systems' blocks of 16 are inverted row by row and joined by products: a power series over the whole chunk would cancel
where keys repeat. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl.kernels import limits
from sgl.kernels.gdn.rows import CHUNK, NORM_EPS, Rows

_VALUES = 32  # columns of a state's program: registers for 4 warps, and enough programs for one sequence
_LEAST = 16  # sides of a product
_HEADS = 8


def delta_rule(
    qkv: torch.Tensor,
    gates_in: tuple[torch.Tensor, torch.Tensor],
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """`ops.delta_rule`."""
    beta, decay = gates_in
    _, v_heads, k_dim, v_dim = states.shape
    shared = v_heads * k_dim * 2 // (qkv.shape[1] - v_heads * v_dim)
    out = qkv.new_empty(len(qkv), v_heads, v_dim)
    block_keys = max(_LEAST, triton.next_power_of_2(k_dim))
    block_values = max(_LEAST, min(_VALUES, triton.next_power_of_2(v_dim)))
    blocks = triton.cdiv(v_dim, block_values)
    gates = beta, decay, beta.stride(0), decay.stride(0), a_log, dt_bias
    sizes = {"shared": shared, "k_dim": k_dim, "v_dim": v_dim, "block_keys": block_keys, "eps": NORM_EPS}
    if rows.num_single:
        _delta_single[(rows.num_single, v_heads, blocks)](
            qkv, *gates, states, rows.slots, out, v_heads, block_values=block_values, **sizes
        )
    if rows.lens:
        num_chunks, k_heads = len(rows.chunks), v_heads // shared
        unit = qkv.new_empty(len(qkv), 2 * k_heads, k_dim)
        _unit[(len(qkv), triton.cdiv(2 * k_heads, _HEADS))](
            qkv,
            unit,
            qkv.shape[1],
            k_heads,
            k_dim=k_dim,
            block_keys=block_keys,
            block_heads=_HEADS,
            eps=NORM_EPS,
        )
        values = qkv.new_empty(num_chunks, v_heads, CHUNK, v_dim)
        keys = qkv.new_empty(num_chunks, v_heads, CHUNK, k_dim)
        total = torch.empty(num_chunks, v_heads, CHUNK, dtype=torch.float32, device=qkv.device)
        del sizes["eps"]
        # float32 as tensor cores have it: in three parts on NVIDIA's, as it is on AMD's
        precision = "tf32x3" if limits.of(qkv.device).is_nvidia else "ieee"
        _delta_prepare[(num_chunks, v_heads)](
            qkv,
            unit,
            *gates,
            rows.starts,
            rows.chunks,
            values,
            keys,
            total,
            v_heads,
            block_values=max(_LEAST, triton.next_power_of_2(v_dim)),
            chunk=CHUNK,
            precision=precision,
            **sizes,
            num_warps=4,
        )
        _delta_scan[(len(rows.lens), v_heads, blocks)](
            unit,
            states,
            rows.slots,
            rows.starts,
            rows.first_chunks,
            values,
            keys,
            total,
            out,
            v_heads,
            rows.num_single,
            block_values=block_values,
            chunk=CHUNK,
            precision=precision,
            **sizes,
            num_warps=4,
            num_stages=1 if qkv.dtype.itemsize == 4 else 2,  # of 256 keys, float32 has no room for two
        )
    return out


@triton.jit
def _gates(beta, decay, beta_stride, decay_stride, a_log, dt_bias, token, head, inside):
    """beta and g of `ops.gates` at tokens."""
    step = tl.load(beta + token * beta_stride + head, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(decay + token * decay_stride + head, mask=inside, other=0.0).to(tl.float32) + tl.load(
        dt_bias + head
    )
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    g = -tl.exp(tl.load(a_log + head)) * softplus
    return tl.where(inside, 1.0 / (1.0 + tl.exp(-step)), 0.0), tl.where(inside, g, 0.0)


@triton.jit
def _delta_single(
    qkv,
    beta,
    decay,
    beta_stride,
    decay_stride,
    a_log,
    dt_bias,
    states,
    slots,
    out,
    v_heads,
    shared: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    block_keys: tl.constexpr,
    block_values: tl.constexpr,
    eps: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, block_keys)
    columns = tl.program_id(2) * block_values + tl.arange(0, block_values)
    is_dim, is_column = dims < k_dim, columns < v_dim
    key_width = v_heads // shared * k_dim
    at = qkv + token * (2 * key_width + v_heads * v_dim)
    state = states + (tl.load(slots + token) * v_heads + head) * k_dim * v_dim
    state += dims[:, None] * v_dim + columns[None, :]
    inside = is_dim[:, None] & is_column[None, :]
    content = tl.load(state, mask=inside, other=0.0)
    query = tl.load(at + head // shared * k_dim + dims, mask=is_dim, other=0.0).to(tl.float32)
    key = tl.load(at + key_width + head // shared * k_dim + dims, mask=is_dim, other=0.0).to(tl.float32)
    value = tl.load(at + 2 * key_width + head * v_dim + columns, mask=is_column, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * (k_dim**-0.5)
    key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
    step, g = _gates(beta, decay, beta_stride, decay_stride, a_log, dt_bias, token, head, token >= 0)
    content *= tl.exp(g)
    written = (value - tl.sum(content * key[:, None], 0)) * step
    content += key[:, None] * written[None, :]
    tl.store(state, content, mask=inside)
    read = tl.sum(content * query[:, None], 0)
    to = out + (token * v_heads + head) * v_dim + columns
    tl.store(to, read.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _unit(
    qkv,
    unit,
    stride,
    k_heads,
    k_dim: tl.constexpr,
    block_keys: tl.constexpr,
    block_heads: tl.constexpr,
    eps: tl.constexpr,
):
    """Queries and keys of unit length, queries scaled."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    place = head[:, None] * k_dim + tl.arange(0, block_keys)[None, :]
    inside = (head < 2 * k_heads)[:, None] & (tl.arange(0, block_keys) < k_dim)[None, :]
    rows = tl.load(qkv + token * stride + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(rows * rows, 1) + eps) * tl.where(head < k_heads, k_dim**-0.5, 1.0)
    rows = (rows * scale[:, None]).to(unit.dtype.element_ty)
    tl.store(unit + token * 2 * k_heads * k_dim + place, rows, mask=inside)


@triton.jit
def _delta_prepare(
    qkv,
    unit,
    beta,
    decay,
    beta_stride,
    decay_stride,
    a_log,
    dt_bias,
    starts,
    chunks,
    values,
    keys,
    total,
    v_heads,
    shared: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    block_keys: tl.constexpr,
    block_values: tl.constexpr,
    chunk: tl.constexpr,
    precision: tl.constexpr,
):
    """Of each chunk and head: the solutions for beta v and beta exp(c) k, and c, as in `ops.chunked`."""
    dtype = qkv.dtype.element_ty
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, first = tl.load(chunks + 2 * number), tl.load(chunks + 2 * number + 1)
    at, columns, dims = tl.arange(0, chunk), tl.arange(0, block_values), tl.arange(0, block_keys)
    token = (first + at).to(tl.int64)
    is_token = token < tl.load(starts + row + 1)
    k_heads = v_heads // shared
    inside = is_token[:, None] & (dims < k_dim)[None, :]
    of_token = unit + token[:, None] * 2 * k_heads * k_dim + (k_heads + head // shared) * k_dim
    key = tl.load(of_token + dims[None, :], mask=inside, other=0.0)
    step, g = _gates(beta, decay, beta_stride, decay_stride, a_log, dt_bias, token, head, is_token)
    passed = tl.cumsum(g, 0)
    place = (number * v_heads + head) * chunk + at
    tl.store(total + place, passed)
    is_below = at[:, None] > at[None, :]
    between = tl.exp(tl.where(is_below, passed[:, None] - passed[None, :], 0.0)) * step[:, None]
    lower = tl.where(is_below, tl.dot(key, tl.trans(key), input_precision=precision) * between, 0.0)
    in_block = at[:, None] // 16 == at[None, :] // 16
    inverse = tl.where(in_block, -lower, 0.0)
    for line in range(1, 16):
        is_line = at[:, None] % 16 == line
        rows = tl.sum(tl.where(is_line, inverse, 0.0), 0)
        rows += tl.sum(rows[:, None] * inverse, 0)
        inverse = tl.where(is_line & in_block, rows[None, :], inverse)
    inverse = tl.where(at[:, None] == at[None, :], 1.0, inverse)
    # (I + N) with N = inverse @ rest, whose fourth power vanishes: N steps from block to block
    rest = tl.dot(inverse, tl.where(in_block, 0.0, lower), input_precision=precision)
    right = inverse + tl.dot(tl.dot(rest, rest, input_precision=precision), inverse, input_precision=precision)
    inverse = (right - tl.dot(rest, right, input_precision=precision)) * step[None, :]
    inside = is_token[:, None] & (columns < v_dim)[None, :]
    of_token = qkv + token[:, None] * (2 * k_heads * k_dim + v_heads * v_dim) + 2 * k_heads * k_dim + head * v_dim
    value = tl.load(of_token + columns[None, :], mask=inside, other=0.0)
    solved = tl.dot(inverse.to(dtype), value, input_precision=precision).to(dtype)
    tl.store(values + place[:, None] * v_dim + columns[None, :], solved, mask=(columns < v_dim)[None, :])
    inverse *= tl.exp(passed)[None, :]
    solved = tl.dot(inverse.to(dtype), key, input_precision=precision).to(dtype)
    tl.store(keys + place[:, None] * k_dim + dims[None, :], solved, mask=(dims < k_dim)[None, :])


@triton.jit(do_not_specialize=["num_single"])
def _delta_scan(
    unit,
    states,
    slots,
    starts,
    first_chunks,
    values,
    keys,
    total,
    out,
    v_heads,
    num_single,
    shared: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    block_keys: tl.constexpr,
    block_values: tl.constexpr,
    chunk: tl.constexpr,
    precision: tl.constexpr,
):
    """Pass some columns of a head's state over a row's chunks."""
    dtype = unit.dtype.element_ty
    row, head = num_single + tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    first_chunk = tl.load(first_chunks + tl.program_id(0)).to(tl.int64)
    num_chunks = tl.load(first_chunks + tl.program_id(0) + 1) - first_chunk
    at, dims = tl.arange(0, chunk), tl.arange(0, block_keys)
    columns = tl.program_id(2) * block_values + tl.arange(0, block_values)
    is_dim, is_column = dims < k_dim, columns < v_dim
    k_heads = v_heads // shared
    state = states + (tl.load(slots + row) * v_heads + head) * k_dim * v_dim
    state += dims[:, None] * v_dim + columns[None, :]
    content = tl.load(state, mask=is_dim[:, None] & is_column[None, :], other=0.0)
    is_seen = at[:, None] >= at[None, :]
    for number in range(num_chunks):
        token = (start + number * chunk + at).to(tl.int64)
        is_token = token < end
        inside = is_token[:, None] & is_dim[None, :]
        of_token = unit + (token[:, None] * 2 * k_heads + head // shared) * k_dim + dims[None, :]
        query = tl.load(of_token, mask=inside, other=0.0)
        key = tl.load(of_token + k_heads * k_dim, mask=inside, other=0.0)
        place = ((first_chunk + number) * v_heads + head) * chunk + at
        passed = tl.load(total + place)
        last = tl.min(passed, 0)  # it only falls
        solved = tl.load(keys + place[:, None] * k_dim + dims[None, :], mask=is_dim[None, :], other=0.0)
        written = tl.load(values + place[:, None] * v_dim + columns[None, :], mask=is_column[None, :], other=0.0)
        rounded = content.to(dtype)
        written = written.to(tl.float32) - tl.dot(solved, rounded, input_precision=precision)
        read = tl.dot(query, rounded, input_precision=precision) * tl.exp(passed)[:, None]
        within = tl.dot(query, tl.trans(key), input_precision=precision)
        within *= tl.exp(tl.where(is_seen, passed[:, None] - passed[None, :], 0.0))
        within = tl.where(is_seen, within, 0.0).to(dtype)
        read = tl.dot(within, written.to(dtype), read, input_precision=precision)
        written = (written * tl.exp(last - passed)[:, None]).to(dtype)
        content = tl.dot(tl.trans(key), written, content * tl.exp(last), input_precision=precision)
        to = out + (token[:, None] * v_heads + head) * v_dim + columns[None, :]
        tl.store(to, read.to(dtype), mask=is_token[:, None] & is_column[None, :])
    tl.store(state, content, mask=is_dim[:, None] & is_column[None, :])
