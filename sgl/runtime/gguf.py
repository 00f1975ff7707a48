"""Reads GGUF files: metadata, and tensors as float32. The package gguf knows the types and unpacks their blocks.

Files come from strangers: every count, length and offset is checked against the file before memory is taken for it.
The package's own reader checks none, and takes an array for each string.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl.errors import WeightsError, needs_extra

TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"),
)
"""Of tensors, by llama.cpp's names."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MAX_HEADER = 1 << 28  # bytes
_MAX_ENTRIES = 1 << 16  # tensors, and metadata
_MAX_ITEMS = 1 << 22  # of all arrays together
_AT_ONCE = 1 << 20  # elements unpacked at once


def is_gguf(path: str | Path) -> bool:
    """Whether it is a file that says it is GGUF, by its name or its first bytes."""
    try:
        if not Path(path).is_file():
            return False
        with open(path, "rb") as file:
            return Path(path).suffix == ".gguf" or file.read(4) == b"GGUF"
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies, and how. `shape`: as in torch, the innermost dimension last."""

    shape: tuple[int, ...]
    type: str  # one of TYPES
    start: int  # byte of the file
    row_bytes: int  # of one row along the innermost dimension


class GgufFile:
    """A file's metadata and tensors, by their names in it."""

    def __init__(self, path: str | Path) -> None:
        """Read and check all but the tensors' data. Raises WeightsError."""
        self.path = str(path)
        try:
            self._data = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise self.error(f"cannot be read: {error}") from error
        header = _Header(self, self._data.data[:_MAX_HEADER])
        magic, version, num_tensors, num_values = header.numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise self.error(f"begins with {magic!r}, version {version}: not GGUF 2 or 3, little-endian")
        for count, what in ((num_tensors, "tensors"), (num_values, "metadata values")):
            if count > _MAX_ENTRIES:
                raise self.error(f"claims {count} {what}; at most {_MAX_ENTRIES} are read")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = header.name(self.metadata)
            self.metadata[key] = header.value(key)
        if self.metadata.get("split.count") not in (None, 0, 1):
            raise self.error("is one of several parts: join them with `llama-gguf-split --merge`")
        self.tensors: dict[str, GgufTensor] = self._tensors(header, num_tensors)

    def error(self, message: str, tensor: str | None = None) -> WeightsError:
        """What is wrong with this file."""
        return WeightsError(f"{self.path} {message}", path=self.path, tensor=tensor)

    def read(self, name: str, rows: slice | npt.NDArray[np.int64] = slice(None)) -> npt.NDArray[np.float32]:
        """Some rows of a tensor, or some numbers of a vector. Raises WeightsError if one is not finite."""
        from gguf import GGMLQuantizationType, dequantize

        its = self.tensors[name]
        packed = self.packed(name).reshape(-1, its.row_bytes)
        if len(its.shape) > 1:
            packed = packed[rows]
        values = np.empty((len(packed), its.shape[-1]), np.float32)
        step = max(1, _AT_ONCE // its.shape[-1])
        for start in range(0, len(packed), step):
            with np.errstate(all="ignore"):  # checked below
                part = np.ascontiguousarray(packed[start : start + step])
                values[start : start + step] = dequantize(part, GGMLQuantizationType[its.type])
            if not np.isfinite(values[start : start + step]).all():
                raise self.error(f"has numbers in {name} that are infinite or none", name)
        return values if len(its.shape) > 1 else values[0][rows]

    def packed(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor [..., row_bytes], as they lie in the file."""
        its = self.tensors[name]
        data = self._data[its.start :][: math.prod(its.shape[:-1]) * its.row_bytes]
        return data.reshape(*its.shape[:-1], its.row_bytes)

    def _tensors(self, header: _Header, count: int) -> dict[str, GgufTensor]:
        with needs_extra("engine", "a GGUF file"):
            from gguf import GGML_QUANT_SIZES

        kinds = {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
        found: dict[str, tuple[int, ...]] = {}
        for _ in range(count):
            name = header.name(found)
            (num_dims,) = header.numbers("I")
            if not 1 <= num_dims <= 4:
                raise self.error(f"gives {name} {num_dims} dimensions, not 1 to 4", name)
            found[name] = header.numbers(f"{num_dims}QIQ")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.error(f"has a general.alignment of {alignment!r:.100}, which is no power of two")
        tensors: dict[str, GgufTensor] = {}
        first = place = -(-header.at // alignment) * alignment
        for name, (*sides, number, offset) in found.items():
            shape = tuple(reversed(sides))
            kind, block, block_bytes = kinds.get(number, (str(number), 1, 1))
            if kind not in TYPES:
                raise self.error(f"has {name} in the type {kind}; these are read: {', '.join(TYPES)}", name)
            if 0 in shape or shape[-1] % block:
                raise self.error(f"gives {name} the shape {list(shape)}: {kind} has rows of {block} numbers", name)
            if first + offset != place:
                raise self.error(f"is damaged: it places {name} at byte {first + offset} instead of {place}", name)
            tensors[name] = GgufTensor(shape, kind, place, shape[-1] // block * block_bytes)
            end = place + math.prod(shape[:-1]) * tensors[name].row_bytes
            if end > len(self._data):
                raise self.error(f"({len(self._data)} bytes) is truncated: {name} would end at byte {end}", name)
            place = -(-end // alignment) * alignment
        return tensors


class _Header:
    """The bytes in front of the tensors' data, read from the first on."""

    def __init__(self, file: GgufFile, data: memoryview) -> None:
        self.at = 0
        self._file = file
        self._data = data
        self._num_items = 0

    def numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._bytes(struct.calcsize(f"<{layout}")))

    def name(self, known: dict[str, Any]) -> str:
        name = self._text()
        if name in known:
            raise self._file.error(f"has {name!r:.100} twice")
        return name

    def value(self, key: str) -> Any:
        (kind,) = self.numbers("I")
        if kind != _ARRAY:
            return self._scalar(kind, key)
        kind, count = self.numbers("IQ")
        self._num_items += count
        if self._num_items > _MAX_ITEMS:
            raise self._file.error(f"has arrays of over {_MAX_ITEMS} items, {count} of them in {key!r:.100}")
        if kind in _SCALARS:
            return list(self.numbers(f"{count}{_SCALARS[kind]}"))
        return [self._scalar(kind, key) for _ in range(count)]

    def _scalar(self, kind: int, key: str) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind not in _SCALARS:
            raise self._file.error(f"has a value of the unknown type {kind} at {key!r:.100}")
        return self.numbers(_SCALARS[kind])[0]

    def _text(self) -> str:
        (length,) = self.numbers("Q")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError as error:
            raise self._file.error(f"has a text that is no UTF-8 before byte {self.at}: {error}") from error

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            what = "is truncated" if len(self._data) < _MAX_HEADER else "has too long a header"
            raise self._file.error(f"{what}: {count} bytes should follow byte {self.at}")
        self.at += count
        return self._data[self.at - count : self.at].tobytes()
