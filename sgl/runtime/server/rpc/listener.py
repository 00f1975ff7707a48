"""Serves the gRPC service on a port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from sgl.errors import ConfigError
from sgl.runtime.config import ServerConfig
from sgl.runtime.server.rpc.handlers import RpcHandlers
from sgl.runtime.server.rpc.scheduler import Scheduler
from sgl.runtime.server.service import Service

if TYPE_CHECKING:
    from sgl.runtime.server.rpc.kv_relay import KvRelay

_ENDING_SECONDS = 1.0
_PINGS = {
    # gateways ping connections that they do not use, twice a minute
    "grpc.http2.min_ping_interval_without_data_ms": 10_000,
    "grpc.http2.min_recv_ping_interval_without_data_ms": 10_000,
    "grpc.http2.max_ping_strikes": 0,
    "grpc.keepalive_permit_without_calls": 1,
    # and so is noticed whose machine vanished
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 15_000,
}


class RpcListener:
    """A port that is taken, and from `serving` on served."""

    def __init__(self, config: ServerConfig) -> None:
        """Needs a running event loop. Raises ConfigError if the port is in use."""
        options = {
            **_PINGS,
            "grpc.max_receive_message_length": config.max_request_bytes,
            "grpc.max_send_message_length": -1,  # a result is as long as what was asked for
            "grpc.so_reuseport": 0,
        }
        self._server = grpc.aio.server(options=list(options.items()))
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self.port: int = self._server.add_insecure_port(f"{host}:{config.grpc_port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}:{config.grpc_port}: give --grpc-port another, or 0 for any free one",
                option="grpc_port",
            ) from error
        self.url = f"grpc://{host}:{self.port}"

    @contextlib.asynccontextmanager
    async def serving(self, service: Service) -> AsyncIterator[None]:
        """Serve within the context."""
        relay = _relay_of(service)
        self._server.add_generic_rpc_handlers((RpcHandlers(service).handlers(Scheduler(service, relay)),))
        await self._server.start()
        try:
            yield
        finally:
            await self._server.stop(_ENDING_SECONDS)
            if relay is not None:
                await relay.close()


def _relay_of(service: Service) -> KvRelay | None:
    config = service.engine.config
    if config.kv_events is None:
        return None
    from sgl.runtime.server.rpc.kv_relay import KvRelay  # ZeroMQ is there: the engine publishes by it

    return KvRelay(service)
