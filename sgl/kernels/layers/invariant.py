"""Matrices whose products have the same bits for a row of inputs alone and among any others.

Libraries choose a kernel, and with it the order of sums, by the number of rows. Here it follows from the matrix alone:
on a CPU each number is one chain of multiply-adds in the order of the columns, by cpu.c. A GPU has cuBLAS in calls of
numbers of rows that agree (invariant_blas.py), or Triton where none do (invariant_triton.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl.kernels import cpu
from sgl.kernels.layers import invariant_blas


@dataclass(frozen=True, slots=True)
class InvariantMatrix:
    """A matrix [n, k]."""

    values: torch.Tensor  # [n, k]; on a CPU `cpu.panels` of float32
    num_rows: int  # n
    call_sizes: tuple[int, ...] = ()  # of `invariant_blas`

    @staticmethod
    def of(matrix: torch.Tensor, *, for_logits: bool = False) -> InvariantMatrix:
        """On a GPU of the matrix itself, on a CPU of a copy. for_logits: its products are float32."""
        if matrix.is_cpu:
            return InvariantMatrix(cpu.panels(matrix), len(matrix))
        sizes: tuple[int, ...] = ()
        if matrix.is_cuda:
            size, width = matrix.shape
            sizes = invariant_blas.call_sizes(size, width, matrix.dtype, matrix.device, for_logits=for_logits)
        return InvariantMatrix(matrix, len(matrix), sizes)

    def plain(self) -> torch.Tensor:
        """[n, k]: on a GPU the matrix itself, on a CPU a copy."""
        if not self.values.is_cpu:
            return self.values
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

    def times(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, k] times the matrix, plus the bias [n]: [T, n], rounded once, in `out` if given."""
        if x.is_cpu:
            product = cpu.multiply(x, self.values, self.num_rows, bias)
            return product if out is None else out.copy_(product)
        if self.call_sizes:
            return invariant_blas.multiply(x, self.values, bias, out, self.call_sizes)
        from sgl.kernels.layers import invariant_triton

        out = x.new_empty(len(x), self.num_rows) if out is None else out
        return invariant_triton.multiply(x, self.values, bias, out)


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
