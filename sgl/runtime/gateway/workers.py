"""The workers of a gateway as servers: their addresses, whether they are healthy, and what they tell of themselves.

A worker is looked at every second: one that is merely busy answers. One that refuses connections, or says that it is
not ready, gets no more requests; those that it has go on. One that has answered nothing at all for several looks in a
row is silent: what it has under way is cut."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp

from sgl.errors import ConfigError
from sgl.runtime.gateway.breaker import Breaker
from sgl.runtime.gateway.config import GatewayConfig
from sgl.runtime.gateway.fleet import Fleet
from sgl.runtime.gateway.kv_follower import KvFollower, sources_of
from sgl.runtime.gateway.policy import Worker
from sgl.runtime.gateway.replies import info_of, is_ours, whole
from sgl.runtime.gateway.reports import Load, adapters_of, load_of, mode_of, tokens_of
from sgl.runtime.server.kv_stream import Source
from sgl.runtime.server.placement import BLOCK_IDS
from sgl.runtime.server.probe import PROBE

logger = logging.getLogger(__name__)

PATIENCE, SILENT_SECONDS = 3, 10.0
"""Looks in a row without an answer, and their time, after which a worker is silent."""
MOST_WORKERS = 4096
TIMEOUT = 5.0
"""Seconds of a look."""
_METRICS_BYTES = 8 << 20  # of a worker
_CLOCK_SECONDS = 0.002  # that a timer may be early


class Overdue(aiohttp.ServerDisconnectedError):
    """An answer that has not ended long after its request's deadline."""


class Call:
    """A request at a worker."""

    __slots__ = ("is_cut", "limit", "seconds", "theirs")

    def __init__(self, seconds: float | None) -> None:
        """seconds: until the first byte of the answer, at most."""
        self.seconds = seconds
        self.limit = asyncio.timeout(seconds)
        self.theirs: aiohttp.ClientResponse | None = None  # once there is the first byte
        self.is_cut = False

    def cut(self) -> None:
        """Wait for it no longer: `limit`, or reading the answer, raises."""
        self.is_cut = True
        if self.theirs is None:
            self.limit.reschedule(asyncio.get_running_loop().time())
        else:
            self.theirs.content.set_exception(aiohttp.ServerDisconnectedError("the worker is silent"))

    def end(self) -> None:
        """Its deadline is long past: reading the rest of the answer raises Overdue."""
        if self.theirs is not None:
            self.theirs.content.set_exception(Overdue("the answer goes on beyond its deadline"))


@dataclass(slots=True, eq=False)
class Server:
    """A worker's server."""

    worker: Worker
    url: str
    breaker: Breaker
    tell: Callable[[], None]  # that it may take requests again
    adapters: frozenset[str] = frozenset()  # LoRA adapters' names
    mode: str | None = None  # prefill or decode; None: neither, or not known
    is_up: bool = True
    missed: int = 0  # looks without an answer, in a row
    missed_since: float = 0.0
    heard_at: float = -math.inf  # when a part of an answer came
    calls: set[Call] = field(default_factory=set)
    is_leaving: bool = False  # it has been removed
    checks_keys: bool | None = None  # None: not known
    is_understood: bool = True  # what it says of itself
    load: Load = field(default_factory=Load)
    again: asyncio.TimerHandle | None = None  # when its breaker lets a request pass
    looking: asyncio.Task[None] | None = None  # at it, from the start on

    @property
    def id(self) -> str:
        """The worker's."""
        return self.worker.id

    @property
    def name(self) -> str:
        """For people."""
        return self.url if self.id.rstrip("/") == self.url else f"{self.id} at {self.url}"

    @property
    def lets_pass(self) -> bool:
        """Whether a request may go there now. One that failed is tried again once it answers its looks."""
        is_well = self.is_up and self.breaker.lets_pass and not (self.breaker.is_open and self.missed)
        return is_well and not self.worker.is_draining

    def is_mute(self, began: float) -> bool:
        """Whether it said nothing to anybody since a request began, for as long as a look would wait, and its last
        look got no answer: a client that has no patience proves nothing."""
        return self.missed > 0 and self.heard_at < began <= time.monotonic() - TIMEOUT

    def heard(self) -> None:
        """A part of an answer came from there."""
        had_missed, self.missed, self.heard_at = self.missed, 0, time.monotonic()
        if had_missed:
            self.tell()

    def began_to_answer(self) -> None:
        """A request's first byte came from there."""
        self.breaker.began_to_answer()
        self.heard()
        self.tell()

    def answered(self) -> None:
        """A request to generate was answered there with a result, to the end."""
        self.breaker.succeeded()
        self.heard()
        self.tell()

    def failed(self) -> None:
        """A request failed there."""
        self.breaker.failed()
        if self.breaker.is_open:
            self.forget_again()
            loop = asyncio.get_running_loop()
            self.again = loop.call_later(self.breaker.seconds_left + _CLOCK_SECONDS, self.tell)

    def forget_again(self) -> None:
        """Nobody is told when its breaker lets a request pass."""
        if self.again is not None:
            self.again.cancel()

    def miss(self, began: float) -> bool:
        """A look that began then got no answer. Whether the worker is silent: its calls are cut."""
        if not self.missed:
            self.missed_since = began
        self.missed += 1
        if self.missed < PATIENCE or time.monotonic() - self.missed_since < SILENT_SECONDS:
            return False
        self.cut()
        return True

    def cut(self) -> None:
        """Wait for none of its answers any longer."""
        for call in self.calls:
            call.cut()


