"""`sgl gateway`: one address for several servers that run already."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING

from sgl.cli.logs import announce, configure_logging
from sgl.cli.options import from_flags
from sgl.errors import ConfigError, needs_extra
from sgl.machine_limits import allow_open_files
from sgl.runtime.gateway.config import GatewayConfig, checked_url
from sgl.runtime.server.serve import listen

if TYPE_CHECKING:  # needs an extra
    from sgl.runtime.gateway.app import Gateway

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
    allow_open_files()
    with needs_extra("gateway", "sgl gateway"):
        from sgl.runtime.gateway.app import Gateway
    serving = Gateway(config, admin_api_key=options.admin_api_key, workers=options.worker)
    asyncio.run(_run(serving, options.host, options.port))
    return 0


async def _run(gateway: Gateway, host: str, port: int) -> None:
    bound = listen(host, port)
    from sgl.runtime.gateway.running import serving

    async with serving(gateway, bound, _DRAIN_SECONDS) as stop:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
        name, number = bound.getsockname()[:2]
        text = f"sgl routes to {len(gateway.servers)} workers at http://{name}:{number}"
        announce(text)
        await stop.wait()
