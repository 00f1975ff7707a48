"""What adapters add to a mixture's experts: the torch reference against experts with merged weights, the Triton kernels
(interpreted where there is no GPU) against the reference."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.lora import ops
from sgl.kernels.lora.experts import ExpertAdapters
from sgl.kernels.lora.rows import NO_ADAPTER, AdapterRows
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.mixture import mixture
from sgl.kernels.moe.packed import matrix_of

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
from sgl.kernels.lora import triton as kernels
from sgl.kernels.moe import grouped_triton
from tests.test_lora_kernels import rows_of
from tests.test_moe_kernels import DEVICE, SMALL, check, draw, made, moved
from tests.test_moe_packed import made_packed, to_device

RANK, HIDDEN, SIZE, NUM_EXPERTS = 16, 64, 32, 5
SLOTS = [1, -1, 0, 0, 1, -1, 2, 0, 0]


def rows_with(slots: list[int], device: str = "cpu") -> AdapterRows:
    given = torch.tensor(slots, dtype=torch.int32, device=device)
    return replace(rows_of(slots, 16 if device == "cuda" else None, None, device), slots=given)


def adapters_of(slots: list[int], device: str = "cpu") -> ExpertAdapters:
    """Random ones in three slots, with room between these."""

    def stacked(rows: int, width: int, seed: int) -> torch.Tensor:
        buffer = draw(3, NUM_EXPERTS * rows * width + 70, seed=seed).to(device) * width**-0.5
        return buffer[:, 70:].unflatten(1, (NUM_EXPERTS, rows, width))

    return ExpertAdapters(
        rows_with(slots, device),
        (stacked(2 * RANK, HIDDEN, 1), stacked(2 * SIZE, RANK, 2)),
        (stacked(RANK, SIZE, 3), stacked(HIDDEN, RANK, 4)),
    )


def merged(experts: Experts, adapters: ExpertAdapters, slot: int) -> Experts:
    """With the weights of the adapter in a slot."""
    (a, b), (down_a, down_b) = adapters.gate_up, adapters.down
    halves = [torch.einsum("eor,eri->eoi", b[slot].chunk(2, 1)[half], a[slot].chunk(2, 1)[half]) for half in (0, 1)]
    gate_up, down = (
        torch.stack([matrix_of(its, each, torch.float32) for each in range(NUM_EXPERTS)])
        for its in (experts.gate_up, experts.down)
    )
    return replace(experts, gate_up=gate_up + torch.cat(halves, 1), down=down + down_b[slot] @ down_a[slot])


@pytest.mark.costly
@pytest.mark.parametrize("slots", [SLOTS, [0], [-1, -1], [2] * 40 + [-1] * 3], ids=len)
@pytest.mark.parametrize("has_shared", [False, True])
def test_adapters_equal_merged_experts(slots: list[int], has_shared: bool) -> None:
    experts, x = made(NUM_EXPERTS, HIDDEN, SIZE, 2, has_shared=has_shared), draw(len(slots), HIDDEN)
    shared = draw(len(slots), HIDDEN, seed=1) if has_shared else None
    adapters = adapters_of(slots)
    by_slot = {slot: merged(experts, adapters, slot) for slot in range(3)} | {NO_ADAPTER: experts}
    expected = torch.cat(
        [
            mixture(x[its : its + 1], by_slot[slot], None if shared is None else shared[its : its + 1])
            for its, slot in enumerate(slots)
        ]
    )
    check(mixture(x, experts, shared, adapters), expected, 1e-5)
    on_device = None if shared is None else shared.to(DEVICE)
    parts = grouped_triton.mixture(
        x.to(DEVICE), moved(experts), on_device, SMALL, adapters_of(slots, device=DEVICE)
    )
    check(parts.sum(0), expected, 1e-4)


@pytest.mark.parametrize("kind", ["int4 with zeros", "e2m1"])
def test_adapters_of_packed_experts(kind: str) -> None:
    experts, x, adapters = made_packed(kind, NUM_EXPERTS, HIDDEN, SIZE, 2), draw(9, HIDDEN), adapters_of(SLOTS)
    expected = torch.cat(
        [
            mixture(x[its : its + 1], experts if slot == NO_ADAPTER else merged(experts, adapters, slot))
            for its, slot in enumerate(SLOTS)
        ]
    )
    check(mixture(x, experts, None, adapters), expected, 1e-4)
    on_device = to_device(experts, torch.float32)
    parts = grouped_triton.mixture(x.to(DEVICE), on_device, None, SMALL, adapters_of(SLOTS, device=DEVICE))
    check(parts.sum(0), expected, 1e-4)


@pytest.mark.parametrize("block", [16, 64])
def test_kernels_read_the_matrices_of_a_slot_and_expert(block: int) -> None:
    adapters, x = adapters_of(SLOTS), draw(9, HIDDEN)
    ids = torch.stack(
        [torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(i))[:2] for i in range(9)]
    )
    pairs = adapters.pairs(ids)
    expected = adapters.added(x, pairs)
    tiled = rows_with(SLOTS, DEVICE).of_experts(ids.to(DEVICE), 3, NUM_EXPERTS, block)
    (a, b), actual = (its.to(DEVICE) for its in adapters.gate_up), torch.zeros(18, 2 * SIZE, device=DEVICE)
    shrunk = kernels.shrink(x.to(DEVICE), a, replace(tiled, order=tiled.order % 9), 2)
    kernels.expand_(shrunk, b, actual, tiled, (SIZE, SIZE))
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert ops.shrink(x, adapters.gate_up[0], replace(pairs, order=pairs.order % 9), 2).shape == (18, 2 * RANK)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(NO_ADAPTER, 2), min_size=1, max_size=60),
    st.integers(1, 3),
    st.sampled_from([None, 16, 64]),
    st.randoms(use_true_random=False),
)
def test_tiles_hold_each_pair_with_an_adapter_once(
    slots: list[int], num_used: int, block: int | None, random: st.randoms
) -> None:
    ids = torch.tensor([random.sample(range(4), num_used) for _ in slots])
    rows = rows_with(slots).of_experts(ids, 3, 4, block)
    seen: list[int] = []
    for group, first, count in rows.tiles.tolist():
        assert count <= rows.block
        pairs = rows.order[first : first + count].tolist()
        seen += pairs
        assert {(slots[its % len(slots)], int(ids[its % len(slots), its // len(slots)])) for its in pairs} <= {
            divmod(group, 4)
        }
    with_adapter = [its for its in range(ids.numel()) if slots[its % len(slots)] != NO_ADAPTER]
    assert sorted(seen) == with_adapter
