"""Matrices that bitsandbytes stored in four bits: codes of a table of 16 numbers in blocks that run on from row to row,
and the blocks' scales, which may be codes of a table themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TYPES = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
STATES = tuple(_STATE + kind for kind in TYPES)
"""Last parts of the names of the tensors that say how a matrix is stored."""
_MOST_BYTES = 1 << 16  # of one
_MOST = 1 << 24  # rows, columns, and numbers of a block

Wanted = dict[str, tuple[list[tuple[int, ...]], tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class State:
    """How a matrix is stored."""

    shape: tuple[int, int]
    block: int
    """Numbers that share a scale."""
    nested: int | None
    """Scales that share one; None: they are float32."""
    offset: float
    """What is to be added to scales, of nested ones."""

    @staticmethod
    def read(stored: torch.Tensor) -> State:
        """Of its tensor. Raises ValueError."""
        if stored.numel() > _MOST_BYTES:
            raise ValueError(f"has {stored.numel()} bytes, more than {_MOST_BYTES}")
        try:
            data = json.loads(bytes(stored.tolist()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON: {error}") from error
        if not isinstance(data, dict) or data.get("quant_type") not in TYPES:
            found = data.get("quant_type") if isinstance(data, dict) else data
            raise ValueError(f"has the quant_type {found!r:.100}; these are read: {', '.join(TYPES)}")
        shape = data.get("shape")
        if not isinstance(shape, list) or len(shape) != 2:
            raise ValueError(f"has the shape {shape!r:.100}, not that of a matrix")
        n, k = (_whole(side, "shape") for side in shape)
        nested = data.get("nested_blocksize")
        offset = data.get("nested_offset", 0.0)
        if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
            raise ValueError(f"has the nested_offset {offset!r:.100}, no number")
        block = _whole(data.get("blocksize"), "blocksize")
        return State((n, k), block, None if nested is None else _whole(nested, "nested_blocksize"), offset)

    def wanted(self, dtype: str) -> Wanted:
        """Shapes and dtypes of a module's other tensors, and the shapes of its codes, by the last parts of their names.
        dtype: of its codes, which may be stored as numbers of other types."""
        size = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}.get(dtype, 1)
        count = self.shape[0] * self.shape[1]
        words = -(-count // 2 // size)
        blocks = -(-count // self.block)
        floats = ("F32",)
        found: Wanted = {
            "weight": ([(words, 1), (1, words)], ("U8", "I8", "BF16", "F16", "F32")),
            "weight.absmax": ([(blocks,)], floats if self.nested is None else ("U8",)),
            "weight.quant_map": ([(16,)], floats),
        }
        if self.nested is not None:
            found["weight.nested_absmax"] = ([(-(-blocks // self.nested),)], floats)
            found["weight.nested_quant_map"] = ([(256,)], floats)
        return found


def dequantized(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """float32 [n, k] of a module's tensors, by the last parts of their names."""
    state = State.read(next(its for name, its in tensors.items() if name.startswith(_STATE)))
    whole = tensors["weight"].contiguous().view(torch.uint8).flatten()
    codes = torch.stack((whole >> 4, whole & 15), -1).flatten()[: shape[0] * shape[1]]
    scales = tensors["weight.absmax"]
    if state.nested is not None:
        of_scales = tensors["weight.nested_absmax"].repeat_interleave(state.nested)[: len(scales)]
        scales = tensors["weight.nested_quant_map"][scales.int()] * of_scales + state.offset
    values = tensors["weight.quant_map"][codes.int()]
    return values.mul_(scales.repeat_interleave(state.block)[: len(values)]).view(shape)


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ValueError(f"has the {name} {value!r:.100}, not a whole number from 1 to {_MOST}")
    return value
