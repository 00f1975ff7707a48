"""The process title that other users see, which must hold no keys."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from pathlib import Path

_ARG_START = 47 - 2  # in /proc/self/stat, after the name, which may hold blanks


def hide(secrets: Iterable[str]) -> None:
    """Overwrite each text in the arguments shown by `ps`; Linux only."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        shown = ctypes.string_at(start, end - start) if start else b""
        for secret in filter(None, (secret.encode(errors="surrogateescape") for secret in secrets)):
            at = shown.find(secret)
            while at >= 0:
                ctypes.memset(start + at, ord("*"), len(secret))
                at = shown.find(secret, at + len(secret))
