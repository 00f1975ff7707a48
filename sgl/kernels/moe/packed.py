"""Experts' matrices in four or eight bits: the plain torch reference, and how they are packed for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.layers.invariant import InvariantExperts, InvariantMatrix

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits of a code; the upper one is the sign
_E8M0_BIAS = 127
MOST_EXPONENT = 128
"""Of the scales of four-bit floats, stored: kernels scale a code by two to the power of one less."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A matrix [n, k] of each expert, of (code - zero) * scale.

    In four bits, codes are numbers, in words as those of a `GroupedMatrix`; or floats (e2m1), where scales are
    exponents of two (e8m0). Then word w of a unit of 32 columns has the code of its column 4 * j + w in the bits from
    3 * j on and, its sign, in the bit 24 + j: shifted left, both are in place for a float32.
    """

    values: torch.Tensor  # int32 [experts, n, k / 8], or uint8 or float8_e4m3fn [experts, n, k]
    scales: torch.Tensor  # a float, or uint8 exponents, [experts, n, k / group]
    zeros: torch.Tensor | None = (
        None  # uint8 [experts, n, k / group]; None: the middle of the codes, or 0 for floats
    )

    @property
    def shape(self) -> torch.Size:
        """[experts, n, k]."""
        *lead, width = self.values.shape
        return torch.Size((*lead, width * 8 if self.bits == 4 else width))

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.values.dtype == torch.int32 else 8

    @property
    def is_e2m1(self) -> bool:
        """Whether codes are floats in four bits."""
        return self.scales.dtype == torch.uint8

    @property
    def middle(self) -> int:
        """The zero of codes without zeros."""
        return 0 if self.is_e2m1 else self[0].middle

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[2] // self.scales.shape[2]

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(its.nbytes for its in (self.values, self.scales, self.zeros) if its is not None)

    def numel(self) -> int:
        """Elements of all matrices."""
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, expert: int) -> GroupedMatrix:
        zeros = None if self.zeros is None else self.zeros[expert]
        return GroupedMatrix(self.values[expert], self.scales[expert], zeros)

    @staticmethod
    def of(matrices: Sequence[GroupedMatrix]) -> PackedExperts | None:
        """One of each expert. None: some differ in more than their numbers, or reorder their inputs."""
        kinds = {(its.values.dtype, its.scales.dtype, its.shape, its.group) for its in matrices}
        if len(kinds) != 1 or any(its.order is not None for its in matrices):
            return None
        zeros = None
        if any(its.zeros is not None for its in matrices):
            middle = torch.full_like(matrices[0].scales, matrices[0].middle, dtype=torch.uint8)
            zeros = torch.stack([middle if its.zeros is None else its.zeros for its in matrices])
        values = torch.stack([its.values.view(torch.uint8) for its in matrices]).view(matrices[0].values.dtype)
        return PackedExperts(values, torch.stack([its.scales for its in matrices]), zeros)

    @staticmethod
    def rounded(matrices: torch.Tensor) -> PackedExperts:
        """The nearest four-bit numbers of matrices [experts, n, k], as `GroupedMatrix.rounded`."""
        packed = PackedExperts.of([GroupedMatrix.rounded(matrix) for matrix in matrices])
        assert packed is not None, "all have one shape"
        return packed

    @staticmethod
    def of_e2m1(blocks: torch.Tensor, exponents: torch.Tensor) -> PackedExperts | None:
        """Of MXFP4: uint8 blocks [experts, n, k / 32, 16], two codes a byte, the low half first, and uint8 exponents
        [experts, n, k / 32]. None: a scale is greater than two, for which kernels have no number."""
        if int(exponents.max()) > MOST_EXPONENT:
            return None
        num_experts, n, num_units, _ = blocks.shape
        words = torch.zeros(num_experts, n, num_units, 4, dtype=torch.int32, device=blocks.device)
        for its, found in zip(words, blocks, strict=True):
            codes = torch.stack((found & 15, found >> 4), -1).view(n, num_units, 8, 4)
            for j in range(8):
                code = codes[:, :, j].int()
                its |= (code & 7) << 3 * j | code >> 3 << 24 + j
        return PackedExperts(words.flatten(-2), exponents.contiguous())

    def dequantized(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[n, k]."""
        if not self.is_e2m1:
            return self[expert].dequantized(dtype)
        n, width = self.values.shape[1:]
        words = self.values[expert].view(n, width // 4, 4)
        places = [words >> 3 * j & 7 | (words >> 24 + j & 1) << 3 for j in range(8)]
        codes = torch.stack(places, -2).flatten(-2)  # [n, units, 32]
        positive = torch.tensor(_E2M1, device=codes.device)
        numbers = torch.cat((positive, -positive))[codes]
        exponents = self.scales[expert].int() - _E8M0_BIAS
        return torch.ldexp(numbers, exponents[..., None]).flatten(-2).to(dtype)


ExpertMatrices = torch.Tensor | PackedExperts | InvariantExperts
"""A matrix [n, k] of each expert."""


def matrix_of(experts: ExpertMatrices, expert: int, dtype: torch.dtype) -> torch.Tensor | InvariantMatrix:
    """[n, k] of one of them."""
    return experts.dequantized(expert, dtype) if isinstance(experts, PackedExperts) else experts[expert]
