"""HTTP client of backends: connection pool, deadlines, retries, server-sent events. Runs on the io thread, or on a
loop whose owner closes it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from sgl.errors import BackendError, InvalidRequest, RequestTimeout, ServerUnreachable, SglError
from sgl.lang.aio import io
from sgl.numerals import whole

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
CONNECT_SECONDS = 10.0  # to connect; beyond, no server is there
FAREWELL_SECONDS = 1.0  # for pending farewells on close
DNS_SECONDS = 300  # keep addresses: an exiting process cannot resolve
MAX_DELAY = 30.0  # seconds between tries
_MOST = 10**12  # number of an event, or seconds to wait


class NotThere(InvalidRequest):
    """The server has nothing at that path, or not any more."""


class HttpClient:
    """JSON requests to one server. All are safe to repeat: seeded generations or reads."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 3,
        max_connections: int = 256,
        verify: bool = True,
    ) -> None:
        self.base_url = with_scheme(base_url)
        self._headers = {"User-Agent": "sgl", "Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        self.max_retries = max_retries
        self._max_connections = max_connections
        self._verify = verify
        self._session: Any = None
        self._loop: Any = None  # the session's; another after a fork
        self._farewells: set[asyncio.Task[Any]] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles no connection."""
        return {**self.__dict__, "_session": None, "_loop": None, "_farewells": set()}

    async def get(self, path: str, *, seconds: float | None = None) -> Any:
        """A GET's JSON, within `seconds` if fewer than the client's timeout."""
        return await self._json("GET", path, None, seconds=seconds)

    async def post(self, path: str, body: Any) -> Any:
        """A POST's JSON answer; None if it is not JSON."""
        return await self._json("POST", path, body)

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """JSON events of a POST up to `[DONE]`. Retried until the first."""
        event = None
        async for _, event in self.sse("POST", path, body):
            if isinstance(event, dict) and event.get("error"):
                detail = event["error"]
                message = detail.get("message", detail) if isinstance(detail, dict) else detail
                raise BackendError(f"the server failed while streaming: {message}")
            yield event
        if event is None:
            raise BackendError(f"{self.base_url}{path} answers a stream without an event")

    async def sse(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        last_event_id: int | None = None,
        max_retries: int | None = None,
        answered: Callable[[], object] = bool,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Events up to `[DONE]` as (number, JSON); 0 without a number. `max_retries`: the client's by default.
        `answered`: called once the events begin."""
        headers = {} if last_event_id is None else {"Last-Event-ID": str(last_event_id)}
        async with self._answer(method, path, body, headers, self._timeout, max_retries) as response:
            answered()
            rest, number = b"", 0
            async for chunk in self._chunks(response):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"id:"):
                        number = whole(line[3:].strip().decode("latin-1"), _MOST) or 0
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield number, _event(data)

    def tell_delete(self, path: str) -> None:
        """Send a DELETE without waiting; `close` does."""
        task = asyncio.get_running_loop().create_task(self._tell_delete(path))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _tell_delete(self, path: str) -> None:
        with suppress(SglError, RuntimeError):  # already gone, or will notice; threads may have ended
            await self._json("DELETE", path, None, max_retries=0)

    async def close(self) -> None:
        """Close connections; later requests reopen."""
        if self._loop is not asyncio.get_running_loop():
            return
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=FAREWELL_SECONDS)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _json(
        self, method: str, path: str, body: Any, *, max_retries: int | None = None, seconds: float | None = None
    ) -> Any:
        seconds = self._timeout if seconds is None else min(seconds, self._timeout)
        async with self._answer(method, path, body, {}, seconds, max_retries) as response:
            text = await self._text(response, seconds)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None

    async def _text(self, response: Any, seconds: float) -> str:
        with self._reading(seconds):
            data: bytes = await response.read()
        return data.decode(errors="replace")

    async def _chunks(self, response: Any) -> AsyncIterator[bytes]:
        with self._reading(self._timeout):
            async for chunk in response.content.iter_any():
                yield chunk

    @contextmanager
    def _reading(self, seconds: float) -> Iterator[None]:
        """Translate errors while reading an answer within `seconds`."""
        import aiohttp

        try:
            yield
        except TimeoutError:
            raise self._late(seconds) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BackendError(f"{self.base_url} broke off its answer: {error}", retryable=True) from None

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        seconds: float,
        max_retries: int | None,
    ) -> AsyncIterator[Any]:
        """A response of status 200, after retries."""
        max_retries = self.max_retries if max_retries is None else max_retries
        for attempt in range(max_retries + 1):
            try:
                response = await self._try(method, path, body, headers, seconds)
            except BackendError as error:
                if not error.retryable or attempt == max_retries or isinstance(error, RequestTimeout):
                    raise
                await asyncio.sleep(retry_delay(attempt, error))
                continue
            async with response:
                yield response
            return

    async def _try(self, method: str, path: str, body: Any, headers: Mapping[str, str], seconds: float) -> Any:
        import aiohttp

        url = self.base_url + path
        try:
            data = None if body is None else json.dumps(body).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{url} takes JSON, which cannot hold what is to be sent: {error}") from error
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            response = await self._client().request(method, url, data=data, headers=headers, timeout=limits)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise unreachable(self.base_url, error) from None
        except TimeoutError:
            raise self._late(seconds) from None
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:  # also of URLs and non-HTTP answers
            text = str(error) or type(error).__name__
            raise BackendError(f"{url} cannot be reached: {text}", retryable=True) from None
        if response.status == 200:
            return response
        async with response:
            text = await self._text(response, seconds)
        raise _status_error(url, response.status, text, response.headers.get("Retry-After"))

    def _late(self, seconds: float) -> RequestTimeout:
        return RequestTimeout(f"{self.base_url} did not answer within {seconds:g} s", seconds=seconds)

    def _client(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            import aiohttp

            self._loop, self._farewells = loop, set()
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(
                    limit=self._max_connections, ssl=self._verify, ttl_dns_cache=DNS_SECONDS
                ),
            )
            if loop is io.loop():  # whoever brings a loop closes the client
                io.close_at_exit(self.close)
        return self._session


def with_scheme(url: str) -> str:
    """The URL without trailing slash; the default scheme is http."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


def unreachable(url: str, error: OSError) -> ServerUnreachable:
    """An error that says why no server was found and how to start one."""
    import aiohttp

    cause = getattr(error, "os_error", error)
    if is_late := isinstance(error, TimeoutError):
        reason = f"no connection within {CONNECT_SECONDS:g} s"
    elif isinstance(cause, ConnectionRefusedError):
        reason = "the connection was refused"
    else:
        reason = getattr(cause, "strerror", None) or str(cause)
    message = f"{url} cannot be reached: there is no server ({reason})"
    parts = urlsplit(url)
    if parts.scheme == "https" or isinstance(error, aiohttp.ClientSSLError):
        message += "; is that its address?"
    else:
        message += f"; `sgl serve` starts a server, with --port {parts.port or 80} there"
    return ServerUnreachable(message, url=url, retryable=not is_late)


def retry_delay(attempt: int, error: SglError) -> float:
    """Seconds to the next try: the server's wish, or exponential backoff with jitter."""
    asked: float | None = getattr(error, "retry_after", None)
    seconds = asked if asked is not None else 0.2 * 2 ** min(attempt, 10) * (0.5 + random.random())
    return min(MAX_DELAY, seconds)


def _status_error(url: str, status: int, text: str, retry_after: str | None) -> Exception:
    try:
        body = json.loads(text)
        detail = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        message = detail.get("message", detail) if isinstance(detail, dict) else detail
    except ValueError:
        message = text
    if status in (400, 404, 413, 422):
        kind = NotThere if status == 404 else InvalidRequest
        return kind(f"{url} refused the request ({status}): {message}")
    hint = " (api_key of a backend, --api-key of a command)" if status == 401 else ""
    error = BackendError(f"{url} failed ({status}): {message}{hint}", status=status, retryable=status in RETRIED)
    if retry_after and (seconds := whole(retry_after, _MOST)) is not None:
        error.retry_after = float(seconds)  # type: ignore[attr-defined]
    return error


def _event(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BackendError(f"the server sent an event that is not JSON: {data[:200]!r}") from error
