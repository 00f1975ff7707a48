"""Which request the present task or thread works for; the server's process and the engine's know it alike."""

from __future__ import annotations

from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Sent back as X-Request-Id, and in every line of the log that is about the request."""
