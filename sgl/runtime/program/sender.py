"""Where a program comes from. Whoever opens it sets this; its executor reads it."""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from typing import NamedTuple


class Sender(NamedTuple):
    """Who sent a program, and with what."""

    tenant: str | None = None
    """The name charged for shared resources; None: anonymous."""
    batch: Hashable | None = None
    """Programs of one batch share one place in the waiting queue; None: a place of its own."""


_UNKNOWN = Sender()
current_sender: ContextVar[Sender] = ContextVar("sender", default=_UNKNOWN)
"""Of the program about to be opened."""
