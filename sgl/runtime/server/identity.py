"""Which request the present task or thread works for; the server's process and the engine's know it alike."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Sent back as X-Request-Id, and in every line of the log that is about the request."""


def new_identity() -> str:
    """For a request that brings none."""
    return uuid.uuid4().hex


@contextlib.contextmanager
def working_for(identity: str) -> Iterator[None]:
    """Within it, this thread works for that request."""
    token = request_id.set(identity)
    try:
        yield
    finally:
        request_id.reset(token)
