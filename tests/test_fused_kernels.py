"""The fused Triton kernels (interpreted where there is no GPU) against the plain torch that they replace."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.layers import activation, embedding, linear, norm, qkv, rope

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
from sgl.kernels import launch_triton, limits, staging, staging_triton
from sgl.kernels.launch_triton import Launcher
from sgl.kernels.layers import few_triton, fused_triton, parts_triton, single_triton
from sgl.kernels.mask.layout import Places
from sgl.kernels.staging import Uploader, views_into
from sgl.runtime.model import lora

pytestmark = pytest.mark.usefixtures("plain_torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
NARROW = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]  # no bfloat16: it multiplies none
# Of numbers rounded to e4m3, relative and absolute; the interpreter loses the carry where a mantissa rounds up to 2
E4M3_ERROR, E4M3_FLOOR = (2.0**-4, 2.0**-9) if DEVICE == "cuda" else (0.5, 2.0**-6)


@pytest.fixture
def much_shared_memory() -> None:
    """An H100's, for which products of few tokens are tiled."""
    has = limits.of(torch.device(DEVICE)).shared_memory
    if has is not None and has < 227 << 10:
        pytest.skip("with so little shared memory other kernels multiply")


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
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 48), (5, 300)])
def test_norms_of_what_is_added(rows: int, width: int, has_weight: bool, dtype: torch.dtype) -> None:
    """By weights in float32, as Gemma's, or of the same dtype; and of parts of each row."""
    x, residual = (draw(rows, width, dtype=dtype, seed=i) for i in range(2))
    for of_weights in {torch.float32, dtype}:
        before, weight = (draw(width, dtype=of_weights, seed=i) for i in range(2, 4))
        on_device, expected = residual.to(DEVICE, copy=True), residual.clone()
        last = weight if has_weight else None
        last_ = None if last is None else last.to(DEVICE)
        out = fused_triton.add_rms_norm(x.to(DEVICE), on_device, last_, 1e-5, before.to(DEVICE))
        check(out, norm.add_rms_norm(x, expected, last, 1e-5, before))
        check(on_device, expected)
    sizes = (width - width // 3, width // 3)
    if sizes[1]:
        parts, factors = draw(rows, width + 7, dtype=dtype), draw(width, dtype=dtype)
        on_device = parts.to(DEVICE, copy=True)
        fused_triton.norm_parts_(on_device, factors.to(DEVICE), sizes, 1e-5)
        norm.norm_parts_(parts, factors, sizes, 1e-5)
        check(on_device, parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 40), (2, 1030)])
def test_gates(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = draw(rows, 2 * width, dtype=dtype) * 4
    check(fused_triton.silu_and_mul(gate_up.to(DEVICE)), activation.silu_and_mul(gate_up))
    added = draw(rows, 2 * width, dtype=dtype)
    found = fused_triton.silu_and_mul(gate_up.to(DEVICE), added.to(DEVICE))
    check(found, activation.silu_and_mul(gate_up, added))
    check(fused_triton.silu_and_mul(gate_up.to(DEVICE), is_gelu=True), activation.gelu_and_mul(gate_up))


@pytest.mark.parametrize("shape", [(1, 1), (3, 700)])
def test_soft_caps(shape: tuple[int, int]) -> None:
    x = draw(*shape) * 40
    found = fused_triton.cap_(x.to(DEVICE, copy=True), 30.0)
    torch.testing.assert_close(found.cpu(), activation.cap_(x.clone(), 30.0), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1, 1500])
@pytest.mark.parametrize(("given", "wanted"), [(torch.int64, torch.int64), (torch.int64, torch.int32)])
def test_pinned_memory_is_copied_from_and_to(size: int, given: torch.dtype, wanted: torch.dtype) -> None:
    source = torch.arange(-3, size - 3, dtype=given, pin_memory=DEVICE == "cuda")
    between = torch.zeros(size + 1, dtype=given, device=DEVICE)
    target = torch.zeros(size, dtype=wanted, pin_memory=DEVICE == "cuda")
    staging_triton.copy_(between[:size], source)
    staging_triton.copy_(target, between[:size])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert target.tolist() == source.tolist()
    assert between[-1] == 0


