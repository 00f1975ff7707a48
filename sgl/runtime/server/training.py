"""What trainers ask of a server, in the original's words: pauses, and new weights."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BeforeValidator, Field

from sgl.errors import InvalidRequest, ModelError
from sgl.numerals import port
from sgl.runtime.server.encoding import json_response
from sgl.runtime.server.errors import error_body
from sgl.runtime.server.fields import Lenient, OneGroup
from sgl.runtime.server.methods import Method
from sgl.runtime.server.replies import ReleasedMemory, StatusMessage, WeightUpdate, WeightVersion
from sgl.runtime.server.routes import Api, endpoint


class PauseBody(Lenient):
    """What becomes of generations under way."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class MemoryBody(Lenient):
    """Which memory: kv_cache, weights, cuda_graph; null: all."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None


Selector = Literal["all", "target"]
"""Both mean the model: a draft model keeps its weights."""


class _Update(Lenient):
    abort_all_requests: bool = Field(False, exclude=True)
    """End all generations first."""
    weight_version: str | None = None
    load_format: str | None = None
    selector: Selector = Field("all", exclude=True)


class DiskBody(_Update):
    """A checkpoint of the same model, in a folder on the server."""

    model_path: str


class TensorBody(_Update):
    """Tensors as torch.multiprocessing's pickler ships them, as base64: one text, or one for each rank."""

    serialized_named_tensors: list[str]


class DistributedBody(_Update):
    """What a trainer is about to broadcast, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


def _port(given: Any) -> Any:
    """AReaL writes it as a text."""
    return (isinstance(given, str) and port(given)) or given


class GroupBody(Lenient):
    """Where the trainer, rank 0, waits, and which rank the engine is."""

    master_address: str
    master_port: Annotated[int, BeforeValidator(_port)]
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"
    pp_rank: OneGroup = Field(None, exclude=True)


class GroupNameBody(Lenient):
    """A group that was entered."""

    group_name: str = "weight_update_group"


class VersionBody(Lenient):
    """What the present weights are called from now on."""

    new_version: str
    abort_all_requests: bool = Field(True, exclude=True)
    """End all generations first."""


class SeriesBody(Lenient):
    """Of which model weights are about to come."""

    selector: Selector = Field("all", exclude=True)


class WeightBody(Lenient):
    """A tensor's name in a checkpoint, and how many of its rows are wanted."""

    name: str
    truncate_size: int = 100


