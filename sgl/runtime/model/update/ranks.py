"""Writing checked tensors on all ranks that hold parts of a model: rank 0 has them, and sends them to the ranks of its
stage, each of which sends them down its chain of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sgl.runtime.model.base import Model
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.gdn.model import Hybrid
from sgl.runtime.model.mla.model import LatentDecoder
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import WHOLE
from sgl.runtime.model.update.choice import writer_of
from sgl.runtime.model.update.writer import Given, Writer

Told = list[tuple[str, str, list[int]]]
"""Names, dtypes and shapes, in order."""
_PIECE = 1 << 22  # numbers that are put together at once


@torch.inference_mode()
def write(
    model: Model,
    writer: Writer,
    given: Mapping[str, Given],
    get: Callable[[str], torch.Tensor],
    tells: Callable[[Told], None] | None,
) -> None:
    """Write tensors that were checked. tells: the other ranks, which then `follow`. On return nothing reads the given
    tensors any more."""
    route = None
    if tells is not None:
        tells([(name, _name(its.dtype), list(its.shape)) for name, its in given.items()])
        route = _Route(model)
    writer.begin(given.keys())
    for name in given:
        tensor = get(name).detach()
        if route is not None:
            tensor = tensor.to(model.device).contiguous()
            route.share(tensor)
        writer.put(name, tensor)
    writer.finish()
    if route is not None:
        route.end()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # another process may own what was copied


@torch.inference_mode()
def follow(model: Model, told: Sequence[Any]) -> None:
    """Take part in `write` on a rank other than 0."""
    writer, route = writer_of(model, None), _Route(model)  # rank 0 has refused what has no writer
    writer.begin([name for name, _, _ in told])
    for name, dtype, shape in told:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=model.device)
        route.share(tensor)
        writer.put(name, tensor)
    writer.finish()
    route.end()


@torch.inference_mode()
def first_rows(model: Model, writer: Writer, name: str, num_rows: int) -> torch.Tensor:
    """The first rows of a tensor, on all ranks at once; rank 0's are right."""
    writer.begin([name])
    try:
        part = writer.rows(name, 0, num_rows)
    finally:
        writer.finish()
    return total(model, part)


@torch.inference_mode()
def hashed(model: Model, writer: Writer | None, hash_of: Callable[[Iterable[torch.Tensor]], bytes]) -> bytes:
    """A hash of all weights, on all ranks at once; rank 0's is right. writer: with which numbers are read, so that it
    is the same for any number of ranks; None: of how each rank holds them."""
    if writer is not None:
        names = sorted(writer.missing(()))
        writer.begin(names)
        try:
            return hash_of(_pieces(model, writer, names))
        finally:
            writer.finish()
    own = hash_of(model.weights.tensors())
    if not _is_cut(model):
        return own
    ranks = _of_all(model)
    shard, words = ranks.shard, len(own) // 8
    of_all = torch.zeros(shard.stages * shard.size, words, dtype=torch.int64)
    of_all[shard.stage * shard.size + shard.rank] = torch.frombuffer(bytearray(own), dtype=torch.int64)
    return hash_of([torch.tensor(ranks.sum(of_all.view(-1).tolist(), model.device))])


def _pieces(model: Model, writer: Writer, names: Iterable[str]) -> Iterator[torch.Tensor]:
    """All numbers, some rows at a time. A zero has no sign: sums of ranks' have none."""
    for name in names:
        num_rows, *rest = writer.shapes[name] or (1,)
        at_once = max(1, _PIECE // max(1, math.prod(rest)))
        for first in range(0, num_rows, at_once):
            yield total(model, writer.rows(name, first, min(num_rows, first + at_once)).add_(0.0))


def total(model: Model, part: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' parts."""
    if not _is_cut(model):
        return part
    # flat: no hidden states, which have a faster way
    return _of_all(model).total(part.reshape(-1)).view(part.shape)


def _is_cut(model: Model) -> bool:
    shard = getattr(model, "shard", WHOLE)
    return bool(shard.size * shard.stages > 1)


def _of_all(model: Model) -> Ranks:
    assert isinstance(model, Decoder | LatentDecoder | Hybrid), "other models are not cut"
    return Ranks(model.shard, model.collectives, model.links)


class _Route:
    """This rank's part of the way from rank 0 to all."""

    def __init__(self, model: Model) -> None:
        self._ranks, self._device = _of_all(model), model.device

    def share(self, tensor: torch.Tensor) -> None:
        """Send rank 0's values, or fill the tensor with them, and pass them on."""
        values, shard = tensor.view(-1).view(torch.uint8), self._ranks.shard
        group, links = self._ranks.stage, self._ranks.links
        if group is not None and not shard.stage:
            group.broadcast_(values)
        elif links is not None and shard.stage:
            links.receive(values)
        if links is not None and not shard.is_last:
            links.send(values)

    def end(self) -> None:
        """Then rank 0 knows that the last stage has all."""
        self._ranks.sum([0], self._device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
