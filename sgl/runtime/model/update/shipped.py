"""Tensors that another process sends: pickled with handles of shared memory or a GPU's (CUDA IPC), or with their bytes.

Clients use torch.multiprocessing's pickler. A pickle may call anything, so only the names below are found in it; each
stands for a function here that checks its arguments and then does what torch's does.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.multiprocessing import reductions

from sgl.errors import InvalidRequest

FLATTENED = "flattened_bucket"
LOAD_FORMATS = (None, "auto", "direct", FLATTENED)
MOST_BYTES = 1 << 33
"""Of one message."""
_HANDLE = re.compile(rb"/torch_[0-9]+_[0-9]+(_[0-9]+)?")
_REDUCTIONS = "torch.multiprocessing.reductions"
_DTYPES = {name: its for name, its in vars(torch).items() if isinstance(its, torch.dtype)}
_PARAM = "serialized_named_tensors"


def shipped_tensors(
    message: Any, load_format: str | None, *, is_copy: bool = False
) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of a message: bytes, or base64 of them. is_copy: another process reads it, too, and lets go of
    its shared memory, which senders count on once. Raises InvalidRequest for anything else."""
    found = _loaded(message, is_copy)
    if load_format == FLATTENED:
        return _unflattened(found)
    pairs = list(found.items()) if isinstance(found, dict) else found
    if not isinstance(pairs, list):
        raise _wrong(f"holds a {type(found).__name__}, not pairs of a name and a tensor")
    return [_pair(pair, is_copy) for pair in pairs]


def check_load_format(given: Any) -> None:
    """Raise InvalidRequest for an unknown one."""
    if given not in LOAD_FORMATS:
        known = ", ".join(str(its) for its in LOAD_FORMATS[1:])
        raise InvalidRequest(f"load_format must be one of {known}, not {given!r}", param="load_format")


