"""Serves on a socket, and drains at the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from sgl.errors import ConfigError, needs_extra
from sgl.runtime.config import ServerConfig
from sgl.runtime.server.app import build_app
from sgl.runtime.server.connection import Connection
from sgl.runtime.server.service import Service

if TYPE_CHECKING:  # needs an extra
    from sgl.runtime.server.rpc.listener import RpcListener

logger = logging.getLogger(__name__)

_BACKLOG = 2048  # pending connections: a benchmark's clients arrive at once
_SILENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP keepalive, in seconds and tries."""
_HINTS = {
    errno.EADDRINUSE: ": give another port, or 0 for any free one",
    errno.EACCES: ": ports below 1024 are root's: give another port",
}
_LINGER = 2.0  # seconds to read a refused body, so that its client can read the answer


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError."""
    if not 0 <= port < 1 << 16:  # getaddrinfo takes the rest of a division
        raise ConfigError(f"port={port}: a port is a number from 0, any free one, to 65535", option="port")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        notice_silence(bound)
        bound.bind(address)
    except OSError as error:
        raise cannot_listen((host, port), error) from error
    return bound


def cannot_listen(address: tuple[Any, ...], error: OSError, option: str = "port") -> ConfigError:
    """Two sockets can be bound to a port, until one of them listens: so this may show up later, too."""
    where = f"{address[0]}:{address[1]}" + (f" ({option})" if option != "port" else "")
    hint = _HINTS.get(error.errno or 0, "")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        option = "host"
        hint = ": host is a name or address of this machine, 127.0.0.1 for it alone, 0.0.0.0 for all"
    return ConfigError(f"cannot listen on {where}: {error}{hint}", option=option)


def notice_silence(its: socket.socket) -> None:
    """Have a connection, or all that a listening socket accepts, break when the other machine vanished."""
    its.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        if hasattr(socket, name):  # not on every system; connections inherit it
            its.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen_for_rpc(config: ServerConfig) -> RpcListener | None:
    """A port for gRPC, if one is wanted. Needs a running event loop. Raises ConfigError."""
    if config.grpc_port is None:
        return None
    with needs_extra("grpc", "--grpc-port", option="grpc_port"):
        from sgl.runtime.server.rpc.listener import RpcListener
    return RpcListener(config)


@contextlib.asynccontextmanager
async def serving(service: Service, bound: socket.socket, rpc: RpcListener | None = None) -> AsyncIterator[str]:
    """Serve on the socket, and by gRPC, within the context; yields the URL."""
    runner = web.AppRunner(build_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {
        "access_log": None,
        "keepalive_timeout": service.config.read_timeout,
        "lingering_time": _LINGER,
    }
    make = partial(Connection, runner.server, loop=loop, **options)
    try:
        listener = await loop.create_server(make, sock=bound, backlog=_BACKLOG)
    except OSError as error:
        raise cannot_listen(bound.getsockname(), error) from error
    try:
        host, port = bound.getsockname()[:2]
        async with contextlib.nullcontext() if rpc is None else rpc.serving(service):
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        listener.close()
        await runner.cleanup()
        service.close()


async def serve_until_stopped(
    service: Service, bound: socket.socket, on_ready: Callable[[str], None], rpc: RpcListener | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain until the timeout or a second signal."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        async with serving(service, bound, rpc) as url:
            service.reader.start()
            gc.collect()
            gc.freeze()  # modules stay: to look through them takes so long that all requests wait
            on_ready(url)
            await stop.wait()
            service.is_draining = True
            logger.info("draining %d requests", service.metrics.open_requests)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(service.config.drain_timeout):
                    await _drained(service, hurry)
    finally:
        await service.engine.close()
        if service.tracer is not None:
            await asyncio.to_thread(service.tracer.close)


async def _drained(service: Service, hurry: asyncio.Event) -> None:
    while service.metrics.open_requests and not hurry.is_set():
        await asyncio.sleep(0.02)
