"""Runs a gateway on a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from aiohttp import web

from sgl.runtime.gateway.app import Gateway
from sgl.runtime.server.connection import Connection

BACKLOG = 2048
UNUSED_SECONDS = 60.0
"""After which a connection that is unused, or sends no whole head, is closed."""

_COLLECTED = (
    20_000  # objects more, of some hundred requests: what these have is not looked through for each few of them
)


@contextlib.asynccontextmanager
async def serving(gateway: Gateway, bound: socket.socket, drain_seconds: float) -> AsyncIterator[asyncio.Event]:
    """Serve within the context, and finish what runs, for so long; yields what SIGTERM sets."""
    options: dict[str, Any] = {"access_log": None, "keepalive_timeout": UNUSED_SECONDS, "lingering_time": 2.0}
    runner = web.AppRunner(gateway.app, handler_cancellation=True, shutdown_timeout=drain_seconds)
    await runner.setup()
    assert runner.server is not None
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    make = partial(_Connection, runner.server, loop=loop, **options)
    listener = await loop.create_server(make, sock=bound, backlog=BACKLOG)
    gc.collect()
    gc.freeze()  # modules stay: to look through them takes so long that all requests wait
    gc.set_threshold(_COLLECTED)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield stop
    finally:
        listener.close()
        await runner.cleanup()


class _Connection(Connection):
    """A server's, whose client has left once it closes its sending side."""

    def eof_received(self) -> None:
        """The client sends no more."""
        web.RequestHandler.eof_received(self)
