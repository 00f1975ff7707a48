"""Pairs prefill with decode workers: the first computes a prompt, the second pulls its pages and answers.

A request is placed at a decode worker first. If that has not computed its prompt, the prefill worker that would be done
with it first does: it gets the request's own body without what concerns the output, and answers `kv_transfer_params`,
which go with the request. What fails on the way costs time alone: the decode worker computes what it is not brought.
Each further try asks anew, which is cheap where the prompt is cached; a lease that nobody will use is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import fields, replace
from typing import Any, Final

import aiohttp
import msgspec
from multidict import CIMultiDict
from prometheus_client import Counter

from sgl.errors import RequestTimeout, SglError
from sgl.runtime.gateway.demands import Pages
from sgl.runtime.gateway.fleet import Ticket
from sgl.runtime.gateway.limits import headers_of
from sgl.runtime.gateway.passing import NotBegunError, Passed, Passing
from sgl.runtime.gateway.reading import Reader
from sgl.runtime.gateway.replies import whole
from sgl.runtime.gateway.workers import Server, Servers
from sgl.runtime.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

PARAMS: Final = "kv_transfer_params"
# within a message, quotes are escaped: no text that an error repeats can look like this
_OF_PAGES = re.compile(rb'"(param"\s*:\s*"kv_transfer_params[".]|message"\s*:\s*"kv_transfer_params\b)')
_MOST_BYTES = 8 << 20  # of a prefill worker's answer
_LIMIT = aiohttp.ClientTimeout(total=5.0)  # to end a lease
_OF_OUTPUTS = {each.name for each in fields(SamplingParams)} | {"sampling_params", "stream", "stream_options"}
_OF_OUTPUTS |= {"return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "logprobs"}
_OF_OUTPUTS |= {"top_logprobs", "max_tokens", "max_completion_tokens", "min_tokens", "best_of", "response_format"}
_OF_OUTPUTS |= {"return_token_ids", "return_tokens_as_token_ids", "include_stop_str_in_output"}
_OF_OUTPUTS |= {"stop_sequences", "output_format", "max_output_tokens", "text", "include", "metadata", "store"}
_NO_OUTPUT: Final[dict[str, dict[str, Any]]] = {
    "/generate": {"sampling_params": {"max_new_tokens": 0}},
    "/v1/responses": {"max_output_tokens": 0, "store": False},
    "/v1/programs": {},
}


def prefill_body(data: bytes | bytearray, path: str) -> bytes:
    """Of a request, the body that asks for its prompt's pages alone."""
    given: dict[str, msgspec.Raw] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    dropped = _OF_OUTPUTS - {"text"} if path == "/generate" else _OF_OUTPUTS
    body: dict[str, Any] = {name: value for name, value in given.items() if name not in dropped}
    body |= _NO_OUTPUT.get(path, {"max_tokens": 0})
    return msgspec.json.encode({**body, f"return_{PARAMS}": True})


