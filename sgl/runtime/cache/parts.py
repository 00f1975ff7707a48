"""The folders that engines have to themselves, below one that several share.

    <folder>/lock-<user>
    <folder>/<model>/part-<n>/lock

An engine that starts takes the first part that nobody has locked; what nobody uses is removed when there is too much.
One engine of a user at a time does so, by a lock of the folder: else it would take a part that another one looks
through for one in use.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_MOST_PARTS: Final = 64
_PATIENCE: Final = 10.0  # seconds for others that start
_POLL: Final = 0.01
_OPEN: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def claim(folder: Path, model: str, max_bytes: int) -> tuple[Path, int]:
    """A part of a model that no other engine has, and its lock. Of what nobody uses, the oldest segments are removed
    until no more than max_bytes are left. Raises OSError."""
    for each in (*reversed(folder.parents), folder):  # parents=True would leave new ones open to others
        each.mkdir(mode=0o700, exist_ok=True)
    starting = os.open(folder / f"lock-{os.getuid()}", _OPEN | os.O_CREAT, 0o600)
    try:
        _wait_for(starting)
        part, lock = _claim(folder / model)
        try:
            _tidy(folder, part, max_bytes)
        except OSError:
            os.close(lock)
            raise
        return part, lock
    finally:
        os.close(starting)


def _wait_for(lock: int) -> None:
    end = time.monotonic() + _PATIENCE
    while not _try(lock):
        if time.monotonic() > end:
            raise OSError(f"another engine that starts has locked it for {_PATIENCE:g} s")
        time.sleep(_POLL)


def _try(lock: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _claim(folder: Path) -> tuple[Path, int]:
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in range(_MOST_PARTS):
        part = folder / f"part-{number}"
        part.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(part / "lock", _OPEN | os.O_CREAT, 0o600)
        try:
            if _try(lock):
                return part, lock
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
    raise OSError(f"{_MOST_PARTS} engines use it already")


def _tidy(folder: Path, own: Path, max_bytes: int) -> None:
    found: list[tuple[float, int, Path]] = []
    for part in folder.glob("*/part-*"):
        if part == own:
            continue
        with suppress(OSError):  # in use, another user's, or no part
            lock = os.open(part / "lock", _OPEN)
            try:
                if _try(lock):
                    for path in part.glob("*.pages"):
                        status = path.lstat()
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
