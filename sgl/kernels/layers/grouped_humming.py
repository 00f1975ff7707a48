"""Products of several tokens with a `GroupedMatrix` in four bits by humming-kernels, which compiles them where it runs.
Imported only where that is installed, and there is an NVIDIA GPU."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from humming.layer import HummingLayer

from sgl.kernels.layers.grouped import GroupedMatrix

_ROWS, _COLUMNS = 64, 64  # that a matrix has multiples of
_CHECKED = (2, 24, 64, 200)  # numbers of tokens
_MOST_ERROR = 0.02  # of a product, relative; rounding scales and sums to bfloat16 makes 0.003


def name() -> str:
    """Of the library, with its version."""
    return f"humming-kernels {version('humming-kernels')}"


def why_not(matrix: GroupedMatrix, dtype: torch.dtype) -> str | None:
    """What the library does not take of a matrix, for inputs of a dtype."""
    (n, k), group = matrix.shape, matrix.group
    if matrix.bits != 4 or dtype.itemsize != 2:
        return f"{matrix.bits} bits times {dtype}"
    if matrix.order is not None:
        return "columns in activation order"
    if n % _ROWS or k % _COLUMNS or (group < k and group not in (32, 64, 128)):
        return f"[{n}, {k}] in groups of {group}"
    return None


class HummingProduct:
    """A matrix in the library's own layout."""

    def __init__(self, matrix: GroupedMatrix, dtype: torch.dtype) -> None:
        """Of a matrix that `why_not` has no word against. Compiles with the first product."""
        (n, k), groups = matrix.shape, matrix.scales.shape[1]
        schema: dict[str, Any] = {"dtype": "uint4", "group_size": 0 if groups == 1 else matrix.group}
        codes = matrix.codes()
        tensors = {"weight": _packed(codes), "weight_scale": matrix.scales.to(dtype)}
        if matrix.zeros is not None:
            schema["has_zero_point"] = True
            tensors["zero_point"] = _packed(matrix.zeros.t()).t()
        with torch.device("cpu"):
            self._layer = HummingLayer(shape_n=n, shape_k=k, weight_config=schema, torch_dtype=dtype)
        self._layer.to(matrix.values.device)
        self._layer.load_from_tensors(tensors)
        self._layer.transform()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, k] times the matrix [n, k]: [T, n]."""
        product: torch.Tensor = self._layer(x)
        return product

    def tensors(self) -> Iterator[torch.Tensor]:
        """That hold it."""
        yield from self._layer.parameters()
        yield from self._layer.buffers()

    def error(self, matrix: GroupedMatrix, dtype: torch.dtype) -> str | None:
        """What is wrong with its products of random inputs, compared to `matrix`."""
        generator = torch.Generator(matrix.values.device).manual_seed(0)
        plain = matrix.dequantized(torch.float32)
        for count in _CHECKED:
            x = torch.randn(count, matrix.shape[1], generator=generator, device=plain.device).to(dtype)
            expected = x.float() @ plain.t()
            found = float((self(x).float() - expected).norm() / expected.norm())
            if not found <= _MOST_ERROR:
                return f"products of {count} tokens with {list(matrix.shape)} are off by {found:.3g}"
        return None


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """int32 [a, b / 8] of uint8 [a, b], the first in the lowest bits."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).flatten().view(torch.int32).view(len(codes), -1)
