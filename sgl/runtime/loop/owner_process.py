"""The process an engine runs in. A forked child copies the engine's objects but not its threads, with locks in any
state; engines check first."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from sgl.errors import EngineDead


class OwnerProcess:
    """The process in which it was made."""

    _first: ClassVar[int | None] = None  # the process of the first engine

    def __init__(self) -> None:
        self._pid = os.getpid()

    @classmethod
    def of_engine(cls) -> OwnerProcess:
        """For a new engine. Raises EngineDead in a forked child of a process that ever had one: torch would wait
        for missing threads."""
        cls._first = cls._first or os.getpid()
        if cls._first != os.getpid():
            raise _forked(cls._first)
        return cls()

    @property
    def was_forked(self) -> bool:
        """Whether this process was forked from it."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise EngineDead in another process."""
        if self.was_forked:
            raise _forked(self._pid)

    def __reduce__(self) -> Any:
        raise TypeError(
            "an engine cannot be sent to another process: make one there, or let `sgl serve` run the model and send "
            "the sgl.RuntimeEndpoint"
        )


def _forked(pid: int) -> EngineDead:
    return EngineDead(
        f"no engine runs in this process, which was forked from process {pid}, where one runs: make an sgl.Engine in "
        "a process of its own, started with multiprocessing's 'spawn' or before there is an engine, or let `sgl "
        "serve` run the model and use an sgl.RuntimeEndpoint, which works in every process"
    )
