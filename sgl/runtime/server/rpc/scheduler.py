"""The gRPC service SglangScheduler, by which smg and other gateways send token ids: the same engine as over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from sgl.errors import EngineDead, InvalidRequest
from sgl.runtime.requests.threads import in_thread
from sgl.runtime.server.embeddings.api import embed
from sgl.runtime.server.encoding import size_of_result
from sgl.runtime.server.errors import NotServed
from sgl.runtime.server.identity import current_caller
from sgl.runtime.server.native import SILENT_SECONDS, UNRESPONSIVE_SECONDS
from sgl.runtime.server.rpc.about import About
from sgl.runtime.server.rpc.adapters import AdapterIds
from sgl.runtime.server.rpc.bodies import (
    UNDONE_PROFILE,
    check_rank,
    generate_arguments,
    ids_of,
    refuse,
    stream_interval,
)
from sgl.runtime.server.rpc.handlers import Write, rpc
from sgl.runtime.server.rpc.replies import Stream, completions
from sgl.runtime.server.service import Service

if TYPE_CHECKING:
    from sgl.runtime.server.rpc.kv_relay import KvRelay

# Methods have the definition's names.
# ruff: noqa: N802


class Scheduler:
    """The methods."""

    def __init__(self, service: Service, relay: KvRelay | None) -> None:
        """relay: of KV events, if the engine tells them."""
        self._service, self._relay = service, relay
        self._about = About(service)
        self._adapters = AdapterIds(service)

    @rpc()
    async def Generate(self, request: Any, write: Write) -> None:
        """Chunks if asked for, and the end of each output."""
        service = self._service
        dp_size = service.engine.config.dp_size
        arguments = generate_arguments(request, context_length=service.context_length, dp_size=dp_size)
        if request.lora_id:
            arguments["lora_path"] = self._adapters.name_of(request.lora_id)
        if not request.stream:
            results = await self._service.generate(**arguments)
            several = results if isinstance(results, list) else [results]
            build = partial(completions, request.request_id, several)
            for message in await in_thread(build, sum(map(size_of_result, several))):
                await write(message)
            return
        stream = Stream(request.request_id, stream_interval(request))
        async with contextlib.aclosing(self._service.stream(**arguments)) as events:
            async for event in events:
                for message in await in_thread(partial(stream.messages, event), size_of_result(event)):
                    await write(message)

    @rpc()
    async def Embed(self, request: Any) -> Any:
        """A prompt's embedding."""
        if request.is_cross_encoder or request.texts:
            raise InvalidRequest("is_cross_encoder is not supported here: rank over HTTP, at /v1/rerank")
        if request.HasField("mm_inputs"):
            raise InvalidRequest("mm_inputs is not supported here", param="mm_inputs")
        if request.data_parallel_rank:
            check_rank(request, self._service.engine.config.dp_size)
        ids = ids_of(request, self._service.context_length)
        found = await embed(self._service, [ids], param="tokenized")
        [vector] = found.vectors
        usage = found.usage["prompt_tokens"]
        return pb.EmbedResponse(embedding=vector, embedding_dim=len(vector), prompt_tokens=usage)

    @rpc(is_open=True, is_probe=True)
    async def HealthCheck(self, request: Any) -> Any:
        """Whether the engine's loop moves, as /health says."""
        try:
            self._service.check_is_up(within=UNRESPONSIVE_SECONDS, heard_within=SILENT_SECONDS)
        except EngineDead as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message="ok")

    @rpc()
    async def Abort(self, request: Any) -> Any:
        """End a request of the caller's; unknown ones are ignored."""
        if not request.request_id:
            raise InvalidRequest("request_id is needed", param="request_id")
        await self._service.abort(request.request_id, current_caller.get())
        return pb.AbortResponse(success=True, message="it has ended")

    @rpc(is_probe=True)
    async def GetModelInfo(self, request: Any) -> Any:
        """The served model."""
        return await self._about.model()

    @rpc(is_probe=True)
    async def GetServerInfo(self, request: Any) -> Any:
        """Options, version and what runs."""
        return await self._about.server()

    @rpc(is_probe=True)
    async def GetLoads(self, request: Any) -> Any:
        """What each engine has to do."""
        rank = request.dp_rank if request.HasField("dp_rank") else None
        return await self._about.loads(rank, request.include)

    @rpc()
    async def GetTokenizer(self, request: Any, write: Write) -> None:
        """The tokenizer's files."""
        for chunk in await asyncio.to_thread(self._about.tokenizer):
            await write(chunk)

    @rpc(for_admin=True)
    async def LoadLoRAAdapter(self, request: Any) -> Any:
        """Load a LoRA adapter from a folder of this server."""
        return await self._adapters.load(request)

    @rpc(for_admin=True)
    async def UnloadLoRAAdapter(self, request: Any) -> Any:
        """Refuse new requests with a LoRA adapter, wait for those that have it, and free it."""
        return await self._adapters.unload(request)

    @rpc(is_probe=True)
    async def ListLoadedLoRAAdapters(self, request: Any) -> Any:
        """Those that requests may name, however they were loaded."""
        return self._adapters.listed()

    @rpc(for_admin=True, is_probe=True)
    async def SubscribeKvEvents(self, request: Any, write: Write) -> None:
        """What the caches store and drop."""
        if self._relay is None:
            raise NotServed("this server's caches tell nothing: start it with --kv-events tcp://HOST:PORT")
        found = self._relay.batches(request.start_sequence_number, lambda: self._service.is_draining)
        async with contextlib.aclosing(found) as batches:
            async for batch in batches:
                await write(batch)

    @rpc(for_admin=True)
    async def StartProfile(self, request: Any) -> Any:
        """Record a profile of steps until StopProfile."""
        refuse(request, UNDONE_PROFILE)
        await self._service.engine.call("start_profile")
        return common_pb2.ProfileResponse(success=True, message="steps are recorded until StopProfile")

    @rpc(for_admin=True)
    async def StopProfile(self, request: Any) -> Any:
        """Write the profile, for Chrome or Perfetto."""
        path = await self._service.engine.call("stop_profile")
        return common_pb2.ProfileResponse(success=True, message=f"the profile is in {path} on the server")

    @rpc(for_admin=True)
    async def FlushCache(self, request: Any) -> Any:
        """Drop cached prefixes, once nothing runs or `timeout_s` is over."""
        flush = partial(self._service.engine.call, "flush_cache")
        is_empty = await flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(0.0, request.timeout_s), 3600.0)):
                while not is_empty:
                    await asyncio.sleep(0.1)
                    is_empty = await flush()
        said = "" if is_empty else "running requests hold some cached prefixes; the others were forgotten"
        return common_pb2.FlushCacheResponse(success=is_empty, message=said)
