"""The request that a task or thread works for, as both processes know it, and the caller's name."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

ADMIN = "#admin"
"""The name that requests of the admin's key have; no other can be given it."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Sent back as X-Request-Id, and in every line of the log that is about the request."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request: the name of the key that came with it, None where none is asked for."""

    name: str | None = None
    is_admin: bool = True
    tenant: str | None = None
    """As who it takes of what all share: its name, where there are several keys."""

    @property
    def owner(self) -> str:
        """Whose its requests are, to the engine."""
        return self.name or ""

    def may_reach(self, owner: str | None) -> bool:
        """Whether what was made in that name is this caller's to read, extend and end."""
        return self.is_admin or self.name == owner


_NOBODY = Caller()
caller: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)
"""Of the request that the present task works for."""


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
