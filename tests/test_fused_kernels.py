"""The fused Triton kernels (interpreted where there is no GPU) against the plain torch that they replace."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sgl.kernels import activation, norm, qkv, rope, single

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
from sgl.kernels import fused_triton, single_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """On the CPU, where the references run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to rounding; the interpreter cuts bfloat16 off where a GPU rounds."""
    assert actual.dtype == expected.dtype
    tolerance = 2e-6 if expected.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 48), (2, 64), (5, 300)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (draw(rows, width, dtype=dtype, seed=i) for i in range(3))
    check(fused_triton.rms_norm(x.to(DEVICE), weight[0].to(DEVICE), 1e-5), norm.rms_norm(x, weight[0], 1e-5))
    on_device = residual.to(DEVICE, copy=True)
    out = fused_triton.add_rms_norm(x.to(DEVICE), on_device, weight[0].to(DEVICE), 1e-5)
    check(out, norm.add_rms_norm(x, residual, weight[0], 1e-5))
    check(on_device, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 40), (2, 1030)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = draw(rows, 2 * width, dtype=dtype) * 4
    check(fused_triton.silu_and_mul(gate_up.to(DEVICE)), activation.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 12, 64])
def test_rotary_rows(head_dim: int, dtype: torch.dtype) -> None:
    table, positions = draw(50, head_dim), torch.tensor([0, 49, 7])
    actual = fused_triton.rotary_rows(table.to(DEVICE), positions.to(DEVICE), dtype)
    for ours, expected in zip(actual, rope.rotary_rows(table, positions, dtype), strict=True):
        check(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 8), (7, 7, 12), (9, 1, 64)])
def test_heads_are_normed_rotated_and_stored(
    num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    heads = draw(3, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    weight = draw(num_heads + num_kv_heads, head_dim, dtype=dtype) if has_norm else None
    rotary = rope.rotary_rows(draw(50, head_dim), torch.tensor([4, 0, 49]), dtype)
    slots = torch.tensor([7, 0, 18])
    caches = [torch.full((5, 4, num_kv_heads, head_dim), 0.5, dtype=dtype) for _ in range(2)]
    ours = [cache.to(DEVICE, copy=True) for cache in caches]
    expected = qkv.rotate_and_store(heads, num_heads, rotary, weight, 1e-5, *caches, slots)
    cos, sin = (part.to(DEVICE) for part in rotary)
    actual = fused_triton.rotate_and_store(
        heads.to(DEVICE),
        num_heads,
        (cos, sin),
        None if weight is None else weight.to(DEVICE),
        1e-5,
        ours[0],
        ours[1],
        slots.to(DEVICE),
    )
    check(actual, expected)
    for our, cache in zip(ours, caches, strict=True):
        check(our, cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("size", "width"), [(3, 40), (7, 1024), (2, 1536), (5, 4500)])
def test_products_of_a_single_token(size: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, residual, weight = draw(1, width, dtype=dtype), draw(1, size, dtype=dtype), draw(width, dtype=dtype)
    matrix = (draw(2 * size, width) / width**0.5).to(dtype)
    bias = draw(2 * size, dtype=dtype, seed=5) if has_bias else None
    half = None if bias is None else bias[:size]

    def moved(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
        return [None if tensor is None else tensor.to(DEVICE, copy=True) for tensor in tensors]

    x_, residual_, weight_, matrix_, bias_, half_ = moved(x, residual, weight, matrix, bias, half)
    check_sum(
        single_triton.project(x_, weight_, 1e-5, matrix_, bias_), single.project(x, weight, 1e-5, matrix, bias)
    )
    expected = single.project_gated(x, weight, 1e-5, matrix, bias)
    check_sum(single_triton.project_gated(x_, weight_, 1e-5, matrix_, bias_), expected)
    single_triton.project_add_(x_, matrix_[:size], half_, residual_)
    single.project_add_(x, matrix[:size], half, residual)
    check_sum(residual_, residual)


def check_sum(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of many products, in another order."""
    assert actual.dtype == expected.dtype
    error = (actual.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-5 if expected.dtype == torch.float32 else 2e-2)
