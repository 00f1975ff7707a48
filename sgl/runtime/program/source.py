"""Where a program comes from: set by whoever opens it, read by what executes it."""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from typing import NamedTuple


class Source(NamedTuple):
    """Who sent a program, and with what."""

    tenant: str | None = None
    """The name under which it takes of what all programs share; None: nobody else is told apart."""
    batch: Hashable | None = None
    """Programs that were sent as one have one share of the waiting queue; None: a program has its own."""


_UNKNOWN = Source()
source: ContextVar[Source] = ContextVar("source", default=_UNKNOWN)
"""Of the program that is about to be opened."""
