"""`sgl serve`: an engine process, and HTTP in front of it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sgl.cli.logs import announce, configure_logging
from sgl.cli.options import configs
from sgl.errors import needs_extra
from sgl.machine_limits import allow_open_files
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.server.engine_process import EngineProcess, prepare
from sgl.runtime.server.option_checks import checked_template
from sgl.runtime.server.replicas import Replicas
from sgl.runtime.server.sampling_defaults import sampling_defaults
from sgl.runtime.server.serve import listen, listen_for_rpc, serve_until_stopped
from sgl.runtime.server.service import Service

if TYPE_CHECKING:  # needs an extra
    from sgl.runtime.server.tracing import Tracer

logger = logging.getLogger(__name__)


def serve(options: SimpleNamespace) -> int:
    """Serve until a signal."""
    engine, server = configs(options, (EngineConfig, ServerConfig))
    configure_logging(server.log_level, server.log_format)
    if engine.node_rank:
        follow(engine)
    else:
        serve_engine(engine, server)
    return 0


def follow(config: EngineConfig) -> None:
    """Compute for host 0 until a signal."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    announce(f"sgl follows {config.dist_init_addr} as host {config.node_rank} of {config.nnodes}")
    from sgl.runtime.parallel.node import run_node  # which needs torch

    run_node(config, stop)


Tell = Callable[[str, EngineConfig], None]


def serve_engine(engine: EngineConfig, config: ServerConfig, tell: Tell = lambda url, config: None) -> None:
    """Serve until a signal; `tell` gets the URL and what was decided of the options once it is up."""
    began = time.monotonic()
    allow_open_files()
    template = checked_template(config)
    defaults = sampling_defaults(config, engine.model_path)
    bound = listen(config.host, config.port)
    logger.info("starting the engine with %s", engine.model_name)
    prepare()  # before there are threads
    asyncio.run(_serve(engine, config, bound, template, defaults, tell, began))


async def _serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    bound: socket.socket,
    template: str | None,
    defaults: dict[str, Any],
    tell: Tell,
    began: float,
) -> None:
    tracer, rpc = _tracer(config), listen_for_rpc(config)
    configure = partial(configure_logging, config.log_level, config.log_format)
    kind = EngineProcess if engine_config.dp_size == 1 else Replicas
    engine = kind(engine_config, configure=configure, watchdog_timeout=config.watchdog_timeout)
    await engine.start()
    service = Service(config, engine, template, defaults, tracer, grpc_port=None if rpc is None else rpc.port)

    def on_ready(url: str) -> None:
        service.metrics.startup_seconds = time.monotonic() - began
        seconds = service.metrics.startup_seconds
        places = url if rpc is None else f"{url} and {rpc.url}"
        text = f"sgl serves {service.model_name}{_shape(engine.config)} at {places} (ready in {seconds:.1f} s)"
        announce(text)
        tell(url, engine.config)

    await serve_until_stopped(service, bound, on_ready, rpc)


def _shape(config: EngineConfig) -> str:
    """Engines and ranks, if there are several."""
    engines = f" by {config.dp_size} engines" if config.dp_size > 1 else ""
    return engines + (f" of {config.num_ranks} ranks" if config.num_ranks > 1 else "")


def _tracer(config: ServerConfig) -> Tracer | None:
    if config.otlp_endpoint is None:
        return None
    with needs_extra("otel", "--otlp-endpoint", option="otlp_endpoint"):
        from sgl.runtime.server.tracing import otlp_tracer
    return otlp_tracer(config.otlp_endpoint)
