"""Runs a gateway on a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from sgl.runtime.gateway.app import Gateway

BACKLOG = 2048
UNUSED_SECONDS = 60.0
"""After which a connection that is unused, or sends no whole head, is closed."""


@contextlib.asynccontextmanager
async def serving(gateway: Gateway, bound: socket.socket, drain_seconds: float) -> AsyncIterator[asyncio.Event]:
    """Serve within the context, and finish what runs, for so long; yields what SIGTERM sets."""
    options: dict[str, Any] = {"access_log": None, "keepalive_timeout": UNUSED_SECONDS, "lingering_time": 2.0}
    runner = web.AppRunner(gateway.app, handler_cancellation=True, shutdown_timeout=drain_seconds, **options)
    await runner.setup()
    await web.SockSite(runner, bound, backlog=BACKLOG).start()
    gc.collect()
    gc.freeze()  # modules stay: to look through them takes so long that all requests wait
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield stop
    finally:
        await runner.cleanup()
