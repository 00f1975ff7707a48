"""Matrices in four and eight bits by groups: the Triton kernels (interpreted where there is no GPU) against the plain
torch reference, and that against float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.nn import functional

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.layers.linear import linear
from sgl.kernels.layers.norm import rms_norm

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
from sgl.kernels.layers import grouped_single_triton, grouped_triton, single_triton

pytestmark = pytest.mark.usefixtures("plain_torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(
    n: int, k: int, *, bits: int = 4, group: int = 32, has_zeros: bool = False, has_order: bool = False
) -> GroupedMatrix:
    """A random one on the device. bits 0: e4m3."""
    generator = torch.Generator().manual_seed(n + k + bits)
    if bits:
        codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    else:
        codes = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(n, k // group, generator=generator) * (0.5**bits if bits else 1.0) + 0.5**bits * 0.1
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8, generator=generator) if has_zeros else None
    order = torch.randperm(k, generator=generator).int().to(DEVICE) if has_order else None
    return GroupedMatrix.of(
        codes.to(DEVICE),
        scales.half().to(DEVICE),
        None if zeros is None else zeros.to(DEVICE),
        bits=bits or 8,
        order=order,
    )


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-4 if actual.dtype == torch.float32 else 3e-2
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * scale)


MATRICES = [
    {},
    {"group": 64, "has_zeros": True},
    {"has_order": True},
    {"group": 192, "has_zeros": True, "has_order": True},
    {"bits": 8},
    {"bits": 8, "has_zeros": True, "group": 192},
    {"bits": 0, "group": 64},
    {"bits": 0, "group": 48, "has_order": True},
]
CASES = [
    pytest.param(options, dtype, marks=[pytest.mark.slow] * ((index % 4 == 0) != (dtype == torch.bfloat16)))
    for index, options in enumerate(MATRICES)
    for dtype in (torch.float32, torch.bfloat16)
]  # one dtype of each in every run


@pytest.mark.parametrize("options", MATRICES)
def test_packing_loses_nothing(options: dict[str, int]) -> None:
    bits, group = options.get("bits", 4), options.get("group", 32)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << (bits or 6), (6, 192), dtype=torch.uint8, generator=generator)
    codes = codes.to(torch.float8_e4m3fn) if bits == 0 else codes
    scales, order = torch.rand(6, 192 // group, generator=generator), torch.randperm(192, generator=generator)
    matrix = GroupedMatrix.of(codes, scales, None, bits=bits or 8, order=order.int())
    assert (matrix.shape, matrix.bits, matrix.group) == ((6, 192), bits or 8, group)
    expected = (codes.float() - (8, 128, 0)[(4, 8, 0).index(bits)]) * scales.repeat_interleave(group, 1)
    assert torch.equal(matrix.dequantized(torch.float32)[:, order], expected)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_rounding_is_to_the_nearest(group: int) -> None:
    weights = torch.randn(5, 3 * group)
    matrix = GroupedMatrix.rounded(weights)
    assert matrix.group == group
    error = (matrix.dequantized(torch.float32) - weights).abs().view(5, 3, group)
    assert (error <= matrix.scales[..., None] / 2 * 1.001).all()
    assert not GroupedMatrix.rounded(torch.zeros(2, 32)).dequantized(torch.float32).any()


@pytest.mark.costly
@pytest.mark.parametrize(("options", "dtype"), CASES)
def test_single_tokens(options: dict[str, int], dtype: torch.dtype) -> None:
    matrix = drawn(6, 192, **options)
    x, norm, bias, residual = (draw(1, its, seed=i, dtype=dtype) for i, its in enumerate((192, 192, 6, 6)))
    plain = matrix.dequantized(torch.float32)
    normed = rms_norm(x.float(), norm[0].float(), 1e-5)
    check(single_triton.project(x, None, 0.0, matrix, None), functional.linear(x.float(), plain))
    expected = functional.linear(normed, plain, bias[0].float())
    check(single_triton.project(x, norm[0], 1e-5, matrix, bias[0]), expected)
    gate, up = expected.chunk(2, -1)
    check(single_triton.project_gated(x, norm[0], 1e-5, matrix, bias[0]), functional.silu(gate) * up)
    added = residual.clone()
    single_triton.project_add_(x, matrix, bias[0], added)
    check(added, residual.float() + functional.linear(x.float(), plain, bias[0].float()))


@pytest.mark.parametrize("options", MATRICES[:5:2])
def test_rows_in_turn(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that holds whole rows goes on with others; longer rows are read in parts."""
    monkeypatch.setattr(grouped_single_triton, "_LEAST_PROGRAMS", 1)
    matrix, x, norm = drawn(36, 192, **options), draw(1, 192), draw(192)
    expected = functional.linear(rms_norm(x, norm, 1e-5), matrix.dequantized(torch.float32))
    for units in (128, 4):
        monkeypatch.setattr(grouped_single_triton, "_UNITS", units)
        check(single_triton.project(x, norm, 1e-5, matrix, None), expected)
        gate, up = expected.chunk(2, -1)
        check(single_triton.project_gated(x, norm, 1e-5, matrix, None), functional.silu(gate) * up)


