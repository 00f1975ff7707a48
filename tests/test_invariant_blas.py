"""Calls of a library whose sums may have another order for other numbers of rows: only those that agree are used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl.kernels.layers import invariant_blas
from sgl.kernels.layers.invariant_blas import ROWS, agreeing, call_sizes, cover, multiply

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
SIZE, WIDTH = 24, 64


def library(parts_of: Callable[[int, torch.Tensor], torch.Tensor]) -> Call:
    """A library that cuts the sum of a row into two parts where parts_of(rows of the call, their places) says so."""

    def call(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        whole, *parts = torch.zeros(3, len(x), len(matrix)).unbind()
        for k in range(WIDTH):
            term = x[:, k, None].float() * matrix[None, :, k].float()
            whole += term
            parts[2 * k // WIDTH] += term
        total = torch.where(parts_of(len(x), torch.arange(len(x)))[:, None], parts[0] + parts[1], whole)
        return out.copy_(total if bias is None else total + bias.float())

    return call


def never(rows: int, places: torch.Tensor) -> torch.Tensor:
    return places < 0


def in_small_calls(rows: int, places: torch.Tensor) -> torch.Tensor:
    return (places >= 0) & (rows < 128)


def in_large_calls(rows: int, places: torch.Tensor) -> torch.Tensor:
    return (places >= 0) & (rows > 256)


def at_an_end(rows: int, places: torch.Tensor) -> torch.Tensor:
    return places == rows - 1


@pytest.mark.parametrize(
    ("parts_of", "expected"),
    [(never, ROWS), (in_small_calls, (128, 256, 512, 1024)), (in_large_calls, (64, 128, 256)), (at_an_end, ())],
)
def test_calls_that_agree_are_found_and_give_each_row_its_bits(
    parts_of: Callable[[int, torch.Tensor], torch.Tensor],
    expected: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invariant_blas, "_call", library(parts_of))
    sizes = agreeing(*invariant_blas._cancelling(1024, SIZE, WIDTH, torch.bfloat16, torch.device("cpu")))
    assert sizes == expected
    random = torch.Generator().manual_seed(1)
    x = torch.randn(1500, WIDTH, generator=random).bfloat16()
    matrix = torch.randn(SIZE, WIDTH, generator=random).bfloat16()
    bias = torch.randn(SIZE, generator=random).bfloat16()
    if not sizes:
        return
    for b in (None, bias):
        whole = multiply(x, matrix, b, None, sizes)
        torch.testing.assert_close(whole, torch.nn.functional.linear(x, matrix, b), rtol=2e-2, atol=1e-3)
        for start, stop in ((0, 1), (7, 71), (3, 320), (700, 1500)):
            assert torch.equal(multiply(x[start:stop], matrix, b, None, sizes), whole[start:stop])
            out = torch.full((stop - start, SIZE), 9.0, dtype=torch.bfloat16)
            assert multiply(x[start:stop], matrix, b, out, sizes) is out
            assert torch.equal(out, whole[start:stop])


@given(num_rows=st.integers(0, 20_000), sizes=st.sets(st.sampled_from(ROWS), min_size=1))
def test_calls_cover_the_rows_once(num_rows: int, sizes: set[int]) -> None:
    calls = cover(num_rows, tuple(sorted(sizes)))
    assert set(calls) <= sizes
    assert sum(calls) >= num_rows
    assert not calls or sum(calls[:-1]) < num_rows, "only the last is filled up"


def test_what_is_not_aligned_alike_or_not_in_16_bits_is_left_to_others() -> None:
    device = torch.device("cpu")
    assert call_sizes(36, 64, torch.bfloat16, device) == ()
    assert call_sizes(64, 36, torch.bfloat16, device) == ()
    assert call_sizes(64, 64, torch.float32, device) == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("size", "width"), [(6144, 4096), (4096, 14336), (1024, 512), (896, 4864), (32_000, 2048)])
@pytest.mark.parametrize("is_logits", [False, True])
def test_a_row_has_its_bits_in_any_calls_on_a_gpu(size: int, width: int, is_logits: bool) -> None:
    device = torch.device("cuda")
    sizes = call_sizes(size, width, torch.bfloat16, device, for_logits=is_logits)
    print(size, width, sizes)
    assert sizes, "cuBLAS agrees with itself on every GPU that was tried"
    random = torch.Generator(device).manual_seed(2)
    x = torch.randn(3000, width, generator=random, device=device).bfloat16()
    matrix = torch.randn(size, width, generator=random, device=device).bfloat16()
    bias = torch.randn(size, generator=random, device=device).bfloat16()
    dtype = torch.float32 if is_logits else torch.bfloat16
    for b in (None,) if is_logits else (None, bias):
        whole = multiply(x, matrix, b, torch.empty(len(x), size, dtype=dtype, device=device), sizes)
        exact = torch.nn.functional.linear(x[:100].float(), matrix.float(), None if b is None else b.float())
        torch.testing.assert_close(whole[:100].float(), exact, rtol=2e-2, atol=0.5)
        for start, stop in ((0, 1), (7, 71), (3, 320), (700, 1500), (2000, 3000)):
            out = torch.empty(stop - start, size, dtype=dtype, device=device)
            assert torch.equal(multiply(x[start:stop], matrix, b, out, sizes), whole[start:stop])
