"""What trainers do with a running engine: stop its generations, give it new weights, go on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from sgl.errors import InvalidRequest
from sgl.lang.ir.sampling import shown
from sgl.runtime import startup
from sgl.runtime.config import EngineConfig
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.owner_process import OwnerProcess
from sgl.runtime.loop.pause import PauseMode
from sgl.runtime.model.update.shipped import FLATTENED, check_load_format, shipped_tensors
from sgl.runtime.occupation import MemoryOccupation
from sgl.runtime.requests.changes import WeightsUpdate, checked_path
from sgl.runtime.sampling_params import checked_seconds
from sgl.runtime.weights import NamedTensors, WeightUpdates


class Trainable:
    """Of an engine. All methods are safe from any thread but the engine's own."""

    config: EngineConfig
    _process: OwnerProcess
    _loop: EngineLoop
    _memory: MemoryOccupation
    _started: startup.Started

    def update_weights(
        self,
        named_tensors: NamedTensors,
        *,
        weight_version: str | None = None,
        hold: bool = False,
    ) -> WeightsUpdate:
        """Replace weights in place, by their names in a Hugging Face checkpoint; tensors that are not given stay.

        Tensors are whole, of any float dtype, on any device, with finite numbers; each rank takes its part. All are
        checked first: after a WeightsError or InvalidRequest the old weights stand. Nothing that is cached is found
        again. Generations under way go on with the KV that they have, unless `pause_generation("retract")` came before.
        weight_version: a name for the weights. hold: check all, and keep it for `commit_update`, so that of several
        engines all take an update or none does. Raises EngineDead, too.
        """
        self._process.check()
        return self._weights.from_tensors(named_tensors, version=weight_version, source="the update", hold=hold)

    def check_weight_updates(self) -> WeightsUpdate:
        """Before or after a series of updates. Nothing is left to do for it: each is complete when it returns. Raises
        WeightsError and InvalidRequest where the engine takes none, and EngineDead."""
        self._process.check()
        self._weights.check_able()
        return WeightsUpdate(
            True, "updates are taken, and each is complete when it is answered: nothing is to be done"
        )

    def commit_update(self) -> WeightsUpdate:
        """Write the update that is held. Raises InvalidRequest if none is, or while weights are released, and
        EngineDead."""
        self._process.check()
        update, path = self._weights.commit()
        if path is not None:
            self.config = dataclasses.replace(self.config, model_path=path)
        return update

    def drop_update(self) -> None:
        """Forget the update that is held. Idempotent. Raises EngineDead."""
        self._process.check()
        self._weights.drop()

    def update_weights_from_tensor(
        self,
        named_tensors: NamedTensors | Sequence[str | bytes] | None = None,
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        serialized_named_tensors: Sequence[str | bytes] | None = None,
        weight_version: str | None = None,
        hold: bool = False,
        is_copy: bool = False,
    ) -> WeightsUpdate:
        """`update_weights`, perhaps with tensors of another process.

        serialized_named_tensors: what torch.multiprocessing's pickler (ForkingPickler) makes of pairs of a name and a
        tensor, as bytes or base64; one of them, or one for each rank, of which the first is taken. On a GPU, tensors
        then travel as handles of its memory (CUDA IPC); on a CPU as names of shared memory, with the sharing strategy
        "file_system". Nothing but tensors is read from them. load_format "flattened_bucket": a dictionary of one
        flattened tensor and its parts' places, which may also be given first. flush_cache changes nothing: what is
        cached of old weights is never found. is_copy: another engine reads the same message, too.
        """
        self._process.check()
        check_load_format(load_format)
        if load_format == FLATTENED and serialized_named_tensors is None:  # as SGLang's Engine takes it
            named_tensors, serialized_named_tensors = None, cast(Any, named_tensors)
        if (named_tensors is None) == (serialized_named_tensors is None):
            message = "give either named_tensors or serialized_named_tensors"
            raise InvalidRequest(message, param="named_tensors")
        if serialized_named_tensors is not None:
            if not isinstance(serialized_named_tensors, list | tuple) or not serialized_named_tensors:
                message = "serialized_named_tensors must be a list with one text, or one for each rank"
                raise InvalidRequest(message, param="serialized_named_tensors")
            named_tensors = shipped_tensors(serialized_named_tensors[0], load_format, is_copy=is_copy)
        assert named_tensors is not None, "one was given"
        given = cast(NamedTensors, named_tensors)
        return self._weights.from_tensors(given, version=weight_version, source="the update", hold=hold)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
        *,
        timeout: float = 300.0,
    ) -> WeightsUpdate:
        """Enter a process group with a trainer, its rank 0, as rank `rank_offset` of `world_size`; with tp_size or
        pp_size, each rank enters, from there on. timeout: seconds for the trainer to come, and later for each update to
        arrive. Raises InvalidRequest."""
        self._process.check()
        seconds = checked_seconds("timeout", timeout)
        self._weights.join(master_address, master_port, rank_offset, world_size, group_name, backend, seconds)
        return WeightsUpdate(True, f"this engine is of the group {group_name!r}")

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
        hold: bool = False,
    ) -> WeightsUpdate:
        """`update_weights` with tensors that a group's trainer broadcasts, in this order; "flattened_bucket": all their
        bytes in one tensor. flush_cache changes nothing. A trainer that sends nothing costs its group, and the old
        weights stand. Raises InvalidRequest, WeightsError and EngineDead."""
        self._process.check()
        check_load_format(load_format)
        is_flat = load_format == FLATTENED
        options: dict[str, Any] = {"version": weight_version, "is_flat": is_flat, "hold": hold}
        return self._weights.from_group(names, dtypes, shapes, group_name, **options)

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> WeightsUpdate:
        """Leave a trainer's group; who is just entering it, or receives, gets InvalidRequest. Raises InvalidRequest for
        an unknown one."""
        self._process.check()
        self._weights.leave(group_name)
        return WeightsUpdate(True, f"this engine is not of the group {group_name!r} any more")

    def update_weights_from_disk(
        self,
        model_path: str | os.PathLike[str],
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
        hold: bool = False,
    ) -> WeightsUpdate:
        """`update_weights` with all tensors of a checkpoint of the same model. load_format: "auto" or "safetensors",
        which are the same. Raises ModelError and InvalidRequest, too."""
        self._process.check()
        if load_format not in (None, "auto", "safetensors"):
            message = f"load_format must be auto or safetensors, not {shown(load_format)}"
            raise InvalidRequest(message, param="load_format")
        path = checked_path("model_path", model_path)
        update = self._weights.from_files(path, version=weight_version, hold=hold)
        if not hold:
            self.config = dataclasses.replace(self.config, model_path=path)
        return update

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first rows of a tensor, as lists of numbers, by its name in a checkpoint. Raises WeightsError for an
        unknown one, and InvalidRequest."""
        self._process.check()
        return self._weights.read(name, truncate_size)

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Begin no further step, and return when none is under way. New requests wait.

        mode: "abort" ends what was asked for so far, with the tokens that there are and finish_reason "abort"; a gen of
        a program fails with RequestAborted. "retract" takes the KV of running generations, which is computed again
        later, with the weights of that time. "in_place" keeps it. Idempotent; programs stay open, and deadlines run.
        Raises InvalidRequest and EngineDead.
        """
        self._process.check()
        self._memory.pause(mode)

    def continue_generation(self) -> bool:
        """Go on after `pause_generation`. False: memory is released, and generations go on once all of it is there
        again. Idempotent. Raises EngineDead."""
        self._process.check()
        return self._memory.go_on()

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> dict[str, int]:
        """Give memory back, for a trainer on the same device; returns bytes by tag.

        tags: of "kv_cache", "weights" and "cuda_graph", of which the last goes with either; None: all that can be given
        back. Weights are kept in host memory. The engine is paused, running generations are computed anew later, and
        nothing that was cached is found again. New requests wait, deadlines run. Idempotent. Raises InvalidRequest and
        EngineDead.
        """
        self._process.check()
        return self._memory.release(tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again that was released; None: all of it. Once all is there, generations go on, unless
        `pause_generation` came before or meanwhile and no `continue_generation` after it. Idempotent. Raises
        InvalidRequest and EngineDead."""
        self._process.check()
        self._memory.resume(tags)

    def weights_hash(self) -> str:
        """Of the numbers of all weights, as hexadecimal digits: the same for any tp_size, pp_size and dp_size. Where
        they are not read back (`get_weights_by_name`), of how each rank holds them. Raises WeightsError where torch
        does not hold them, and EngineDead."""
        self._process.check()
        return self._weights.hash().hex()

    def update_weight_version(self, new_version: str) -> None:
        """Call the present weights so. Raises InvalidRequest and EngineDead."""
        self._process.check()
        self._weights.rename(new_version)

    @property
    def weight_version(self) -> str:
        """What the last update called its weights, or "default"."""
        return self._weights.version

    def _halts(self) -> dict[str, Any]:
        """For users: why nothing is generated."""
        return {"is_paused": self._loop.scheduler.is_paused, "released_memory": self._memory.released}

    @cached_property
    def _weights(self) -> WeightUpdates:
        its = self._started
        return WeightUpdates(
            self.config, its.model, its.scheduler, self._loop, its.group, its.trainers, self._memory
        )