class TrainingApi(Api):
    """The endpoints that verl, slime, miles and AReaL call."""

    @endpoint("POST /pause_generation", example={"mode": "retract"}, for_admin=True)
    async def pause(self, request: web.Request, body: PauseBody) -> StatusMessage:
        """Begin no further step, and answer when none is under way. New requests wait."""
        await self._service.engine.call("pause_generation", body.mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @endpoint("POST /continue_generation", for_admin=True)
    async def go_on(self, request: web.Request) -> StatusMessage:
        """Go on after a pause; while memory is released, once all of it is resumed."""
        goes_on = await self._service.engine.call("continue_generation")
        later = "Generation continues once all memory is resumed."
        return {"message": "Generation continued successfully." if goes_on else later, "status": "ok"}

    @endpoint("POST /release_memory_occupation", example={"tags": ["kv_cache"]}, for_admin=True)
    async def release(self, request: web.Request, body: MemoryBody) -> ReleasedMemory:
        """Pause, forget all that is cached, and give memory back to a trainer on the same device. New requests wait."""
        # to the end, if who asked hangs up: an update waits until all engines have
        released = await asyncio.shield(self._service.engine.call("release_memory_occupation", body.tags))
        return {"message": "Memory released.", "status": "ok", "released": released}

    @endpoint("POST /resume_memory_occupation", example={}, for_admin=True)
    async def resume(self, request: web.Request, body: MemoryBody) -> StatusMessage:
        """Take memory again that was released, and go on once all is there."""
        await asyncio.shield(self._service.engine.call("resume_memory_occupation", body.tags))
        return {"message": "Memory resumed.", "status": "ok"}

    @endpoint(
        "POST /update_weights_from_disk",
        example={"model_path": "path/to/checkpoint"},
        answer=WeightUpdate,
        for_admin=True,
    )
    async def from_disk(self, request: web.Request, body: DiskBody) -> web.Response:
        """Replace all weights by a checkpoint's. 400 if it does not fit; the old ones stand."""
        return await self._changed("update_weights_from_disk", body)

    @endpoint(
        "POST /update_weights_from_tensor",
        example={"serialized_named_tensors": ["gASVLg…"]},
        answer=WeightUpdate,
        for_admin=True,
    )
    async def from_tensor(self, request: web.Request, body: TensorBody) -> web.Response:
        """Replace weights by another process's tensors. 400 if one does not fit; the old ones stand."""
        return await self._changed("update_weights_from_tensor", body)

    @endpoint(
        "POST /update_weights_from_distributed",
        example={"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[4096]]},
        answer=WeightUpdate,
        for_admin=True,
    )
    async def from_distributed(self, request: web.Request, body: DistributedBody) -> web.Response:
        """Replace weights by what a trainer broadcasts. 400 if it does not fit or does not come; the old ones stand."""
        return await self._changed("update_weights_from_distributed", body)

    @endpoint(
        "POST /init_weights_update_group",
        example={"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2},
        answer=WeightUpdate,
        for_admin=True,
    )
    async def enter_group(self, request: web.Request, body: GroupBody) -> web.Response:
        """Enter a process group with a trainer. 400 if it does not come."""
        return await self._changed("init_weights_update_group", body)

    @endpoint("POST /destroy_weights_update_group", example={}, answer=WeightUpdate, for_admin=True)
    async def leave_group(self, request: web.Request, body: GroupNameBody) -> web.Response:
        """Leave a trainer's group. 400 if there is none."""
        return await self._changed("destroy_weights_update_group", body)

    @endpoint(
        "POST /begin_weight_update",
        "POST /end_weight_update",
        "POST /post_process_weights",
        example={},
        answer=WeightUpdate,
        for_admin=True,
    )
    async def series(self, request: web.Request, body: SeriesBody) -> web.Response:
        """Around a series of updates. Nothing is to be done: each is complete when it is answered. 400 if none would be
        taken."""
        return await self._changed("check_weight_updates", body)

    @endpoint(
        "POST /get_weights_by_name", example={"name": "model.norm.weight", "truncate_size": 4}, for_admin=True
    )
    async def read(self, request: web.Request, body: WeightBody) -> list[Any]:
        """The first rows of a tensor. 400 for an unknown one."""
        try:
            rows: list[Any] = await self._service.engine.call("get_weights_by_name", body.name, body.truncate_size)
        except ModelError as error:
            raise InvalidRequest(str(error), param="name") from error
        return rows

    @endpoint("POST /update_weight_version", example={"new_version": "step-2"}, answer=WeightUpdate, for_admin=True)
    async def rename(self, request: web.Request, body: VersionBody) -> web.Response:
        """Give the present weights another name."""
        return await self._changed("update_weight_version", body)

    @endpoint("GET /get_weight_version", "GET /weight_version")
    async def version(self, request: web.Request) -> WeightVersion:
        """What the present weights are called."""
        return {"weight_version": (await self._service.info())["weight_version"]}

    async def _changed(self, method: Method, body: Lenient) -> web.Response:
        """Call an engine's method with a body's fields. It goes on if who asked hangs up, lest of several engines some
        take an update."""
        engine = self._service.engine

        async def change() -> Any:
            if getattr(body, "abort_all_requests", False):
                await engine.call("abort", None)
            found = await engine.call(method, **body.model_dump())
            if isinstance(body, DiskBody):
                engine.note_model(body.model_path)
            return found

        try:
            found = await asyncio.shield(change())
        except (InvalidRequest, ModelError) as error:
            # a ModelError is of the caller's checkpoint
            refused = error if isinstance(error, InvalidRequest) else InvalidRequest(str(error))
            told = {**error_body(refused), "success": False, "message": str(refused)}
            return json_response(told, refused.http_status)
        said, also = found[1] if found else "Succeeded.", {}
        if isinstance(body, VersionBody):
            said, also = f"Weight version updated to {body.new_version}", {"new_version": body.new_version}
        return json_response({"success": True, "message": said, "num_paused_requests": 0, **also})
