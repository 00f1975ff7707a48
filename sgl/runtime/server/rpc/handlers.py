"""What every call of the gRPC service passes before and after its method: key, deadline, log, metrics, errors.

A call that is cancelled, or whose time is over, cancels its method, which aborts its request as over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message_factory import GetMessageClass
from multidict import CIMultiDict
from smg_grpc_proto import sglang_scheduler_pb2

from sgl.errors import RequestTimeout, SglError
from sgl.lang.ir.sampling import MAX_SECONDS
from sgl.runtime.server.answering import Arrived, answering
from sgl.runtime.server.deadline import Deadline, deadline
from sgl.runtime.server.errors import error_body
from sgl.runtime.server.keys import Keys
from sgl.runtime.server.service import Service

logger = logging.getLogger(__name__)

SERVICE = sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"]
"""The definition."""
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
Write = Callable[[Any], Awaitable[None]]

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_DETAIL_BYTES = 1300  # they travel in a header, which clients take up to 8 KiB of, at three bytes each
_LEAST_SECONDS = 1e-3


def rpc(*, for_admin: bool = False, is_open: bool = False, is_probe: bool = False) -> Callable[[Method], Method]:
    """Marks a method by who may call it, and calls that answer well as no news."""

    def mark(method: Method) -> Method:
        its: Any = method  # functions take any
        its.for_admin, its.is_open, its.is_probe = for_admin, is_open, is_probe
        return method

    return mark


class RpcHandlers:
    """Of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._keys = Keys(service)

    def handlers(self, scheduler: Any) -> grpc.GenericRpcHandler:
        """The definition's methods that `scheduler` has. A unary one takes a message and returns one; one that streams
        is also given a function that writes. gRPC answers for the others that they are not implemented."""
        found = {}
        for method in SERVICE.methods:
            function = getattr(scheduler, method.name, None)
            if function is None:
                continue
            make = (
                grpc.unary_stream_rpc_method_handler
                if method.server_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            found[method.name] = make(
                partial(self._handle, method.name, function, method.server_streaming),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=_packed,
            )
        return grpc.method_handlers_generic_handler(SERVICE.full_name, found)

    async def _handle(self, name: str, function: Any, streams: bool, request: Any, context: Any) -> Any:
        headers = CIMultiDict(
            (key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)
        )
        if named := getattr(request, "request_id", ""):
            headers.setdefault("X-Request-Id", named)
        about = Arrived("POST", f"/{SERVICE.full_name}/{name}", headers, context.peer(), function.is_probe)
        with answering(self._service, about) as answered:
            due = Deadline()
            deadline.set(due)
            try:
                self._keys.enter(headers, is_open=function.is_open, for_admin=function.for_admin)
                async with due.enforced():
                    if (left := context.time_remaining()) is not None:
                        due.set(min(max(left, _LEAST_SECONDS), MAX_SECONDS))
                    arguments = (request, partial(self._write, context)) if streams else (request,)
                    reply = await function(*arguments)
                answered.status = 200
                return reply
            except SglError as error:
                failure: Exception = error
                answered.status = error.http_status
            except asyncio.CancelledError:
                raise
            except Exception as error:  # a defect: logged, and told as INTERNAL
                logger.exception("the request failed")
                failure, answered.status = error, 500
        said = error_body(failure)["error"]["message"].encode()[:_DETAIL_BYTES].decode(errors="ignore")
        return await context.abort(_CODES.get(answered.status, grpc.StatusCode.INTERNAL), said)

    async def _write(self, context: Any, message: Any) -> None:
        """Send a message. Raises RequestTimeout to a client that does not read."""
        seconds = self._service.config.write_timeout
        try:
            async with asyncio.timeout(seconds):
                await context.write(message)
        except TimeoutError:
            raise RequestTimeout(f"the client read nothing for {seconds:g} s", seconds=seconds) from None


def _packed(message: Any) -> bytes:
    """A message, or one that was packed before."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())
