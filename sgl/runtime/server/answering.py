"""What every request leaves behind, whichever protocol it came by: its id, a line in the log, a span, counts."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl.runtime.server.history import Note, note
from sgl.runtime.server.identity import current_caller, new_identity, request_id

if TYPE_CHECKING:
    from sgl.runtime.server.service import Service

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request."""

    method: str
    path: str  # of its endpoint
    headers: Mapping[str, str]
    client: str | None
    is_probe: bool = False  # no news if it is answered well


@dataclass(slots=True)
class Answered:
    """Its answer."""

    status: int = 499  # the client left, unless it is answered


@contextlib.contextmanager
def answering(service: Service, arrived: Arrived) -> Iterator[Answered]:
    """Answer a request within the context, and say how."""
    given = arrived.headers.get("X-Request-Id", "")
    identity = given if _REQUEST_ID.fullmatch(given) else new_identity()
    request_id.set(identity)
    began = time.monotonic()
    metrics, tracer, method, path = service.metrics, service.tracer, arrived.method, arrived.path
    metrics.open_requests += 1
    current = Note(identity, path, None, time.time())
    note.set(current)
    answered = Answered()
    spanned = (
        contextlib.nullcontext() if tracer is None else tracer.request(method, path, identity, arrived.headers)
    )
    with spanned as span:
        try:
            yield answered
        finally:
            status = answered.status
            metrics.open_requests -= 1
            service.history.ended(current, status)
            metrics.answered(path, status)
            seconds = time.monotonic() - began
            fields = {"method": method, "path": path, "status": status}
            fields |= {"seconds": round(seconds, 6), "client": arrived.client}
            if current_caller.get().name is not None:
                fields["key"] = current_caller.get().name
            if tracer is not None and span is not None:
                fields["trace_id"] = tracer.answered(span, status)
            level = logging.DEBUG if status == 200 and arrived.is_probe else logging.INFO
            logger.log(level, "%s %s %d %.1f ms", method, path, status, 1000 * seconds, extra={"fields": fields})
