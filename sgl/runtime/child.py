"""Processes of ours beside the caller's: how they are started so that no file of the working folder runs in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(code: str) -> list[str]:
    """What runs code in an interpreter that imports what this one does, but from the working folder only if sgl itself
    lies there: a `selectors.py` that somebody left in it would else be imported in place of Python's own."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {search_path()!r}; {code}"]


def search_path() -> list[str]:
    """Where such a process looks for modules."""
    here, home = os.getcwd(), str(Path(__file__).resolve().parents[2])
    return [entry for entry in sys.path if entry and os.path.abspath(entry) not in (here, home)] + [home]
