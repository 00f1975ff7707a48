"""What the environment says of a key; the language reads it nowhere else."""

from __future__ import annotations

import os


def environment(variable: str) -> str | None:
    """The value of a variable; None if it is not set."""
    return os.environ.get(variable)
