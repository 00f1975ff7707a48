"""The Triton kernels of LoRA adapters (interpreted where there is no GPU) against plain torch, and how tokens are cut
into tiles."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.lora import ops
from sgl.kernels.lora.rows import NO_ADAPTER, AdapterRows, most_tiles, tiled

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
from sgl.kernels.lora import triton as kernels

pytestmark = pytest.mark.usefixtures("plain_torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIXTEEN = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no products of bfloat16


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def rows_of(slots: list[int], block: int | None, num_tiles: int | None = None, device: str = "cpu") -> AdapterRows:
    order, tiles = tiled(np.array(slots, np.int32), block, num_tiles)
    return AdapterRows(torch.from_numpy(order).to(device), torch.from_numpy(tiles).to(device), block or len(slots))


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to rounding."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else 6e-2
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


CASES: dict[str, dict[str, Any]] = {
    "mixed": {"slots": [2, -1, 0, 2, 2, 1, -1, 0]},
    "one token": {"slots": [1]},
    "nobody": {"slots": [-1, -1, -1]},
    "more than a tile": {"slots": [0] * 19 + [-1] * 2 + [2] * 33},
    "unused tiles": {"slots": [0, 0, 1], "num_tiles": 6},
    "many tokens": {"slots": [0] * 70 + [1] * 5, "block": 64},
    "a high rank": {"slots": [0, 1, -1], "rank": 128},
    "wide inputs": {"slots": [0, -1, 1], "width": 2100},
    "sixteen bits": {"slots": [2, -1, 0, 2], "dtype": SIXTEEN},
    "odd parts": {"slots": [1, 0, 0], "parts": (40, 8, 8)},
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_against_torch(name: str) -> None:
    case = {"parts": (96, 64, 64), "rank": 16, "width": 80, "block": 16, "dtype": torch.float32} | CASES[name]
    slots, parts, rank, width, dtype = (case[key] for key in ("slots", "parts", "rank", "width", "dtype"))
    x = draw(len(slots), width, dtype=dtype)
    a = draw(3, len(parts) * rank, width, dtype=dtype, seed=1) * width**-0.5
    b = draw(3, sum(parts), rank, dtype=dtype, seed=2) * rank**-0.5
    out = draw(len(slots), sum(parts), dtype=dtype, seed=3)
    expected = out.clone()
    plain = rows_of(slots, None)
    ops.expand_(ops.shrink(x, a, plain, len(parts)), b, expected, plain, parts)
    by_hand = out.float().clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            narrow = [a[slot].float()[p * rank : (p + 1) * rank] @ x[token].float() for p in range(len(parts))]
            wide = [m @ n for m, n in zip(torch.split(b[slot].float(), list(parts)), narrow, strict=True)]
            by_hand[token] += torch.cat(wide)
    check(expected, by_hand.to(dtype))
    rows = rows_of(slots, case["block"], case.get("num_tiles"), DEVICE)
    on_device = out.to(DEVICE, copy=True)
    shrunk = kernels.shrink(x.to(DEVICE), a.to(DEVICE), rows, len(parts))
    kernels.expand_(shrunk, b.to(DEVICE), on_device, rows, parts)
    check(on_device, expected)


@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN])
@pytest.mark.parametrize("rank", [16, 128])
def test_expanding_to_a_gate(rank: int, dtype: torch.dtype) -> None:
    slots, width, hidden = [1, -1, 0, 1, -1], 72, 48
    x, gate_up = draw(5, hidden, dtype=dtype), draw(5, 2 * width, dtype=dtype, seed=1)
    a = draw(2, 2 * rank, hidden, dtype=dtype, seed=2) * hidden**-0.5
    b = draw(2, 2 * width, rank, dtype=dtype, seed=3) * rank**-0.5
    plain = rows_of(slots, None)
    expected = ops.expand_silu_and_mul(ops.shrink(x, a, plain, 2), b, gate_up.clone(), plain)
    torch.testing.assert_close(expected[1], silu_and_mul(gate_up)[1])
    rows = rows_of(slots, 16, 5, DEVICE)
    shrunk = kernels.shrink(x.to(DEVICE), a.to(DEVICE), rows, 2)
    check(kernels.expand_silu_and_mul(shrunk, b.to(DEVICE), gate_up.to(DEVICE), rows), expected)


def test_stacked_matrices_may_have_room_between_slots() -> None:
    slots, parts, rank, width = [1, 0, -1], (64, 64), 16, 64
    buffer = draw(2, 9000)
    a = buffer[:, 100 : 100 + 2 * rank * width].unflatten(1, (2 * rank, width))
    b = buffer[:, 5000 : 5000 + 128 * rank].unflatten(1, (128, rank))
    x, out = draw(3, width), draw(3, 128, seed=1)
    plain, rows = rows_of(slots, None), rows_of(slots, 16, None, DEVICE)
    expected = out.clone()
    ops.expand_(ops.shrink(x, a, plain, 2), b, expected, plain, parts)
    buffer = buffer.to(DEVICE)
    on_device = out.to(DEVICE, copy=True)
    a = buffer[:, 100 : 100 + 2 * rank * width].unflatten(1, (2 * rank, width))
    b = buffer[:, 5000 : 5000 + 128 * rank].unflatten(1, (128, rank))
    kernels.expand_(kernels.shrink(x.to(DEVICE), a, rows, 2), b, on_device, rows, parts)
    torch.testing.assert_close(on_device.cpu(), expected, rtol=1e-4, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(NO_ADAPTER, 4), min_size=1, max_size=90), st.sampled_from([None, 16, 64]))
def test_tiles_hold_each_token_once(slots: list[int], block: int | None) -> None:
    order, tiles = tiled(np.array(slots, np.int32), block)
    seen: list[int] = []
    for slot, first, count in tiles.tolist():
        assert 0 < count <= (block or len(slots))
        tokens = order[first : first + count].tolist()
        assert {slots[token] for token in tokens} == {slot}
        seen += tokens
    assert sorted(seen) == list(range(len(slots)))
    if block is not None:
        most = most_tiles(len(slots), 5, block)
        assert len(tiles) <= most
        padded = tiled(np.array(slots, np.int32), block, most)[1]
        assert (padded[: len(tiles)] == tiles).all()
        assert not padded[len(tiles) :, 2].any()
