"""Whole pages of all layers, gathered and scattered: torch's, and Triton's kernel, interpreted without a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels import pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize(("fragments", "num_bytes"), [(4, 4096), (3, 20_488), (2, 1028), (5, 70), (1, 33)])
def test_the_kernel_copies_what_torch_does(fragments: int, num_bytes: int) -> None:
    from sgl.kernels import pages_triton

    generator = torch.Generator().manual_seed(num_bytes)
    cache = torch.randint(0, 256, (fragments, 9, num_bytes), generator=generator, dtype=torch.uint8)
    chosen = torch.tensor([7, 0, 3, 8])
    expected = torch.empty(4, fragments, num_bytes, dtype=torch.uint8)
    pages.gather(cache, chosen, expected)
    assert torch.equal(expected[2], cache[:, 3])

    cache, chosen = cache.to(DEVICE), chosen.to(DEVICE)
    buffer = torch.zeros_like(expected, device=DEVICE)
    pages_triton.copy(cache, chosen, buffer, is_gather=True)
    assert torch.equal(buffer.cpu(), expected)

    others = torch.tensor([1, 2, 4, 5], device=DEVICE)
    wanted = cache.clone()
    wanted[:, others] = buffer.transpose(0, 1)
    pages_triton.copy(cache, others, buffer, is_gather=False)
    assert torch.equal(cache, wanted)
    pages_triton.copy(cache, others[:0], buffer[:0], is_gather=False)
    assert torch.equal(cache, wanted)

    long, rows = torch.zeros(9, fragments, num_bytes, dtype=torch.uint8, device=DEVICE), chosen.flip(0)
    pages_triton.copy(cache, chosen, long, rows, is_gather=True)
    in_rows = torch.zeros(long.shape, dtype=torch.uint8)
    pages.gather(cache.cpu(), chosen.cpu(), in_rows, rows.cpu())
    assert torch.equal(long.cpu(), in_rows)
    assert torch.equal(long[rows].cpu(), expected)
    wanted[:, others], found = cache[:, chosen], cache.cpu()
    pages_triton.copy(cache, others, long, rows, is_gather=False)
    assert torch.equal(cache, wanted)
    pages.scatter(found, others.cpu(), in_rows, rows.cpu())
    assert torch.equal(cache.cpu(), found)
