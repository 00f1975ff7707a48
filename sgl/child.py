"""Starts child processes that import no file of the working folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(code: str) -> list[str]:
    """The command that runs code in an interpreter with our import path. The working folder is left out (unless sgl
    lies there): a `selectors.py` in it would replace Python's own."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {search_path()!r}; {code}"]


def search_path() -> list[str]:
    """The import path of such a process."""
    here, home = os.getcwd(), str(Path(__file__).resolve().parents[1])
    return [entry for entry in sys.path if entry and os.path.abspath(entry) not in (here, home)] + [home]
