"""The current request's id and caller."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

ADMIN = "#admin"
"""The admin's name; no other key may have it."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Sent back as X-Request-Id and logged with each line."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the key's name, None without keys."""

    name: str | None = None
    is_admin: bool = True
    tenant: str | None = None
    """The name charged for shared limits, where keys have several names."""

    @property
    def owner(self) -> str:
        """The owner of its requests in the engine."""
        return self.name or ""

    def may_reach(self, owner: str | None) -> bool:
        """Whether the caller may read, extend and end what `owner` made."""
        return self.is_admin or self.name == owner


_NOBODY = Caller()
current_caller: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)
"""Of the current task's request."""


def new_identity() -> str:
    """An id for a request without one."""
    return uuid.uuid4().hex


@contextlib.contextmanager
def working_for(identity: str) -> Iterator[None]:
    """Work for a request inside the block."""
    token = request_id.set(identity)
    try:
        yield
    finally:
        request_id.reset(token)
