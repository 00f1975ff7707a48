"""What other users of the machine see of a command: its title, in which keys have no place."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from pathlib import Path

_ARG_START = 47 - 2  # in /proc/self/stat, counted behind the name, which may hold blanks; the end follows


def hide(secrets: Iterable[str]) -> None:
    """Overwrite each with asterisks in the arguments that `ps` shows of this process; on Linux only."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        shown = ctypes.string_at(start, end - start) if start else b""
        for secret in filter(None, (secret.encode(errors="surrogateescape") for secret in secrets)):
            at = shown.find(secret)
            while at >= 0:
                ctypes.memset(start + at, ord("*"), len(secret))
                at = shown.find(secret, at + len(secret))
