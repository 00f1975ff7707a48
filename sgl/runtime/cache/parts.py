"""The folders that engines have to themselves, below one that several share.

    <folder>/<model>/part-<n>/lock

An engine that starts takes the first part that nobody has locked; what nobody uses is removed when there is too much.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_MOST_PARTS: Final = 64


def tidy(folder: Path, own: Path, max_bytes: int) -> None:
    """Remove the oldest segments of models and parts that no engine uses, until no more than max_bytes are left."""
    found: list[tuple[float, int, Path]] = []
    for part in folder.glob("*/part-*"):
        if part == own:
            continue
        with suppress(OSError):  # in use, another user's, or no part
            lock = os.open(part / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in part.glob("*.pages"):
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
            finally:
                os.close(lock)
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= max_bytes:
            break
        with suppress(OSError):
            path.unlink(missing_ok=True)
            left -= size


def claim(folder: Path) -> tuple[Path, int]:
    """A part that no other engine has, and its lock. Raises OSError."""
    for number in range(_MOST_PARTS):
        part = folder / f"part-{number}"
        for each in (*reversed(part.parents), part):  # parents=True would leave new ones open to others
            each.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(part / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return part, lock
    raise OSError(f"{_MOST_PARTS} engines use it already")