def test_uploads_have_the_arrays_values_types_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By buffers that are used again, larger ones where they do not suffice."""
    uploader = Uploader(torch.device(DEVICE), num_buffers=2)
    if DEVICE == "cpu":  # as on a GPU, but for the memory
        monkeypatch.setattr(uploader, "_is_host", False)
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        monkeypatch.setattr(staging, "pinned_buffer", lambda size: (torch.empty(size, dtype=torch.uint8), event))
    random = np.random.default_rng(0)
    target = torch.zeros(1 << 18, dtype=torch.uint8, device=DEVICE)
    for size in (3, 1, 0, 70, 3000):
        arrays = (
            random.integers(-(2**40), 2**40, size),
            random.integers(0, 9, (2, size), np.int32),
            random.normal(0, 1, (size, 3)).astype(np.float32),
            random.integers(-(2**40), 2**40, (3, size)).T,
            random.integers(0, 255, size, np.uint8),
        )
        uploader.upload_into(target, *arrays)
        for found in (uploader.upload(*arrays), views_into(target, arrays)):
            for its, array in zip(found, arrays, strict=True):
                assert its.cpu().numpy().dtype == array.dtype
                assert its.shape == array.shape
                assert np.array_equal(its.cpu().numpy(), array)
    assert not target[-100:].any()


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


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("parts", "num_heads", "num_kv_heads", "head_dim"), [(2, 4, 2, 8), (4, 9, 1, 64), (1, 2, 2, 16)]
)
def test_parts_of_heads_are_summed_and_rounded_before_they_are_rotated(
    parts: int, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool
) -> None:
    """Values are stored as rounded; by the twins and the plain torch."""
    dtype = torch.float16
    heads = draw(parts, 3, num_heads + 2 * num_kv_heads, head_dim)
    whole = heads.sum(0).to(dtype)
    weight = draw(num_heads + num_kv_heads, head_dim, dtype=dtype) if has_norm else None
    rotary = rope.rotary_rows(draw(50, head_dim), torch.tensor([4, 0, 49]), dtype)
    slots = torch.tensor([7, 0, 18])
    caches = [torch.full((5, 4, num_kv_heads, head_dim), 0.5, dtype=dtype) for _ in range(2)]
    expected = qkv.rotate_and_store(whole, num_heads, rotary, weight, 1e-5, *caches, slots)
    for rotate, device in ((qkv.rotate_and_store, "cpu"), (fused_triton.rotate_and_store, DEVICE)):
        cos, sin = (its.to(device) for its in rotary)
        ours = [torch.full_like(cache, 0.5, device=device) for cache in caches]
        weight_ = None if weight is None else weight.to(device)
        actual = rotate(heads.to(device), num_heads, (cos, sin), weight_, 1e-5, *ours, slots.to(device))
        check(actual, expected)
        for our, cache in zip(ours, caches, strict=True):
            check(our, cache)


def test_keys_and_values_are_stored_in_eight_bits() -> None:
    heads = draw(3, 8, 16) * 300
    rotary = rope.rotary_rows(draw(50, 16).clamp_(-1, 1), torch.tensor([4, 0, 49]), torch.float32)
    slots, caches = torch.tensor([7, 0, 18]), [torch.zeros(5, 4, 2, 16) for _ in range(2)]
    ours = [cache.to(DEVICE, torch.float8_e4m3fn) for cache in caches]
    qkv.rotate_and_store(heads, 4, rotary, None, 1e-5, *caches, slots)
    cos, sin = (part.to(DEVICE) for part in rotary)
    fused_triton.rotate_and_store(heads.to(DEVICE), 4, (cos, sin), None, 1e-5, *ours, slots.to(DEVICE))
    for our, cache in zip(ours, caches, strict=True):
        expected = cache.clamp(-448, 448)
        assert ((our.cpu().float() - expected).abs() <= expected.abs() * E4M3_ERROR + E4M3_FLOOR).all()
        assert (expected.abs() == 448).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 40), (2, 1030)])
def test_rows_in_eight_bits(rows: int, width: int, dtype: torch.dtype) -> None:
    """Within half of e4m3's last bit, or of its least number where a row has far larger ones."""
    x = draw(rows, width, dtype=dtype) * torch.logspace(-3, 3, rows)[:, None].to(dtype)
    x[:, 0] = 0
    for values, scales in (linear.quantize_rows(x), fused_triton.quantize_rows(x.to(DEVICE))):
        assert values.dtype == torch.float8_e4m3fn
        error = (values.cpu().float() * scales.cpu() - x.float()).abs()
        assert (error <= x.float().abs() * E4M3_ERROR * 1.01 + scales.cpu() * E4M3_FLOOR).all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_with_a_matrix_in_eight_bits(has_bias: bool) -> None:
    """Against the same numbers in float32: rounding them is measured by benchmarks/gpu/accuracy.py."""
    x, matrix = draw(5, 64), draw(48, 64)
    bias = draw(48) if has_bias else None
    rounded = linear.Fp8Matrix.of(matrix)
    values, scales = linear.quantize_rows(x)
    expected = (values.double() * scales) @ (rounded.values.double() * rounded.scales).T
    expected = expected if bias is None else expected + bias
    check_sum(linear.linear(x, rounded, bias), expected.float())
    on_device = linear.Fp8Matrix(rounded.values.to(DEVICE), rounded.scales.to(DEVICE))
    norm_weight, bias_ = torch.ones(64).to(DEVICE), None if bias is None else bias.to(DEVICE)
    row = single_triton.project(x[:1].to(DEVICE), norm_weight, 1e-5, on_device, bias_)
    wide = rounded.values.float() * rounded.scales
    check_sum(row, product(x[:1], torch.ones(64), wide, bias))
    gated = single_triton.project_gated(x[:1].to(DEVICE), norm_weight, 1e-5, on_device, bias_)
    check_sum(gated, activation.silu_and_mul(product(x[:1], torch.ones(64), wide, bias)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_of_tokens_that_are_here(dtype: torch.dtype) -> None:
    table, token_ids = draw(7, 1030, dtype=dtype), torch.tensor([31, 32, 33, 38, 39, 1000, 0])
    expected = torch.zeros(len(token_ids), 1030, dtype=dtype)
    expected[1:4] = table[[0, 1, 6]]
    assert torch.equal(embedding.embedding_part(token_ids, table, 32), expected)
    found = fused_triton.embedding_part(token_ids.to(DEVICE), table.to(DEVICE), 32)
    assert torch.equal(found.cpu(), expected)


def product(x: torch.Tensor, weight: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Of a matrix and the normed x."""
    return linear.linear(norm.rms_norm(x, weight, 1e-5), matrix, bias)


@pytest.mark.costly
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
    check_sum(single_triton.project(x_, weight_, 1e-5, matrix_, bias_), product(x, weight, matrix, bias))
    expected = activation.silu_and_mul(product(x, weight, matrix, bias))
    check_sum(single_triton.project_gated(x_, weight_, 1e-5, matrix_, bias_), expected)
    expected = activation.gelu_and_mul(product(x, weight, matrix, bias))
    check_sum(single_triton.project_gated(x_, weight_, 1e-5, matrix_, bias_, is_gelu=True), expected)
    check_sum(single_triton.project(x_, None, 1e-5, matrix_, bias_), linear.linear(x, matrix, bias))
    expected = activation.silu_and_mul(linear.linear(x, matrix, bias))
    check_sum(single_triton.project_gated(x_, None, 1e-5, matrix_, bias_), expected)
    single_triton.project_add_(x_, matrix_[:size], half_, residual_)
    residual.add_(linear.linear(x, matrix[:size], half))
    check_sum(residual_, residual)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "size", "width", "processors", "parts"),
    [(5, 48, 512, 132, 4), (70, 40, 384, 132, 3), (3, 130, 300, 132, 3), (9, 64, 96, 132, 1), (130, 64, 512, 6, 2)],
)
def test_parts_of_a_product_are_added_by_the_norm(
    tokens: int, size: int, width: int, processors: int, parts: int, has_bias: bool
) -> None:
    """In float16: Triton's interpreter multiplies no bfloat16."""
    x, residual = (draw(tokens, n, dtype=torch.float16) for n in (width, size))
    matrix = (draw(size, width) / width**0.5).half()
    bias, weight = draw(size, dtype=torch.float16, seed=5) if has_bias else None, draw(size, dtype=torch.float16)
    on_device = None if bias is None else bias.to(DEVICE)
    found = parts_triton.linear_parts(x.to(DEVICE), matrix.to(DEVICE), on_device, processors)
    assert found is not None
    assert found.shape == (parts, tokens, size)
    expected = linear.linear(x.float(), matrix.float(), None if bias is None else bias.float())
    check_sum(found.sum(0), expected)
    residual_ = residual.to(DEVICE, copy=True)
    normed = fused_triton.add_rms_norm(found, residual_, weight.to(DEVICE), 1e-5)
    check_sum(normed, norm.add_rms_norm(found.cpu(), residual, weight, 1e-5))
    check_sum(residual_, residual)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [96, 512])
def test_a_product_is_added_to_the_residual_one_way_or_another(width: int, captured: bool, has_bias: bool) -> None:
    x, residual, weight = (draw(*shape, dtype=torch.bfloat16) for shape in ((9, width), (9, 64), (64,)))
    matrix, bias = draw(64, width) / width**0.5, draw(64, seed=5) if has_bias else None
    summed = linear.linear(x.float(), matrix.bfloat16().float(), bias) + residual.float()
    residual_ = residual.to(DEVICE, copy=True)
    bias_ = None if bias is None else bias.bfloat16().to(DEVICE)
    left = linear.linear_add(x.to(DEVICE), matrix.bfloat16().to(DEVICE), bias_, residual_, captured=captured)
    normed = norm.add_rms_norm(left, residual_, weight.to(DEVICE), 1e-5)
    check_sum(residual_, summed.bfloat16())
    check_sum(normed, norm.rms_norm(summed, weight.float(), 1e-5).bfloat16())


def test_a_product_is_not_cut_where_its_tiles_fill_the_gpu() -> None:
    x, matrix = (draw(n, 256, dtype=torch.float16).to(DEVICE) for n in (130, 300))
    assert parts_triton.linear_parts(x, matrix, None, 29) is None


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "size", "width", "processors"), [(5, 48, 512, 3), (70, 130, 200, 6), (130, 40, 96, 2)]
)
def test_whole_sums_are_those_of_a_product(
    tokens: int, size: int, width: int, processors: int, has_bias: bool
) -> None:
    x, matrix = draw(tokens, width, dtype=torch.float16), (draw(size, width) / width**0.5).half()
    bias = draw(size, dtype=torch.float16, seed=5) if has_bias else None
    on_device = None if bias is None else bias.to(DEVICE)
    found = parts_triton.linear_whole(x.to(DEVICE), matrix.to(DEVICE), on_device, processors)
    assert found is not None
    expected = linear.linear(x.float(), matrix.float(), None if bias is None else bias.float())
    check_sum(found, expected.half())