@pytest.mark.parametrize(("n", "k"), [(2, 32), (40, 64), (3, 4128), (2, 4096)])
def test_sizes_of_single_products(n: int, k: int) -> None:
    for bits in (4, 8):
        matrix, x = drawn(n, k, bits=bits), draw(1, k)
        check(single_triton.project(x, None, 0.0, matrix, None), functional.linear(x, matrix.dequantized(x.dtype)))


@pytest.mark.parametrize(("options", "dtype"), CASES)
def test_several_tokens(options: dict[str, int], dtype: torch.dtype) -> None:
    """In float16: Triton's interpreter multiplies no bfloat16."""
    dtype = torch.float16 if dtype == torch.bfloat16 else dtype
    matrix, bias = drawn(70, 192, **options), draw(70)
    for num_tokens in (2, 17) if options.get("bits") != 8 else (3,):
        x = draw(num_tokens, 192, dtype=dtype)
        expected = functional.linear(x.float(), matrix.dequantized(torch.float32), bias)
        check(grouped_triton.linear(x, matrix, bias.to(dtype)), expected)


@pytest.mark.parametrize("options", [{}, {"group": 128, "has_zeros": True}, {"bits": 0, "group": 64}])
def test_parts_of_products_are_for_the_sum(options: dict[str, int]) -> None:
    """Of long rows and few: each multiprocessor gets some. Groups of a tile's columns are scaled as sums."""
    matrix, bias, x = drawn(70, 640, **options), draw(70), draw(3, 640, dtype=torch.float16)
    parts = grouped_triton.linear_parts(x, matrix, bias.half(), 3)
    assert parts is not None
    assert (parts.dtype, parts.shape) == (torch.float32, (3, 3, 70))
    check(parts.sum(0).half(), functional.linear(x.float(), matrix.dequantized(torch.float32), bias))
    assert grouped_triton.linear_parts(x, matrix, None, 1) is None


@pytest.mark.parametrize("options", MATRICES)
def test_dequantized_copies(options: dict[str, int]) -> None:
    matrix = drawn(3, 576, **options)
    assert torch.equal(grouped_triton.dequantized(matrix, torch.float32), matrix.dequantized(torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((options, torch.bfloat16) for options in MATRICES), ({}, torch.float16), ({}, torch.float32)],
)
def test_products_of_real_sizes(options: dict[str, int], dtype: torch.dtype) -> None:
    """A kernel is compiled for up to 16, 32, 64 and more tokens."""
    group = options.get("group", 32)
    n, k = 1024, 14336
    matrix = drawn(n, k, **{**options, "group": group if k % group == 0 else 128})
    plain, bias = matrix.dequantized(torch.float32), draw(n)
    few = (1, 2, 16, 17)
    for num_tokens in few if dtype == torch.float32 else (*few, 7, 40, 64, 65, 128, 129, 300, 1030):
        x = draw(num_tokens, k, dtype=dtype)
        expected = functional.linear(x.double(), plain.double(), bias.double()).float()
        check(linear(x, matrix, bias.to(dtype)), expected)
        if num_tokens == 1:
            check(single_triton.project(x, None, 0.0, matrix, bias.to(dtype)), expected)
