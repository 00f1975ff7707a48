"""In whose name programs are opened: set by whoever opens them, read by what executes them."""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from typing import NamedTuple


class Party(NamedTuple):
    """Whose programs they are."""

    key: str | None = None
    """The name under which they take of what all programs share; None: nobody else is told apart."""
    batch: Hashable | None = None
    """Programs that were sent as one have one share of the waiting queue; None: a program has its own."""


_NOBODY = Party()
party: ContextVar[Party] = ContextVar("party", default=_NOBODY)
"""Of the program that is about to be opened."""