def _loaded(message: Any, is_copy: bool) -> Any:
    if isinstance(message, str):
        try:
            message = base64.b64decode(message, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _wrong("is no base64") from error
    if not isinstance(message, bytes) or len(message) > MOST_BYTES:
        raise _wrong(f"must be at most {MOST_BYTES} bytes, or base64 of them")
    try:
        return _Unpickler(io.BytesIO(message), is_copy).load()
    except InvalidRequest:
        raise
    except Exception as error:  # a torn pickle raises anything
        raise _wrong(f"cannot be read: {type(error).__name__}: {error}") from error


def _pair(pair: Any, is_copy: bool) -> tuple[str, torch.Tensor]:
    name, its = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
    if isinstance(its, _OfRanks):  # each rank's process made one of its own; they are equal
        values = getattr(its, "values", None)
        if not isinstance(values, list) or not values:
            raise _wrong(f"{name} has no values")
        its = _loaded(values[0], is_copy)
    if not isinstance(name, str) or not isinstance(its, torch.Tensor):
        raise _wrong("holds something else than pairs of a name and a tensor")
    return name, its


def _unflattened(found: Any) -> list[tuple[str, torch.Tensor]]:
    """A bucket: all tensors behind each other in one, and where each is."""
    flat, places = (
        (found.get(key) for key in ("flattened_tensor", "metadata")) if isinstance(found, dict) else (None,) * 2
    )
    if not isinstance(flat, torch.Tensor) or not isinstance(places, list):
        raise _wrong(f"is no {FLATTENED}: a dictionary with flattened_tensor and metadata")
    tensors = []
    for place in places:
        try:
            name, dtype, start, end = place.name, place.dtype, int(place.start_idx), int(place.end_idx)
            tensors.append((str(name), flat[start:end].view(dtype).reshape(tuple(place.shape))))
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise _wrong(f"has a place in its metadata that is none: {error}") from error
    return tensors


class _Place:
    """Of a tensor in a bucket."""


class _OfRanks:
    """A tensor as each rank was sent it."""


def _tensor(cls: Any, storage: Any, metadata: Any) -> torch.Tensor:
    offset, size, stride, *_ = metadata
    size, stride, offset = tuple(map(int, size)), tuple(map(int, stride)), int(offset)
    if min((*size, *stride, offset), default=0) < 0 or len(size) != len(stride):
        raise ValueError("a tensor's size, strides and offset are not negative")
    last = 0 if 0 in size else offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    dtype, untyped = storage.dtype, storage._untyped_storage  # what else a typed one has warns of its end
    if last * dtype.itemsize > untyped.nbytes():
        raise ValueError("a tensor reaches behind its storage")
    return torch.empty(0, dtype=dtype, device=untyped.device).set_(untyped, offset, size, stride)


def _inline(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    return _tensor(torch.Tensor, storage, (offset, size, stride))


def _parameter(data: Any, *_: Any) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise TypeError("a parameter is a tensor")
    return data.detach()


def _file(cls: Any, manager: Any, handle: Any, size: Any, dtype: Any = None) -> Any:
    """Of shared memory with torch's own names."""
    if not isinstance(handle, bytes) or not _HANDLE.fullmatch(handle) or not isinstance(manager, bytes):
        raise ValueError("a handle of shared memory is not torch's")
    rebuild: Any = reductions.rebuild_storage_filename
    return rebuild(torch.UntypedStorage, manager, handle, int(size))


def _copied_file(*arguments: Any) -> Any:
    """`_file`, without a share in who still reads it."""
    storage = _file(*arguments)
    storage._shared_incref()
    return storage


def _typed(storage: Any, dtype: Any) -> Any:
    if not isinstance(storage, torch.UntypedStorage) or not isinstance(dtype, torch.dtype):
        raise TypeError("a typed storage is of an untyped one")
    make: Any = torch.storage.TypedStorage  # it has no types
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def _bytes(data: Any) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _cuda(
    cls: Any,
    size: Any,
    stride: Any,
    offset: Any,
    storage_cls: Any,
    dtype: Any,
    device: Any,
    handle: Any,
    *rest: Any,
) -> torch.Tensor:
    """Of another process's GPU memory. device: a number, or the GPU's own id."""
    num_bytes, num_before, _, counter, counter_offset, event, waits = rest
    if isinstance(device, str):
        known = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        if device not in known:
            raise ValueError(f"GPU {device} is not one of this process's")
        device = known[device]
    sizes = tuple(map(int, size)), tuple(map(int, stride)), int(offset)
    if not isinstance(dtype, torch.dtype) or math.prod(sizes[0]) * dtype.itemsize > int(num_bytes):
        raise ValueError("a tensor is larger than its storage")
    if not all(its is None or isinstance(its, bytes) for its in (handle, counter, event)):
        raise TypeError("handles are bytes")
    rebuild: Any = reductions.rebuild_cuda_tensor
    typed = torch.storage.TypedStorage
    handles = handle, int(num_bytes), int(num_before), False, counter, int(counter_offset), event, bool(waits)
    its: torch.Tensor = rebuild(torch.Tensor, *sizes, typed, dtype, int(device), *handles)
    return its


class _Unpickler(pickle.Unpickler):
    known: ClassVar[Mapping[tuple[str, str], Any]] = {
        (_REDUCTIONS, "rebuild_tensor"): _tensor,
        (_REDUCTIONS, "rebuild_storage_filename"): _file,
        (_REDUCTIONS, "rebuild_typed_storage"): _typed,
        (_REDUCTIONS, "rebuild_cuda_tensor"): _cuda,
        ("torch._utils", "_rebuild_tensor_v2"): _inline,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch.storage", "_load_from_bytes"): _bytes,
        ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
        ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
        ("torch", "Size"): torch.Size,
        ("torch", "Tensor"): torch.Tensor,
        ("torch._tensor", "Tensor"): torch.Tensor,
        ("torch.nn.parameter", "Parameter"): torch.Tensor,
        ("collections", "OrderedDict"): OrderedDict,
    }
    ours: ClassVar[Mapping[str, Callable[..., Any] | type]] = {
        "FlattenedTensorMetadata": _Place,
        "LocalSerializedTensor": _OfRanks,
        "_rebuild_cuda_tensor_modified": _cuda,
    }
    """What clients' own modules have names for, wherever these are."""

    def __init__(self, file: io.BytesIO, is_copy: bool) -> None:
        super().__init__(file)
        self._is_copy = is_copy

    def find_class(self, module: str, name: str) -> Any:
        """See pickle. Raises InvalidRequest for what tensors do not need."""
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        found = self.known.get((module, name), self.ours.get(name))
        if found is None:
            hint = ""
            if name in ("rebuild_storage_fd", "DupFd"):
                hint = ': set torch.multiprocessing.set_sharing_strategy("file_system") where CPU tensors are sent'
            raise _wrong(f"calls for {module}.{name}, which tensors do not need{hint}")
        return _copied_file if found is _file and self._is_copy else found


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"{_PARAM} {what}", param=_PARAM)
