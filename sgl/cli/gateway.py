"""`sgl gateway`: one address for several servers that run already."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING

from aiohttp import web
from rich.console import Console

from sgl.cli.logs import configure_logging
from sgl.cli.options import from_flags
from sgl.errors import ConfigError, needs_extra
from sgl.runtime.gateway.config import GatewayConfig, checked_url
from sgl.runtime.server.serve import listen

if TYPE_CHECKING:  # needs an extra
    from sgl.runtime.gateway.app import Gateway

_BACKLOG = 2048
_DRAIN_SECONDS = 30.0


def gateway(options: SimpleNamespace) -> int:
    """Pass requests on until a signal."""
    if not options.worker and options.admin_api_key is None:
        raise ConfigError(
            "a gateway needs workers: name each by --worker http://HOST:PORT, or give --admin-api-key KEY, with which "
            "they are added at /workers",
            option="worker",
        )
    config = GatewayConfig.from_options(from_flags(options, GatewayConfig))
    for url in options.worker:
        checked_url(url)
    configure_logging("info", "text")
    with needs_extra("gateway", "sgl gateway"):
        from sgl.runtime.gateway.app import Gateway
    serving = Gateway(config, admin_api_key=options.admin_api_key, workers=options.worker)
    asyncio.run(_run(serving, options.host, options.port))
    return 0


async def _run(serving: Gateway, host: str, port: int) -> None:
    bound = listen(host, port)
    from sgl.runtime.gateway.app import RUNNING

    runner = web.AppRunner(serving.app, shutdown_timeout=_DRAIN_SECONDS, **RUNNING)
    await runner.setup()
    await web.SockSite(runner, bound, backlog=_BACKLOG).start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    name, number = bound.getsockname()[:2]
    text = f"sgl routes to {len(serving.servers)} workers at http://{name}:{number}"
    Console(soft_wrap=True, highlight=False).print(text, style="bold", markup=False)
    try:
        await stop.wait()
    finally:
        await runner.cleanup()