class Pairs:
    """Of one gateway."""

    def __init__(
        self,
        passing: Passing,
        servers: Servers,
        reader: Reader,
        session: Callable[[], aiohttp.ClientSession],
        counts: Counter,
        least: int,
    ) -> None:
        """counts: by outcome. least: tokens of a prompt, not computed by the decode worker, that are worth it."""
        self.passing = passing
        self.servers = servers
        self.reader = reader
        self.counts = counts
        self.least = least
        self.apart: set[tuple[str, str]] = set()
        """Prefill and decode workers that do not take each other's pages, as the log has it."""
        self._session = session
        self._ending: set[asyncio.Task[None]] = set()

    def of(
        self, passed: Passed, path: str, pages: Pages, prompt: float | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """Within it, a request brings the pages that it can, and goes to a prefill worker if they are all it wants.
        prompt: tokens that there may be pages of; None: all that are asked."""
        if pages == "none" or not any(its.mode == "prefill" for its in self.servers.values()):
            return contextlib.nullcontext()
        if pages == "wanted":
            passed.mode = "prefill"
            return contextlib.nullcontext()
        pair = Pair(self, passed, path, passed.demand.prompt if prompt is None else prompt)
        passed.pairing = pair
        return contextlib.aclosing(pair)

    def forget(self, worker: str) -> None:
        """It has left."""
        self.apart = {two for two in self.apart if worker not in two}

    def end(self, prefill: Server, params: bytes, headers: Mapping[str, str]) -> None:
        """Have a prefill worker keep pages no longer."""
        task = asyncio.ensure_future(self._end(prefill.url, params, headers))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Wait until what ends has ended."""
        await asyncio.gather(*self._ending)

    async def _end(self, url: str, params: bytes, headers: Mapping[str, str]) -> None:
        body = b'{"%b":%b}' % (PARAMS.encode(), params)
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the lease ends by its time
            headers = {**headers_of(headers), "Content-Type": "application/json"}
            async with self._session().post(f"{url}/end_kv_transfer", data=body, headers=headers, timeout=_LIMIT):
                pass


class Pair:
    """Of one request."""

    def __init__(self, pairs: Pairs, passed: Passed, path: str, prompt: float) -> None:
        self._pairs = pairs
        self._passed = passed
        self._path = path
        self._prompt = prompt
        self._asked: bytes | None = None  # what a prefill worker gets
        self._params: bytes | None = None  # what it answered, until the pages are pulled or let go of
        self._prefill: Server | None = None  # that answered them
        self._is_refused = False

    async def body(self, server: Server, ticket: Ticket) -> bytes | bytearray:
        """See `Pairing`. Raises RequestTimeout."""
        self.end()  # nobody has pulled what an earlier try brought, or all of it
        passed = self._passed
        if self._is_refused or server.mode != "decode":
            return passed.body
        if self._prompt - ticket.found_tokens < self._pairs.least:
            self._count("short")
            return passed.body
        self._params = await self._computed()
        if self._params is None:
            self._count("failed")
            return passed.body
        ticket.computed_elsewhere()
        rest = memoryview(passed.body)[passed.body.index(b"{") + 1 :]
        return b"".join((b'{"', PARAMS.encode(), b'":', self._params, b",", rest))

    def answered(self, server: Server, status: int, first: bytes) -> None:
        """See `Pairing`."""
        if self._params is None or self._prefill is None:
            return
        if status == 400 and _OF_PAGES.search(first):
            self._is_refused = True
            del self._passed.tried[server.id]  # it is well, and may have it without pages
            self._count("refused")
            if (two := (self._prefill.id, server.id)) not in self._pairs.apart:
                self._pairs.apart.update({two} if self._pairs.servers.keys() >= set(two) else ())
                logger.warning("worker %s takes no pages of %s: %s", *reversed(two), first.decode(errors="replace"))
            raise NotBegunError("pages refused")
        if status < 400:
            self._count("paired")
            self._params = self._asked = None

    async def aclose(self) -> None:
        """See `end`."""
        self.end()

    def end(self) -> None:
        """Let go of pages that were not pulled. Idempotent."""
        params, self._params = self._params, None
        if params is not None and self._prefill is not None:
            self._pairs.end(self._prefill, params, self._passed.headers)

    def _count(self, outcome: str) -> None:
        self._pairs.counts.labels(outcome).inc()

    async def _computed(self) -> bytes | None:
        """The `kv_transfer_params` of the prompt, or a list of them; None: there are none."""
        pairs, passed = self._pairs, self._passed
        if not pairs.servers.ready_for("prefill"):
            return None
        try:
            if self._asked is None:
                self._asked = await pairs.reader.read(prefill_body, passed.body, self._path)
            headers = CIMultiDict(passed.headers)
            headers.popall("Accept-Encoding", None)
            session = None if passed.demand.session is None else f"prefill {passed.demand.session}"
            demand = replace(passed.demand, generated=0.0, session=session)
            asked = Passed(
                "POST", passed.path, headers, self._asked, demand, passed.due, mode="prefill", waited=math.inf
            )
            async with pairs.passing.opened(asked) as (theirs, data, self._prefill):
                try:
                    data = await whole(theirs, data, most=_MOST_BYTES)
                    return _params_of(data) if theirs.status == 200 else None
                except (aiohttp.ClientError, OSError, msgspec.MsgspecError, RecursionError):
                    self._prefill.failed()
                    raise
        except RequestTimeout:
            raise
        except (SglError, aiohttp.ClientError, OSError, msgspec.MsgspecError, RecursionError) as error:
            logger.debug("no prefill worker computed a prompt: %s", error)
            return None


def _params_of(data: bytes) -> bytes | None:
    answer = msgspec.json.decode(data)
    several = answer if isinstance(answer, list) else [answer]
    found = [each.get(PARAMS) for each in several if isinstance(each, dict)]
    if len(found) != len(several) or not all(found):
        return None
    return msgspec.json.encode(found if isinstance(answer, list) else found[0])
