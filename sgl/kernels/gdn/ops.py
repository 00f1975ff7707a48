"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) over states by slot: convolution, delta rule, gated norm.

A layer's state is a matrix S [k_dim, v_dim] for each value head, in float32, and the last inputs of its convolution. A
token with key k, value v, decay exp(g) and step beta makes it S' = exp(g) S + k (beta (v - exp(g) S^T k))^T and reads
S'^T q. The plain torch references; GPUs have Triton twins.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sgl.kernels.gdn.rows import CHUNK, NORM_EPS, Rows


def convolve(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """silu of the causal convolution of each channel, [T, C] in x's dtype; moves the states on, in place.

    x: [T, C], its rows perhaps apart. weight: [width, C]; the last row is of the token itself. states: [slots,
    width - 1, C], the inputs before."""
    if x.is_cuda:
        from sgl.kernels.gdn import parts_triton

        return parts_triton.convolve(x, weight, states, rows)
    width, outputs = len(weight), []
    wide = weight.float()
    if rows.num_single:
        slots = rows.slots[: rows.num_single]
        inputs = torch.cat((states.index_select(0, slots), x[: rows.num_single, None]), 1)
        states.index_copy_(0, slots, inputs[:, 1:])
        outputs.append((inputs.float() * wide).sum(1))
    first = rows.num_single
    for slot, count in zip(rows.slots[rows.num_single :].tolist(), rows.lens, strict=True):
        inputs = torch.cat((states[slot], x[first : first + count]))
        states[slot] = inputs[count:]
        outputs.append((inputs.float().unfold(0, width, 1) * wide.t()).sum(-1))
        first += count
    return functional.silu(torch.cat(outputs)).to(x.dtype)


def gates(
    beta: torch.Tensor, decay: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """beta and g, float32 [T, v_heads], of what the input projection gives; a_log, dt_bias: float32 [v_heads]."""
    return beta.float().sigmoid(), -a_log.exp() * functional.softplus(decay.float() + dt_bias)


def delta_rule(
    qkv: torch.Tensor,
    gates_in: tuple[torch.Tensor, torch.Tensor],
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """What tokens read of the states, [T, v_heads, v_dim] in qkv's dtype; moves the states on, in place.

    qkv: [T, (2 k_heads) k_dim + v_heads v_dim], contiguous, queries and keys of any length. gates_in: beta and decay of
    `gates`, [T, v_heads], their rows perhaps apart. states: float32 [slots, v_heads, k_dim, v_dim]. A query and key
    head serves v_heads / k_heads value heads."""
    if qkv.is_cuda:
        from sgl.kernels.gdn import delta_triton

        return delta_triton.delta_rule(qkv, gates_in, a_log, dt_bias, states, rows)
    _, v_heads, k_dim, v_dim = states.shape
    value_width = v_heads * v_dim
    key_width = (qkv.shape[1] - value_width) // 2
    query, key, value = torch.split(qkv.float(), [key_width, key_width, value_width], -1)
    num_shared = v_heads * k_dim // key_width
    query, key = (_unit(part.view(len(qkv), -1, k_dim)).repeat_interleave(num_shared, 1) for part in (query, key))
    query, value = query * k_dim**-0.5, value.view(len(qkv), v_heads, v_dim)
    beta, g = gates(*gates_in, a_log, dt_bias)
    outputs, first = [], rows.num_single
    if first:
        slots = rows.slots[:first]
        parts = (query[:first], key[:first], value[:first], beta[:first], g[:first])
        state, read = recurrent(states.index_select(0, slots), *parts)
        states.index_copy_(0, slots, state)
        outputs.append(read)
    for slot, count in zip(rows.slots[first:].tolist(), rows.lens, strict=True):
        end = first + count
        parts = (query[first:end], key[first:end], value[first:end], beta[first:end], g[first:end])
        states[slot], read = chunked(states[slot], *parts)
        outputs.append(read)
        first = end
    return torch.cat(outputs).to(qkv.dtype)


def recurrent(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new states [B, H, K, V] and what is read, [B, H, V], of one token for each of B states.

    float32; query, key: [B, H, K], of unit length, queries scaled; value: [B, H, V]; beta, g: [B, H]."""
    state = state * g.exp()[..., None, None]
    known = (state * key[..., None]).sum(-2)
    state += key[..., None] * ((value - known) * beta[..., None])[..., None, :]
    return state, (state * query[..., None]).sum(-2)


def chunked(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    size: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new state [H, K, V] and what T tokens read, [T, H, V], as `recurrent` one by one; query, key: [T, H, K].

    Within a chunk, the delta rule is one triangular system: (I + L) w = beta (v - exp(c) S^T k), where c sums g up and
    L[i, j] = beta_i exp(c_i - c_j) k_i k_j below the diagonal."""
    num_tokens = len(query)
    padding = -num_tokens % size
    query, key, value = (
        torch.unflatten(functional.pad(part, (0, 0, 0, 0, 0, padding)), 0, (-1, size)).transpose(1, 2)
        for part in (query, key, value)
    )  # [N, H, size, ...]
    beta, g = (torch.unflatten(functional.pad(part, (0, 0, 0, padding)), 0, (-1, size)).mT for part in (beta, g))
    total = g.cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    weighted = key * beta[..., None]
    system = (weighted @ key.mT) * between  # the diagonal is taken for ones
    right = torch.cat((value * beta[..., None], weighted * total.exp()[..., None]), -1)
    values, keys = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], -1
    )
    within = (query @ key.mT) * between
    query, key = query * total.exp()[..., None], key * (total[..., -1:] - total).exp()[..., None]
    last, read = total[..., -1].exp()[..., None, None], []
    for at in range(len(query)):
        written = values[at] - keys[at] @ state
        read.append(query[at] @ state + within[at] @ written)
        state = state * last[at] + key[at].mT @ written
    return state, torch.stack(read).transpose(1, 2).flatten(0, 1)[:num_tokens]


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, heads, n] at a root mean square of 1, times weight [n], times silu(gate), [T, heads * n] in x's dtype.

    gate: [T, heads * n], its rows perhaps apart."""
    if x.is_cuda:
        from sgl.kernels.gdn import parts_triton

        return parts_triton.gated_norm(x, gate, weight, eps)
    wide = x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    wide = weight.float() * wide.to(x.dtype).float()
    return (wide.flatten(1) * functional.silu(gate.float())).to(x.dtype)


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, n] times sigmoid(gate) [T, n], whose rows may be apart; in x's dtype."""
    if x.is_cuda:
        from sgl.kernels.gdn import parts_triton

        return parts_triton.sigmoid_gated(x, gate)
    return x * gate.sigmoid()


def copy_states(states: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """states[:, target] = states[:, source] for each pair, in place; of a source of -1, zeros. states: [layers, slots,
    ...], contiguous. sources, targets: int64 [N]; none is both."""
    if states.is_cuda:
        from sgl.kernels.gdn import parts_triton

        parts_triton.copy_states(states, sources, targets)
        return
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if source < 0:
            states[:, target].zero_()
        else:
            states[:, target].copy_(states[:, source])


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
