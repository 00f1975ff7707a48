"""The gateway's HTTP application: who may enter, what it answers itself, and what it passes on.

It answers /health, /metrics and /workers; what concerns all workers (/flush_cache, adapters) it asks of all. A worker's
answer to anything else passes unchanged."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from sgl.errors import ConfigError, EngineDead, InvalidRequest, QueueFull, SglError
from sgl.runtime.gateway.bodies import Bodies
from sgl.runtime.gateway.config import GatewayConfig, checked_url
from sgl.runtime.gateway.demands import Facts, facts_of, session_of, unread
from sgl.runtime.gateway.fleet import Fleet
from sgl.runtime.gateway.limits import Limits, headers_of, key_of
from sgl.runtime.gateway.metrics import GatewayMetrics, text_of
from sgl.runtime.gateway.pairs import Pairs
from sgl.runtime.gateway.passing import Passed, Passing, in_pieces
from sgl.runtime.gateway.policy import Demand
from sgl.runtime.gateway.programs import Programs
from sgl.runtime.gateway.reading import Reader
from sgl.runtime.gateway.replies import whole, why_not
from sgl.runtime.gateway.workers import Call, Server, Servers
from sgl.runtime.sampling_params import checked_seconds
from sgl.runtime.server.deadline import DEADLINE_HEADER, header_seconds
from sgl.runtime.server.encoding import json_response
from sgl.runtime.server.errors import BodyTooLong, WrongKey, error_response
from sgl.runtime.server.pages import page
from sgl.runtime.server.serve import notice_silence

logger = logging.getLogger(__name__)

PROGRAM_BYTES = 32 << 20  # of one body, which is kept
READ_BYTES = 32 << 20  # of another body; of a longer one, only its length is used
MOST_READ = 16  # large bodies that wait to be read, before others are passed on unread
TO_ALL_SECONDS = 600.0  # for a worker to load an adapter, say

_TO_ALL = {"/flush_cache", "/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter"}
_TO_ALL |= {"/v1/unload_lora_adapter", "/start_profile", "/stop_profile", "/abort_request"}
_TRAINERS = {"/pause_generation", "/continue_generation", "/get_weights_by_name", "/post_process_weights"}
_TRAINERS |= {f"/{verb}_memory_occupation" for verb in ("release", "resume")} | {"/update_weight_version"}
_TRAINERS |= {f"/{verb}_weight_update" for verb in ("begin", "end")}
_TRAINERS |= {f"/{verb}_weights_update_group" for verb in ("init", "destroy")}
_TRAINERS |= {f"/update_weights_from_{where}" for where in ("disk", "tensor", "distributed")}
"""Of one engine, or of a group that counts them."""
_HEALTH = ("/health", "/health_generate", "/ready", "/ping")
_LABELS = {*_TO_ALL, *_HEALTH, "/cluster", "/metrics", "/workers", "/list_workers"}
_LABELS |= {"/generate", "/encode", "/tokenize"}
_LABELS |= {f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings", "tags", "show")}
_LABELS |= {f"/v1/{name}" for name in ("chat", "completions", "embeddings", "messages", "models")}
_LABELS |= {f"/v1/{name}" for name in ("programs", "responses", "tokenize")}


class Gateway:
    """The application, and its workers."""

    def __init__(
        self, config: GatewayConfig | None = None, *, admin_api_key: str | None = None, workers: Sequence[str] = ()
    ) -> None:
        """admin_api_key: of what changes the workers; None: nobody may. workers: URLs."""
        self.config = config or GatewayConfig()
        self.fleet = Fleet(self.config.routing_policy)
        self.servers = Servers(self.config, self.fleet)
        self.metrics = GatewayMetrics()
        self._admin_api_key = admin_api_key
        self._limits = Limits(self.config)
        self.metrics.waiting.set_function(lambda: self._limits.num_waiting)
        self._bodies = Bodies()
        self._reader = Reader()
        self._client: aiohttp.ClientSession | None = None
        about = self.config, self.fleet, self.servers, self.metrics, self._limits
        self._passing = Passing(*about, self._session)
        least = self.config.min_prefill_tokens
        self._pairs = Pairs(self._passing, self.servers, self._reader, self._session, self.metrics.pairs, least)
        self._programs = Programs(
            self._passing, self._pairs, self._reader, self._session, self.metrics.reopened.inc
        )
        self.servers.removed += [self.metrics.forget, self._pairs.forget]
        self._merging = asyncio.Lock()
        self._started = time.time()
        for url in workers:
            self.servers.add(url)
        self.app = web.Application(middlewares=[self._guard])
        self.app.cleanup_ctx.append(self._connected)
        for path in _HEALTH:
            self.app.router.add_get(path, self._health)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/cluster", self._page)
        self.app.router.add_get("/cluster/status", self._status)
        self.app.router.add_route("*", "/workers", self._workers)
        self.app.router.add_route("*", "/workers/{id:.+}", self._workers)
        self.app.router.add_get("/list_workers", self._urls)
        self.app.router.add_route("*", "/{path:.*}", self._pass)

    def _session(self) -> aiohttp.ClientSession:
        assert self._client is not None, "the application runs"
        return self._client

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, connect=10.0, sock_connect=5.0)  # with its name's address
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=10.0, socket_factory=_to_worker)
        of_clients = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # theirs, or none
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),  # cookies are the clients'
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=of_clients,
        ) as self._client:
            self.servers.start(self._client)
            yield
            await self._programs.close()
            await self._pairs.close()
            await self.servers.stop()
            self._reader.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.metrics.open.inc()
        response: web.StreamResponse | None = None
        try:
            response = await handler(request)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # each is answered
            if isinstance(error, QueueFull):
                self.metrics.refused.labels("full").inc()
            elif not isinstance(error, (web.HTTPException, SglError)):  # a defect, answered with 500
                logger.exception("the request failed")
            response = error_response(error)
        finally:
            self.metrics.open.dec()
            status = 499 if response is None else response.status
            self.metrics.requests.labels(_known_path(request.path), str(status)).inc()
        return response

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        if not request.rel_url.raw_path.startswith("/"):
            raise InvalidRequest(
                f"a request names a path such as /generate, not {request.raw_path!r}", param="path"
            )
        await self._limits.count(key_of(request.headers), request.remote or "")
        async with self._bodies.of(request) as body:
            return await self._pass_body(request, body, arrived)

    async def _pass_body(self, request: web.Request, body: bytearray, arrived: float) -> web.StreamResponse:
        is_program = request.path == "/v1/programs" or request.path.startswith("/v1/programs/")
        if is_program and len(body) > PROGRAM_BYTES:
            raise BodyTooLong(f"a program or a segment may have {PROGRAM_BYTES} bytes here, not {len(body)}")
        if request.path in _TRAINERS:
            raise InvalidRequest(f"{request.path} is for each worker: /workers lists their URLs", param="path")
        if request.path in _TO_ALL:
            return await self._to_all(request, body)
        if request.path == "/v1/programs" and request.method == "POST":
            async with self._limits.place():
                return await self._programs.create(request, body, _due(request, None, arrived))
        if request.path.startswith("/v1/programs/"):
            return await self._programs.of_one(request, body)
        facts = await self._facts(request, body)
        due = _due(request, facts.timeout, arrived)
        passed = Passed(request.method, _target(request), request.headers, body, facts.demand, due)
        response = request.path.split("/")[3] if request.path.startswith("/v1/responses/") else facts.previous
        home = self._passing.stored.get(response or "")
        passed.only = home if home in self.servers else None  # gone: another says that there is no such response
        if request.method != "POST":
            return await self._passing.answer(request, passed)
        async with self._limits.place(), self._pairs.of(passed, request.path, facts.pages):
            return await self._passing.answer(request, passed)

    async def _facts(self, request: web.Request, body: bytearray) -> Facts:
        """Of what a request asks. Where many large bodies wait to be read, or it is too large, its length."""
        if request.method != "POST":
            return Facts(Demand())
        session = session_of(request.headers)
        if self._reader.num_reading >= MOST_READ or len(body) > READ_BYTES:
            return unread(body, session)
        try:
            return await self._reader.read(facts_of, body, request.path, session, self.servers.adapters)
        except InvalidRequest:
            return unread(body, session)

    async def _to_all(self, request: web.Request, body: bytearray) -> web.StreamResponse:
        """The first answer, or the first that is an error."""
        ready = self.servers.ready()
        if not ready:
            raise EngineDead("no worker takes requests")

        async def ask(server: Server) -> web.Response:
            call = Call(TO_ALL_SECONDS)
            headers = CIMultiDict(headers_of(request.headers, "Content-Type"))
            server.calls.add(call)  # of a silent worker, too
            try:
                async with (
                    call.limit,
                    self._session().request(
                        request.method,
                        server.url + _target(request),
                        data=in_pieces(body, headers),
                        headers=headers,
                        allow_redirects=False,
                    ) as theirs,
                ):
                    text = await whole(theirs)
                    if (reason := why_not(theirs, "GET", text)) is not None:
                        raise aiohttp.ClientPayloadError(reason)
                    return web.Response(status=theirs.status, body=text, content_type=theirs.content_type)
            except (aiohttp.ClientError, OSError) as error:
                why = str(error) or type(error).__name__
                return error_response(EngineDead(f"the worker {server.id} did not answer: {why}"))
            finally:
                server.calls.discard(call)

        answers = await asyncio.gather(*(ask(server) for server in ready))
        return max(answers, key=lambda answer: answer.status)

    async def _health(self, request: web.Request) -> web.Response:
        """200 while a worker takes requests."""
        ready = self.servers.ready()
        status = "ok" if ready else "no worker takes requests"
        about = {"status": status, "workers": len(self.servers), "ready": len(ready)}
        return json_response(about) if ready else json_response(about, 503, {"Retry-After": "2"})

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = headers_of(request.headers)
        async with self._merging:  # in a thread: the workers' texts are long
            self.metrics.tell(self.servers)
            text = await asyncio.to_thread(text_of, self.metrics, await self.servers.texts("/metrics", headers))
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _page(self, request: web.Request) -> web.Response:
        """The workers and what they do, for people."""
        return page("sgl.runtime.gateway", "page.html")

    async def _status(self, request: web.Request) -> web.Response:
        """What the page shows."""
        counts = self.metrics.counts()
        return json_response(
            {
                "time": time.time(),
                "started": self._started,
                "policy": self.config.routing_policy,
                "ready": len(self.servers.ready()),
                "programs": len(self._programs.open),
                **counts,
                "open_requests": counts["open_requests"] - 1,  # this request
                "workers": self.servers.about(),
            }
        )

    async def _workers(self, request: web.Request) -> web.Response:
        """List them, add one, or let one go: as SGLang's router does, whose clients read the answers."""
        if request.method == "GET":
            return json_response(self._listed(request.match_info.get("id")))
        _, _, given = request.headers.get("Authorization", "").partition(" ")
        if self._admin_api_key is None or not hmac.compare_digest(
            given.encode("utf-8", "surrogateescape"), self._admin_api_key.encode()
        ):
            raise WrongKey("workers are changed with the gateway's admin_api_key only")
        if request.method == "POST" and "id" not in request.match_info:
            added = _worker(await request.read())
            try:
                self.servers.add(added.url, added.id)
            except ConfigError as error:  # there are too many
                raise InvalidRequest(str(error), param="url") from error
        elif request.method == "DELETE":
            worker = self._listed(request.match_info.get("id") or request.query.get("id", ""))["id"]
            if request.query.get("now") == "true":
                self.servers.remove(worker)
            else:
                self.servers.drain(worker)
        else:
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "POST", "DELETE"])
        return json_response(self._listed())

    def _listed(self, worker: str | None = None) -> dict[str, Any]:
        """All workers, or one by its id or URL. Raises InvalidRequest."""
        found = self.servers.about()
        if worker is not None:
            named = [its for its in found if {worker, worker.rstrip("/")} & {its["id"], its["url"]}]
            if not named:
                raise InvalidRequest(f"there is no worker {worker!r}: /workers lists them", param="id")
            return named[0]
        kinds = Counter(its["worker_type"] for its in found)
        stats = {f"{kind}_count": kinds[kind] for kind in ("regular", "prefill", "decode")}
        return {"workers": found, "total": len(found), "stats": stats}

    async def _urls(self, request: web.Request) -> web.Response:
        """As SGLang's older routers list them."""
        return json_response({"urls": [its["url"] for its in self.servers.about()]})


