"""A cluster's process: it holds the listening socket, keeps a router behind it, has Ray Serve keep the replicas, and
knows which of them take requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec
from aiohttp import web

from sgl.errors import BackendError, ConfigError, EngineDead
from sgl.runtime.cluster.config import Options, refuse
from sgl.runtime.cluster.control import Control
from sgl.runtime.cluster.placement import Placement, placed
from sgl.runtime.cluster.registry import Registry
from sgl.runtime.cluster.router import RouterProcess
from sgl.runtime.cluster.running import Running, began
from sgl.runtime.cluster.scaling import Scaler
from sgl.runtime.cluster.serve_app import RayCluster, ServeApp, keep_token
from sgl.runtime.server.serve import cannot_listen

logger = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_MUTE_SECONDS = 15.0  # that the end waits for what Ray Serve is being told
_ENDING = "the cluster is ending: start it anew with `sgl cluster up FILE`"


@dataclass(frozen=True, slots=True)
class _Before:
    """What served before an update that goes on."""

    options: Options
    counts: dict[str, int]
    generation: int
    placements: dict[str, Placement]
    failure: str | None  # that Ray Serve told already


class _Scale(msgspec.Struct):
    """The body of /scale."""

    replicas: Annotated[int, msgspec.Meta(le=1 << 20)]
    kind: str = "worker"


class _Update(msgspec.Struct):
    """The body of /update."""

    options: dict[str, Any]
    source: str


class Cluster:
    """One cluster. Its methods run on one event loop."""

    _how: tuple[dict[str, Placement], bool]
    """Of the generation that is deployed, by kind; and whether each new replica starts first."""

    def __init__(self, options: Options, bound: socket.socket, ray: RayCluster) -> None:
        """bound: where clients connect."""
        self._options = options
        self._bound = bound
        self._ray = ray
        self._registry = Registry()
        self._token = secrets.token_urlsafe(32)
        self._transfer_secret = secrets.token_hex(32)
        told = [web.get("/status", self._status), web.post("/scale", self._scale)]
        told += [web.post("/update", self._update), web.post("/down", self._down)]
        self._control = Control(self._token, self._registry, told)
        self._scaler = Scaler(options.cluster)
        self._host, self._port = bound.getsockname()[:2]  # the socket is closed while the cluster ends
        self._app = ServeApp(f"sgl-{self._port}")
        self._counts = options.counts
        self._generation = self._newest = 0
        self._before: _Before | None = None
        self._progress = 0, 0.0  # of an update: workers that serve, and since when so many
        self._undone: dict[str, Any] | None = None
        self._controller: int | None = None
        self._changing = asyncio.Lock()  # Ray Serve is told one thing at a time
        self._call: asyncio.Future[Any] | None = None  # that tells it
        self._stop = asyncio.Event()
        self._control_url = ""
        self._router: RouterProcess | None = None

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Serve until `stop`. on_ready: called with the URL once all replicas serve. Raises EngineDead if one does
        not start."""
        async with self._controlled():
            options = {
                "control": self._control_url,
                "token": self._token,
                "gateway": {**asdict(self._options.gateway), "worker_api_key": self._options.own_key},
                "drain_timeout": self._options.server.drain_timeout,
                "log_level": self._options.server.log_level,
                "log_format": self._options.server.log_format,
            }
            self._router = router = RouterProcess(self._bound, options)
            known = self._known()
            known.write()
            try:
                async with asyncio.TaskGroup() as tasks:
                    kept = [tasks.create_task(router.keep()), tasks.create_task(self._tick())]
                    self._serve(self._placements(self._options, self._counts), surge=False)
                    async with self._turn():
                        await self._tell(self._deploy)
                    if await self._all_are_ready():
                        on_ready(known.url)
                        await self._stop.wait()
                    for task in kept:
                        task.cancel()
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                self.stop()  # nothing is deployed from now on
                await router.stop(self._options.server.drain_timeout)
                is_there = await asyncio.to_thread(self._ray.is_there)
                is_told = is_there and await self._is_told()
                is_deleted = is_there and await asyncio.to_thread(self._app.delete)
                if (is_told and is_deleted) or self._ray.is_own:
                    known.forget()
                else:
                    address = self._ray.address
                    logger.error("no Ray answers at %s: `sgl cluster down` ends the replicas when it does", address)

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(await self.status())

    async def _scale(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=_Scale)
        await self.scale(asked.replicas, asked.kind)
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=_Update)
        return web.json_response({"generation": await self.update(asked.options, asked.source)})

    async def _down(self, request: web.Request) -> web.Response:
        self.stop()
        return web.json_response({})

    async def status(self) -> dict[str, Any]:
        """All about it."""
        workers = self._registry.table(time.monotonic())
        return {
            "url": self._known().url,
            "model": self._options.engine.model_name,
            "replicas": sum(self._counts.values()),
            "prefill_replicas": self._counts["prefill"],
            "generation": self._generation,
            "is_updating": self._before is not None,
            "undone": self._undone,  # the last update whose replicas did not start
            "last_failure": self._registry.last_failure,
            "serving": len(self._registry.serving(time.monotonic())),
            "patience": self._options.cluster.start_timeout + self._options.server.drain_timeout,
            "pids": {
                "cluster": os.getpid(),
                "router": None if self._router is None else self._router.pid,
                "controller": self._controller,
            },
            "router_restarts": 0 if self._router is None else self._router.restarts,
            "ray_address": self._ray.address,
            "logs": self._ray.logs,
            "workers": workers,
        }

    async def scale(self, replicas: int, kind: str = "worker", *, by_load: bool = False) -> None:
        """Have so many replicas of a kind, worker or prefill. by_load: nobody asks for it. Raises ConfigError."""
        async with self._change():
            counts, before = self._scaled(self._options, self._counts, replicas, kind), self._before
            if before is not None and (not by_load or before.options.cluster.is_automatic):
                try:  # so many are to serve if the update is undone, too
                    before = replace(before, counts=self._scaled(before.options, before.counts, replicas, kind))
                except ConfigError as error:
                    text = f"an update goes on, which may be undone, and with the options of before: {error}"
                    raise ConfigError(text, option=error.option) from None
            logger.info("%d %s replicas in place of %d", replicas, kind, self._counts[kind])
            self._counts, self._before = counts, before
            await self._tell(self._app.scale, counts)

    def _scaled(self, options: Options, counts: dict[str, int], replicas: int, kind: str) -> dict[str, int]:
        """How many of each kind there are then. Raises ConfigError where those options do not allow it."""
        config = options.cluster
        refuse(replicas < 1, "replicas", f"{replicas} replicas: one at least; `sgl cluster down` ends all")
        refuse(not counts.get(kind), "prefill", "this cluster has no prefill replicas: its file says how many")
        is_outside = kind == "worker" and config.is_automatic and not config.least <= replicas <= config.most
        text = (
            f"{replicas} replicas: load decides between min_replicas={config.least} and max_replicas={config.most}"
        )
        refuse(is_outside, "replicas", text)
        counts = {**counts, kind: replicas}
        self._placements(options, counts)
        return counts

    async def update(self, given: dict[str, Any], source: str) -> int:
        """Replace all replicas by ones with a file's options; the number of their generation. Raises ConfigError."""
        options = Options.of(given, source, is_on_own_ray=self._ray.is_own)
        for name, before, after in self._fixed(options):
            text = f"{source}: {name} stays {before!r} while the cluster runs: end it and start it anew"
            refuse(before != after, name, text)
        async with self._change():
            counts = options.counts
            placements, surge = self._placements(options, counts), True
            try:
                self._placements(options, {kind: number + 1 for kind, number in counts.items()})
            except ConfigError:
                surge = False
            if self._before is None:
                self._before = _Before(
                    self._options, self._counts, self._generation, self._how[0], self._app.failure
                )
            self._take(options, counts)
            self._serve(placements, surge=surge)
            self._progress = 0, time.monotonic()
            logger.info("all replicas are replaced by generation %d", self._generation)
            await self._tell(self._deploy)
            return self._generation

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """As `_turn`. Raises EngineDead once the cluster ends: what is deployed then, nobody would delete."""
        async with self._turn():
            if self._stop.is_set():
                raise EngineDead(_ENDING)
            yield
            if self._call is not None and not self._call.done():
                raise EngineDead(_ENDING)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """To tell Ray Serve something. `_changing` is held until the call has ended, also where nobody waits for it any
        more: its thread goes on, and would deploy behind what deletes."""
        await self._changing.acquire()

        def end(call: asyncio.Future[Any] | None) -> None:
            self._changing.release()
            if call is not None and not call.cancelled():
                call.exception()  # which whoever waited was told

        try:
            yield
        finally:
            if self._call is None or self._call.done():
                end(self._call)
            else:
                self._call.add_done_callback(end)

    async def _tell(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call what tells Ray Serve something, in a `_turn`. Returns once `stop` comes, too: it may never answer."""
        told: Future[object] = Future()

        def run() -> None:
            try:
                told.set_result(call(*arguments))
            except BaseException as error:  # raised where it is waited for
                told.set_exception(error)

        self._call = answer = asyncio.wrap_future(told)
        threading.Thread(target=run, name="sgl-told", daemon=True).start()  # which the loop's end does not wait for
        stop: asyncio.Future[object] = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([answer, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if answer.done():
            answer.result()

    async def _is_told(self) -> bool:
        """Wait until Ray Serve has heard what it was being told; False: it does not answer."""
        try:
            async with asyncio.timeout(_MUTE_SECONDS), self._changing:
                return True
        except TimeoutError:
            logger.error("Ray Serve has not answered what it was told for %g s: it is left alone", _MUTE_SECONDS)
            return False

    def _take(self, options: Options, counts: dict[str, int]) -> None:
        self._options, self._counts = options, counts
        self._scaler = Scaler(options.cluster)

    async def _settle(self) -> None:
        """Note that an update is done, or undo it where a replica of it does not start."""
        if self._before is None or self._changing.locked():
            return
        now, before = time.monotonic(), self._before
        num_ready = sum(worker.state == "ready" for worker in self._registry.of(self._generation))
        if num_ready != self._progress[0]:
            self._progress = num_ready, now
        if num_ready == sum(self._counts.values()) == len(self._registry.workers):
            self._before = None
            return
        why = self._registry.failure(self._generation)
        if why is None and self._app.failure != before.failure:
            why = self._app.failure
        if why is None and now - self._progress[1] > self._options.cluster.start_timeout:
            why = f"no further replica was ready within {self._options.cluster.start_timeout:g} s"
        if why is None:
            return
        async with self._turn():
            logger.error("generation %d does not start, %d serves on: %s", self._generation, before.generation, why)
            self._undone = {"generation": self._generation, "reason": why}
            self._before = None
            self._take(before.options, before.counts)
            self._generation = before.generation
            self._how = before.placements, self._how[1]
            await self._tell(self._deploy)

    def _fixed(self, options: Options) -> Iterator[tuple[str, Any, Any]]:
        """What an update cannot change, and its values before and after."""
        ours = self._options
        for name in ("host", "port"):
            yield name, getattr(ours.server, name), getattr(options.server, name)
        for name in ("control_port", "ray_address"):
            yield name, getattr(ours.cluster, name), getattr(options.cluster, name)
        for name, value in asdict(ours.gateway).items():
            yield name, value, getattr(options.gateway, name)

    def _placements(self, options: Options, counts: Mapping[str, int]) -> dict[str, Placement]:
        return placed(options.engines, self._ray.hosts(), counts)

    def _serve(self, placements: dict[str, Placement], *, surge: bool) -> None:
        """Offer the options to replicas of a new generation."""
        options = self._options
        self._newest += 1
        self._generation = self._newest
        self._control.offer(
            self._generation,
            {
                **options.for_replicas(),
                "bind": "127.0.0.1" if self._ray.is_own else None,
                "key": options.own_key,
                "transfer_secret": self._transfer_secret,
                "drain_timeout": options.server.drain_timeout,
                "unhealthy_timeout": options.cluster.unhealthy_timeout,
            },
            self._generation if self._before is None else self._before.generation,
        )
        self._how = placements, surge

    def _deploy(self) -> None:
        placements, surge = self._how
        keep_token(self._app.name, self._token)
        arguments = {
            "control": self._control_url,
            "key": self._app.name,
            "generation": self._generation,
            "hosts": placements["worker"].hosts,  # those of other kinds have one
        }
        self._app.deploy(self._options, placements, self._counts, arguments, surge=surge)

    async def _all_are_ready(self) -> bool:
        """Wait for them; False: `stop` came first."""
        end = time.monotonic() + self._options.cluster.start_timeout
        while len(self._registry.serving(time.monotonic())) < sum(self._counts.values()):
            if (why := self._registry.failure(self._generation) or self._app.failure) is not None:
                raise EngineDead(f"a replica did not start: {why}")
            if time.monotonic() > end:
                raise EngineDead(f"the replicas were not ready within {self._options.cluster.start_timeout:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._stop.wait()
            if self._stop.is_set():
                return False
        return True

    async def _tick(self) -> None:
        """Keep the registry in step with Ray Serve, and the number of replicas with the load."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                states = await asyncio.to_thread(self._app.states)
            except BackendError as error:
                logger.warning("%s", error)
            else:
                await self._settle()
                if states is not None:
                    self._registry.compare(states, time.monotonic())
            self._controller = await asyncio.to_thread(self._app.controller_pid)
            before = self._registry.version
            self._registry.tick(time.monotonic())
            if self._registry.version != before:
                await self._control.tell()
            if self._options.cluster.is_automatic and not self._changing.locked():
                now = time.monotonic()
                wanted = self._scaler.wanted(self._counts["worker"], self._registry.loads(now), now)
                if wanted != self._counts["worker"]:
                    await self._scale_by_itself(wanted)

    async def _scale_by_itself(self, wanted: int) -> None:
        try:
            await self.scale(wanted, by_load=True)
        except (ConfigError, EngineDead) as error:  # it ends
            logger.warning("the load asks for %d replicas: %s", wanted, error)

    def _known(self) -> Running:
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return Running(
            pid=os.getpid(),
            port=self._port,
            url=f"http://{shown}:{self._port}",
            control=self._control_url,
            token=self._token,
            ray_address=None if self._ray.is_own else self._ray.address,
            app=self._app.name,
            folder=self._ray.folder,
            began=began(os.getpid()),
            ray_auth=os.environ.get("RAY_AUTH_MODE"),
        )

    @contextlib.asynccontextmanager
    async def _controlled(self) -> AsyncIterator[None]:
        runner = web.AppRunner(self._control.app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._ray.host, self._options.cluster.control_port)
            try:
                await site.start()
            except OSError as error:
                address = self._ray.host, self._options.cluster.control_port
                raise cannot_listen(address, error, option="control_port") from error
            port = runner.addresses[0][1]
            self._control_url = f"http://{self._ray.host}:{port}"
            yield
        finally:
            await runner.cleanup()
