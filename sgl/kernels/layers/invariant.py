"""Matrices whose products have the same bits for a row of inputs alone and among any others.

Libraries choose a kernel, and with it the order of sums, by the number of rows. Here each number is one chain of
multiply-adds in the order of the columns, by cpu.c: for float32, on a CPU that can be compiled for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl.kernels import cpu


@dataclass(frozen=True, slots=True)
class InvariantMatrix:
    """A matrix [n, k]."""

    values: torch.Tensor  # `cpu.panels`
    num_rows: int  # n

    @staticmethod
    def of(matrix: torch.Tensor) -> InvariantMatrix:
        """Of a copy."""
        return InvariantMatrix(cpu.panels(matrix), len(matrix))

    def plain(self) -> torch.Tensor:
        """A copy, [n, k]."""
        return self.values.transpose(1, 2).flatten(0, 1)[: self.num_rows].clone()

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    def __len__(self) -> int:
        return self.num_rows

    def numel(self) -> int:
        """Its elements, filled up."""
        return self.values.numel()

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, k] times the matrix, plus the bias [n]: [T, n]."""
        return cpu.multiply(x, self.values, self.num_rows, bias)


@dataclass(frozen=True, slots=True)
class InvariantExperts:
    """A matrix [n, k] of each expert."""

    values: torch.Tensor  # [experts, ...]
    num_rows: int  # n

    @staticmethod
    def of(matrices: torch.Tensor) -> InvariantExperts:
        """Of a copy of matrices [experts, n, k]."""
        return InvariantExperts(torch.stack([cpu.panels(matrix) for matrix in matrices]), matrices.shape[1])

    def plain(self) -> torch.Tensor:
        """A copy, [experts, n, k]."""
        return torch.stack([self[expert].plain() for expert in range(len(self))])

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, expert: int) -> InvariantMatrix:
        return InvariantMatrix(self.values[expert], self.num_rows)

    @property
    def shape(self) -> torch.Size:
        """[experts, n, k]."""
        return torch.Size((len(self.values), self.num_rows, self.values.shape[2]))

    def numel(self) -> int:
        """Elements of all matrices, filled up."""
        return self.values.numel()
