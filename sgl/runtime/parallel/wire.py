"""Frames that rank 0 sends to the others: plain data and arrays as MessagePack, no pickle.

A frame is one of

    Load     the options, first of all
    Build    what rank 0 decided of "auto" options, once its weights are loaded
    Forward  a batch
    Move     pages to copy between the device and host memory
    Sample   what the others need of its masks
    AddAdapter, DropAdapter   a LoRA adapter, by its number and folder
    Write, Read, Hash   weights are written, read or hashed by all, through the collectives
    JoinGroup, Broadcast, LeaveGroup   a trainer's process group, and what it broadcasts there
    Release, Restore, Capture   memory, given back and taken again
    Stop     the end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import msgspec
import numpy as np

from sgl.runtime.batch import Batch, PageMoves, RowSetup
from sgl.runtime.media.item import MediaItem, MediaRun
from sgl.runtime.runner.occupation import Part
from sgl.runtime.sampling_params import SamplingParams

_DTYPES = {0: np.dtype(np.int32), 1: np.dtype(np.bool_)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_ELSEWHERE = MediaItem("image", np.zeros((0, 0, 0, 3), np.uint8), (0, 0, 0), 1)


@dataclass(frozen=True, slots=True)
class Load:
    """Load the model with these options."""

    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Build:
    """Make a runner with these options, and KV pages as planned."""

    options: dict[str, Any]
    plan: dict[str, Any]
    eos_ids: list[int]
    shared: str  # the file of memory that ranks share, if they do


@dataclass(frozen=True, slots=True)
class Forward:
    """Start a step."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample after it; masks: see `cut_vocabulary.outline`."""

    masks: list[int | None] | None


@dataclass(frozen=True, slots=True)
class Move:
    """Copy these."""

    moves: PageMoves


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """Read a LoRA adapter's folder and keep it under this number."""

    number: int
    path: str


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Free an adapter."""

    number: int


@dataclass(frozen=True, slots=True)
class Write:
    """Take part in writing new weights; see `update.ranks`."""

    told: list[Any]


@dataclass(frozen=True, slots=True)
class Read:
    """Take part in reading a tensor's first rows."""

    name: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class Hash:
    """Take part in a hash of all weights: of numbers that are read, or of how each rank holds them."""

    reads: bool


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Enter a trainer's group, each rank as the `first` and its own number; see `TrainerGroup`."""

    address: str
    port: int
    first: int
    size: int
    name: str
    backend: str
    seconds: float
    number: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Take part in broadcasts of tensors of these dtypes and numbers of elements; alone: before the next frame that
    uses other connections."""

    name: str
    tensors: list[tuple[str, int]]
    is_alone: bool


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Leave a trainer's group, unless another has its name by now."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give these parts of the memory back; see `occupation`."""

    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Restore:
    """Take these parts again."""

    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Capture:
    """Record CUDA graphs anew, with all ranks."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""


Frame = (
    Load
    | Build
    | Forward
    | Move
    | Sample
    | AddAdapter
    | DropAdapter
    | Write
    | Read
    | Hash
    | JoinGroup
    | Broadcast
    | LeaveGroup
    | Release
    | Restore
    | Capture
    | Stop
)
_KINDS: dict[str, type[Frame]] = {kind.__name__: kind for kind in get_args(Frame)}


def packed(frame: Frame) -> bytes:
    """The bytes of a frame."""
    values: list[Any] = [getattr(frame, field.name) for field in fields(frame)]
    if isinstance(frame, Forward):  # images stay here: who holds the vision tower sees them
        plain: Any = [(run.start, run.first, run.count) for run in frame.batch.media]
        values = [replace(frame.batch, media=plain)]
    return _encoder.encode((type(frame).__name__, values))


def unpacked(data: bytes) -> Frame:
    """The frame of its bytes."""
    name, values = _decoder.decode(data)
    kind = _KINDS[name]
    if kind is Forward:
        return Forward(_batch(values[0]))
    if kind is Move:
        return Move(PageMoves(**{name: pairs.reshape(-1, 2) for name, pairs in values[0].items()}))
    return kind(*values)


def _batch(values: dict[str, Any]) -> Batch:
    del values["_sampling"]  # found anew
    values["setups"] = [
        RowSetup(**{**setup, "params": SamplingParams(**setup["params"])}) for setup in values["setups"]
    ]
    values["media"] = [MediaRun(start, _ELSEWHERE, first, count) for start, first, count in values["media"]]
    values["places"] = {b: its.reshape(3, -1) for b, its in values["places"].items()}
    values["page_writes"] = values["page_writes"].reshape(-1, 3)
    for name, width in (("window_writes", 3), ("state_loads", 2), ("state_saves", 2)):
        if values[name] is not None:
            values[name] = values[name].reshape(-1, width)
    return Batch(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_CODES[value.dtype], np.ascontiguousarray(value).tobytes())
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"{type(value).__name__} is not sent to other ranks")  # what msgspec asks of a hook


def _array(code: int, data: memoryview) -> Any:
    return np.frombuffer(data, _DTYPES[code]).copy()  # writable, like the original


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(ext_hook=_array)