@pytest.mark.parametrize(
    ("tokens", "width", "processors"), [(257, 64, 20), (60, 64, 9), (60, 64, 20), (60, 1025, 10)]
)
def test_whole_sums_are_left_to_others_where_they_are_long_or_tiles_too_many_or_too_few(
    tokens: int, width: int, processors: int
) -> None:
    x, matrix = (draw(n, width, dtype=torch.float16).to(DEVICE) for n in (tokens, 320))
    assert parts_triton.linear_whole(x, matrix, None, processors) is None


@pytest.mark.usefixtures("much_shared_memory")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "size", "width", "processors", "parts"),
    [
        (2, 64, 512, 4, 4),
        (5, 192, 1024, 13, 4),
        (8, 128, 768, 5, 2),
        (16, 192, 512, 5, 2),
        (9, 192, 1536, 3, 2),
        (17, 64, 512, 4, 4),
        (32, 192, 512, 3, 2),
        (33, 128, 512, 5, 2),
        (64, 192, 1024, 13, 4),
        (65, 128, 512, 9, 4),
        (128, 192, 512, 6, 2),
    ],
)
def test_few_tokens_have_parts_of_products_for_the_norm(
    tokens: int, size: int, width: int, processors: int, parts: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, matrix = draw(tokens, width, dtype=dtype), (draw(size, width) / width**0.5).to(dtype)
    bias = draw(size, dtype=dtype, seed=5) if has_bias else None
    bias_ = None if bias is None else bias.to(DEVICE)
    found = few_triton.linear_parts(x.to(DEVICE), matrix.to(DEVICE), bias_, processors)
    assert found is not None
    assert found.shape == (parts, tokens, size)
    expected = linear.linear(x.double(), matrix.double(), None if bias is None else bias.double())
    check_sum(found.sum(0), expected.float())
    chunks = zip(x.double().chunk(parts, 1), matrix.double().chunk(parts, 1), strict=True)
    for part, (columns, of_matrix) in enumerate(chunks):  # of as many columns each, the bias in the first
        check_sum(
            found[part], linear.linear(columns, of_matrix, None if bias is None or part else bias.double()).float()
        )


@pytest.mark.parametrize(
    ("tokens", "size", "width", "processors"),
    [
        (1, 64, 512, 132),
        (129, 64, 512, 132),
        (65, 192, 512, 5),
        (17, 192, 512, 5),
        (8, 64, 512, 6),
        (8, 96, 512, 132),
        (8, 64, 384, 132),
        (8, 64, 500, 132),
        (8, 192, 512, 2),
        (8, 64, 512, 8),
    ],
)
def test_few_tokens_leave_products_to_others_that_do_not_divide_or_fill_the_gpu(
    tokens: int, size: int, width: int, processors: int
) -> None:
    x, matrix = (draw(n, width, dtype=torch.float16).to(DEVICE) for n in (tokens, size))
    assert few_triton.linear_parts(x, matrix, None, processors) is None


@pytest.mark.usefixtures("much_shared_memory")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize(
    ("tokens", "size", "width", "processors"),
    [
        (2, 128, 256, 2),
        (5, 64, 128, 1),
        (8, 320, 128, 3),
        (16, 192, 384, 3),
        (17, 128, 128, 2),
        (32, 128, 256, 2),
        (33, 64, 128, 1),
        (64, 256, 128, 5),
        (65, 128, 64, 1),
        (128, 256, 192, 2),
    ],
)
def test_few_tokens_are_gated_by_their_product(
    tokens: int, size: int, width: int, processors: int, is_gelu: bool, dtype: torch.dtype
) -> None:
    """Rounded once: nearer to float64 than what is rounded between."""
    x, matrix = draw(tokens, width, dtype=dtype), (draw(2 * size, width) / width**0.5).to(dtype)
    found = few_triton.gated(x.to(DEVICE), matrix.to(DEVICE), processors, is_gelu=is_gelu)
    assert found is not None
    gate = activation.gelu_and_mul if is_gelu else activation.silu_and_mul
    torch.testing.assert_close(found.cpu(), gate(linear.linear(x.double(), matrix.double(), None)).to(dtype))


@pytest.mark.parametrize(
    ("tokens", "size", "width", "processors"),
    [
        (1, 128, 128, 2),
        (129, 128, 128, 1),
        (65, 192, 128, 1),
        (8, 96, 128, 1),
        (8, 128, 192, 2),
        (8, 192, 128, 4),
        (8, 192, 128, 2),
    ],
)
def test_few_tokens_leave_gates_to_others_that_do_not_divide_or_fill_the_gpu(
    tokens: int, size: int, width: int, processors: int
) -> None:
    x, matrix = (draw(n, width, dtype=torch.float16).to(DEVICE) for n in (tokens, 2 * size))
    assert few_triton.gated(x, matrix, processors, is_gelu=False) is None


@pytest.mark.parametrize(
    ("shared_memory", "tokens", "has_parts", "is_gated"),
    [
        (232_448, 128, True, True),
        (166_912, 128, True, True),
        (166_912, 40, False, True),
        (101_376, 16, True, False),
        (65_536, 16, True, False),
        (65_536, 17, False, False),
    ],
)
def test_few_tokens_leave_products_to_others_where_shared_memory_holds_few_stages(
    shared_memory: int, tokens: int, has_parts: bool, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two programs of a multiprocessor, too, which 40 tokens have here."""
    its = limits.Limits(shared_memory=shared_memory, warp=32, is_nvidia=False, overlaps=False)
    monkeypatch.setattr(limits, "of", lambda device: its)
    x, matrix = (draw(n, 512, dtype=torch.float16).to(DEVICE) for n in (tokens, 256))
    processors = 5 if tokens == 40 else 8
    assert (few_triton.linear_parts(x, matrix, None, processors) is not None) is has_parts
    assert (few_triton.gated(x, matrix, 1 if tokens == 128 else 2, is_gelu=False) is not None) is is_gated


@pytest.mark.usefixtures("much_shared_memory")
@pytest.mark.parametrize(
    ("tokens", "width", "parts"), [(3, 1536, 2), (40, 1536, 2), (129, 1536, None), (3, 1024, None)]
)
def test_captured_steps_have_whole_products_or_parts_where_these_are_read(
    tokens: int, width: int, parts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole ones by a kernel for short sums, or by torch."""
    monkeypatch.setattr(linear, "launches_overlap", lambda device: True)
    monkeypatch.setattr(linear, "_num_processors", lambda device: 12)
    x, matrix = (draw(n, width, dtype=torch.float16).to(DEVICE) for n in (tokens, 320))
    whole = linear.linear_overlapped(x, matrix, None)
    assert (whole is None) is (width > 1024)
    found = linear.linear_overlapped(x, matrix, None, has_parts=True)
    shape = (tokens, 320) if parts is None else (parts, tokens, 320)
    assert (None if found is None else found.shape) == (None if parts is None and whole is None else shape)


@pytest.mark.usefixtures("much_shared_memory")
@pytest.mark.parametrize(
    ("captured", "dtype", "has_bias", "is_fused"),
    [
        (True, torch.float16, False, True),
        (True, torch.float16, True, False),
        (True, torch.float32, False, False),
        (False, torch.float16, False, False),
    ],
)
def test_captured_steps_gate_by_their_product(
    captured: bool, dtype: torch.dtype, has_bias: bool, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 bits without a bias."""
    fused: list[torch.Tensor | None] = []
    gated = few_triton.gated
    monkeypatch.setattr(linear, "launches_overlap", lambda device: True)
    monkeypatch.setattr(linear, "_num_processors", lambda device: 2)
    monkeypatch.setattr(
        few_triton, "gated", lambda *its, **options: fused.append(gated(*its, **options)) or fused[-1]
    )
    x, matrix = draw(3, 128, dtype=dtype).to(DEVICE), (draw(256, 128) / 11).to(DEVICE, dtype)
    bias = draw(256, dtype=dtype).to(DEVICE) if has_bias else None
    for gate in (activation.silu_and_mul, activation.gelu_and_mul):
        found = lora.gated(x, matrix, bias, gate, 0, None, captured=captured)
        assert [found is its for its in fused] == [True] * is_fused
        check_sum(found, gate(linear.linear(x, matrix, bias)))
        fused.clear()


def check_sum(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of many products, in another order."""
    assert actual.dtype == expected.dtype
    error = (actual.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-5 if expected.dtype == torch.float32 else 2e-2)


def test_kernels_are_compiled_again_for_what_their_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types, alignment, values of numbers, options, also within tuples; and on AMD memory that is far apart."""
    compiled: list[Any] = []
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **options: Any) -> Any:
                compiled.append((arguments, options))
                return {grid: lambda *its: launched.append(its)}

            return launch

    launch, grid = Launcher(Kernel()), (1, 1, 1)
    numbers = torch.zeros(64, dtype=torch.int32)
    one = Places(*[numbers[i : i + 8] for i in (0, 4, 8, 12, 16, 20)])
    for arguments in (
        (numbers, 3, None, one),
        (numbers[1:], 3, None, one),
        (numbers.long(), 3, None, one),
        (numbers, 4, None, one),
        (numbers, 3, numbers, one),
        (numbers, 3, None, one._replace(depths=numbers[1:])),
    ):
        before = len(compiled), len(launched)
        for value in (5, 6):
            launch(grid, *arguments, value, any_values=(4,), num_warps=2)
        assert (len(compiled), len(launched)) == (before[0] + 1, before[1] + 1)
        assert launched[-1] == (*arguments, 6)
    count = len(compiled)
    launch(grid, numbers[4:], 3, None, one, 7, any_values=(4,), num_warps=2)
    assert len(compiled) == count
    launch(grid, numbers, 3, None, one, 7, any_values=(4,), num_warps=4)
    assert len(compiled) == count + 1
    monkeypatch.setattr(launch_triton, "_IS_AMD", True)
    for size in (256, 257):  # bytes from which on memory is far
        monkeypatch.setattr(launch_triton, "_NEAR", size)
        launch(grid, numbers, 3, None, one, 7, any_values=(4,), num_warps=4)
    assert len(compiled) == count + 2