class Servers(dict[str, Server]):
    """All of them, by their ids, which they share with a fleet."""

    def __init__(self, config: GatewayConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self.adapters: frozenset[str] = frozenset()
        """The names of all LoRA adapters."""
        self.removed: list[Callable[[str], None]] = []
        """To call with the id of each that has left."""
        self._leaving: set[asyncio.Task[None]] = set()  # that look at those that were removed
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] = {"User-Agent": PROBE}
        if config.worker_api_key is not None:
            self._headers["Authorization"] = f"Bearer {config.worker_api_key}"
        self.kv = KvFollower(fleet.index)
        self._turns: dict[tuple[str | None, str | None, frozenset[str]], dict[asyncio.Future[None], None]] = {}
        """See `turn`."""

    def ready(self) -> list[Server]:
        """Those that take requests now."""
        return [its for its in self.values() if its.lets_pass]

    def _options(self, only: str | None, mode: str | None, adapters: frozenset[str]) -> list[Server]:
        """Of those, that one, or those of that mode that have the adapters, if any worker has."""
        if only is None:
            found = [its for its in self.values() if mode in (None, its.mode) and its.lets_pass]
            if adapters and any(adapters <= its.adapters for its in self.values()):
                found = [its for its in found if adapters <= its.adapters]
            return found
        return [self[only]] if only in self and self[only].lets_pass else []

    def ready_for(
        self,
        mode: str | None,
        tried: Mapping[str, int] = MappingProxyType({}),
        only: str | None = None,
        adapters: frozenset[str] = frozenset(),
    ) -> list[Server]:
        """Those of that mode that take requests now; None: of any, of prefill workers only if there are no others.
        tried: a number of each that was, higher for later ones; those that were not, or the one that was first.
        only: the one that it may be. adapters: that it has, if any worker has them, ready or not."""
        options = self._options(only, mode, adapters)
        if len(options) < 2:  # at one worker, in no time
            return options
        ranks = {its: (tried.get(its.id, 0), its.mode == "prefill") for its in options}
        least = min(ranks.values(), default=None)
        return [its for its, rank in ranks.items() if rank == least]

    def add(self, url: str, worker_id: str | None = None) -> None:
        """One more, or another server in its place. Of the same one, what runs goes on, and it drains no longer. Raises
        ConfigError if there are too many."""
        url = url.rstrip("/")
        worker_id = worker_id or url
        if worker_id in self and self[worker_id].url == url:
            self[worker_id].worker.is_draining = False
            self.tell()
            return
        if len(self) >= MOST_WORKERS and worker_id not in self:
            message = f"a gateway has at most {MOST_WORKERS} workers, which it looks at each second: take one away"
            raise ConfigError(message, option="worker")
        self.remove(worker_id)
        breaker = Breaker(self._config.breaker_failures, self._config.breaker_seconds)
        server = self[worker_id] = Server(self._fleet.add(worker_id), url, breaker, self.tell)
        self.tell()
        if self._session is not None:
            server.looking = asyncio.ensure_future(self._look(server))

    def drain(self, worker_id: str) -> None:
        """Give it no more; what runs goes on."""
        if worker_id in self:
            self[worker_id].worker.is_draining = True

    def remove(self, worker_id: str, *, now: bool = True) -> None:
        """It is gone. now: with what it has under way; otherwise that is cut when the worker is silent. Idempotent."""
        server = self.pop(worker_id, None)
        if server is None:
            return
        server.forget_again()
        task = server.looking
        if task is not None and server.calls and not now:
            server.is_leaving = True
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        else:
            server.cut()
            if task is not None:
                task.cancel()
        self.kv.follow(worker_id, [])
        self._fleet.remove(worker_id)
        for forget in self.removed:
            forget(worker_id)
        self._note_adapters()
        self.tell()

    def start(self, session: aiohttp.ClientSession) -> None:
        """Look at them from now on."""
        self._session = session
        for server in self.values():
            server.looking = asyncio.ensure_future(self._look(server))

    async def stop(self) -> None:
        """Look no more."""
        self._session = None
        for server in self.values():
            server.forget_again()
        tasks = [*(its.looking for its in self.values() if its.looking is not None), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self.kv.close)

    async def turn(self, only: str | None, mode: str | None, adapters: frozenset[str], seconds: float) -> bool:
        """Wait until one of those, see `ready_for`, takes requests, or is gone, or so long. Those that came first go
        first. Whether it is this one's turn: if it does not use it, it is to `tell`."""
        key, turn = (only, mode, adapters), asyncio.get_running_loop().create_future()
        self._turns.setdefault(key, {})[turn] = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await turn
            return turn not in self._turns.get(key, ())
        except asyncio.CancelledError:
            if turn not in self._turns.get(key, ()):  # it had its turn, which another may have now
                self.tell()
            raise
        finally:
            waiting = self._turns.get(key, {})
            waiting.pop(turn, None)
            if not waiting:
                self._turns.pop(key, None)

    def tell(self) -> None:
        """Some worker may take requests now, or is gone: it is the turn of all that can go there, of one if that is to
        try whether it is well again."""
        for (only, mode, adapters), waiting in list(self._turns.items()):
            options = self._options(only, mode, adapters)
            are_all = (only is not None and only not in self) or any(not its.breaker.is_open for its in options)
            for turn in list(itertools.islice(waiting, None if are_all else len(options))):
                del waiting[turn]
                if not turn.done():
                    turn.set_result(None)

    async def texts(self, path: str, headers: Mapping[str, str]) -> dict[str, str]:
        """What each that is up answers there, of those that do with 200."""

        async def text(server: Server) -> tuple[str, str | None]:
            with contextlib.suppress(aiohttp.ClientError, OSError, UnicodeDecodeError):
                async with self._get(server, path, headers) as answer:
                    if answer.status == 200:
                        return server.id, (await whole(answer, most=_METRICS_BYTES)).decode()
            return server.id, None

        found = await asyncio.gather(*(text(server) for server in self.values() if server.is_up))
        return {worker: said for worker, said in found if said is not None}

    async def _look(self, server: Server) -> None:
        while server.calls or not server.is_leaving:
            try:
                async with asyncio.TaskGroup() as looks:
                    looks.create_task(self._look_once(server))
                    if server.is_up and not server.is_leaving:
                        looks.create_task(self._ask(server))
            except ExceptionGroup:  # a defect: looking goes on, or nobody would see that the worker dies
                if self._session is None:  # a task group that fails forgets that it was cancelled
                    return
                logger.exception("worker %s: what it says of itself", server.name)
            await asyncio.sleep(self._config.probe_seconds)

    def _get(self, server: Server, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """Ask a worker itself: it names nobody else to ask."""
        assert self._session is not None
        headers = self._headers if headers is None else headers
        limit = aiohttp.ClientTimeout(total=TIMEOUT)
        return self._session.get(server.url + path, headers=headers, timeout=limit, allow_redirects=False)

    async def _ask(self, server: Server) -> None:
        """What it has to do; nothing, if it does not say."""
        info: dict[str, Any] | None = None
        load, sources, room, status = Load(), list[Source](), 0, 0
        try:
            async with self._get(server, "/get_server_info") as answer:
                info, status = await info_of(answer), answer.status
            is_understood = info is not None
            if info is not None:
                load, sources, room = load_of(info), sources_of(info, server.url), tokens_of(info)
                if (adapters := adapters_of(info)) != server.adapters:
                    server.adapters = adapters
                    self._note_adapters()
                    self.tell()
        except (aiohttp.ClientError, OSError):
            is_understood = server.is_understood
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            is_understood, info = False, None
        if server.is_understood and not is_understood:
            why = "see worker_api_key" if status in (401, 403) else "it may be no server of sgl"
            message = "worker %s does not say what it has to do: /get_server_info answers %d; %s"
            logger.warning(message, server.name, status, why)
        server.is_understood = is_understood
        server.load = load
        if self.get(server.id) is server and server.is_up:
            self._fleet.report(server.worker, load)
            if info is not None:
                self.kv.follow(server.id, sources)
                self._fleet.index.set_room(server.id, room // BLOCK_IDS)
                was, server.mode = server.mode, mode_of(info)
                if was != server.mode:
                    self.tell()

    def _note_adapters(self) -> None:
        """Once for all requests: each is read with them."""
        self.adapters = frozenset().union(*(its.adapters for its in self.values()))

    async def _look_once(self, server: Server) -> None:
        was_up, began = server.is_up, time.monotonic()
        try:
            async with self._get(server, "/health") as answer:
                server.is_up = answer.status < 500
                server.heard()
        except TimeoutError:
            server.is_up = not server.miss(began) and server.is_up
        except (aiohttp.ClientError, OSError) as error:
            if is_ours(error):
                return
            server.is_up = False
            if isinstance(getattr(error, "os_error", error), ConnectionRefusedError):
                server.missed = 0  # it may finish what it has
            else:
                server.miss(began)
        if server.is_leaving:
            return
        if was_up != server.is_up:
            logger.warning("worker %s is %s", server.name, "up" if server.is_up else "down")
        if was_up and not server.is_up:
            server.checks_keys = None
            self.kv.follow(server.id, [])
            self._fleet.index.forget(server.id)
        elif server.is_up and not was_up:
            server.began_to_answer()
        if server.is_up and server.checks_keys is None and self._config.key_rate is not None:
            await self._look_for_keys(server)

    async def _look_for_keys(self, server: Server) -> None:
        """Whether it refuses a wrong key."""
        wrong = {**self._headers, "Authorization": f"Bearer {secrets.token_hex(16)}"}
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self._get(server, "/v1/models", wrong) as answer:
                server.checks_keys = answer.status in (401, 403)

    def about(self) -> list[dict[str, Any]]:
        """Each as plain data."""
        return [
            {
                "id": its.id,
                "url": its.url,
                "mode": its.mode,
                "worker_type": its.mode or "regular",
                "is_healthy": its.is_up and not its.breaker.is_open,
                "is_up": its.is_up,
                "breaker": "open" if its.breaker.is_open else "closed",
                "is_draining": its.worker.is_draining,
                "in_flight": its.worker.in_flight,
                "running": its.load.running,
                "waiting": its.load.waiting,
                "hit_rate": its.load.hit_rate,
                "others": its.worker.others,
                "kv_usage": round(its.worker.kv_usage, 3),
                "work_tokens": round(its.worker.work),
                "tokens_per_second": round(its.worker.rate),
                "placed": its.worker.placed,
                "kv_events": its.id in self.kv.workers,
            }
            for its in self.values()
        ]
