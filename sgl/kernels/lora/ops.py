"""Low-rank adapters on a product's output: out += B (A x), with each token's own A and B.

The plain torch reference serves the CPU; a GPU runs two Triton kernels. The matrices of all adapters are stacked by
slot, or by slot and expert. Of a fused product, whose output has several parts side by side, each part has its own A
and B.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.lora.rows import AdapterRows

Shrunk = torch.Tensor
"""What `shrink` leaves for `expand_`, in the order of `AdapterRows`: [T, parts * rank] on a CPU, float32
[splits, T, parts * rank] to sum on a GPU."""


def shrink(x: torch.Tensor, a: torch.Tensor, rows: AdapterRows, num_parts: int) -> Shrunk:
    """A x of tokens of x [n, k], T in `rows`. a: [slots, parts * rank, k], or [slots, experts, parts * rank, k]. Tokens
    without adapter are left out."""
    if x.is_cuda:
        from sgl.kernels.lora import triton as kernels

        return kernels.shrink(x, a, rows, num_parts)
    shrunk = x.new_zeros(len(rows.order), a.shape[-2])
    for slot, tokens, places in rows.groups:
        shrunk[places] = functional.linear(x[tokens], _matrix(a, slot))
    return shrunk


def expand_(shrunk: Shrunk, b: torch.Tensor, out: torch.Tensor, rows: AdapterRows, parts: tuple[int, ...]) -> None:
    """Add B times what `shrink` left to out [T, n], in place. b: [slots, n, rank], scaled, or
    [slots, experts, n, rank]. parts: widths of its parts, side by side."""
    if out.is_cuda:
        from sgl.kernels.lora import triton as kernels

        kernels.expand_(shrunk, b, out, rows, parts)
        return
    for slot, tokens, places in rows.groups:
        out[tokens] += _expanded(shrunk[places], _matrix(b, slot), parts)


def expand_silu_and_mul(shrunk: Shrunk, b: torch.Tensor, gate_up: torch.Tensor, rows: AdapterRows) -> torch.Tensor:
    """`expand_` to gate_up [T, 2n], whose contents are undefined afterwards, then `silu_and_mul`: [T, n]."""
    if gate_up.is_cuda:
        from sgl.kernels.lora import triton as kernels

        return kernels.expand_silu_and_mul(shrunk, b, gate_up, rows)
    width = gate_up.shape[1] // 2
    expand_(shrunk, b, gate_up, rows, (width, width))
    return silu_and_mul(gate_up)


def _matrix(stacked: torch.Tensor, slot: int) -> torch.Tensor:
    return stacked[slot] if stacked.dim() == 3 else stacked[divmod(slot, stacked.shape[1])]


def _expanded(shrunk: torch.Tensor, b: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    pairs = zip(shrunk.chunk(len(parts), dim=1), torch.split(b, list(parts)), strict=True)
    return torch.cat([functional.linear(x, matrix) for x, matrix in pairs], dim=1)
