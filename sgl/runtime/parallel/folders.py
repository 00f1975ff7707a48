"""Folders in memory, each shared by the ranks of one engine on one host. What processes that were killed leave there
stays taken, so whoever comes next removes folders that no process leads any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "sgl-ranks-"
_LOCK: Final = "lock"


class LedFolder:
    """One that nobody else may read, led by this process."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_memory()))
        made = self.path / f"{_LOCK}.new"
        self._lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(self.path / _LOCK)  # nobody finds it before it is locked

    def close(self) -> None:
        """Remove it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove this user's folders whose leaders have ended."""
    for lock in _memory().glob(f"{_PREFIX}*/{_LOCK}"):
        remove_if_left(lock.parent)


def remove_if_left(folder: Path) -> None:
    """Remove one if its leader has ended."""
    with contextlib.suppress(OSError):  # it has not, or somebody else removes it, or it is another user's
        if folder.lstat().st_uid != os.getuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _memory() -> Path:
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
