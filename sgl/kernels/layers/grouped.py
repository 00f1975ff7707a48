"""Matrices in four or eight bits with a scale for each row and group of columns: the plain torch reference, and how
they are packed for kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

UNIT = 32
"""Columns that groups are multiples of."""
_LANES = 4  # words of a unit in four bits


class Product(Protocol):
    """A matrix [n, k] as a library holds it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, k] times it: [T, n]."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """That hold it."""


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [n, k] of (code - zero) * scale.

    In four bits, word w of a unit of 32 columns has in its bits from 4 * j on the code of the unit's column 4 * j + w:
    a thread that holds a unit's four words multiplies with four neighbouring inputs at a time.
    """

    values: torch.Tensor  # int32 [n, k / 8], or uint8 or float8_e4m3fn [n, k]
    scales: torch.Tensor  # a float [n, k / group]
    zeros: torch.Tensor | None  # uint8 [n, k / group]; None: the middle of the codes, or 0 for floats
    order: torch.Tensor | None = None  # int32 [k]: which columns of an input the matrix's are
    of_several: Product | None = None  # a library's product with more than one token

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k]."""
        n, width = self.values.shape
        return n, width * 8 if self.bits == 4 else width

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.values.dtype == torch.int32 else 8

    @property
    def middle(self) -> int:
        """The zero of codes without zeros."""
        return {torch.int32: 8, torch.uint8: 128}.get(self.values.dtype, 0)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @staticmethod
    def of(
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        *,
        bits: int,
        order: torch.Tensor | None = None,
    ) -> GroupedMatrix:
        """Pack codes, uint8 or float8_e4m3fn [n, k]; the other arguments are the fields."""
        if bits == 8:
            return GroupedMatrix(codes.contiguous(), scales.contiguous(), zeros, order)
        n, k = codes.shape
        places = codes.view(n, k // UNIT, 8, _LANES).transpose(2, 3)
        pairs = places[..., ::2] | places[..., 1::2] << 4
        words = pairs.flatten().view(torch.int32).view(n, k // 8)
        return GroupedMatrix(words, scales.contiguous(), zeros, order)

    @staticmethod
    def rounded(matrix: torch.Tensor) -> GroupedMatrix:
        """The nearest four-bit numbers of a matrix [n, k]: 15 a group, up to its largest one, without zeros. Groups
        have 128 columns, or 64 or 32 where those do not divide k, a multiple of 32."""
        n, k = matrix.shape
        group = next(size for size in (128, 64, UNIT) if k % size == 0)
        groups = matrix.float().view(n, k // group, group)
        scales = (groups.abs().amax(-1) / 7).clamp_(min=torch.finfo(matrix.dtype).tiny).to(matrix.dtype)
        codes = (groups / scales.float()[..., None]).round_().clamp_(-7, 7).add_(8).to(torch.uint8)
        return GroupedMatrix.of(codes.view(n, k), scales, None, bits=4)

    def codes(self) -> torch.Tensor:
        """uint8 or float8_e4m3fn [n, k], as `of` takes them."""
        if self.bits == 8:
            return self.values
        n, k = self.shape
        pairs = self.values.view(torch.uint8).view(n, k // UNIT, _LANES, 4)
        places = torch.stack((pairs & 15, pairs >> 4), -1).view(n, k // UNIT, _LANES, 8)
        return places.transpose(2, 3).reshape(n, k)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[n, k], in the order of inputs."""
        n, k = self.shape
        wide = self.codes().view(n, self.scales.shape[1], -1).float()
        wide -= self.middle if self.zeros is None else self.zeros.float()[..., None]
        matrix = (wide * self.scales.float()[..., None]).to(dtype).view(n, k)
        if self.order is None:
            return matrix
        return torch.empty_like(matrix).index_copy_(1, self.order.long(), matrix)