def _due(request: web.Request, timeout: float | None, arrived: float) -> float | None:
    """When the request is due: by its header, or its body's timeout. Raises InvalidRequest for a wrong header."""
    if (given := request.headers.get(DEADLINE_HEADER)) is not None:
        return arrived + header_seconds(given)
    return None if timeout is None else arrived + checked_seconds("timeout", timeout)


def _to_worker(about: tuple[Any, ...]) -> socket.socket:
    """A socket for a connection."""
    its = socket.socket(*about[:3])
    notice_silence(its)
    return its


class _Added(msgspec.Struct):
    """What a worker is added with."""

    url: str
    id: str | None = None


def _worker(body: bytes) -> _Added:
    """Raises InvalidRequest."""
    try:
        added = msgspec.json.decode(body, type=_Added)
        checked_url(added.url)
    except (msgspec.MsgspecError, RecursionError):
        text = (
            'a worker is added with a JSON object: {"url": "http://HOST:PORT"}, and a string as its "id", or none'
        )
        raise InvalidRequest(text, param="url") from None
    except ConfigError as error:
        raise InvalidRequest(str(error), param="url") from error
    return added


def _target(request: web.Request) -> str:
    """Path and query as they came. A request may name a host, too: it goes to no other than a worker's."""
    return request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs


def _known_path(path: str) -> str:
    """A path as a metric's label: its beginning, if that is one of a few."""
    parts = path.split("/")
    label = "/".join(parts[: 3 if parts[1:2] in (["v1"], ["api"]) else 2])
    return label if label in _LABELS else "other"
