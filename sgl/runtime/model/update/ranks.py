"""Writing checked tensors on all ranks that hold parts of a model: rank 0 has them, and the others are sent them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sgl.runtime.model.base import Model
from sgl.runtime.model.update.choice import writer_of
from sgl.runtime.model.update.writer import Given, Writer

Told = list[tuple[str, str, list[int]]]
"""Names, dtypes and shapes, in order."""


@torch.inference_mode()
def write(
    model: Model,
    writer: Writer,
    given: Mapping[str, Given],
    get: Callable[[str], torch.Tensor],
    tells: Callable[[Told], None] | None,
) -> None:
    """Write tensors that were checked. tells: the other ranks, which then `follow`."""
    if tells is not None:
        tells([(name, _name(its.dtype), list(its.shape)) for name, its in given.items()])
    writer.begin(given.keys())
    for name in given:
        tensor = get(name).detach()
        if tells is not None and model.collectives is not None:
            tensor = tensor.to(model.device).contiguous()
            model.collectives.broadcast_(_bytes(tensor))
        writer.put(name, tensor)
    writer.finish()


@torch.inference_mode()
def follow(model: Model, told: Sequence[Any]) -> None:
    """Take part in `write` on a rank other than 0."""
    writer = writer_of(model, None)  # rank 0 has refused what has none
    writer.begin([name for name, _, _ in told])
    assert model.collectives is not None, "there are several ranks"
    for name, dtype, shape in told:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=model.device)
        model.collectives.broadcast_(_bytes(tensor))
        writer.put(name, tensor)
    writer.finish()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
