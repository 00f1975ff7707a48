"""aiohttp's connection, with our error bodies for clients that speak no HTTP or stop early."""

from __future__ import annotations

import json

from aiohttp import web

from sgl.runtime.server.encoding import json_response
from sgl.runtime.server.errors import described, error_response
from sgl.runtime.server.identity import new_identity, working_for


class Connection(web.RequestHandler):
    """One connection. A client that closes its sending side is told that its request was given up."""

    is_owed = False  # bytes came, no answer begun
    _is_rest = False  # bytes still belong to an answered request

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        self.is_owed = not self._is_rest
        super().data_received(data)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; aiohttp's own errors get our shape."""
        if isinstance(resp, web.HTTPException):
            resp = error_response(resp)
        if request.content.exception() is not None:  # no further request can be found behind such a body
            resp.force_close()
        self._is_rest = not request.content.is_eof()
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer invalid HTTP. Raises ConnectionError if an answer has begun."""
        identity = new_identity()
        with working_for(identity):
            super().handle_error(request, status, exc, message)  # logs it
        self.is_owed = False
        if status == 400:
            status, message = _too_long(message or "")
        what = " ".join(message.split()).rstrip(" ^") if message else "internal error: the server's log has it"
        body = described(what, status, "bad_http" if status < 500 else None)
        response = json_response(body, status, {"X-Request-Id": identity})
        response.force_close()
        return response

    def eof_received(self) -> None:
        """The client sends no more; what is written here still reaches it."""
        if self.is_owed and self.transport is not None and not self.transport.is_closing():
            message = (
                "the client closed its side of the connection before it had its answer: the request was given up"
            )
            body = json.dumps(described(message, 400, "client_closed")).encode()
            head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
            head += f"X-Request-Id: {new_identity()}\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        super().eof_received()


def _too_long(message: str) -> tuple[int, str]:
    """Status and message for a parser's refusal, recognised by its words."""
    if message.startswith("Got more than"):
        if "bytearray" in message:  # a path
            return 414, "the path is too long"
        return 431, "a header is too long"
    return 431 if message.startswith("Too many headers") else 400, message
