"""What trainers do with a running engine: stop its generations, give it new weights, go on."""

from __future__ import annotations

import dataclasses
import os
from functools import cached_property
from typing import Any

from sgl.runtime import startup
from sgl.runtime.config import EngineConfig
from sgl.runtime.loop.home import Home
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.pause import PauseMode, go_on, pause
from sgl.runtime.parallel.wire import Write
from sgl.runtime.weights import NamedTensors, WeightsUpdate, WeightUpdates


class Trainable:
    """Of an engine. All methods are safe from any thread but the engine's own."""

    config: EngineConfig
    _home: Home
    _loop: EngineLoop
    _started: startup.Started

    def update_weights(
        self,
        named_tensors: NamedTensors,
        *,
        weight_version: str | None = None,
    ) -> WeightsUpdate:
        """Replace weights in place, by their names in a Hugging Face checkpoint; tensors that are not given stay.

        Tensors are whole, of any float dtype, on any device; each rank takes its part. All are checked first: after a
        WeightsError or InvalidRequest the old weights stand. Nothing that is cached is found again. Generations under
        way go on with the KV that they have, unless `pause_generation("retract")` came before. weight_version: a name
        for the weights. Raises EngineDead, too.
        """
        self._home.check()
        return self._weights.from_tensors(named_tensors, version=weight_version, source="the update")

    def update_weights_from_disk(
        self, model_path: str | os.PathLike[str], *, weight_version: str | None = None
    ) -> WeightsUpdate:
        """`update_weights` with all tensors of a checkpoint of the same model. Raises ModelError, too."""
        self._home.check()
        update = self._weights.from_files(os.fspath(model_path), version=weight_version)
        self.config = dataclasses.replace(self.config, model_path=os.fspath(model_path))
        return update

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first rows of a tensor, as lists of numbers, by its name in a checkpoint. Raises WeightsError for an
        unknown one or one that is cut among ranks, and InvalidRequest."""
        self._home.check()
        return self._weights.read(name, truncate_size)

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Begin no further step, and return when none is under way. New requests wait.

        mode: "abort" ends what was asked for so far, with the tokens that there are and finish_reason "abort"; a gen of
        a program fails with RequestAborted. "retract" takes the KV of running generations, which is computed again
        later, with the weights of that time. "in_place" keeps it. Idempotent; programs stay open, and deadlines run.
        Raises InvalidRequest and EngineDead.
        """
        self._home.check()
        pause(self._loop, mode)

    def continue_generation(self) -> None:
        """Go on after `pause_generation`. Idempotent. Raises EngineDead."""
        self._home.check()
        go_on(self._loop)

    @property
    def weight_version(self) -> str:
        """What the last update called its weights, or "default"."""
        return self._weights.version

    @cached_property
    def _weights(self) -> WeightUpdates:
        started, group = self._started, self._started.group
        tells = None if group is None else lambda told: group.send(Write(told))
        return WeightUpdates(self.config, started.model, started.scheduler, self._loop, tells)
