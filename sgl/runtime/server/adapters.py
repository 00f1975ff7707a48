"""LoRA adapters over HTTP: loading, unloading, and which one a request means."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from aiohttp import web

from sgl.errors import AdapterError, InvalidRequest
from sgl.runtime.server.encoding import json_response
from sgl.runtime.server.errors import NoSuchModel, error_body
from sgl.runtime.server.fields import Lenient
from sgl.runtime.server.replies import LoraUpdate
from sgl.runtime.server.routes import Api, endpoint
from sgl.runtime.server.service import Service


class LoadLoraBody(Lenient):
    """A name for requests, and a folder on the server as peft saves it."""

    lora_name: str
    lora_path: str
    pinned: bool = False
    """Once on the device, it stays there."""


class UnloadLoraBody(Lenient):
    """The name of a loaded adapter."""

    lora_name: str


class LoraApi(Api):
    """The endpoints of SGLang and vLLM."""

    @endpoint(
        "POST /load_lora_adapter",
        "POST /v1/load_lora_adapter",
        example={"lora_name": "sql", "lora_path": "path/to/adapter"},
        answer=LoraUpdate,
        for_admin=True,
    )
    async def load(self, request: web.Request, body: LoadLoraBody) -> web.Response:
        """Load a LoRA adapter. 400 if its files are wrong or its name is in use."""
        if check_name(self._service, body.lora_name) is None:
            message = f"{body.lora_name!r} is the model's own name: give the adapter another"
            return self._failed(InvalidRequest(message, param="lora_name"))
        return await self._changed("load_lora_adapter", body.lora_name, body.lora_path, body.pinned)

    @endpoint(
        "POST /unload_lora_adapter",
        "POST /v1/unload_lora_adapter",
        example={"lora_name": "sql"},
        answer=LoraUpdate,
        for_admin=True,
    )
    async def unload(self, request: web.Request, body: UnloadLoraBody) -> web.Response:
        """Refuse new requests with a LoRA adapter, wait for those that have it, and free it. 400 if there is none."""
        return await self._changed("unload_lora_adapter", body.lora_name)

    async def _changed(self, method: Any, *arguments: Any) -> web.Response:
        try:
            return json_response(asdict(await change_adapter(self._service, method, *arguments)))
        except (InvalidRequest, AdapterError) as error:
            return self._failed(error)

    def _failed(self, error: InvalidRequest | AdapterError) -> web.Response:
        """Our error's body with the fields of SGLang's."""
        loaded = {its.lora_name: its.lora_path for its in self._service.adapters}
        told = {"success": False, "error_message": str(error), "loaded_adapters": loaded}
        return json_response({**error_body(error), **told}, error.http_status)


async def change_adapter(service: Service, method: Any, name: str, *about: Any) -> Any:
    """Load or unload one, and note it; both, also if who asked hangs up. Raises InvalidRequest and AdapterError."""

    async def change() -> Any:
        update = await service.engine.call(method, name, *about)
        service.engine.note_adapter(method, name, *about)
        return update

    return await asyncio.shield(change())


def check_name(service: Service, name: str | None) -> str | None:
    """What may be an adapter's name in the name of a model, `NAME` or `MODEL:NAME`; None for the model itself."""
    served = service.model_name
    if name in (None, "", "default", served, f"{served}:latest", service.engine.config.model_path):
        return None
    assert name is not None, "it was told apart"
    return name if service.has_adapter(name) else name.removeprefix(f"{served}:")


def check_model(service: Service, name: str | None) -> str | None:
    """The adapter that a model's name means; None: the served model alone. Raises NoSuchModel."""
    adapter = check_name(service, name)
    if adapter is not None and not service.has_adapter(adapter):
        adapters = [repr(its.lora_name) for its in service.adapters]
        more = f" and the LoRA adapters {', '.join(adapters)}" if adapters else ""
        raise NoSuchModel(
            f"the model {name!r} does not exist: this server has {service.model_name!r}{more}", param="model"
        )
    return adapter


def adapter_options(service: Service, model: str | None, given: Any, num_prompts: int) -> dict[str, Any]:
    """The engine's arguments for what a body says of its adapter by `model` and `lora_path`. Raises NoSuchModel, and
    InvalidRequest if they differ."""
    named = check_model(service, model)
    if isinstance(given, list) and num_prompts == 1 and len(given) == 1:
        given = given[0]
    if not given:
        return {} if named is None else {"lora_path": named}
    if named is not None and given != named:
        raise InvalidRequest(f"model means the adapter {named!r}, and lora_path {given!r}", param="lora_path")
    return {"lora_path": given}


def shown_model(service: Service, arguments: dict[str, Any]) -> str:
    """The name of what answers a call with these arguments of the engine: the model's, or its adapter's."""
    adapter = arguments.get("lora_path")
    return adapter if isinstance(adapter, str) else service.model_name
