"""The router's process: the gateway on a listening socket that it inherits, told by the cluster's process which workers
there are."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from typing import Any

import aiohttp

from sgl.child import command
from sgl.runtime.cluster.control import NOTHING_KNOWN
from sgl.runtime.cluster.link import TOKEN_HEADER
from sgl.runtime.cluster.member import end, tell
from sgl.runtime.gateway.app import Gateway
from sgl.runtime.gateway.config import GatewayConfig
from sgl.runtime.gateway.running import BACKLOG, serving
from sgl.runtime.server.serve import cannot_listen

logger = logging.getLogger(__name__)

_CODE = "from sgl.cli.router import main; main()"
_PAUSE_SECONDS = 0.5
_AGAIN_SECONDS = 1.0  # a router that lived shorter is not started again at once


class RouterProcess:
    """Keeps one running. The socket stays open here: while a router is being replaced, connections wait."""

    def __init__(self, bound: socket.socket, options: dict[str, Any]) -> None:
        """options: of `route`."""
        try:
            bound.listen(BACKLOG)
        except OSError as error:
            raise cannot_listen(bound.getsockname(), error) from error
        self._bound = bound
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts = -1

    @property
    def pid(self) -> int | None:
        """The process's."""
        return None if self._process is None else self._process.pid

    async def keep(self) -> None:
        """Start it, and start it again whenever it ends, until cancelled."""
        while True:
            began = asyncio.get_running_loop().time()
            self.restarts += 1
            self._process = process = subprocess.Popen(
                command(_CODE), stdin=subprocess.PIPE, pass_fds=[self._bound.fileno()], start_new_session=True
            )
            await asyncio.to_thread(tell, process, {**self._options, "fd": self._bound.fileno()})
            code = await asyncio.to_thread(process.wait)
            logger.error("the router ended (code %d): it is started again", code)
            if asyncio.get_running_loop().time() - began < _AGAIN_SECONDS:
                await asyncio.sleep(_AGAIN_SECONDS)

    async def stop(self, timeout: float) -> None:
        """Refuse connections, finish what runs for up to so many seconds, and end. `keep` is cancelled before."""
        self._bound.close()
        if self._process is not None:
            await asyncio.to_thread(end, self._process, timeout)


async def route(options: dict[str, Any]) -> None:
    """Route until SIGTERM, or a defect keeps it from following the workers, then finish what runs. options: fd (the
    socket), control, token, gateway (of GatewayConfig), drain_timeout."""
    gateway = Gateway(GatewayConfig(**options["gateway"]))
    bound = socket.socket(fileno=options["fd"])
    async with serving(gateway, bound, options["drain_timeout"]) as stop, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(_follow(gateway, options["control"], options["token"]))
        await stop.wait()
        following.cancel()


async def _follow(gateway: Gateway, control: str, token: str) -> None:
    """Keep the gateway's workers those that take requests."""
    version, known, draining = NOTHING_KNOWN, dict[str, str](), set[str]()
    headers = {TOKEN_HEADER: f"Bearer {token}"}
    async with aiohttp.ClientSession(control, headers=headers) as session:
        while True:
            try:
                async with session.get("/workers", params={"version": version}) as answer:
                    answer.raise_for_status()
                    news = await answer.json()
            except (aiohttp.ClientError, TimeoutError) as error:
                logger.warning("the cluster does not answer: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            version, workers = news["version"], news["workers"]
            for name, url in known.items():
                if name in news["draining"]:
                    gateway.servers.drain(name)
                elif workers.get(name) != url:  # gone, or another server is in its place
                    gateway.servers.remove(name, now=False)
            for name in draining.difference(news["draining"]):  # it has finished
                gateway.servers.remove(name, now=False)
            for name, url in workers.items():
                if known.get(name) != url:
                    gateway.servers.add(url, name)
            known, draining = workers, set(news["draining"])
