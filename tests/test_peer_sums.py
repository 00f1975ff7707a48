"""Sums that read the other ranks' memory: the kernel against float64, interpreted without a GPU. Ranks take their turns
in one process here, so each finds that the others have come."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.layers.norm import add_rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BLOCKS, MOST, WIDTH = 3, 9, 48


class Ranks:
    """The memory of all."""

    def __init__(self, size: int, num_tokens: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(size)
        self.size, self.each = size, -(-num_tokens // size)
        self.parts = torch.zeros(size, 2, MOST, WIDTH, dtype=dtype)
        self.parts[:, 1, :num_tokens] = torch.randn(size, num_tokens, WIDTH, generator=random).to(dtype)
        self.parts = self.parts.to(DEVICE)
        self.slices = torch.zeros(size, 2, self.each, WIDTH, dtype=dtype, device=DEVICE)
        self.flags = torch.zeros(size, size, BLOCKS, dtype=torch.int32, device=DEVICE)
        residual, weight = torch.randn(num_tokens, WIDTH, generator=random), torch.randn(WIDTH, generator=random)
        self.residual, self.weight = residual.to(dtype).to(DEVICE), weight.to(dtype).to(DEVICE)

    def run(
        self, rank: int, out: torch.Tensor, rows: tuple[int, int, int], meeting: int, **more: torch.Tensor
    ) -> None:
        from sgl.kernels.peer_sums_triton import sum_rows

        is_of_owners = meeting == 2
        sources = self.slices if is_of_owners else self.parts
        addresses = torch.tensor([each.data_ptr() for each in sources], device=DEVICE)
        flags = torch.tensor([each.data_ptr() for each in self.flags], device=DEVICE)
        others = [each for each in range(self.size) if each != rank]
        self.flags[rank, others] = meeting  # the others are there
        sum_rows(
            addresses, flags, sources[0, 0].numel(), meeting, more.get("residual"), more.get("weight"), out, rows, 1e-5,
            rank=rank, is_of_owners=is_of_owners, num_blocks=BLOCKS,
        )  # fmt: skip
        assert (self.flags[others, rank] == meeting).all()  # and they know that this one was


@pytest.mark.costly
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 7, MOST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rank_has_the_sum_of_all_parts(size: int, num_tokens: int, dtype: torch.dtype) -> None:
    ranks = Ranks(size, num_tokens, dtype)
    total = ranks.parts[:, 1, :num_tokens].double().sum(0)
    added = total + ranks.residual.double()
    normed = add_rms_norm(total.cpu(), ranks.residual.double().cpu(), ranks.weight.double().cpu(), 1e-5)
    bar = 1e-6 if dtype == torch.float32 else 8e-3
    if size > 2:
        for rank in range(size):
            first = min(rank * ranks.each, num_tokens)
            rows = first, min(first + ranks.each, num_tokens), ranks.each
            ranks.run(rank, ranks.slices[rank, 1], rows, 1)
    answers = []
    for rank in range(size):
        rows, meeting = (0, num_tokens, ranks.each if size > 2 else num_tokens), 2 if size > 2 else 1
        out, residual = torch.empty_like(ranks.residual), ranks.residual.clone()
        ranks.run(rank, out, rows, meeting)
        assert (out.double() - total).norm() <= bar * total.norm()
        ranks.run(rank, out, rows, meeting, residual=residual, weight=ranks.weight)
        assert (residual.double() - added).norm() <= bar * added.norm()
        assert (out.double().cpu() - normed).norm() <= bar * normed.norm()
        answers.append((out, residual))
    for each in answers[1:]:  # to the bit
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(each, answers[0], strict=True))
