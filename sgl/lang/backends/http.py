"""HTTP for backends: one pool of kept-alive connections, deadlines, retries, server-sent events.

It knows JSON over HTTP and which failures are worth another try; it knows no API. All methods run on the io thread.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from sgl.errors import BackendError, InvalidRequest, RequestTimeout, SglError
from sgl.lang.aio import io

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class HttpClient:
    """JSON requests to one server. Safe to repeat: what is sent twice is a seeded generation or a read."""

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

    async def get(self, path: str) -> Any:
        """The JSON of a GET."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Any) -> Any:
        """The JSON answer to a POST; None if the answer is not JSON."""
        return await self._json("POST", path, body)

    async def delete(self, path: str) -> Any:
        """The JSON answer to a DELETE."""
        return await self._json("DELETE", path, None)

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The JSON objects of a POST's server-sent events, up to `[DONE]`. Retried until the first one only."""
        async for _, event in self.sse("POST", path, body):
            if isinstance(event, dict) and event.get("error"):
                detail = event["error"]
                message = detail.get("message", detail) if isinstance(detail, dict) else detail
                raise BackendError(f"the server failed while streaming: {message}")
            yield event

    async def sse(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        last_event_id: int | None = None,
        max_retries: int | None = None,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Server-sent events, up to `[DONE]`: their numbers, 0 where they have none, and their JSON. Without
        `max_retries`, a request that fails is tried again as others are."""
        headers = {} if last_event_id is None else {"Last-Event-ID": str(last_event_id)}
        retries = self.max_retries if max_retries is None else max_retries
        async with self._answer(method, path, body, headers, retries) as response:
            rest, number = b"", 0
            async for chunk in self._chunks(response):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"id:"):
                        number = int(line[3:])
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield number, _event(data)

    async def close(self) -> None:
        """Close the connections. A later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _json(self, method: str, path: str, body: Any) -> Any:
        async with self._answer(method, path, body, {}, self.max_retries) as response:
            text = await self._in_time(response.text())
        try:
            return json.loads(text)
        except ValueError:
            return None

    async def _chunks(self, response: Any) -> AsyncIterator[bytes]:
        import aiohttp

        try:
            async for chunk in response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BackendError(f"{self.base_url} broke off its answer: {error}", retryable=True) from error
        except TimeoutError as error:
            raise self._late() from error

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], max_retries: int
    ) -> AsyncIterator[Any]:
        """A response of status 200, after as many tries as it takes and is allowed."""
        for attempt in range(max_retries + 1):
            try:
                response = await self._try(method, path, body, headers)
            except BackendError as error:
                if not error.retryable or attempt == max_retries or isinstance(error, RequestTimeout):
                    raise
                await asyncio.sleep(retry_delay(attempt, error))
                continue
            async with response:
                yield response
            return

    async def _try(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Any:
        import aiohttp

        url = self.base_url + path
        try:
            data = None if body is None else json.dumps(body).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{url} takes JSON, which cannot hold what is to be sent: {error}") from error
        try:
            response = await self._in_time(self._client().request(method, url, data=data, headers=headers))
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BackendError(f"{url} cannot be reached: {error}", retryable=True) from error
        if response.status == 200:
            return response
        async with response:
            text = await self._in_time(response.text())
        raise _status_error(url, response.status, text, response.headers.get("Retry-After"))

    async def _in_time(self, work: Any) -> Any:
        try:
            return await work
        except TimeoutError as error:
            raise self._late() from error

    def _late(self) -> RequestTimeout:
        return RequestTimeout(f"{self.base_url} did not answer within {self._timeout:g} s", seconds=self._timeout)

    def _client(self) -> Any:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                connector=aiohttp.TCPConnector(limit=self._max_connections, ssl=self._verify),
            )
            io.close_at_exit(self.close)
        return self._session


def with_scheme(url: str) -> str:
    """The URL without a slash at its end, and with http:// where it names no scheme."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


def retry_delay(attempt: int, error: SglError) -> float:
    """Seconds before the next try: what the server asks for, or a doubling time with some chance in it."""
    asked: float | None = getattr(error, "retry_after", None)
    return min(30.0, asked) if asked is not None else 0.2 * 2**attempt * (0.5 + random.random())


def _status_error(url: str, status: int, text: str, retry_after: str | None) -> Exception:
    try:
        body = json.loads(text)
        detail = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        message = detail.get("message", detail) if isinstance(detail, dict) else detail
    except ValueError:
        message = text
    if status in (400, 404, 413, 422):
        return InvalidRequest(f"{url} refused the request ({status}): {message}")
    error = BackendError(f"{url} failed ({status}): {message}", status=status, retryable=status in RETRIED)
    if retry_after and retry_after.isdigit():
        error.retry_after = float(retry_after)  # type: ignore[attr-defined]
    return error


def _event(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise BackendError(f"the server sent an event that is not JSON: {data[:200]!r}") from error
