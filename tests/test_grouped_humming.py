"""Matrices are given to humming-kernels in its documented layout: to a stand-in that reads it in plain torch, and on a
GPU to the library itself."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from sgl.kernels import layers
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.layers.linear import linear
from sgl.runtime.model import loader, weights
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.quantized import library
from tests.test_models import Paged, at_once, random_sequences
from tests.tiny_models import tiny_checkpoint

MATRICES = [(64, 128, 128, False), (128, 192, 64, True), (64, 320, 320, True), (64, 64, 32, False)]


class StandIn(torch.nn.Module):
    """What HummingLayer does: (code - zero) * scale, codes in words [n, k / 8], zeros in words [n / 8, groups]."""

    error = 0.0

    def __init__(self, shape_n: int, shape_k: int, weight_config: dict[str, Any], torch_dtype: torch.dtype) -> None:
        super().__init__()
        assert weight_config["dtype"] == "uint4"
        self.shape, self.dtype, self.config = (shape_n, shape_k), torch_dtype, weight_config

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        (n, k), group = self.shape, self.config["group_size"] or self.shape[1]
        words, scales = tensors["weight"], tensors["weight_scale"]
        assert (words.shape, scales.shape) == ((n, k // 8), (n, k // group))
        assert (words.dtype, scales.dtype) == (torch.int32, self.dtype)
        codes = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1)
        zeros: Any = torch.full((n, k // group), 8)
        if self.config.get("has_zero_point"):
            packed = tensors["zero_point"]
            assert packed.shape == (n // 8, k // group)
            zeros = torch.stack([packed >> shift & 15 for shift in range(0, 32, 4)], 1).flatten(0, 1)
        wide = (codes - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
        self.register_buffer("matrix", wide.to(self.dtype))

    def transform(self) -> None:
        self.matrix = self.matrix + self.error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.matrix)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    """In the library's place, and matrices stay packed on a CPU."""
    module, inner = ModuleType("humming"), ModuleType("humming.layer")
    inner.HummingLayer = type("HummingLayer", (StandIn,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", module)
    monkeypatch.setitem(sys.modules, "humming.layer", inner)
    monkeypatch.delitem(sys.modules, "sgl.kernels.layers.grouped_humming", raising=False)
    monkeypatch.delattr(layers, "grouped_humming", raising=False)
    monkeypatch.setattr(library, "find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9")
    monkeypatch.setattr(weights, "keeps_groups", lambda device: True)
    monkeypatch.setattr(loader, "keeps_groups", lambda device: True)
    layer: type[StandIn] = inner.HummingLayer  # type: ignore[attr-defined]
    return layer


def drawn(n: int, k: int, group: int, has_zeros: bool, device: str = "cpu") -> GroupedMatrix:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(n, k // group, generator=generator) + 0.1).to(torch.bfloat16)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=generator) if has_zeros else None
    zeros = None if zeros is None else zeros.to(device)
    return GroupedMatrix.of(codes.to(device), scales.to(device), zeros, bits=4)


@pytest.mark.parametrize("sizes", MATRICES)
def test_matrices_are_laid_out_as_the_library_reads_them(
    sizes: tuple[int, int, int, bool], stand_in: type[StandIn]
) -> None:
    from sgl.kernels.layers import grouped_humming

    matrix = drawn(*sizes)
    assert grouped_humming.why_not(matrix, torch.bfloat16) is None
    product = grouped_humming.HummingProduct(matrix, torch.bfloat16)
    assert product.error(matrix, torch.bfloat16) is None
    x = torch.randn(3, sizes[1]).bfloat16()
    assert torch.equal(product(x), functional.linear(x, matrix.dequantized(torch.bfloat16)))
    assert [tensor.nbytes for tensor in product.tensors()]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 8}, "8 bits"),
        ({"order": torch.arange(128).int()}, "activation order"),
        ({"n": 48}, r"\[48, 128\]"),
    ],
)
def test_other_matrices_are_left_to_our_kernels(
    change: dict[str, Any], reason: str, stand_in: type[StandIn]
) -> None:
    from sgl.kernels.layers import grouped_humming

    n, bits = change.get("n", 64), change.get("bits", 4)
    codes = torch.zeros(n, 128, dtype=torch.uint8)
    matrix = GroupedMatrix.of(codes, torch.ones(n, 1), None, bits=bits, order=change.get("order"))
    assert reason.replace("\\", "") in str(grouped_humming.why_not(matrix, torch.bfloat16))
    assert "float32" in str(grouped_humming.why_not(drawn(64, 128, 128, False), torch.float32))


def test_several_tokens_go_to_the_library(
    stand_in: type[StandIn], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint(tmp_path, intermediate_size=128)
    config, sequences = ModelConfig.from_pretrained(folder), random_sequences(384)
    with caplog.at_level(logging.INFO):
        decoder = loader.load_decoder(config, dtype="bfloat16", quantization="int4")
    matrices = [matrix for layer in decoder.weights.layers for _, matrix in layer.matrices()]
    assert all(isinstance(matrix, GroupedMatrix) and matrix.of_several is not None for matrix in matrices)
    assert "humming-kernels 9 multiplies several tokens with 12 of 12" in caplog.text
    assert (
        sum(tensor.nbytes for tensor in decoder.weights.tensors()) > sum(its.values.nbytes for its in matrices) * 2
    )
    Paged(decoder, sequences, page_size=16).run(at_once(sequences))


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_a_library_that_errs_is_not_used(
    fault: str, stand_in: type[StandIn], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.error = 0.5 if fault == "wrong" else "no compiler"  # type: ignore[assignment]
    folder = tiny_checkpoint(tmp_path, intermediate_size=128)
    decoder = loader.load_decoder(ModelConfig.from_pretrained(folder), dtype="bfloat16", quantization="int4")
    matrices = [matrix for layer in decoder.weights.layers for _, matrix in layer.matrices()]
    assert all(isinstance(matrix, GroupedMatrix) and matrix.of_several is None for matrix in matrices)
    assert "sgl's own kernels, as humming-kernels cannot be used" in caplog.text
    assert ("are off by" if fault == "wrong" else "TypeError") in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("humming") is None, reason="humming-kernels is not installed")
@pytest.mark.parametrize("sizes", [(6144, 4096, 128, False), (1024, 14336, 64, True), (4096, 4096, 4096, False)])
def test_the_library_multiplies_as_the_reference(sizes: tuple[int, int, int, bool]) -> None:
    from dataclasses import replace

    from sgl.kernels.layers import grouped_humming

    matrix = drawn(*sizes, device="cuda")
    matrix = replace(matrix, of_several=grouped_humming.HummingProduct(matrix, torch.bfloat16))
    plain, bias = matrix.dequantized(torch.float32), torch.randn(sizes[0], device="cuda").bfloat16()
    for count in (2, 3, 8, 16, 17, 63, 64, 65, 128, 200, 300, 1030):
        x = torch.randn(count, sizes[1], device="cuda").bfloat16()
        expected = functional.linear(x.float(), plain, bias.float())
        error = (linear(x, matrix, bias).float() - expected).norm() / expected.norm()
        assert error < 0.01, f"{count} tokens: {error}"
