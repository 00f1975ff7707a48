"""Environment variables; the language reads them only here."""

from __future__ import annotations

import os


def environment(variable: str) -> str | None:
    """A variable's value, or None."""
    return os.environ.get(variable)
