"""A checkpoint's weight files and the tensors in them: safetensors, GGUF, and PyTorch's pickles (.bin), of which
tensors alone are read."""

from __future__ import annotations

import json
import math
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sgl.errors import WeightsError
from sgl.runtime.gguf import is_gguf
from sgl.runtime.model.gguf_checkpoint import GgufCheckpoint

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
BODY = "embed_tokens.weight"  # of a checkpoint without the first word of its names
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED_INDEX, _PICKLED = "pytorch_model.bin.index.json", "pytorch_model.bin"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_PICKLES = (".bin", ".pt", ".pth")
_NAMES = {  # of dtypes in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file, or some rows of one."""

    file: Path
    name: str  # there
    shape: tuple[int, ...]
    dtype: str
    first: int | None = None  # of its rows; None: it is the whole tensor

    def part(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where a part of it lies in the file's tensor."""
        if self.first is None:
            return part
        rows = part[0] if part else slice(None)
        start, stop, _ = rows.indices(self.shape[0])
        return slice(self.first + start, self.first + stop), *part[1:]


def read_headers(folder: Path) -> dict[str, Entry]:
    """The tensors of a checkpoint. Raises WeightsError."""
    entries: dict[str, Entry] = {}
    files, index = _files_and_index(folder)
    placed = {} if index is None else _weight_map(index)
    for file in files:
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if placed.get(name, file.name) == file.name:
                    header = tensors.get_slice(name)
                    entries[name] = Entry(file, name, tuple(header.get_shape()), str(header.get_dtype()))
    for name, file_name in placed.items():
        if name not in entries:
            message = f"{folder / file_name} lacks the tensor {name}, which {index} places there"
            raise WeightsError(message, path=str(folder / file_name), tensor=name)
    return entries


def model_headers(folder: Path) -> dict[str, Entry]:
    """The same by the names of a model with a head: those that embed texts may be stored without the first word, as
    Qwen3-Embedding is. Raises WeightsError."""
    entries = read_headers(folder)
    if BODY not in entries:
        return entries
    return {name if name.startswith("lm_head.") else f"model.{name}": entry for name, entry in entries.items()}


def stored_dtype(folder: Path) -> str:
    """torch's name of the type of most numbers of a checkpoint, where its config does not say one."""
    try:
        entries = read_headers(folder).values()
    except WeightsError:  # there may be none yet
        return "float32"
    sizes: dict[str, int] = {"F32": 0}
    for entry in entries:
        if entry.dtype in FLOAT_DTYPES:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + math.prod(entry.shape)
    return {"F16": "float16", "BF16": "bfloat16"}.get(max(sizes, key=sizes.__getitem__), "float32")


def holds_pickles(folder: Path) -> bool:
    """Whether a checkpoint's weights are PyTorch's pickles: there are no safetensors."""
    names = (_SINGLE, _INDEX, _PICKLED, _PICKLED_INDEX)
    return next((name for name in names if (folder / name).is_file()), "").startswith(_PICKLED)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in placed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"cannot read {index}: {error!r}", path=str(index)) from error


def weight_files(folder: Path) -> list[Path]:
    """A checkpoint's. Raises WeightsError."""
    return _files_and_index(folder)[0]


def _files_and_index(folder: Path) -> tuple[list[Path], Path | None]:
    """In transformers' order of preference, and the index that names them."""
    if is_gguf(folder):
        return [folder], None
    for single, index in ((_SINGLE, _INDEX), (_PICKLED, _PICKLED_INDEX)):
        if (folder / single).is_file():
            return [folder / single], None
        if (folder / index).is_file():
            files = [folder / name for name in sorted(set(_weight_map(folder / index).values()))]
            missing = [file for file in files if not file.is_file()]
            if missing or not files:
                first = missing[0] if missing else folder / single
                message = f"weight file {first} is missing, {len(missing)} of the {len(files)} that {index} names"
                raise WeightsError(message, path=str(first))
            return files, folder / index
    found = sorted(path for path in folder.glob("model-*.safetensors") if _SHARD.fullmatch(path.name))
    numbers = {tuple(map(int, match.groups())) for path in found if (match := _SHARD.fullmatch(path.name))}
    if numbers and numbers == {(number, len(numbers)) for number in range(1, len(numbers) + 1)}:
        return found, None  # all there, and only the index is not
    hint = ""
    if others := sorted(
        path.name for path in folder.glob("*") if path.suffix in (*_PICKLES, ".safetensors", ".h5")
    ):
        hint = f"; nor is there {_INDEX}, {_PICKLED} or {_PICKLED_INDEX}, only {', '.join(others[:4])}"
    raise WeightsError(f"weight file {folder / _SINGLE} is missing{hint}", path=str(folder / _SINGLE))


def check_dtype(name: str, entry: Entry) -> None:
    """Raise WeightsError for a tensor of other numbers than floats."""
    if entry.dtype not in FLOAT_DTYPES:
        wrong = f"{entry.dtype}; expected one of {', '.join(FLOAT_DTYPES)}"
        raise WeightsError(f"{name} in {entry.file} is {wrong}", path=str(entry.file), tensor=name)


def opened(file: Path) -> Any:
    """Map the file. Raises WeightsError if it is truncated, or no file of tensors."""
    if is_gguf(file):
        return GgufCheckpoint(str(file))
    is_pickle = file.suffix in _PICKLES
    try:
        return _Pickled(file) if is_pickle else safe_open(str(file), framework="pt")
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        size = file.stat().st_size if file.exists() else 0
        kind = "pickle of tensors alone, and nothing else is read" if is_pickle else "safetensors file"
        said = " ".join(str(error).split())[:300]
        raise WeightsError(f"{file} ({size} bytes) is truncated or no {kind}: {said}", path=str(file)) from error


def read(tensors: Any, name: str, file: Path, part: tuple[slice, ...] = ()) -> torch.Tensor:
    """A tensor of an opened file, or a part of it. Raises WeightsError."""
    try:
        tensor: torch.Tensor = tensors.get_slice(name)[part] if part else tensors.get_tensor(name)
    except SafetensorError as error:
        raise WeightsError(f"cannot read {name} in {file}: {error}", path=str(file), tensor=name) from error
    return tensor


class _Pickled:
    """Opened as `safetensors.safe_open` opens a file. Runs nothing that the file holds."""

    def __init__(self, file: Path) -> None:
        is_new = zipfile.is_zipfile(file)  # files of PyTorch before 1.6 are read whole
        try:
            its = torch.load(file, map_location="cpu", mmap=is_new, weights_only=True)
        except Exception as error:  # whatever a damaged pickle has torch stumble over: KeyError, IndexError, …
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if not isinstance(its, dict):
            raise ValueError(f"it holds a {type(its).__name__}, not tensors by their names")
        for name, value in its.items():
            is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in _NAMES
            if not isinstance(name, str) or not is_plain:
                kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"{name!r:.100} in it is {kind}, no dense tensor")
        self._tensors: dict[str, torch.Tensor] = its

    def __enter__(self) -> _Pickled:
        return self

    def __exit__(self, *error: object) -> None:
        """The file is closed when nothing refers to it any more."""

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.get_tensor(name))


class _Slice:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _NAMES[self._tensor.dtype]

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        return self._tensor[part]
