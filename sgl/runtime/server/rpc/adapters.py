"""LoRA adapters of the gRPC service. Callers mint an id for each that they load, and requests name it by that."""

from __future__ import annotations

from typing import Any

from smg_grpc_proto import sglang_scheduler_pb2 as pb

from sgl.errors import AdapterError, InvalidRequest
from sgl.runtime.lora_options import LoraPath
from sgl.runtime.server.adapters import change_adapter, check_name
from sgl.runtime.server.service import Service

_MOST_CHARACTERS = 256  # of an id


class AdapterIds:
    """Of one service. The id of an adapter that was loaded otherwise is its name."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._minted: dict[str, LoraPath] = {}  # by id; some may have gone since
        self._coming: set[str] = set()  # ids of those that are being loaded

    def name_of(self, identity: str) -> str:
        """The name of the adapter that a request means, which may be none's."""
        return self._known().get(identity, identity)

    def listed(self) -> Any:
        """All that are loaded."""
        ids = {name: identity for identity, name in self._known().items()}
        found = [
            pb.LoadedLoRAAdapter(
                lora_id=ids.get(its.lora_name, its.lora_name),
                lora_name=its.lora_name,
                lora_path=its.lora_path,
                pinned=its.pinned,
            )
            for its in self._service.adapters
        ]
        return pb.ListLoadedLoRAAdaptersResponse(loaded_adapters=found)

    async def load(self, request: Any) -> Any:
        """Load one; the answer says why not."""
        name, identity = request.lora_name, request.lora_id
        try:
            self._check_new(name, request.lora_path, identity)
            self._coming.add(identity)
            try:
                await change_adapter(self._service, "load_lora_adapter", name, request.lora_path, request.pinned)
            finally:
                self._coming.discard(identity)
            self._minted[identity] = LoraPath(name, request.lora_path, request.pinned)
        except (InvalidRequest, AdapterError) as error:
            return self._told(pb.LoadLoRAAdapterResponse, str(error))
        return self._told(pb.LoadLoRAAdapterResponse)

    async def unload(self, request: Any) -> Any:
        """Unload one, once requests that have it are done; the answer says why not."""
        name, identity = request.lora_name, request.lora_id
        try:
            if not name:
                raise InvalidRequest("lora_name is needed", param="lora_name")
            if identity and self.name_of(identity) != name:
                raise InvalidRequest(
                    f"lora_id={identity!r} is not the id of the adapter {name!r}: ListLoadedLoRAAdapters tells whose "
                    "it is",
                    param="lora_id",
                )
            await change_adapter(self._service, "unload_lora_adapter", name)
        except (InvalidRequest, AdapterError) as error:
            return self._told(pb.UnloadLoRAAdapterResponse, str(error))
        return self._told(pb.UnloadLoRAAdapterResponse)

    def _check_new(self, name: str, path: str, identity: str) -> None:
        for param, text in (("lora_name", name), ("lora_path", path), ("lora_id", identity)):
            if not text:
                raise InvalidRequest(f"{param} is needed", param=param)
        if len(identity) > _MOST_CHARACTERS:
            raise InvalidRequest(
                f"lora_id has {len(identity)} characters: {_MOST_CHARACTERS} are the most", param="lora_id"
            )
        if check_name(self._service, name) is None:
            raise InvalidRequest(f"{name!r} is the model's own name: give the adapter another", param="lora_name")
        if identity in self._coming:
            raise InvalidRequest(f"lora_id={identity!r} is being loaded already: mint another", param="lora_id")
        if identity in self._known() or (identity != name and self._service.has_adapter(identity)):
            raise InvalidRequest(
                f"lora_id={identity!r} is the adapter {self.name_of(identity)!r}: mint another", param="lora_id"
            )

    def _told(self, kind: Any, problem: str = "") -> Any:
        ids = [its.lora_id for its in self.listed().loaded_adapters]
        return kind(success=not problem, message=problem, loaded_lora_ids=ids)

    def _known(self) -> dict[str, str]:
        """Names by minted ids, of those that are still loaded."""
        loaded = {its.lora_name: its for its in self._service.adapters}
        self._minted = {one: its for one, its in self._minted.items() if loaded.get(its.lora_name) == its}
        return {identity: its.lora_name for identity, its in self._minted.items()}
