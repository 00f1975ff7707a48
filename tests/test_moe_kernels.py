"""Mixtures of experts: the plain torch reference against an expert after the other and against torch's grouped
products, the Triton kernels (interpreted where there is no GPU) against the reference."""

from __future__ import annotations

import importlib.util
from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.norm import add_rms_norm, rms_norm
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.mixture import mixture, route, summed

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
from sgl.kernels.layers import fused_triton
from sgl.kernels.moe import grouped_triton, single_triton
from sgl.kernels.moe.grouped_triton import Plan, Tiles
from sgl.kernels.moe.single_triton import Cut, Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Plan(Tiles(16, 16, 32, 4, 2), Tiles(16, 32, 16, 4, 2))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """On the CPU, where the reference runs."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def made(
    num_experts: int,
    hidden: int,
    size: int,
    top_k: int,
    *,
    normalises: bool = True,
    has_shared: bool = False,
    has_biases: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Experts:
    """Random experts."""
    router = draw(num_experts + has_shared, hidden) / hidden**0.5 * 3
    gate_up, down = draw(num_experts, 2 * size, hidden) / hidden**0.5, draw(num_experts, hidden, size) / size**0.5
    experts = Experts(router.to(dtype), gate_up.to(dtype), down.to(dtype), top_k, normalises)
    if not has_biases:
        return experts
    shapes = {"router": (num_experts,), "gate_up": (num_experts, 2 * size), "down": (num_experts, hidden)}
    biases = {f"{name}_bias": draw(*shape).to(dtype) for name, shape in shapes.items()}
    return replace(experts, **biases, clamped=(1.7, 0.8))


def moved(experts: Experts) -> Experts:
    tensors = ((field.name, getattr(experts, field.name)) for field in fields(experts))
    return replace(experts, **{name: its.to(DEVICE) for name, its in tensors if isinstance(its, torch.Tensor)})


def one_by_one(x: torch.Tensor, experts: Experts, shared: torch.Tensor | None) -> torch.Tensor:
    """Each token by each of its experts, in float64."""
    num_experts, rows = len(experts.down), []
    for index, row in enumerate(x.double()):
        scores = experts.router.double() @ row
        if experts.router_bias is not None:
            scores += experts.router_bias
        shares = scores[:num_experts].softmax(0)
        chosen = sorted(range(num_experts), key=lambda its: -shares[its])[: experts.top_k]
        total = sum(shares[its] for its in chosen) if experts.normalises else 1.0
        out = torch.zeros_like(row)
        for its in chosen:
            product = experts.gate_up[its].double() @ row
            if experts.gate_up_bias is not None and experts.down_bias is not None:
                gate, up = (product + experts.gate_up_bias[its]).chunk(2)
                gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8) + 1
                made = experts.down[its].double() @ (gate * (1.7 * gate).sigmoid() * up) + experts.down_bias[its]
            else:
                gate, up = product.chunk(2)
                made = experts.down[its].double() @ (functional.silu(gate) * up)
            out += shares[its] / total * made
        if shared is not None:
            out += shared[index].double() * scores[num_experts].sigmoid()
        rows.append(out)
    return torch.stack(rows)


def check(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    error = (actual.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance


CASES = {  # tokens, experts, hidden, intermediate, top_k, normalises, has_shared
    "one token": (1, 8, 64, 32, 2, True, False),
    "few tokens": (5, 8, 64, 32, 2, False, False),
    "no multiples": (19, 6, 72, 40, 3, True, True),
    "all experts": (7, 4, 32, 16, 4, False, True),
    "empty experts": (3, 40, 32, 16, 2, True, False),
    "one expert": (21, 1, 32, 16, 1, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_adds_what_each_expert_makes_of_its_tokens(case: str) -> None:
    num_tokens, num_experts, hidden, size, top_k, normalises, has_shared = CASES[case]
    experts = made(num_experts, hidden, size, top_k, normalises=normalises, has_shared=has_shared)
    x, shared = draw(num_tokens, hidden), draw(num_tokens, hidden, seed=1) if has_shared else None
    check(mixture(x, experts, shared), one_by_one(x, experts, shared), 1e-6)
    assert mixture(x[:0], experts, None if shared is None else shared[:0]).shape == (0, hidden)


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="needs torch 2.10 or newer")
def test_the_reference_equals_grouped_products() -> None:
    experts, x = made(8, 64, 32, 2), draw(50, 64)
    weights, ids = route(functional.linear(x, experts.router), experts)
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=8).cumsum(0).to(torch.int32)

    def products(its: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        rounded = its.bfloat16(), matrices.bfloat16().transpose(1, 2)
        return functional.grouped_mm(*rounded, offs=ends).float()

    gated = silu_and_mul(products(x[order // 2], experts.gate_up))
    scaled = products(gated, experts.down) * weights.flatten()[order, None]
    check(mixture(x, experts), torch.zeros_like(x).index_add_(0, order // 2, scaled), 2e-2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_kernels_equal_the_reference(case: str, dtype: torch.dtype) -> None:
    """In float16 where 16 bits are meant: Triton's interpreter multiplies no bfloat16."""
    num_tokens, num_experts, hidden, size, top_k, normalises, has_shared = CASES[case]
    experts = made(num_experts, hidden, size, top_k, normalises=normalises, has_shared=has_shared, dtype=dtype)
    x = draw(num_tokens, hidden).to(dtype)
    shared = draw(num_tokens, hidden, seed=1).to(dtype) if has_shared else None
    on_device = None if shared is None else shared.to(DEVICE)
    parts = grouped_triton.mixture(x.to(DEVICE), moved(experts), on_device, SMALL)
    assert parts.dtype == dtype
    assert parts.shape == (top_k + has_shared, num_tokens, hidden)
    expected = one_by_one(x, experts, shared)
    check(parts.double().sum(0), expected, 1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("num_tokens", [1, 19])
def test_experts_with_biases_and_clamped_gates(num_tokens: int) -> None:
    experts, x = made(6, 72, 40, 3, has_biases=True), draw(num_tokens, 72)
    expected = one_by_one(x, experts, None)
    check(mixture(x, experts), expected, 1e-6)
    check(grouped_triton.mixture(x.to(DEVICE), moved(experts), None, SMALL).double().sum(0), expected, 1e-5)


@pytest.mark.parametrize("num_tokens", [40, 17])
def test_all_tokens_may_choose_one_expert(num_tokens: int) -> None:
    experts = made(5, 32, 16, 1)
    experts.router[3] = 100.0
    x = draw(num_tokens, 32).abs()
    parts = grouped_triton.mixture(x.to(DEVICE), moved(experts), None, SMALL)
    check(parts[0], one_by_one(x, experts, None), 1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_each_block_is_of_one_expert_and_all_have_a_program(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for num_experts, num_pairs in ((1, 40), (7, 33), (16, 5)):
        chosen = torch.randint(0, num_experts, (num_pairs,), generator=generator)
        needed = sum(-(-its // 8) for its in chosen.bincount(minlength=num_experts).tolist())
        assert needed <= grouped_triton.most_blocks(num_pairs, num_experts, 8)


def test_experts_that_others_chose_are_mixed() -> None:
    experts, x = made(6, 32, 16, 3), draw(300, 32)
    ids = torch.stack([torch.randperm(6)[:3] for _ in x])
    weights = draw(len(x), 3).abs()
    expected = torch.zeros(len(x), 32)
    for slot in range(3):
        up = torch.einsum("th,tih->ti", x, experts.gate_up[ids[:, slot]])
        expected += weights[:, slot, None] * torch.einsum(
            "ti,thi->th", silu_and_mul(up), experts.down[ids[:, slot]]
        )
    check(summed(x, experts, weights, ids), expected, 1e-5)
    counts, lists = torch.zeros(6, dtype=torch.int32), torch.empty(6, len(x), dtype=torch.int32)
    for pair, expert in enumerate(ids.flatten().tolist()):
        lists[expert, counts[expert]] = pair
        counts[expert] += 1
    inputs = (its.to(DEVICE) for its in (weights, counts, lists))
    parts = torch.empty(3, *x.shape, device=DEVICE)
    grouped_triton.multiply(x.to(DEVICE), moved(experts), *inputs, parts, None)
    check(parts.sum(0), expected, 1e-5)


def test_a_shared_expert_without_a_gate_is_added_as_it_is() -> None:
    experts, x = made(6, 32, 16, 2), draw(5, 32)
    shared = draw(5, 32, seed=1)
    expected = mixture(x, experts) + shared
    check(mixture(x, experts, shared), expected, 1e-6)
    check(grouped_triton.mixture(x.to(DEVICE), moved(experts), shared.to(DEVICE), SMALL).sum(0), expected, 1e-5)
    gate_up, down, row = draw(48, 32) / 8, draw(32, 24) / 5, x[:1].to(DEVICE, copy=True)
    expected = x[:1] + mixture(x[:1], experts)
    expected += functional.linear(silu_and_mul(functional.linear(x[:1], gate_up)), down)
    single_triton.mixture_add_(row, None, 1e-5, moved(experts), (gate_up.to(DEVICE), down.to(DEVICE)), row)
    check(row, expected, 1e-5)


def test_scores_that_are_no_numbers_choose_each_expert_once() -> None:
    """So that no list grows beyond its place."""
    experts, x = made(4, 32, 16, 3), draw(6, 32)
    x[1], x[2, 0] = float("nan"), float("inf")
    parts = grouped_triton.mixture(x.to(DEVICE), moved(experts), None, SMALL)
    kept = [0, 3, 4, 5]
    check(parts.double().sum(0)[kept], one_by_one(x[kept], experts, None), 1e-5)


@pytest.mark.parametrize("pairs_per_expert", [1, 20, 50, 500])
def test_every_plan_is_made_of_powers_of_two(pairs_per_expert: int) -> None:
    for tiles in grouped_triton.choose(pairs_per_expert, 2):
        assert all(size & (size - 1) == 0 and size >= 16 for size in tiles[:3])


@pytest.mark.costly
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "hidden", "size", "top_k", "normalises", "has_shared"),
    [
        (8, 64, 32, 2, True, False),
        (6, 72, 40, 3, False, True),
        (1, 32, 16, 1, False, False),
        (140, 32, 256, 8, True, False),
    ],
)
def test_a_single_token_equals_the_reference(
    num_experts: int, hidden: int, size: int, top_k: int, normalises: bool, has_shared: bool, has_norm: bool
) -> None:
    experts = made(num_experts, hidden, size, top_k, normalises=normalises, has_shared=has_shared)
    residual, norm = draw(1, hidden), draw(hidden, seed=3) if has_norm else None
    x = residual if norm is None else rms_norm(residual, norm, 1e-5)
    matrices, shared = None, None
    if has_shared:
        gate_up, down = draw(96, hidden) / 8, draw(hidden, 48) / 7
        shared = functional.linear(silu_and_mul(functional.linear(x, gate_up)), down)
        matrices = gate_up.to(DEVICE), down.to(DEVICE)
    expected = residual.double() + one_by_one(x, experts, shared)
    on_device = residual.to(DEVICE, copy=True)
    norm = None if norm is None else norm.to(DEVICE)
    cut = None if num_experts < 100 else Cut(Shape(16, 64, 4), Shape(16, 64, 4), Shape(16, 64, 4))
    single_triton.mixture_add_(on_device, norm, 1e-5, moved(experts), matrices, on_device, cut)
    check(on_device, expected, 1e-5)


CUTS = (
    Cut(Shape(1, 16, 1), Shape(4, 16, 2), Shape(1, 16, 4)),
    Cut(Shape(4, 128, 4), Shape(1, 128, 4), Shape(8, 64, 2)),
)


@pytest.mark.costly
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("has_biases", [False, True])
def test_a_single_token_may_be_cut_in_any_way(cut: Cut, has_biases: bool) -> None:
    """Twice with the same experts: the count of programs that have scored begins anew."""
    experts, norm = made(6, 72, 40, 3, has_biases=has_biases), draw(72, seed=3)
    on_device = moved(experts)
    for seed in range(2):
        residual = draw(1, 72, seed=seed)
        expected = residual.double() + one_by_one(rms_norm(residual, norm, 1e-5), experts, None)
        row = residual.to(DEVICE, copy=True)
        single_triton.mixture_add_(row, norm.to(DEVICE), 1e-5, on_device, None, row, cut)
        check(row, expected, 1e-5)


def test_the_cut_of_a_single_token_suits_the_rows() -> None:
    cut = single_triton.cut_of(made(4, 768, 1408, 2))
    assert [shape.block for shape in cut] == [256, 256, 256]
    cut = single_triton.cut_of(made(4, 2880, 72, 2))
    assert [shape.block for shape in cut] == [2048, 256, 128]


def test_parts_are_summed_by_the_next_norm() -> None:
    parts, residual, weight = draw(3, 5, 48).bfloat16(), draw(5, 48).bfloat16(), draw(48).bfloat16()
    summed = residual.float() + parts.float().sum(0)
    for module in (fused_triton, None):
        on_device = residual.to(DEVICE, copy=True)
        add = add_rms_norm if module is None else module.add_rms_norm
        normed = add(parts.to(DEVICE), on_device, weight.to(DEVICE), 1e-5)
        check(on_device, summed, 1e-2)
        check(normed, rms_norm(summed, weight.float(), 1e-5), 2e-2)
