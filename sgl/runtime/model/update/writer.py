"""What writes new weights into a loaded model, and the checks before it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch

from sgl.errors import WeightsError
from sgl.kernels.layers.invariant import InvariantMatrix
from sgl.kernels.layers.linear import PackedMatrix
from sgl.kernels.moe.experts import Experts
from sgl.runtime.model.loader import named

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OLD_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias")  # of old checkpoints; they follow from the config


class Given(NamedTuple):
    """What a new tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Writer(Protocol):
    """Of one model. Every tensor is whole: each rank of several takes its part."""

    shapes: dict[str, tuple[int, ...]]
    """Of each tensor that may be given, whole; some are others under another name."""

    aliases: dict[str, str]
    """Names of tensors that are others, and those of the others: of a tied head, the embedding's."""

    def name(self, given: str) -> str:
        """A tensor's, which clients may have under another."""
        return given

    def ignores(self, name: str) -> bool:
        """Whether the model has no use for a tensor that checkpoints may hold."""
        return is_follower(name)

    def missing(self, names: Collection[str]) -> list[str]:
        """What else the model is made of."""

    def begin(self, names: Collection[str]) -> None:
        """Before the first of these is put."""

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one, of any float dtype and device."""

    def finish(self) -> None:
        """After the last: what the model derives from its weights follows."""

    why_not_read: str | None
    """Why its tensors are not read back, if they are not."""

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows of one as a checkpoint has it, in float32, with zeros where other ranks have the numbers: the sum of all
        ranks' is right. Between `begin` and `finish`."""


def is_follower(name: str) -> bool:
    """Whether a checkpoint's tensor follows from its config."""
    return name.endswith(_OLD_BUFFERS)


def check(writer: Writer, given: Mapping[str, Given], *, is_whole: bool, source: str) -> None:
    """Raise WeightsError for an unknown name, another shape, a dtype that is no float's, and, of a whole model, for a
    missing tensor. source: whose they are."""
    unknown = {name: its.shape for name, its in given.items() if name not in writer.shapes}
    if unknown:
        count, first = named(unknown)
        raise WeightsError(
            f"{source} has {count} that this model has no place for: {first}; its own begin with "
            f"{', '.join(list(writer.shapes)[:3])}",
            tensor=next(iter(unknown)),
        )
    for name, (shape, dtype) in given.items():
        if shape != writer.shapes[name]:
            wrong = f"{list(shape)}; this model's is {list(writer.shapes[name])}"
            raise WeightsError(f"{name} of {source} is {wrong}", tensor=name)
        if dtype not in FLOATS:
            known = ", ".join(str(each).removeprefix("torch.") for each in FLOATS)
            raise WeightsError(f"{name} of {source} is {dtype}; it must be one of {known}", tensor=name)
    if is_whole and (missing := writer.missing(given.keys())):
        count, first = named({name: writer.shapes[name] for name in missing})
        raise WeightsError(f"{source} lacks {count} of this model: {first}", tensor=missing[0])


def unpack(parts: Iterable[Any]) -> None:
    """Turn matrices that are packed for a CPU into plain ones, in dataclasses that hold them."""
    for part in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, PackedMatrix):
                setattr(part, field.name, plain(value))
            elif isinstance(value, InvariantMatrix):
                setattr(part, field.name, value.plain())
            elif isinstance(value, Experts):
                setattr(part, field.name, value.plain() if value.is_invariant else value)
            elif is_dataclass(value):
                unpack([value])


def plain(matrix: PackedMatrix) -> torch.Tensor:
    """The matrix [n, k]."""
    return matrix.values.to_dense() if matrix.plain is None else matrix.plain


def check_numbers(
    names: Iterable[str], get: Callable[[str], torch.Tensor], dtype: torch.dtype, source: str
) -> None:
    """Raise WeightsError for a tensor with numbers that are none, or are infinite in the engine's dtype: every output
    would be noise."""
    most = torch.finfo(dtype).max
    for name in names:
        tensor = get(name)
        if tensor.numel() == 0:
            continue
        low, high = map(float, torch.aminmax(tensor.detach()))  # NaN if any of them is
        if not -most <= low <= high <= most:
            least = f"from {low:g} to {high:g}" if low <= high else "NaN"
            limit = f"finite, at most {most:g} in {str(dtype).removeprefix('torch.')}"
            raise WeightsError(f"{name} of {source} has numbers {least}: they must be {limit}", tensor=name)


def check_aliases(writer: Writer, names: Collection[str], get: Callable[[str], torch.Tensor], source: str) -> None:
    """Raise WeightsError for two values of what is one tensor here."""
    for alias, name in writer.aliases.items():
        if alias in names and name in names:
            one, other = get(alias), get(name)
            if one.data_ptr() != other.data_ptr() and not torch.equal(one.to(other), other):
                raise WeightsError(f"{alias} of {source} differs from {name}, and here they are one", tensor=alias)
