"""Quantised checkpoints that are damaged or made to harm end in a typed error, or in matrices of the shapes that they
say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.errors import ModelError
from sgl.runtime.model.quantized.checkpoint import QuantizedCheckpoint
from sgl.runtime.model.quantized.pack import grouped
from sgl.runtime.model.quantized.scheme import QuantScheme
from sgl.runtime.model.weight_files import _NAMES as DTYPES
from tests.examples import few
from tests.tiny_quantized import CONFIGS, Tensors, quantize, quantize_mxfp4

CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(lambda its, dtype=dtype: its.to(dtype) for dtype in (torch.float32, torch.uint8, torch.int8, torch.int32)),
    lambda its: its.flatten(),
    lambda its: its[None],
    lambda its: its[1:] if its.dim() else its,
    lambda its: its[:, :-1] if its.dim() > 1 else its,
    lambda its: its.T if its.dim() == 2 else its,
    lambda its: torch.zeros_like(its),
    lambda its: (its.view(torch.uint8) | 255).view(its.dtype) if its.dim() and its.numel() else its,
    lambda its: its.flatten()[:0],
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
WORDS = st.sampled_from(
    ["group", "block", "tensor", "float", "int", "re:(", "mixed-precision", "naive-quantized", -1, 8]
)
VALUES = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@dataclass(frozen=True)
class Place:
    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


@cache
def stored(name: str) -> Tensors:
    matrix = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    if name == "mxfp4":
        parts, _ = quantize_mxfp4(torch.from_numpy(matrix).view(2, 32, 64))
        return {f"m.experts.down_proj_{part}": its for part, its in parts.items()}
    parts, _ = quantize(matrix, CONFIGS[name])
    return {f"m.{part}": as_in_a_file(its) for part, its in parts.items()}


def as_in_a_file(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("name", CONFIGS)
@few
@given(data=st.data())
def test_damaged_tensors_end_in_a_typed_error_or_a_matrix(name: str, data: st.DataObject) -> None:
    tensors = dict(stored(name))
    for _ in range(data.draw(st.integers(1, 2))):
        part = data.draw(st.sampled_from(sorted(tensors)))
        change = data.draw(st.sampled_from([None, *CHANGES]))
        its = tensors.pop(part)
        tensors |= {"m.other": its} if change is None else {part: as_in_a_file(change(its))}
    places = {part: Place(part, Path("f"), tuple(its.shape), DTYPES[its.dtype]) for part, its in tensors.items()}
    with contextlib.suppress(ModelError):
        found = QuantizedCheckpoint(QuantScheme.of(CONFIGS[name], "p", None), places, tensors.__getitem__)
        for matrix, shape in found.shapes.items():
            assert tuple(found.dequantized(matrix).shape) == shape
            if name != "mxfp4":
                grouped([found.codes(matrix)])


@settings(max_examples=settings().max_examples * 4)
@given(data=st.data())
def test_any_config_is_a_scheme_or_a_typed_error(data: st.DataObject) -> None:
    def damaged(value: Any) -> Any:
        """With one value in it another."""
        if not isinstance(value, dict) or not value or data.draw(st.integers(0, 9)) == 0:
            return data.draw(VALUES)
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: damaged(value[key])}

    more = st.sampled_from(["sparsity_config", "transform_config", "dynamic", "extra_config", "quantization"])
    config = {
        **CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))],
        **data.draw(st.dictionaries(more, VALUES, max_size=1)),
    }
    with contextlib.suppress(ModelError):
        scheme = QuantScheme.of(damaged(config), "p", None)
        assert str(scheme)
        scheme.layout("model.layers.0.mlp.down_proj", "other")
