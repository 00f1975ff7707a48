"""Which runs are not done, and giving them up: where their process ends, where those who wait are interrupted, and
where nobody holds their states any more.

It knows that runs can be given up; what that takes is `sgl.lang.record.run`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol
from weakref import WeakValueDictionary


class _Open(Protocol):
    """What is asked for of `Run` here."""

    is_done: bool

    def cancel(self) -> None: ...
    def drop(self) -> None: ...


class Group:
    """Runs that are given up together. Those of a group are of its parent as well. Safe from any thread."""

    def __init__(self, parent: Group | None = None) -> None:
        self._parent = parent
        self._runs: WeakValueDictionary[int, _Open] = WeakValueDictionary()

    def add(self, run: _Open) -> None:
        """Take in a run that begins."""
        group: Group | None = self
        while group is not None:
            group._runs[id(run)] = run
            group = group._parent

    def remove(self, run: _Open) -> None:
        """Forget a run that is done."""
        group: Group | None = self
        while group is not None:
            group._runs.pop(id(run), None)
            group = group._parent

    def runs(self) -> list[_Open]:
        """Those that are not done."""
        runs = [ref() for ref in self._runs.valuerefs()]  # in one step: other threads add some meanwhile
        return [run for run in runs if run is not None]

    def cancel(self) -> None:
        """Give all of them up."""
        for run in self.runs():
            run.cancel()


everything = Group()
"""The runs of this process."""
current_group: ContextVar[Group] = ContextVar("current_group", default=everything)


@contextmanager
def together() -> Iterator[None]:
    """Runs that begin within, on whatever threads have this context, are given up if the block raises."""
    group = Group(current_group.get())
    token = current_group.set(group)
    try:
        yield
    except BaseException:
        group.cancel()
        raise
    finally:
        current_group.reset(token)


class Hold:
    """What all states of a run share, and nothing else has: when the last one goes, the run is given up."""

    def __init__(self, run: _Open) -> None:
        self._run = run

    def __del__(self) -> None:
        if not self._run.is_done:
            self._run.drop()
