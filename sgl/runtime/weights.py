"""New weights for a running engine: checked as a whole, then written in place between two steps.

What is cached of the old ones is found by no later request. Running requests go on with the KV that they have; their
next tokens are of the new weights (`Engine.pause_generation("retract")` before has theirs computed anew).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from sgl.errors import EngineDead, InvalidRequest
from sgl.runtime.config import EngineConfig
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.model.base import Model
from sgl.runtime.model.update.choice import writer_of
from sgl.runtime.model.update.files import Files
from sgl.runtime.model.update.ranks import Told, write
from sgl.runtime.model.update.writer import Given, Writer, check, check_aliases
from sgl.runtime.scheduler.scheduler import Scheduler

FIRST_VERSION = "default"
MAX_TENSORS = 1 << 20
"""Of one update."""
_MOST_CHARACTERS = 1024  # of a version


NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class WeightsUpdate(NamedTuple):
    """What came of an update, in the original's words."""

    success: bool
    message: str


class WeightUpdates:
    """Of one engine. Safe from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        scheduler: Scheduler,
        loop: EngineLoop,
        tells: Callable[[Told], None] | None,
    ) -> None:
        """tells: see `ranks.write`; None: there is one rank."""
        self._config, self._model, self._scheduler, self._loop = config, model, scheduler, loop
        self._tells = tells
        self._writer: Writer | None = None
        self.version = FIRST_VERSION
        self.num_updates = 0

    def from_tensors(self, given: NamedTensors, *, version: str | None, source: str) -> WeightsUpdate:
        """Write some of the model's tensors. Raises WeightsError and InvalidRequest before the first is written, and
        EngineDead."""
        check_version(version)
        tensors = _named(given)
        looks = {name: Given(tuple(its.shape), its.dtype) for name, its in tensors.items()}
        return self._loop.call(
            lambda: self._write(looks, tensors.__getitem__, version, is_whole=False, source=source)
        )

    def from_files(self, path: str, *, version: str | None) -> WeightsUpdate:
        """Write all of the model's tensors from a checkpoint of the same model. Raises ModelError, and EngineDead."""
        check_version(version)
        files = Files(path, self._model, self._config.model_impl)

        def write_all() -> WeightsUpdate:
            looks = files.given(self.writer)
            return self._write(looks, files.get, version, is_whole=True, source=path)

        return self._loop.call(write_all)

    def read(self, name: Any, most: int) -> list[Any]:
        """The first `most` rows of a tensor, in float32. Raises InvalidRequest, and WeightsError for an unknown one."""
        if not isinstance(name, str) or isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise InvalidRequest("name must be a text, and truncate_size a positive number", param="name")

        def read() -> list[Any]:
            writer = self.writer
            own = writer.name(name)
            if own not in writer.shapes:
                check(writer, {own: Given((), torch.float32)}, is_whole=False, source="the request")
            with torch.inference_mode():
                rows: list[Any] = writer.read(own)[:most].float().cpu().tolist()
            return rows

        return self._loop.call(read)

    @property
    def writer(self) -> Writer:
        """The model's. Raises WeightsError."""
        if self._writer is None:
            self._writer = writer_of(self._model, self._config.quantization)
        return self._writer

    def _write(
        self,
        given: Mapping[str, Given],
        get: Callable[[str], torch.Tensor],
        version: str | None,
        *,
        is_whole: bool,
        source: str,
    ) -> WeightsUpdate:
        """On the loop's thread, between two steps."""
        writer = self.writer
        theirs = {writer.name(name): name for name in given if not writer.ignores(writer.name(name))}
        used = {name: given[its] for name, its in theirs.items()}
        check(writer, used, is_whole=is_whole, source=source)
        check_aliases(writer, used.keys(), lambda name: get(theirs[name]), source)
        self._loop.copies.settle()
        try:
            write(self._model, writer, used, lambda name: get(theirs[name]), self._tells)
        except BaseException as error:
            dead = EngineDead(f"an update failed half-way: {type(error).__name__}: {error}")
            self._loop.fail(dead)
            raise dead from error
        self._scheduler.memory.outdate()
        self.num_updates += 1
        self.version = version if version is not None else self.version
        return WeightsUpdate(True, f"{len(used)} tensors are new; weight_version is {self.version!r}")


def check_version(version: Any) -> None:
    """Raise InvalidRequest unless it can name weights."""
    if version is not None and (not isinstance(version, str) or not 0 < len(version) <= _MOST_CHARACTERS):
        raise InvalidRequest(
            f"weight_version must be a text of at most {_MOST_CHARACTERS} characters", param="weight_version"
        )


def _named(given: Any) -> dict[str, torch.Tensor]:
    """Checked pairs. Raises InvalidRequest."""
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    if not pairs or len(pairs) > MAX_TENSORS:
        raise InvalidRequest(f"an update needs 1 to {MAX_TENSORS} tensors, not {len(pairs)}", param="named_tensors")
    found: dict[str, torch.Tensor] = {}
    for pair in pairs:
        name, tensor = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidRequest("named_tensors must be pairs of a name and a tensor", param="named_tensors")
        if name in found:
            raise InvalidRequest(f"{name} is given twice", param="named_tensors")
        found[name] = tensor
    return found
